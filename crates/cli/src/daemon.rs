//! `shunt daemon`: the broker as a process.
//!
//! In the foreground it behaves as systemd expects: socket activation, notification, the log on
//! standard error. `--detach` starts it in the background.

use std::fs::OpenOptions;
use std::io::{IsTerminal, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use sd_notify::NotifyState;
use shunt_broker::{Config, Mode, SYSTEM_SOCKET};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::args::{DaemonArgs, LOG};
use crate::broker;
use crate::config::OfBroker;

pub(crate) fn run(args: &DaemonArgs) -> Result<()> {
    let socket = match (&args.socket, args.system) {
        (Some(path), _) => std::path::absolute(path)?,
        (None, true) => PathBuf::from(SYSTEM_SOCKET),
        (None, false) => shunt_broker::make_user_socket()?,
    };
    if args.detach { detach(args, &socket) } else { serve(args, socket) }
}

impl DaemonArgs {
    fn mode(&self) -> Mode {
        if self.system { Mode::System } else { Mode::User }
    }
}

fn serve(args: &DaemonArgs, socket: PathBuf) -> Result<()> {
    let configured = OfBroker::read(args.system)?.under(args);
    start_log(configured.log_file.as_deref(), configured.log.as_deref())?;
    let mut config = Config::new(socket, args.mode());
    config.idle_exit = configured.idle_exit.map(Duration::from_secs);
    config.ring_bytes = configured.ring_bytes.unwrap_or(config.ring_bytes);
    config.metrics = configured.metrics;
    config.latency = configured.latency;
    config.overlay_policy.clone_from(&args.overlay_policy);
    config.listener = activated_socket()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Handlers are installed before any signal can arrive. A broker that dies of SIGTERM leaves
        // its socket behind.
        let signals = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()];
        let [terminate, interrupt, hangup] = signals.map(signal);
        let shutdown = until_stopped(terminate?, interrupt?, hangup?);
        shunt_broker::run(config, shutdown).await.map_err(anyhow::Error::from)
    })
}

/// Completes when the broker shall stop. The broker polls it for the first time when it listens.
async fn until_stopped(mut terminate: Signal, mut interrupt: Signal, mut hangup: Signal) {
    notify(NotifyState::Ready);
    let name = tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
        _ = hangup.recv() => "SIGHUP",
    };
    tracing::info!(signal = name, "stopping");
    notify(NotifyState::Stopping);
}

/// Returns a future that completes at SIGTERM or SIGINT. From this call on, these signals no longer
/// end the process.
pub(crate) fn shutdown() -> std::io::Result<impl Future<Output = ()>> {
    let [mut terminate, mut interrupt] = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        notify(NotifyState::Stopping);
    })
}

/// Returns a flag that is set at SIGTERM or SIGINT, so that the caller can clean up.
pub(crate) fn stop_flag() -> std::io::Result<Arc<AtomicBool>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let signalled = {
        let _inside = runtime.enter();
        shutdown()?
    };
    let is_over = Arc::new(AtomicBool::new(false));
    let over = is_over.clone();
    std::thread::spawn(move || {
        runtime.block_on(signalled);
        over.store(true, Relaxed);
    });
    Ok(is_over)
}

pub(crate) fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

/// Returns the socket that a service manager has opened for this process.
fn activated_socket() -> Result<Option<OwnedFd>> {
    use nix::libc::{AF_UNIX, SOCK_SEQPACKET};
    let mut sockets = listenfd::ListenFd::from_env();
    match sockets.len() {
        0 => Ok(None),
        1 => sockets
            .take_custom(0, AF_UNIX, SOCK_SEQPACKET, "broker socket")
            .context("the unit's socket needs ListenSequentialPacket="),
        more => bail!("the service manager hands over {more} sockets; the broker takes one"),
    }
}

/// Starts the log with `filter`, unless the environment sets a filter.
pub(crate) fn start_log(file: Option<&Path>, filter: Option<&str>) -> Result<()> {
    let said = std::env::var(LOG).ok().filter(|said| !said.is_empty());
    let filter = match said.as_deref().or(filter).unwrap_or_default() {
        "" => Targets::new().with_default(LevelFilter::INFO),
        said => said
            .parse()
            .with_context(|| format!("{LOG} takes a filter such as info or shunt_broker=debug"))?,
    };
    // A detached broker's standard error leads nowhere after its start. Failed writes to it must be
    // ignored.
    let log = tracing_subscriber::fmt::layer().log_internal_errors(false);
    let registry = tracing_subscriber::registry();
    match file {
        Some(path) => {
            let file = OpenOptions::new().append(true).create(true).open(path);
            let file = file.with_context(|| format!("cannot write the log to {}", path.display()))?;
            registry.with(log.with_ansi(false).with_writer(Mutex::new(file))).with(filter).init();
        }
        None => {
            let log = log.with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
            registry.with(log).with(filter).init();
        }
    }
    Ok(())
}

/// Starts the broker as a grandchild in its own session, and waits until it accepts programs.
///
/// Succeeds as well if another broker already listens at `socket`.
fn detach(args: &DaemonArgs, socket: &Path) -> Result<()> {
    let log_file = args.log_file.as_deref().map(std::path::absolute).transpose()?;
    close_inherited()?;
    // This process is not a group leader if `shunt run` starts it. If it is one, a user started it
    // in a terminal and may want the terminal's signals to reach it.
    let _ = rustix::process::setsid();
    let mut command = broker::myself();
    command.arg("daemon").arg("--socket").arg(socket).current_dir("/");
    if args.system {
        command.arg("--system");
    }
    if let Some(seconds) = args.idle_exit {
        command.args(["--idle-exit", &seconds.to_string()]);
    }
    if let Some(bytes) = args.ring_bytes {
        command.args(["--ring-bytes", &bytes.to_string()]);
    }
    if let Some(address) = args.metrics {
        command.args(["--metrics", &address.to_string()]);
    }
    if args.latency {
        command.arg("--latency");
    }
    command.arg("--overlay-policy").arg(std::path::absolute(&args.overlay_policy)?);
    if let Some(path) = log_file {
        command.arg("--log-file").arg(path);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut broker = command.spawn().context("the broker cannot be started")?;
    let mut output = broker.stderr.take();
    let started = broker::await_start(socket, args.mode(), || {
        broker.try_wait().ok().flatten()?;
        let mut text = String::new();
        output.take()?.read_to_string(&mut text).ok()?;
        let line = text.lines().last().unwrap_or("it ended without a word");
        Some(line.trim_start_matches("shunt: ").to_owned())
    });
    match started {
        Ok(pid) if pid == broker.id() => Ok(()),
        // Another broker started first. The new one detects that and exits, and is reaped here.
        Ok(_) => broker.wait().map(drop).context("the broker cannot be waited for"),
        Err(why) => {
            let _ = broker.kill();
            let _ = broker.wait();
            Err(anyhow!(why))
        }
    }
}

/// Closes inherited descriptors, for example a lock, or a pipe whose reader waits for its end.
fn close_inherited() -> Result<()> {
    let open: Vec<i32> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|fd| *fd > 2)
        .collect();
    for fd in open {
        // The list includes the descriptor of the directory that was just read, which is closed
        // already.
        let _ = nix::unistd::close(fd);
    }
    Ok(())
}
