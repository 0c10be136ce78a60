//! Runs a service that the kernel's verifier has not accepted in a separate process.
//!
//! ```text
//!            start                     a signal ends it: pause, start again
//!   Waiting --------> Running ---------------------------------------------> Waiting
//!                      |   |  exit status
//!         SIGTERM,     |   +--------------> ended, with the same status
//!         SIGINT       v
//!                    Ending ---> ended; killed if it takes longer than --drain and two seconds
//! ```
//!
//! A call of the service that does not return within a second ends the process (SIGABRT).

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep, timeout};

use crate::args::ServeArgs;
use crate::daemon::{shutdown, start_log};

/// Set in the environment of the process that runs the service.
const SUPERVISED: &str = "SHUNT_SERVE_SUPERVISED";
/// How long a call of the service may take.
const LONGEST_CALL: Duration = Duration::from_secs(1);
/// The pause after the first crash, and the longest pause. It doubles with each crash.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// How long the process may take to end, beyond `--drain`.
const GRACE: Duration = Duration::from_secs(2);

/// Returns whether this process runs the service for a supervisor.
pub(super) fn is_supervised() -> bool {
    std::env::var_os(SUPERVISED).is_some()
}

/// Prepares the process that runs the service: it ends with its supervisor, and once a call hangs.
pub(super) fn be_supervised() -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    shunt_serve::service::watch(LONGEST_CALL, |function| {
        tracing::error!(
            "`{function}` of the service has not returned for {LONGEST_CALL:?}: the process ends, and starts again"
        );
        std::process::abort();
    })
    .context("no thread for the watchdog")
}

/// Runs the service in another process, and starts that again after a crash.
pub(super) fn supervise(args: &ServeArgs) -> Result<()> {
    start_log(None, None)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut shutdown = std::pin::pin!(shutdown()?);
        let mut reload = signal(SignalKind::hangup())?;
        let mut crashes = 0_u32;
        loop {
            let began = Instant::now();
            let mut child = start()?;
            let status = loop {
                tokio::select! {
                    status = child.wait() => break status?,
                    _ = reload.recv() => send(&child, Signal::HUP),
                    () = &mut shutdown => return end(child, Duration::from_secs(args.drain)).await,
                }
            };
            let Some(signal) = killed_by(status) else {
                match status.code() {
                    Some(0) | None => return Ok(()),
                    Some(code) => std::process::exit(code),
                }
            };
            crashes = if began.elapsed() > PAUSES.1 { 0 } else { crashes + 1 };
            let pause = (PAUSES.0 * 2_u32.saturating_pow(crashes.min(16))).min(PAUSES.1);
            tracing::error!("the service has crashed (signal {signal}); it starts again in {pause:?}");
            tokio::select! {
                () = sleep(pause) => {}
                () = &mut shutdown => return Ok(()),
            }
        }
    })
}

fn start() -> Result<Child> {
    let program = std::env::current_exe().context("this program's own file")?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).env(SUPERVISED, "1").kill_on_drop(true);
    command.spawn().context("the service's process cannot be started")
}

fn send(child: &Child, signal: Signal) {
    let pid = child.id().and_then(|pid| Pid::from_raw(pid as i32));
    if let Some(pid) = pid {
        let _ = kill_process(pid, signal);
    }
}

async fn end(mut child: Child, drain: Duration) -> Result<()> {
    send(&child, Signal::TERM);
    match timeout(drain + GRACE, child.wait()).await {
        Ok(_) => Ok(()),
        Err(_) => {
            child.kill().await?;
            bail!("the service had not ended {:?} after the request, and was killed", drain + GRACE)
        }
    }
}

fn killed_by(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}
