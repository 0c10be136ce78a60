//! Starts and stops the proxy: its threads, listeners, health checks and control requests.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shunt_config::Fault;
use shunt_control::{Asked, Control, serve_metrics};
use shunt_serve::engine::{Drain, Request};
use socket2::{Domain, Protocol, Socket, Type};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::signal::unix::Signal;
use tokio::sync::mpsc;

use super::shared::Shared;
use super::worker::Worker;
use super::{health, log, metrics};
use crate::config::Config;

/// The name of the service.
pub const SERVICE: &str = "http-proxy";

/// The options of a proxy.
#[derive(Clone, Debug)]
pub struct Options {
    /// The address that clients connect to.
    pub listen: SocketAddr,
    /// The file of pools and routes.
    pub file: PathBuf,
    /// The number of threads.
    pub threads: usize,
    /// The path of the control socket.
    pub control: PathBuf,
    /// The address of the page for Prometheus.
    pub metrics: Option<SocketAddr>,
    /// How long requests may take to end after a shutdown request.
    pub drain: Duration,
}

/// An error that prevents a proxy from running.
#[derive(Debug, Error)]
pub enum Error {
    /// The file of pools and routes is wrong.
    #[error(transparent)]
    Config(#[from] Fault),
    /// The access log cannot be opened.
    #[error("cannot open the access log {file}: {source}")]
    Log {
        /// Its path.
        file: PathBuf,
        /// The error of the open.
        source: io::Error,
    },
    /// An address or the control socket cannot be bound.
    #[error("cannot listen at {place}: {source}")]
    Listen {
        /// The address or path.
        place: String,
        /// The error of the bind.
        source: io::Error,
    },
    /// A thread or its eventfd cannot be created.
    #[error("no threads: {0}")]
    Threads(io::Error),
}

/// Runs a proxy until `shutdown` completes and its requests have ended.
///
/// `ready` is called once it serves. Each `hangup` reads the file again, and opens the log again.
/// Needs a tokio runtime with I/O and time.
pub async fn run(
    options: Options,
    ready: impl FnOnce(),
    mut hangup: Signal,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let _ = shunt_sys::limits::raise_descriptors();
    let (config, log) = read(&options, None)?;
    let control = Control::open("service", &options.control).map_err(listening(options.control.display()))?;
    let drain = Drain::new(options.threads).map_err(Error::Threads)?;
    let shared = Arc::new(Shared::new(config, log, drain));
    let threads = crew(&options, &shared)?;
    if let Some(address) = options.metrics {
        let listener = TcpListener::bind(address).await.map_err(listening(address))?;
        let page = shared.clone();
        tokio::spawn(serve_metrics(async move || metrics::text(&page), listener));
    }
    let reload = || {
        let (config, log) =
            read(&options, Some(&shared.current().config)).map_err(|error| error.to_string())?;
        let count = config.backends().count();
        shared.replace(config, log);
        tracing::info!(count, "the file was read again");
        Ok(json!({ "backends": count }))
    };
    let began = Instant::now();
    let status = || {
        let mut status = metrics::status(&shared);
        status["listen"] = json!(options.listen);
        status["uptime-seconds"] = json!(began.elapsed().as_secs());
        status
    };
    let mut obey = async |asked: &mut mpsc::Receiver<Asked<Request>>| {
        loop {
            tokio::select! {
                Some((request, answer)) = asked.recv() => {
                    let done: Result<Value, String> = match request {
                        Request::Status => Ok(status()),
                        Request::Reload => reload(),
                        _ => Err("the proxy has no state to dump".to_owned()),
                    };
                    let _ = answer.send(done);
                }
                Some(()) = hangup.recv() => {
                    if let Err(why) = reload() {
                        tracing::error!(why, "the configuration stays as it was");
                    }
                }
            }
        }
    };
    let (sender, mut asked) = mpsc::channel(16);
    ready();
    tokio::select! {
        () = shutdown => {}
        () = control.serve(sender) => {}
        () = obey(&mut asked) => {}
        () = health::look_after(&shared) => {}
    }
    shared.drain.stop(options.drain);
    let joined = move || threads.into_iter().for_each(|thread| drop(thread.join()));
    let _ = tokio::task::spawn_blocking(joined).await;
    Ok(())
}

type Read = (Config, Option<std::sync::mpsc::SyncSender<Vec<u8>>>);

fn read(options: &Options, before: Option<&Config>) -> Result<Read, Error> {
    let config = Config::read(&options.file, before)?;
    let log = match &config.log {
        Some(log) => Some(log::start(log).map_err(|source| Error::Log { file: log.file.clone(), source })?),
        None => None,
    };
    Ok((config, log))
}

fn crew(options: &Options, shared: &Arc<Shared>) -> Result<Vec<JoinHandle<()>>, Error> {
    let mut threads = Vec::new();
    for (number, wake) in shared.drain.wakes().iter().enumerate() {
        let listener = listen(options.listen).map_err(listening(options.listen))?;
        let epoll = Worker::watch(&listener, wake).map_err(|error| Error::Threads(error.into()))?;
        let (shared, wake) = (shared.clone(), wake.clone());
        let thread = std::thread::Builder::new().name(format!("serve-{number}"));
        let run = move || Worker::new(shared, number, (listener, epoll), wake).run();
        threads.push(thread.spawn(run).map_err(Error::Threads)?);
    }
    Ok(threads)
}

/// Opens a listener. Each thread has one on the same port, and the kernel distributes the clients.
fn listen(address: SocketAddr) -> io::Result<OwnedFd> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    // Accepted sockets inherit it.
    socket.set_tcp_nodelay(true)?;
    socket.bind(&address.into())?;
    socket.listen(4096)?;
    Ok(socket.into())
}

fn listening(place: impl ToString) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Listen { place: place.to_string(), source }
}
