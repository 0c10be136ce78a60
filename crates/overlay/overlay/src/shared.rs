//! The state that all conversations of a router share: the supervisors and their listening sockets,
//! the promises to other routers, and the number of conversations that each network namespace has.

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

/// The shared state of a router.
#[derive(Debug)]
pub(crate) struct Shared {
    loaded: Mutex<Arc<Loaded>>,
    map: Mutex<Mapped>,
    pub(crate) discovery: Discovery,
    /// Notified when a supervisor connects.
    pub(crate) supervised: Notify,
    pub(crate) metrics: Metrics,
    pub(crate) errands: Arc<Errands>,
    pub(crate) names: Mutex<Names>,
    /// `None` if containers are trusted.
    pub(crate) guard: Option<Guard>,
    pub(crate) reader: Mutex<Reader>,
    pub(crate) connections: Connections,
    pub(crate) worth: Worth,
    pub(crate) spares: Spares,
    /// The lines that this router keeps to others. `guests` has those that others keep to it.
    pub(crate) peers: Peers,
    pub(crate) guests: Guests,
    /// Bounds the connections from other hosts that have not proved yet that they have the key.
    pub(crate) unproven: Arc<Gate>,
    state: Mutex<State>,
    /// Notified at a promise, a commitment or the end of one. Tasks that wait for one check again.
    pub(crate) changed: Notify,
}

/// The numbers of objects that programs have caused.
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
    /// Namespaces with supervisors, by cookie, each with the number of its supervisors.
    namespaces: HashMap<u64, (Arc<Namespace>, usize)>,
    /// Supervised listening sockets, by cookie.
    listeners: HashMap<u64, Listener>,
    /// The number of Asks that were answered with yes and not yet offered, by destination and
    /// client. Each Ask is counted under both names of its client.
    asked: HashMap<(SocketAddr, Client), usize>,
    /// Promises, by the cookie of the socket that the server's program accepts.
    promises: HashMap<u64, Promise>,
    /// Accepted sockets whose supervisor waits for an answer, by cookie.
    waiting: BTreeSet<u64>,
    /// Sockets that have stayed on the overlay, by cookie.
    stayed: BTreeSet<u64>,
    stayed_order: VecDeque<u64>,
    /// The number of conversations of each namespace.
    shares: HashMap<u64, usize>,
    /// The number of conversations that other routers have begun.
    visitors: usize,
    /// Records for each namespace cookie if only root can have made the namespace. That never
    /// changes.
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
    /// Other sockets may listen on that port as well (SO_REUSEPORT). The kernel chooses one for
    /// each connection.
    shares: bool,
    /// The accepted sockets are of the family AF_INET.
    is_ipv4: bool,
}

/// The listening sockets that may get a connection. All of them are supervised.
#[derive(Clone, Debug)]
pub(crate) struct Takers {
    pub(crate) namespace: Arc<Namespace>,
    /// The cookies of the sockets.
    sockets: Vec<u64>,
    /// Other sockets may have joined the port by the time that the connection is established.
    shares: bool,
}

/// A promise of this router, the server's, to the client's router.
#[derive(Debug)]
struct Promise {
    takers: Takers,
    local: SocketAddr,
    remote: SocketAddr,
    origin: Origin,
    /// The host connection, once it is committed.
    committed: Option<OwnedFd>,
    /// Shared with [`Promised`]: set when the supervisor that has accepted the socket stops
    /// waiting.
    unwanted: Arc<Unwanted>,
    /// The time since which no process seems to be there that could take the connection.
    lost: Option<Instant>,
}

/// A request to withdraw a promise, if that is still possible.
#[derive(Debug, Default)]
struct Unwanted {
    is_so: AtomicBool,
    changed: Notify,
}

/// A name under which the server's router expects a client's connection. The container may turn out
/// to have another address than the expected one, and the map may not know its host yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Client {
    Host(IpAddr),
    Container(IpAddr),
}

/// The state of a socket that was accepted.
#[derive(Debug)]
pub(crate) enum Claim {
    /// Committed: this host connection replaces the socket. The client's first sequence numbers are
    /// given.
    Taken(OwnedFd, Origin),
    /// Promised, and not committed yet.
    Promised,
    /// Neither, but an offer may be on its way.
    Expected,
    /// There is no host connection for it.
    Unknown,
}

/// The largest number of conversations that one namespace may have.
const SHARE: usize = 1024;
/// The largest number of conversations that other routers may have begun.
const VISITORS: usize = 4096;
/// Bounds for connections that have not proved the key. The hosts of one overlay are usually on one
/// network, so the bound for a network is that for all.
const UNPROVEN: Shares = Shares { host: 2048, network: 4096, all: 4096, reserved: 0 };
/// The largest number of listening sockets that one supervisor may show.
const LISTENERS: usize = 4096;
/// The largest number of supervisors that one namespace may have.
const SUPERVISORS: usize = 1024;
/// The number of sockets that are remembered as having stayed on the overlay.
const STAYED: usize = 65_536;
/// The number of namespaces for which [`Shared::lives_in`] remembers its result.
const NAMESPACES: usize = 4096;
/// The time within which a supervisor asks about a socket that its program has accepted, even on a
/// busy machine. After it, no process is assumed to be there that could ask.
const ASKS: Duration = Duration::from_secs(15);
/// The time after which a socket that the kernel does not find is taken to be closed.
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

    /// Returns the socket options that are copied from a container's socket to its host connection.
    pub(crate) fn copied(&self) -> Copied {
        if self.guard.is_some() { Copied::Harmless } else { Copied::All }
    }

    /// Returns the current configuration.
    pub(crate) fn loaded(&self) -> Arc<Loaded> {
        self.loaded.lock().expect(NEVER).clone()
    }

    /// Returns the current map of containers to hosts.
    pub(crate) fn map(&self) -> Arc<Map> {
        self.map.lock().expect(NEVER).map.clone()
    }

    /// Replaces the configuration.
    pub(crate) fn reload(&self, loaded: Loaded) {
        *self.loaded.lock().expect(NEVER) = Arc::new(loaded);
        let published = self.map.lock().expect(NEVER).published.clone();
        self.publish(published);
    }

    /// Replaces the published part of the map. From now on a line to each other router is kept.
    pub(crate) fn publish(&self, published: Published) {
        let loaded = self.loaded();
        let map = Arc::new(Map::new(&loaded.config, &published));
        self.peers.keep(&map.routers_but(&loaded.config.name));
        *self.map.lock().expect(NEVER) = Mapped { map, published };
    }

    /// Returns the result of `read` for the published part of the map.
    pub(crate) fn published<T>(&self, read: impl FnOnce(&Published) -> T) -> T {
        read(&self.map.lock().expect(NEVER).published)
    }

    /// Returns the namespaces that have supervisors.
    pub(crate) fn namespaces(&self) -> Vec<Arc<Namespace>> {
        self.state().namespaces.values().map(|(known, _)| known.clone()).collect()
    }

    /// Reserves room for one more conversation of a namespace.
    pub(crate) fn share(self: &Arc<Shared>, namespace: u64) -> Option<Share> {
        let mut state = self.state();
        let count = state.shares.entry(namespace).or_default();
        if *count >= SHARE {
            return None;
        }
        *count += 1;
        Some(Share { shared: self.clone(), namespace })
    }

    /// Reserves room for one more conversation of another router.
    pub(crate) fn visit(self: &Arc<Shared>) -> Option<Visit> {
        let mut state = self.state();
        if state.visitors >= VISITORS {
            return None;
        }
        state.visitors += 1;
        Some(Visit(self.clone()))
    }

    /// Adds a supervisor to the namespace of the socket that it has shown.
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

    /// Returns the namespace with that cookie while it has a supervisor.
    pub(crate) fn namespace(&self, cookie: u64) -> Option<Arc<Namespace>> {
        self.state().namespaces.get(&cookie).map(|(known, _)| known.clone())
    }

    /// Checks that the socket belongs to that namespace, and that only root can have made the
    /// namespace.
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

    /// Returns the listening sockets that may get a connection to `destination`.
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
        // Half of the share is kept free, so that the accepting program can still ask.
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

    /// Expects an offer until the returned value is dropped.
    pub(crate) fn expect(self: &Arc<Shared>, ask: Ask, host: IpAddr) -> Expected {
        let keys =
            [Client::Host(host), Client::Container(ask.source)].map(|client| (ask.destination, client));
        let mut state = self.state();
        for key in keys {
            *state.asked.entry(key).or_default() += 1;
        }
        Expected { shared: self.clone(), keys }
    }

    /// Promises the host connection to the process that accepts the socket `cookie`, until the
    /// returned value is dropped. One of `takers` has that socket in its backlog, or has accepted
    /// it.
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
        // The connection exists by now, so its listener is among the current ones.
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

    /// Returns the state of an accepted socket. `expected` names its connection: destination and
    /// client.
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

    /// Notes that a supervisor waits for the answer about an accepted socket, until the returned
    /// value is dropped.
    pub(crate) fn wait_for(self: &Arc<Shared>, cookie: u64) -> Waiting {
        self.state().waiting.insert(cookie);
        self.changed.notify_waiters();
        Waiting { shared: self.clone(), cookie }
    }

    /// Returns `true` if a supervisor waits for an answer about that socket, or was answered that
    /// it stays on the overlay.
    pub(crate) fn has_asked(&self, cookie: u64) -> bool {
        let state = self.state();
        state.waiting.contains(&cookie) || state.stayed.contains(&cookie)
    }

    /// Asks the task that keeps the promise to withdraw it, if that is still possible. `changed` is
    /// notified when it has decided.
    pub(crate) fn give_up(&self, cookie: u64) {
        if let Some(promise) = self.state().promises.get(&cookie) {
            promise.unwanted.is_so.store(true, Relaxed);
            promise.unwanted.changed.notify_one();
        }
    }

    /// Keeps the socket on the overlay for good. Returns `false` if it has been promised.
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

    /// Forgets connections that have ended on the overlay, when the table is half full.
    fn forget_stayed(&self) {
        if !self.connections.has_many_stayed() {
            return;
        }
        let known: Vec<Arc<Namespace>> =
            self.state().namespaces.values().map(|(known, _)| known.clone()).collect();
        let open: Result<Vec<_>, _> = known.iter().map(|known| known.connections()).collect();
        // If the kernel cannot be asked, all are kept.
        if let Ok(open) = open {
            self.connections.retain_stayed(&open.into_iter().flatten().map(|it| it.cookie).collect());
        }
    }

    /// Runs the periodic work: ends promises that no process can accept any more or asks about, and
    /// forgets connections that have ended.
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
    /// Adds a supervised listening socket with that cookie.
    pub(crate) fn listen(&self, socket: impl AsFd, cookie: u64, namespace: u64) -> Result<(), Errno> {
        // If the option cannot be read, assume that the port is shared.
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

    /// Removes all listening sockets of this supervisor.
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
    /// Resets the connection: no process will take it. A reset is reported to the other end
    /// immediately; a mere close would leave it able to write.
    fn reset(self) {
        if let Some(connection) = self.committed {
            let _ = SockRef::from(&connection).set_linger(Some(Duration::ZERO));
        }
    }
}

/// Room for a conversation, from [`Shared::share`].
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

/// Room for a conversation, from [`Shared::visit`].
#[derive(Debug)]
pub(crate) struct Visit(Arc<Shared>);

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.state().visitors -= 1;
    }
}

/// An expected offer, from [`Shared::expect`].
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

/// A waiting supervisor, from [`Shared::wait_for`].
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

/// A promise that is not committed yet, from [`Shared::promise`].
#[derive(Debug)]
pub(crate) struct Promised {
    shared: Arc<Shared>,
    cookie: u64,
    /// The network namespace of the accepting program.
    namespace: u64,
    unwanted: Arc<Unwanted>,
}

impl Promised {
    pub(crate) fn namespace(&self) -> u64 {
        self.namespace
    }

    /// Waits until the promise is to be withdrawn.
    pub(crate) async fn is_unwanted(&self) {
        while !self.unwanted.is_so.load(Relaxed) {
            self.unwanted.changed.notified().await;
        }
    }

    /// Commits the host connection to the promise. Returns it if no process is left that could
    /// accept it.
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
