//! Starts and stops a service: its threads, listeners, health checks and control requests.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use shunt_config::Fault;
use shunt_control::{AskError, Asked, Control, serve_metrics};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::signal::unix::Signal;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::address::{Address, Bound, Listeners};
use super::backends::{Backend, Backends, Changes};
use super::choose::Hashing;
use super::drain::Drain;
use super::files::{self, Files, Filled};
use super::half::{Half, Source};
use super::kernel::{Kernel, Stores};
use super::limiter::Limit;
use super::metrics;
use super::registrar::Permitted;
use super::shared::{Engine, Shared};
use super::worker::Worker;
use crate::service::Service;
use crate::service::layout::Layout;
use crate::service::store::Store;
use crate::service::trial::Trial;
use crate::service::verifier::{LoadError, check_loadable};

/// The options of a service.
pub struct Options {
    /// The native half.
    pub service: Arc<dyn Service>,
    /// The BPF half.
    pub object: Vec<u8>,
    /// The memory of the service's state, which the native half has too.
    pub store: Arc<Store>,
    /// The memory of its content store, if it has one.
    pub contents: Option<Arc<Store>>,
    /// Refuse the service if the kernel's verifier rejects its functions.
    pub verify: bool,
    /// The addresses that clients connect to.
    pub listen: Vec<Address>,
    /// Files that content stores of the service are filled with.
    pub files: Vec<Files>,
    /// The file of backends, if the service has any.
    pub backends: Option<PathBuf>,
    /// The engine that serves conversations.
    pub engine: Engine,
    /// The rate limit of each client address. The memory of the state has room for its buckets.
    pub limit: Option<Limit>,
    /// Networks whose addresses the service may register and unregister by itself.
    pub may_register: Vec<IpNet>,
    /// Overrides the hashing in the file of backends.
    pub hashing: Option<Hashing>,
    /// The number of threads that serve conversations.
    pub threads: usize,
    /// The path of the control socket.
    pub control: PathBuf,
    /// The address of the page for Prometheus.
    pub metrics: Option<SocketAddr>,
    /// How long open conversations may take to end after a shutdown request.
    pub drain: Duration,
}

/// The default path of the control socket.
pub const DEFAULT_CONTROL: &str = "/run/shunt/serve.sock";

/// A request on the control socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Reports the status.
    Status,
    /// Reads the file of backends again.
    Reload,
    /// Returns the entries of the part of the state with this name.
    Dump(String),
    /// Adds a backend.
    Register {
        /// ADDRESS:PORT or unix:PATH.
        address: String,
        /// Its weight, for ketama.
        weight: u32,
    },
    /// Removes the backend with this address.
    Unregister(String),
}

/// Sends a request to the service with this control socket and returns its answer.
pub fn ask(path: &Path, request: Request) -> Result<Value, AskError> {
    shunt_control::ask(SERVICE, path, &request)
}

/// The word for the process in error messages.
const SERVICE: &str = "service";

/// An error that prevents a service from running.
#[derive(Debug, Error)]
pub enum Error {
    /// The file of backends is wrong.
    #[error(transparent)]
    Backends(#[from] Fault),
    /// A content store cannot be filled with its files.
    #[error("--content: {0}")]
    Content(String),
    /// The kernel was required and rejected the service.
    #[error("the service cannot run in the kernel, as --engine kernel asks: {0}")]
    Kernel(#[from] LoadError),
    /// The kernel's verifier has rejected a function of the service.
    #[error(
        "{0}\nSuch a service may crash or hang in user space too, so it is not run. Correct it, or add --unverified, \
         which runs it in a process of its own"
    )]
    Unverified(LoadError),
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

/// Checks that a service can run in the kernel: loads it and unloads it again.
pub fn try_kernel(object: &[u8], answers: bool) -> Result<(), LoadError> {
    Kernel::load(object, Stores::default(), 1, true, answers).map(drop)
}

/// Runs a service until `shutdown` completes and its conversations have ended.
///
/// `ready` is called once it serves. Each `hangup` reads the backends again. Needs a tokio runtime
/// with I/O and time.
pub async fn run(
    mut options: Options,
    ready: impl FnOnce(),
    mut hangup: Signal,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let changes = RefCell::new(Changes::default());
    let read = |changes: &Changes, before: Option<&Backends>| {
        let settings = (options.hashing, options.threads);
        Backends::read(options.backends.as_deref(), settings, changes, before)
    };
    let backends = read(&changes.borrow(), None)?;
    let control = Control::open(SERVICE, &options.control).map_err(listening(options.control.display()))?;
    let source = Source {
        object: std::mem::take(&mut options.object),
        state: options.store.clone(),
        contents: options.contents.clone(),
        limit: options.limit.clone(),
        backends: backends.list.len(),
        is_auto: options.engine == Engine::Auto,
        answers: options.service.properties().answers,
        threads: options.threads,
    };
    let layout = Layout::read(&source.object);
    let refusal = refusal(&options, &source.object)?;
    let loads_meanwhile = options.engine == Engine::Auto && refusal.is_none();
    let half = match (options.engine, refusal) {
        (Engine::User, _) => Half::unused(),
        (Engine::Kernel, _) => Half::ended(Ok(source.load()?)),
        (Engine::Auto, None) => Half::loading(),
        (Engine::Auto, Some(error)) => Half::ended(Err(error)),
    };
    let drain = Drain::new(options.threads).map_err(Error::Threads)?;
    let state = (options.store.clone(), layout);
    let mut shared = Shared::new(options.service.clone(), state, (options.engine, half), backends, drain);
    shared.limit = options.limit.clone();
    shared.registrar.networks = options.may_register.clone();
    let shared = Arc::new(shared);
    let filled = files::fill(&shared, &options.files, &Filled::default()).map_err(Error::Content)?;
    let filled = RefCell::new(filled);
    shared.start();
    let (threads, paths) = crew(&options, &shared)?;
    if loads_meanwhile {
        let (thread, shared) = (std::thread::Builder::new().name("serve-kernel".to_owned()), shared.clone());
        // It is not awaited at the end: it may be waiting for the verifier, or for a processor.
        drop(thread.spawn(move || load(source, &shared)).map_err(Error::Threads)?);
    }
    if let Some(address) = options.metrics {
        let listener = TcpListener::bind(address).await.map_err(listening(address))?;
        let page = shared.clone();
        tokio::spawn(serve_metrics(async move || metrics::text(&page), listener));
    }
    // Makes a change if the list is right with it.
    let change = |make: &dyn Fn(&mut Changes)| {
        let mut changed = changes.borrow().clone();
        make(&mut changed);
        let backends = read(&changed, Some(&shared.backends().1)).map_err(|error| error.to_string())?;
        let count = backends.list.len();
        changes.replace(changed);
        shared.set_backends(backends);
        tracing::info!(count, "the backends have changed");
        Ok(json!({ "backends": count }))
    };
    let reload = || {
        let now = files::fill(&shared, &options.files, &filled.borrow())?;
        filled.replace(now);
        change(&Changes::restore)
    };
    let register = |address: Address, weight| {
        let is_known = |backend: &Arc<Backend>| (&backend.address, backend.weight) == (&address, weight);
        match shared.backends().1.list.iter().any(is_known) {
            true => Err(format!("{address} is a backend already")),
            false => change(&|changes| changes.add(address.clone(), weight)),
        }
    };
    let unregister =
        |address: Address| match shared.backends().1.list.iter().any(|backend| backend.address == address) {
            true => change(&|changes| changes.remove(address.clone())),
            false => Err(format!("{address} is no backend")),
        };
    let began = Instant::now();
    let status = || {
        let mut status = metrics::status(&shared);
        let listen: Vec<String> = options.listen.iter().map(Address::to_string).collect();
        status["listen"] = json!(listen.join(", "));
        status["uptime-seconds"] = json!(began.elapsed().as_secs());
        status
    };
    let mut obey = async |asked: &mut mpsc::Receiver<Asked<Request>>| {
        loop {
            tokio::select! {
                Some((request, answer)) = asked.recv() => {
                    let done = match request {
                        Request::Status => Ok(status()),
                        Request::Reload => reload(),
                        Request::Dump(name) => dump(&shared, &name),
                        Request::Register { address, weight } => {
                            address.parse().and_then(|address| register(address, weight))
                        }
                        Request::Unregister(address) => address.parse().and_then(unregister),
                    };
                    let _ = answer.send(done);
                }
                change = shared.registrar.next() => {
                    let done = match change {
                        Permitted::Add(address, weight) => register(Address::Tcp(address), weight),
                        Permitted::Remove(address) => unregister(Address::Tcp(address)),
                    };
                    match done {
                        Ok(_) => shared.registrar.made(),
                        Err(why) => shared.registrar.refuse(&why),
                    }
                }
                Some(()) = hangup.recv() => {
                    if let Err(why) = reload() {
                        tracing::error!(why, "the backends stay as they were");
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
        () = look_after(&shared) => {}
    }
    shared.drain.stop(options.drain);
    shared.delays.stop();
    let joined = move || threads.into_iter().for_each(|thread| drop(thread.join()));
    let _ = tokio::task::spawn_blocking(joined).await;
    drop(paths);
    Ok(())
}

/// Returns the entries of a part of the state, or an error with the names that there are.
fn dump(shared: &Shared, name: &str) -> Result<Value, String> {
    let measures = shared.service.measures();
    if let Some(found) = measures.iter().find(|measure| measure.0 == name) {
        return Ok(metrics::measure(*found));
    }
    shared.layout.dump(name, &shared.store).ok_or_else(|| {
        let parts = shared.layout.parts.iter().map(|part| part.name.as_str());
        let names: Vec<&str> = parts.chain(measures.iter().map(|measure| measure.0)).collect();
        match names.is_empty() {
            true => "the service has no state".to_owned(),
            false => format!("the service's state has no {name}; there are: {}", names.join(", ")),
        }
    })
}

/// Returns why no program can be loaded at all, or an error if the kernel's verifier rejects a
/// function of the service. With `--engine kernel`, loading shows both.
fn refusal(options: &Options, object: &[u8]) -> Result<Option<LoadError>, Error> {
    if options.engine == Engine::Kernel {
        return Ok(None);
    }
    // Without the right to load programs, the verifier cannot be asked.
    let refusal = check_loadable(object).err();
    if refusal.is_none()
        && options.verify
        && let Err(error @ LoadError::Unsafe(_)) = Trial::load(object)
    {
        return Err(Error::Unverified(error));
    }
    Ok(refusal)
}

/// Loads the kernel engines while user space serves, and then watches the delays of the kernel's
/// worker threads, until the service ends.
fn load(source: Source, shared: &Shared) {
    let loaded = source.load();
    drop(source);
    let is_loaded = loaded.is_ok();
    shared.half.end(loaded);
    shared.drain.wake();
    if is_loaded && let Some(probe) = shared.delays.prepare() {
        shared.delays.watch(probe, shared);
    }
}

/// Starts the threads. The paths of Unix sockets are removed when they are dropped.
fn crew(options: &Options, shared: &Arc<Shared>) -> Result<(Vec<JoinHandle<()>>, Vec<Bound>), Error> {
    let (mut threads, mut paths) = (Vec::new(), Vec::new());
    let mut listeners: Vec<Vec<OwnedFd>> = shared.drain.wakes().iter().map(|_| Vec::new()).collect();
    for address in &options.listen {
        let Listeners { sockets, path } = address.listen(listeners.len()).map_err(listening(address))?;
        listeners.iter_mut().zip(sockets).for_each(|(all, socket)| all.push(socket));
        paths.extend(path);
    }
    for (number, (wake, listeners)) in shared.drain.wakes().iter().zip(listeners).enumerate() {
        let worker = Worker::new(number, shared.clone(), listeners, wake.clone());
        let worker = worker.map_err(|error| Error::Threads(error.into()))?;
        let thread = std::thread::Builder::new().name(format!("serve-{number}"));
        threads.push(thread.spawn(move || worker.run()).map_err(Error::Threads)?);
    }
    Ok((threads, paths))
}

/// Connects to each backend periodically, so that failures and recoveries are known before a
/// message needs the backend.
async fn look_after(shared: &Shared) {
    loop {
        let (_, backends) = shared.backends();
        for backend in backends.list.iter().filter(|backend| backend.may_be_tried()).cloned() {
            let limit = backends.health.timeout();
            tokio::spawn(async move {
                match timeout(limit, backend.address.try_connect()).await {
                    Ok(Ok(_)) => backend.works(),
                    _ => backend.fails(),
                }
            });
        }
        tokio::time::sleep(backends.health.interval()).await;
    }
}

fn listening(place: impl ToString) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Listen { place: place.to_string(), source }
}
