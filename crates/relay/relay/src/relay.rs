//! Starts, reconfigures and stops a relay: its threads, its listeners, and the requests to its
//! control socket.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shunt_control::{Asked, Control, serve_metrics};
use shunt_kernel::window::{End, Windows};
use shunt_sys::limits;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Handle};
use tokio::signal::unix::Signal;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::config::{Config, ConfigError, Loaded};
use crate::intercept::Rules;
use crate::listener::Stop;
use crate::request::{RELAY, Request};
use crate::shared::Shared;
use crate::syn::Syns;
use crate::tool::ToolError;
use crate::{edge, exit, leg, socket};

/// Why a relay does not run.
#[derive(Debug, Error)]
pub enum Error {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// This host lacks a feature.
    #[error("{0}")]
    Host(String),
    /// The rules cannot be installed.
    #[error(transparent)]
    Intercept(#[from] ToolError),
    /// A listening address, or the control socket, cannot be used.
    #[error("cannot listen at {place}: {source}")]
    Listen {
        /// The address or path.
        place: String,
        /// The error.
        source: io::Error,
    },
    /// Threads cannot be started.
    #[error("no threads: {0}")]
    Threads(io::Error),
}

/// Checks whether a relay could run with this file, without starting it.
pub fn check(path: &Path) -> Result<(), Error> {
    leg::check(&Loaded::read(path)?).map_err(Error::Host)
}

/// Runs a relay until `shutdown` completes or the relay has drained.
///
/// `ready` is called when the relay accepts connections. With each `hangup`, it reads its file
/// again. Needs a tokio runtime with I/O and time.
pub async fn run(
    path: PathBuf,
    ready: impl FnOnce(),
    hangup: Signal,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let loaded = Loaded::read(&path)?;
    leg::check(&loaded).map_err(Error::Host)?;
    raise_descriptor_limit();
    let control_path = loaded.config.control.clone();
    let control = Control::open(RELAY, &control_path).map_err(listening(control_path.display()))?;
    let workers = Workers::start()?;
    let shared = Arc::new(Shared::new(loaded.clone(), workers.handles.clone()));
    let mut relay = Relay {
        path,
        shared,
        turbo: Turbo::default(),
        listeners: HashMap::new(),
        ending: Vec::new(),
        rules: None,
        began: Instant::now(),
    };
    relay.apply(loaded).await?;
    let (sender, mut asked) = mpsc::channel(16);
    ready();
    tokio::select! {
        () = shutdown => {}
        () = control.serve(sender) => {}
        () = relay.obey(&mut asked, hangup) => {}
    }
    relay.close().await;
    Ok(())
}

struct Relay {
    path: PathBuf,
    shared: Arc<Shared>,
    turbo: Turbo,
    /// The tasks that wait for connections.
    listeners: HashMap<ListenerKey, Running>,
    /// Tasks that serve the last clients of stopped listeners.
    ending: Vec<JoinHandle<()>>,
    rules: Option<Rules>,
    began: Instant,
}

/// Identifies a listener. One with other options is another listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ListenerKey {
    Forward(SocketAddr),
    /// An address for relays, and the options of its socket.
    Relays(SocketAddr, leg::Options),
    Diverted(SocketAddr),
    Syns(u16, u32),
    Metrics(SocketAddr),
}

/// A task that waits for connections until it is stopped or aborted.
struct Task {
    future: Pin<Box<dyn Future<Output = ()> + Send>>,
    stop: Option<Stop>,
}

/// A running [`Task`].
struct Running {
    handle: JoinHandle<()>,
    stop: Option<Stop>,
}

/// The time for which a stopped listener completes handshakes: while a relay drains, and while
/// another configuration waits for the address.
const DRAIN_LINGER: Duration = Duration::from_secs(1);
const RELOAD_LINGER: Duration = Duration::from_millis(200);

impl Task {
    /// Returns a task that serves no clients: it can be aborted.
    fn new(future: impl Future<Output = ()> + Send + 'static) -> Task {
        Task { future: Box::pin(future), stop: None }
    }

    /// Returns a task that accepts clients.
    fn accepting(future: impl Future<Output = ()> + Send + 'static, stop: Stop) -> Task {
        Task { future: Box::pin(future), stop: Some(stop) }
    }

    fn spawn(self) -> Running {
        Running { handle: tokio::spawn(self.future), stop: self.stop }
    }
}

impl Running {
    /// Stops the task. Its socket is closed when the returned handle completes. A listener serves
    /// first those clients that have connected already.
    fn stop(self, linger: Duration) -> JoinHandle<()> {
        match self.stop {
            Some(stop) => stop.after(linger),
            None => self.handle.abort(),
        }
        self.handle
    }
}

impl ListenerKey {
    /// Returns true if this one cannot be opened while the other is open.
    fn conflicts_with(&self, other: &ListenerKey) -> bool {
        match (self, other) {
            (ListenerKey::Syns(queue, _), ListenerKey::Syns(other, _)) => queue == other,
            _ => self.port().is_some_and(|port| other.port() == Some(port)),
        }
    }

    fn port(&self) -> Option<u16> {
        match self {
            ListenerKey::Forward(address)
            | ListenerKey::Relays(address, _)
            | ListenerKey::Diverted(address)
            | ListenerKey::Metrics(address) => Some(address.port()),
            ListenerKey::Syns(..) => None,
        }
    }
}

impl Relay {
    /// Applies a configuration without losing connections. After an error, the configuration before
    /// is still in use.
    async fn apply(&mut self, loaded: Loaded) -> Result<(), Error> {
        leg::check(&loaded).map_err(Error::Host)?;
        let (before, windows) = (self.shared.loaded(), self.turbo.set.clone());
        // Before anything listens, because the program only affects sockets that are made later.
        if let Err(error) = self.turbo.widen(&leg::windows(&loaded.config)) {
            self.turbo.restore(&windows);
            return Err(error);
        }
        let wanted = listener_keys(&loaded.config, socket::has_ipv6());
        let mut stopped = Vec::new();
        let opened = self.open_all(&wanted, &loaded.config, &mut stopped).await;
        // The rules come last, because all that follows succeeds.
        let opened = opened.and_then(|opened| {
            self.divert(&before.config, &loaded.config)?;
            Ok(opened)
        });
        let opened = match opened {
            Ok(opened) => opened,
            Err(error) => {
                self.turbo.restore(&windows);
                self.reopen(stopped, &before.config);
                return Err(error);
            }
        };
        // This thread carries the listeners' tasks. None of them runs before all has changed.
        self.shared.adopt(loaded);
        self.listeners.extend(opened.into_iter().map(|(key, task)| (key, task.spawn())));
        self.leave(|key| !wanted.contains(key)).await;
        Ok(())
    }

    /// Opens the sockets of all wanted listeners that are not there yet. A task whose address is
    /// needed is stopped before, if it is not wanted any more. `stopped` lists these, also after an
    /// error.
    async fn open_all(
        &mut self,
        wanted: &[ListenerKey],
        config: &Config,
        stopped: &mut Vec<ListenerKey>,
    ) -> Result<Vec<(ListenerKey, Task)>, Error> {
        let mut opened = Vec::new();
        for key in wanted {
            if self.listeners.contains_key(key) {
                continue;
            }
            let in_the_way = |other: &ListenerKey| !wanted.contains(other) && key.conflicts_with(other);
            stopped.extend(self.listeners.keys().filter(|other| in_the_way(other)).cloned());
            self.leave(in_the_way).await;
            opened.push((key.clone(), self.open(key, config)?));
        }
        Ok(opened)
    }

    /// Starts tasks again that were stopped for a configuration that failed.
    fn reopen(&mut self, stopped: Vec<ListenerKey>, config: &Config) {
        for key in stopped {
            match self.open(&key, config) {
                Ok(task) => drop(self.listeners.insert(key, task.spawn())),
                Err(error) => tracing::error!(%error, "a listener is missing until the next reload"),
            }
        }
    }

    /// Installs the rules of a configuration. After an error, those of the configuration before are
    /// installed.
    fn divert(&mut self, before: &Config, config: &Config) -> Result<(), ToolError> {
        let Some(intercept) = &config.intercept else {
            self.rules = None;
            return Ok(());
        };
        if let Some(rules) = self.rules.as_mut().filter(|rules| rules.intercept() == intercept) {
            return rules.replace(config).inspect_err(|_| restored(rules.replace(before)));
        }
        let old = self.rules.take().map(|rules| rules.intercept().clone());
        match (Rules::make(intercept, config), old) {
            (Ok(rules), _) => self.rules = Some(rules),
            (Err(error), None) => return Err(error),
            (Err(error), Some(old)) => {
                let made = Rules::make(&old, before);
                self.rules = made.map_err(|error| restored(Err(error))).ok();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Opens the socket of a listener. The returned task waits for its connections.
    fn open(&self, key: &ListenerKey, config: &Config) -> Result<Task, Error> {
        let shared = self.shared.clone();
        Ok(match key {
            ListenerKey::Forward(address) => {
                let (listener, stop) = edge::listen(*address).map_err(listening(address))?;
                Task::accepting(edge::forward(shared, listener, *address), stop)
            }
            ListenerKey::Diverted(address) => {
                let (listener, stop) = edge::listen_for_all(*address).map_err(listening(address))?;
                Task::accepting(edge::intercept(shared, listener), stop)
            }
            ListenerKey::Relays(address, options) => {
                let (listener, stop) = leg::listen(*address, options).map_err(listening(address))?;
                Task::accepting(exit::accept(shared, listener), stop)
            }
            ListenerKey::Syns(queue, _) => {
                let intercept = config.intercept.as_ref().expect("its listener is wanted");
                let place = format!("netfilter queue {queue}");
                Task::new(Syns::open(shared, intercept).map_err(listening(place))?.watch())
            }
            ListenerKey::Metrics(address) => {
                let listener = std::net::TcpListener::bind(address).and_then(|listener| {
                    listener.set_nonblocking(true)?;
                    TcpListener::from_std(listener)
                });
                let listener = listener.map_err(listening(address))?;
                let text =
                    async move || shared.metrics.text(shared.strangers.count(), shared.levels().into_iter());
                Task::new(serve_metrics(text, listener))
            }
        })
    }

    /// Stops the tasks that `which` selects, and waits until their sockets are closed.
    async fn leave(&mut self, which: impl Fn(&ListenerKey) -> bool) {
        for handle in self.stop(which, RELOAD_LINGER) {
            let _ = handle.await;
        }
    }

    fn stop(&mut self, which: impl Fn(&ListenerKey) -> bool, linger: Duration) -> Vec<JoinHandle<()>> {
        self.listeners.extract_if(|key, _| which(key)).map(|(_, running)| running.stop(linger)).collect()
    }

    /// Serves requests and hang-ups until the relay has drained.
    async fn obey(&mut self, asked: &mut mpsc::Receiver<Asked<Request>>, mut hangup: Signal) {
        let mut drained: Option<Instant> = None;
        loop {
            let pause = tokio::time::sleep(Duration::from_millis(100));
            tokio::select! {
                Some((request, answer)) = asked.recv() => self.answer(request, answer, &mut drained).await,
                Some(()) = hangup.recv() => {
                    if let Err(why) = self.change(Loaded::read(&self.path)).await {
                        tracing::error!(why, "the configuration stays as it was");
                    }
                }
                () = pause, if drained.is_some() => {
                    let late = drained.is_some_and(|deadline| Instant::now() >= deadline);
                    let is_over = self.ending.iter().all(JoinHandle::is_finished);
                    if late || is_over && self.shared.metrics.open.get() == 0 {
                        return tracing::info!("drained");
                    }
                }
            }
        }
    }

    async fn answer(
        &mut self,
        request: Request,
        answer: oneshot::Sender<Result<Value, String>>,
        drained: &mut Option<Instant>,
    ) {
        let done = match request {
            Request::Status => Ok(self.status()),
            Request::Set(assignment) => self.change(self.shared.loaded().with(&assignment)).await,
            Request::Reload => self.change(Loaded::read(&self.path)).await,
            Request::Drain(seconds) => {
                self.drain();
                *drained = Some(Instant::now() + Duration::from_secs(seconds));
                Ok(json!({ "open": self.shared.metrics.open.get() }))
            }
        };
        let _ = answer.send(done);
    }

    async fn change(&mut self, loaded: Result<Loaded, ConfigError>) -> Result<Value, String> {
        // New listeners and rules would attract connections that a draining relay resets.
        if self.shared.is_draining() {
            return Err("the relay drains, so its configuration cannot be changed".to_owned());
        }
        let loaded = loaded.map_err(|error| error.to_string())?;
        let before = self.shared.loaded();
        if loaded.config.control != before.config.control {
            return Err("control cannot be changed while the relay runs".to_owned());
        }
        self.apply(loaded).await.map_err(|error| error.to_string())?;
        tracing::info!("the configuration has changed");
        Ok(Value::Null)
    }

    /// Stops to intercept and to accept new connections. Existing connections continue, also those
    /// that the kernel has completed and the relay has not accepted yet.
    fn drain(&mut self) {
        self.shared.drain();
        if let Some(rules) = &mut self.rules {
            // Packets of existing connections are still diverted.
            let nowhere = Config { routes: Vec::new(), ..self.shared.loaded().config.clone() };
            if let Err(error) = rules.replace(&nowhere) {
                tracing::warn!(%error, "new connections are still intercepted");
            }
        }
        let ending = self.stop(|key| !matches!(key, ListenerKey::Metrics(_)), DRAIN_LINGER);
        self.ending.extend(ending);
    }

    fn status(&self) -> Value {
        let (loaded, metrics) = (self.shared.loaded(), &self.shared.metrics);
        let levels = self.shared.levels();
        let text = metrics.text(self.shared.strangers.count(), levels.clone().into_iter());
        let samples =
            text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' '));
        let counters: serde_json::Map<String, Value> = samples
            .filter(|(name, _)| !name.contains("_bucket{"))
            .filter_map(|(name, value)| Some((name.to_owned(), value.parse::<u64>().ok()?.into())))
            .collect();
        let peers: Vec<Value> = loaded
            .config
            .peers
            .iter()
            .map(|peer| {
                let level = levels.iter().find(|(name, _)| *name == peer.name).map(|(_, level)| level);
                json!({ "name": peer.name, "address": peer.address, "pool": level })
            })
            .collect();
        json!({
            "name": loaded.config.name,
            "uptime-seconds": self.began.elapsed().as_secs(),
            "draining": self.shared.is_draining(),
            "open-connections": metrics.open.get(),
            "idle-legs": metrics.idle_legs.get(),
            "handshakes": self.shared.strangers.count(),
            "peers": peers,
            "counters": counters,
            "config": loaded.config,
        })
    }

    async fn close(mut self) {
        self.rules = None;
        let running = self.listeners.drain().map(|(_, running)| running.handle);
        for handle in running.chain(self.ending.drain(..)) {
            handle.abort();
            let _ = handle.await;
        }
    }
}

/// Returns all listeners that a configuration wants. Without IPv6 sockets, no IPv6
/// packets can be diverted, and none come.
fn listener_keys(config: &Config, has_ipv6: bool) -> Vec<ListenerKey> {
    let mut keys: Vec<ListenerKey> =
        config.forwards.iter().map(|forward| ListenerKey::Forward(forward.listen)).collect();
    keys.extend(config.metrics.map(ListenerKey::Metrics));
    if let Some(accept) = &config.accept {
        let options = leg::Options::for_peers(&accept.peers);
        keys.extend(accept.listen.iter().map(|address| ListenerKey::Relays(*address, options.clone())));
    }
    if let Some(intercept) = &config.intercept {
        let port = intercept.port;
        keys.push(ListenerKey::Diverted((Ipv4Addr::UNSPECIFIED, port).into()));
        if has_ipv6 {
            keys.push(ListenerKey::Diverted((Ipv6Addr::UNSPECIFIED, port).into()));
        }
        keys.push(ListenerKey::Syns(intercept.queue, intercept.mark));
    }
    keys
}

/// The threads that carry connections. They end when this is dropped.
struct Workers {
    handles: Vec<Handle>,
    _stop: Vec<oneshot::Sender<()>>,
}

impl Workers {
    /// Starts one thread for each processor.
    fn start() -> Result<Workers, Error> {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let (mut handles, mut stops) = (Vec::new(), Vec::new());
        for number in 0..count {
            let runtime = Builder::new_current_thread().enable_all().build().map_err(Error::Threads)?;
            handles.push(runtime.handle().clone());
            let (stop, stopped) = oneshot::channel::<()>();
            stops.push(stop);
            let thread = std::thread::Builder::new().name(format!("relay-{number}"));
            thread.spawn(move || runtime.block_on(stopped)).map_err(Error::Threads)?;
        }
        Ok(Workers { handles, _stop: stops })
    }
}

/// The initial congestion windows of turbo start.
#[derive(Default)]
struct Turbo {
    /// The program that sets them. It is attached when a leg uses turbo start for the first time,
    /// if the kernel accepts it.
    program: Option<Windows>,
    /// The windows that the program sets now.
    set: HashMap<End, u32>,
}

impl Turbo {
    /// Sets the wanted windows, and the default for all others. An error may leave some of them as
    /// they were.
    fn widen(&mut self, wanted: &HashMap<End, u32>) -> Result<(), Error> {
        if self.program.is_none() && !wanted.is_empty() {
            let attached = Windows::attach();
            if let Err(error) = &attached {
                tracing::warn!(%error, "turbo start begins with the kernel's own congestion window");
            }
            self.program = attached.ok();
        }
        let Some(program) = &mut self.program else { return Ok(()) };
        for (end, segments) in leg::changes(&self.set, wanted) {
            program.set(end, segments).map_err(|error| Error::Host(error.to_string()))?;
            match segments {
                0 => self.set.remove(&end),
                segments => self.set.insert(end, segments),
            };
        }
        Ok(())
    }

    /// Sets the windows of the configuration before, after an error.
    fn restore(&mut self, before: &HashMap<End, u32>) {
        if let Err(error) = self.widen(before) {
            tracing::error!(%error, "some congestion windows are wrong until the next reload");
        }
    }
}

/// Logs that the rules of the configuration before could not be installed again.
fn restored(done: Result<(), ToolError>) {
    if let Err(error) = done {
        tracing::error!(%error, "nothing may be intercepted until the next reload");
    }
}

fn listening(place: impl ToString) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Listen { place: place.to_string(), source }
}

/// Each connection takes two descriptors, and temporarily four more for pipes.
fn raise_descriptor_limit() {
    if let Err(error) = limits::raise_descriptors() {
        tracing::debug!(%error, "the descriptor limit stays as it is");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_ipv6_has_no_ipv6_listener() {
        let config = Loaded::parse("name = 'a'\n[intercept]\n").unwrap().config;
        let diverted = |has_ipv6| {
            let keys = listener_keys(&config, has_ipv6).into_iter();
            keys.filter_map(|key| match key {
                ListenerKey::Diverted(address) => Some(address.to_string()),
                _ => None,
            })
            .collect::<Vec<_>>()
        };
        assert_eq!(diverted(true), ["0.0.0.0:7441", "[::]:7441"]);
        assert_eq!(diverted(false), ["0.0.0.0:7441"]);
    }
}
