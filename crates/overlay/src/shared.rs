//! What all conversations of a router share: who listens, what is promised to whom, and how much of the router each namespace uses.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, sockopt};
use serde_json::{Value, json};
use shunt_control::{Gate, Shares};
use shunt_kernel::names::Names;
use shunt_kernel::sequence::{Origin, Reader};
use shunt_sys::options::Copied;
use shunt_sys::{Errno, identity, netns};
use socket2::SockRef;
use tokio::sync::Notify;

use crate::account::Spares;
use crate::config::Loaded;
use crate::connections::Connections;
use crate::discovery::Discovery;
use crate::errand::Errands;
use crate::guests::Guests;
use crate::map::{Map, Published};
use crate::metrics::{End, Metrics};
use crate::namespace::Namespace;
use crate::peers::Peers;
use crate::reason::Reason;
use crate::secure::Guard;
use crate::wire::Ask;
use crate::worth::Worth;

/// See the module.
#[derive(Debug)]
pub(crate) struct Shared {
    loaded: Mutex<Arc<Loaded>>,
    map: Mutex<Mapped>,
    pub(crate) discovery: Discovery,
    /// A supervisor has come.
    pub(crate) supervised: Notify,
    pub(crate) metrics: Metrics,
    pub(crate) errands: Arc<Errands>,
    pub(crate) names: Mutex<Names>,
    /// None: containers are trusted.
    pub(crate) guard: Option<Guard>,
    pub(crate) reader: Mutex<Reader>,
    pub(crate) connections: Connections,
    pub(crate) worth: Worth,
    pub(crate) spares: Spares,
    /// The lines to other routers, and theirs to this one.
    pub(crate) peers: Peers,
    pub(crate) guests: Guests,
    /// Who has connected from the address of another router's host, and has not shown yet that it has the key.
    pub(crate) unproven: Arc<Gate>,
    state: Mutex<State>,
    /// A promise, a commitment or an end: whoever waits for one looks again.
    pub(crate) changed: Notify,
}

/// How much there is of what programs bring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Levels {
    pub(crate) supervisors: usize,
    pub(crate) namespaces: usize,
    pub(crate) listeners: usize,
    pub(crate) promises: usize,
}

#[derive(Debug)]
struct Mapped {
    map: Arc<Map>,
    published: Published,
}

#[derive(Debug, Default)]
struct State {
    supervisors: HashMap<u64, Supervisor>,
    next: u64,
    /// By their cookies.
    namespaces: HashMap<u64, (Arc<Namespace>, usize)>,
    /// By their cookies.
    listeners: HashMap<u64, Listener>,
    /// What was asked for and not offered yet: where, and for whom, by either name.
    asked: HashMap<(SocketAddr, Client), usize>,
    /// By the cookie of the socket that the server's program accepts.
    promises: HashMap<u64, Promise>,
    /// Sockets that have been accepted by somebody who waits for an answer.
    waiting: BTreeSet<u64>,
    /// Sockets that have stayed on the overlay, by their cookies.
    stayed: BTreeSet<u64>,
    stayed_order: VecDeque<u64>,
    /// Conversations of each namespace.
    shares: HashMap<u64, usize>,
    /// Conversations that other routers have begun.
    visitors: usize,
    /// Whether a namespace is one that only root can have made, by their cookies. That never changes.
    roots: HashMap<u64, bool>,
}

#[derive(Debug)]
struct Supervisor {
    namespace: u64,
}

#[derive(Clone, Copy, Debug)]
struct Listener {
    supervisor: u64,
    namespace: u64,
    /// Others may listen there as well (SO_REUSEPORT), and the kernel chooses for each connection.
    shares: bool,
    /// What it accepts are sockets of IPv4.
    is_ipv4: bool,
}

/// The listening sockets of which one gets a connection: all are supervised.
#[derive(Clone, Debug)]
pub(crate) struct Takers {
    pub(crate) namespace: Arc<Namespace>,
    /// Their cookies.
    sockets: Vec<u64>,
    /// There may be others by the time that the connection is there.
    shares: bool,
}

/// What the server's router has said to the client's.
#[derive(Debug)]
struct Promise {
    takers: Takers,
    local: SocketAddr,
    remote: SocketAddr,
    origin: Origin,
    /// The host connection, once it is committed.
    committed: Option<OwnedFd>,
    /// Whoever has accepted the socket cannot wait any longer.
    unwanted: Arc<Unwanted>,
    /// Since when nobody will take it, as it seems.
    lost: Option<Instant>,
}

/// Whether a promise is to be taken back, if it still can be.
#[derive(Debug, Default)]
struct Unwanted {
    is_so: AtomicBool,
    changed: Notify,
}

/// By what the server's router knows whose connection is coming: its container may have another address than that which was probable, and
/// nobody may have told yet on which host it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Client {
    Host(IpAddr),
    Container(IpAddr),
}

/// What the server's router knows of a socket that was accepted.
#[derive(Debug)]
pub(crate) enum Claim {
    /// It is this host connection's, of a client whose streams begin there.
    Taken(OwnedFd, Origin),
    /// That will be known soon.
    Promised,
    /// An offer may be on its way.
    Expected,
    /// No.
    Unknown,
}

/// A namespace may have so many conversations under way.
const SHARE: usize = 1024;
/// So many conversations other routers may have under way.
const VISITORS: usize = 4096;
/// So many may have shown nothing yet. Hosts of one overlay are of one network more often than not.
const UNPROVEN: Shares = Shares { host: 2048, network: 4096, all: 4096, reserved: 0 };
/// So many listening sockets a supervisor may show.
const LISTENERS: usize = 4096;
/// So many supervisors a namespace may have.
const SUPERVISORS: usize = 1024;
/// So many sockets are remembered to have stayed.
const STAYED: usize = 65_536;
/// Of so many namespaces it is remembered who made them.
const NAMESPACES: usize = 4096;
/// Whoever has accepted a socket asks for what is committed within this, however busy the machine is; or there is nobody who could.
const ASKS: Duration = Duration::from_secs(15);
/// A socket that is not found for so long is not there.
const GONE: Duration = Duration::from_secs(2);

impl Shared {
    pub(crate) fn new(
        loaded: Loaded,
        names: Names,
        guard: Option<Guard>,
        reader: Reader,
    ) -> Result<Shared, Errno> {
        let connections = Connections::new()?;
        let own = loaded.host().address.ip();
        Ok(Shared {
            peers: Peers::new(loaded.keys.clone(), own, loaded.config.ask()),
            guests: Guests::default(),
            map: Mutex::new(Mapped {
                map: Arc::new(Map::new(&loaded.config, &Published::default())),
                published: Published::default(),
            }),
            discovery: Discovery::default(),
            supervised: Notify::new(),
            loaded: Mutex::new(Arc::new(loaded)),
            metrics: Metrics::default(),
            errands: Arc::new(Errands::new(tokio::runtime::Handle::current())),
            names: Mutex::new(names),
            guard,
            reader: Mutex::new(reader),
            connections,
            worth: Worth::default(),
            spares: Spares::default(),
            unproven: Gate::new(UNPROVEN),
            state: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// Which options of a container's socket its host connection gets.
    pub(crate) fn copied(&self) -> Copied {
        if self.guard.is_some() { Copied::Harmless } else { Copied::All }
    }

    /// The configuration as it is now.
    pub(crate) fn loaded(&self) -> Arc<Loaded> {
        self.loaded.lock().expect(NEVER).clone()
    }

    /// Which host has which container, as far as is known now.
    pub(crate) fn map(&self) -> Arc<Map> {
        self.map.lock().expect(NEVER).map.clone()
    }

    /// Another configuration.
    pub(crate) fn reload(&self, loaded: Loaded) {
        *self.loaded.lock().expect(NEVER) = Arc::new(loaded);
        let published = self.map.lock().expect(NEVER).published.clone();
        self.publish(published);
    }

    /// What hosts have published. Has a line to each other router from now on.
    pub(crate) fn publish(&self, published: Published) {
        let loaded = self.loaded();
        let map = Arc::new(Map::new(&loaded.config, &published));
        self.peers.keep(&map.routers_but(&loaded.config.name));
        *self.map.lock().expect(NEVER) = Mapped { map, published };
    }

    /// Those with supervisors.
    pub(crate) fn namespaces(&self) -> Vec<Arc<Namespace>> {
        self.state().namespaces.values().map(|(known, _)| known.clone()).collect()
    }

    /// Room for one more conversation of a namespace.
    pub(crate) fn share(self: &Arc<Shared>, namespace: u64) -> Option<Share> {
        let mut state = self.state();
        let count = state.shares.entry(namespace).or_default();
        if *count >= SHARE {
            return None;
        }
        *count += 1;
        Some(Share { shared: self.clone(), namespace })
    }

    /// Room for one more conversation of another router.
    pub(crate) fn visit(self: &Arc<Shared>) -> Option<Visit> {
        let mut state = self.state();
        if state.visitors >= VISITORS {
            return None;
        }
        state.visitors += 1;
        Some(Visit(self.clone()))
    }

    /// A supervisor in the namespace of a socket that it has shown.
    pub(crate) fn supervise(
        self: &Arc<Shared>,
        namespace: u64,
        socket: impl AsFd,
    ) -> Result<Supervision, Errno> {
        let mut state = self.state();
        match state.namespaces.get_mut(&namespace) {
            Some((_, supervisors)) if *supervisors >= SUPERVISORS => return Err(Errno::MFILE),
            Some((_, supervisors)) => *supervisors += 1,
            None => {
                let known = Arc::new(Namespace::of(socket.as_fd())?);
                state.namespaces.insert(namespace, (known, 1));
            }
        }
        let id = state.next;
        state.next += 1;
        state.supervisors.insert(id, Supervisor { namespace });
        self.supervised.notify_one();
        Ok(Supervision { shared: self.clone(), id })
    }

    /// The one with that cookie, while a supervisor is in it.
    pub(crate) fn namespace(&self, cookie: u64) -> Option<Arc<Namespace>> {
        self.state().namespaces.get(&cookie).map(|(known, _)| known.clone())
    }

    /// Whether a socket is of that namespace, and the namespace one that only root can have made.
    pub(crate) fn lives_in(&self, socket: BorrowedFd<'_>, namespace: u64) -> bool {
        if identity::namespace(socket) != Ok(namespace) {
            return false;
        }
        let mut state = self.state();
        if let Some(is_roots) = state.roots.get(&namespace) {
            return *is_roots;
        }
        let Ok(is_roots) = netns::belongs_here(socket) else { return false };
        if state.roots.len() >= NAMESPACES {
            state.roots.clear();
        }
        state.roots.insert(namespace, is_roots);
        is_roots
    }

    /// Which listening sockets a connection to `destination` may get to.
    pub(crate) fn takers(&self, destination: SocketAddr) -> Result<Takers, Reason> {
        let namespaces: Vec<(u64, Arc<Namespace>)> =
            self.state().namespaces.iter().map(|(cookie, (known, _))| (*cookie, known.clone())).collect();
        let mut having = namespaces.into_iter().filter(|(_, known)| known.has(destination.ip()));
        let (cookie, namespace) = having.next().ok_or(Reason::NotSupervised)?;
        if having.next().is_some() {
            return Err(Reason::Ambiguous);
        }
        let found = namespace.listener(destination).ok_or(Reason::NotSupervised)?;
        let hosts_are_ipv6 = self.loaded().host().address.is_ipv6();
        let shares = self.state().listeners.get(&found.cookie).is_some_and(|listener| listener.shares);
        let sockets = match shares {
            true => namespace.listeners(destination).map_err(|_| Reason::Failed)?,
            false => vec![found.cookie],
        };
        let state = self.state();
        // Whoever accepts must be able to ask.
        if state.shares.get(&cookie).is_some_and(|count| *count > SHARE / 2) {
            return Err(Reason::Busy);
        }
        let is_supervised =
            |socket| state.listeners.get(socket).is_some_and(|listener| listener.namespace == cookie);
        if sockets.is_empty() || !sockets.iter().all(is_supervised) {
            return Err(Reason::NotSupervised);
        }
        if hosts_are_ipv6 && sockets.iter().any(|socket| state.listeners[socket].is_ipv4) {
            return Err(Reason::Family);
        }
        Ok(Takers { namespace, sockets, shares })
    }

    /// An offer is to be expected until what is returned is dropped.
    pub(crate) fn expect(self: &Arc<Shared>, ask: Ask, host: IpAddr) -> Expected {
        let keys =
            [Client::Host(host), Client::Container(ask.source)].map(|client| (ask.destination, client));
        let mut state = self.state();
        for key in keys {
            *state.asked.entry(key).or_default() += 1;
        }
        Expected { shared: self.clone(), keys }
    }

    /// Whoever accepts the socket `cookie` gets what is committed, until what is returned is dropped. One of the takers has it, or has
    /// accepted it.
    pub(crate) fn promise(
        self: &Arc<Shared>,
        cookie: u64,
        takers: Takers,
        (local, remote): (SocketAddr, SocketAddr),
        origin: Origin,
    ) -> Result<Promised, Reason> {
        if self.connections.is_full() {
            return Err(Reason::Busy);
        }
        // It is there, so whoever has it is among those that there are now.
        let takers = if takers.shares { self.takers(local)? } else { takers };
        let mut state = self.state();
        if state.stayed.contains(&cookie) {
            return Err(Reason::Late);
        }
        let listeners = takers.sockets.iter().map(|socket| state.listeners.get(socket));
        let listeners: Option<Vec<&Listener>> = listeners.collect();
        let listener = listeners.and_then(|listeners| listeners.first().copied());
        let namespace = listener.ok_or(Reason::NotSupervised)?.namespace;
        if state.promises.contains_key(&cookie) {
            return Err(Reason::Mismatch);
        }
        let unwanted = Arc::<Unwanted>::default();
        let promise = Promise {
            takers,
            local,
            remote,
            origin,
            committed: None,
            unwanted: unwanted.clone(),
            lost: None,
        };
        state.promises.insert(cookie, promise);
        drop(state);
        self.changed.notify_waiters();
        Ok(Promised { shared: self.clone(), cookie, namespace, unwanted })
    }

    /// What there is for a socket that was accepted, of a connection to that address by that client.
    pub(crate) fn claim(&self, cookie: u64, expected: Option<(SocketAddr, Client)>) -> Claim {
        let mut state = self.state();
        if let Some(promise) = state.promises.get_mut(&cookie) {
            let Some(connection) = promise.committed.take() else { return Claim::Promised };
            let origin = promise.origin;
            state.promises.remove(&cookie);
            return Claim::Taken(connection, origin);
        }
        let is_expected = expected.is_some_and(|expected| state.asked.contains_key(&expected));
        if is_expected { Claim::Expected } else { Claim::Unknown }
    }

    /// A program has accepted the socket, and waits for an answer until what is returned is dropped.
    pub(crate) fn wait_for(self: &Arc<Shared>, cookie: u64) -> Waiting {
        self.state().waiting.insert(cookie);
        self.changed.notify_waiters();
        Waiting { shared: self.clone(), cookie }
    }

    /// Whether one does, or has been told that the socket stays on the overlay.
    pub(crate) fn has_asked(&self, cookie: u64) -> bool {
        let state = self.state();
        state.waiting.contains(&cookie) || state.stayed.contains(&cookie)
    }

    /// The promise is taken back, if it still can be: whoever waits for it is told what has come of that.
    pub(crate) fn give_up(&self, cookie: u64) {
        if let Some(promise) = self.state().promises.get(&cookie) {
            promise.unwanted.is_so.store(true, Relaxed);
            promise.unwanted.changed.notify_one();
        }
    }

    /// The socket stays on the overlay, whatever comes. False: it has been promised meanwhile.
    pub(crate) fn stay(&self, cookie: u64) -> bool {
        let mut state = self.state();
        if state.promises.contains_key(&cookie) {
            return false;
        }
        if state.stayed.insert(cookie) {
            state.stayed_order.push_back(cookie);
        }
        if state.stayed_order.len() > STAYED
            && let Some(oldest) = state.stayed_order.pop_front()
        {
            state.stayed.remove(&oldest);
        }
        true
    }

    /// Forgets connections that have ended on the overlay, when there are many.
    fn forget_stayed(&self) {
        if !self.connections.has_many_stayed() {
            return;
        }
        let known: Vec<Arc<Namespace>> =
            self.state().namespaces.values().map(|(known, _)| known.clone()).collect();
        let open: Result<Vec<_>, _> = known.iter().map(|known| known.connections()).collect();
        // In doubt they are kept.
        if let Ok(open) = open {
            self.connections.retain_stayed(&open.into_iter().flatten().map(|it| it.cookie).collect());
        }
    }

    /// Drops what is committed and cannot be accepted any more, or was by somebody who did not ask; and lets go of what has ended.
    pub(crate) fn sweep(&self) {
        let keys = &self.loaded().keys;
        if keys.look_again() {
            self.peers.renew();
            self.guests.renew(&keys.now());
        }
        self.worth.sweep(&self.connections);
        self.connections.sweep();
        self.spares.sweep();
        self.guests.sweep();
        self.forget_stayed();
        let committed: Vec<(u64, Arc<Namespace>, SocketAddr, SocketAddr)> = self
            .state()
            .promises
            .iter()
            .filter(|(_, promise)| promise.committed.is_some())
            .map(|(cookie, it)| (*cookie, it.takers.namespace.clone(), it.local, it.remote))
            .collect();
        for (cookie, namespace, local, remote) in committed {
            let found = namespace.connection(local, remote).filter(|found| found.cookie == cookie);
            let (waits, limit) = match found {
                Some(found) => (!found.held, ASKS),
                None => (false, GONE),
            };
            let mut state = self.state();
            let is_waited_for = state.waiting.contains(&cookie);
            let Some(promise) = state.promises.get_mut(&cookie) else { continue };
            if waits || is_waited_for {
                promise.lost = None;
            } else if promise.lost.get_or_insert_with(Instant::now).elapsed() > limit {
                let lost = state.promises.remove(&cookie);
                drop(state);
                lost.into_iter().for_each(Promise::reset);
                self.metrics.reset();
            }
        }
    }

    pub(crate) fn report(&self) -> Value {
        let lines: serde_json::Map<String, Value> = self
            .peers
            .report()
            .into_iter()
            .map(|(router, is_up)| (router.to_string(), is_up.into()))
            .collect();
        let levels = self.levels();
        json!({
            "supervisors": levels.supervisors,
            "namespaces": levels.namespaces,
            "listeners": levels.listeners,
            "promises": levels.promises,
            "etcd": self.loaded().config.etcd.as_ref().map(|_| self.discovery.report()),
            "lines": { "to": lines, "from": self.guests.count() },
            "connections": {
                "client": self.connections.count(End::Client),
                "server": self.connections.count(End::Server),
            },
        })
    }

    pub(crate) fn levels(&self) -> Levels {
        let state = self.state();
        let namespaces: BTreeSet<u64> =
            state.supervisors.values().map(|supervisor| supervisor.namespace).collect();
        Levels {
            supervisors: state.supervisors.len(),
            namespaces: namespaces.len(),
            listeners: state.listeners.len(),
            promises: state.promises.len(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(NEVER)
    }
}

const NEVER: &str = "nobody panics while it is locked";

/// A supervisor, as long as it is connected.
#[derive(Debug)]
pub(crate) struct Supervision {
    shared: Arc<Shared>,
    id: u64,
}

impl Supervision {
    /// This listening socket, whose cookie is that, is supervised.
    pub(crate) fn listen(&self, socket: impl AsFd, cookie: u64, namespace: u64) -> Result<(), Errno> {
        // In doubt it shares its port.
        let shares = sockopt::socket_reuseport(&socket).unwrap_or(true);
        let is_ipv4 = sockopt::socket_domain(&socket)? == AddressFamily::INET;
        let mut state = self.shared.state();
        let count = state.listeners.values().filter(|listener| listener.supervisor == self.id).count();
        if count >= LISTENERS {
            return Err(Errno::MFILE);
        }
        state.listeners.insert(cookie, Listener { supervisor: self.id, namespace, shares, is_ipv4 });
        Ok(())
    }

    /// None is any more.
    pub(crate) fn withdraw(&self) {
        self.shared.state().listeners.retain(|_, listener| listener.supervisor != self.id);
    }
}

impl Drop for Supervision {
    fn drop(&mut self) {
        self.withdraw();
        let mut state = self.shared.state();
        let Some(supervisor) = state.supervisors.remove(&self.id) else { return };
        if let Some((_, supervisors)) = state.namespaces.get_mut(&supervisor.namespace) {
            *supervisors -= 1;
            if *supervisors == 0 {
                state.namespaces.remove(&supervisor.namespace);
            }
        }
        let State { promises, listeners, .. } = &mut *state;
        let left = promises
            .extract_if(|_, promise| !promise.takers.sockets.iter().any(|it| listeners.contains_key(it)));
        let left: Vec<Promise> = left.map(|(_, promise)| promise).collect();
        drop(state);
        for promise in left {
            promise.unwanted.is_so.store(true, Relaxed);
            promise.unwanted.changed.notify_one();
            promise.reset();
        }
    }
}

impl Promise {
    /// Nobody will take it: who has it at the other end is told at once, and not only that it has been closed.
    fn reset(self) {
        if let Some(connection) = self.committed {
            let _ = SockRef::from(&connection).set_linger(Some(Duration::ZERO));
        }
    }
}

/// See [`Shared::share`].
#[derive(Debug)]
pub(crate) struct Share {
    shared: Arc<Shared>,
    namespace: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        if let Some(count) = state.shares.get_mut(&self.namespace) {
            *count -= 1;
            if *count == 0 {
                state.shares.remove(&self.namespace);
            }
        }
    }
}

/// See [`Shared::visit`].
#[derive(Debug)]
pub(crate) struct Visit(Arc<Shared>);

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.state().visitors -= 1;
    }
}

/// See [`Shared::expect`].
#[derive(Debug)]
pub(crate) struct Expected {
    shared: Arc<Shared>,
    keys: [(SocketAddr, Client); 2],
}

impl Drop for Expected {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        for key in self.keys {
            if let Some(count) = state.asked.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    state.asked.remove(&key);
                }
            }
        }
        drop(state);
        self.shared.changed.notify_waiters();
    }
}

/// See [`Shared::wait_for`].
#[derive(Debug)]
pub(crate) struct Waiting {
    shared: Arc<Shared>,
    cookie: u64,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.shared.state().waiting.remove(&self.cookie);
    }
}

/// See [`Shared::promise`].
#[derive(Debug)]
pub(crate) struct Promised {
    shared: Arc<Shared>,
    cookie: u64,
    /// The network namespace of whoever will accept it.
    namespace: u64,
    unwanted: Arc<Unwanted>,
}

impl Promised {
    pub(crate) fn namespace(&self) -> u64 {
        self.namespace
    }

    /// Until it is to be taken back.
    pub(crate) async fn is_unwanted(&self) {
        while !self.unwanted.is_so.load(Relaxed) {
            self.unwanted.changed.notified().await;
        }
    }

    /// This is the host connection. None: nobody is left who could accept it, and it is given back.
    pub(crate) fn commit(self, connection: OwnedFd) -> Option<OwnedFd> {
        let mut state = self.shared.state();
        let Some(promise) = state.promises.get_mut(&self.cookie) else { return Some(connection) };
        promise.committed = Some(connection);
        None
    }
}

impl Drop for Promised {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        if state.promises.get(&self.cookie).is_some_and(|promise| promise.committed.is_none()) {
            state.promises.remove(&self.cookie);
        }
        drop(state);
        self.shared.changed.notify_waiters();
    }
}
