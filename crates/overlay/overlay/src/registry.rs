//! The registry of supervisors: the network namespaces that they are in, and the listening sockets
//! that they have shown.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, sockopt};
use shunt_sys::{Errno, identity, netns};
use tokio::sync::Notify;

use crate::lock::lock;
use crate::namespace::Namespace;
use crate::reason::Reason;

/// The largest number of listening sockets that one supervisor may show.
const LISTENERS: usize = 4096;
/// The number of listening sockets of a namespace from which closed ones are looked for.
const MANY: usize = 256;
/// The time between two such searches in a namespace.
const PAUSE: Duration = Duration::from_secs(10);
/// The largest number of supervisors that one namespace may have.
const SUPERVISORS: usize = 1024;
/// The number of namespaces for which [`Registry::lives_in`] remembers its result.
const NAMESPACES: usize = 4096;

/// All supervisors of a router.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    state: Mutex<State>,
    /// Notified when a supervisor connects.
    supervised: Notify,
    /// Notified when one connects that is the first in its namespace.
    inhabited: Notify,
}

#[derive(Debug, Default)]
struct State {
    supervisors: HashMap<u64, Supervisor>,
    next: u64,
    /// Namespaces with supervisors, by cookie, each with the number of its supervisors.
    namespaces: HashMap<u64, (Arc<Namespace>, usize)>,
    /// When the first of a namespace's supervisors came.
    since: HashMap<u64, Instant>,
    /// Supervised listening sockets, by cookie.
    listeners: HashMap<u64, Listener>,
    /// Namespaces in which closed sockets were looked for, and when.
    checked: HashMap<u64, Instant>,
    /// Records for each namespace cookie if only root can have made the namespace. That never
    /// changes.
    roots: HashMap<u64, bool>,
}

#[derive(Clone, Debug)]
struct Supervisor {
    /// The cookie of its namespace.
    namespace: u64,
    process: Process,
}

/// A supervisor's process.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    /// `None`: it is not visible from here.
    pub(crate) id: Option<u32>,
    /// The number of listening sockets that it has yet to show, which a former router knew.
    pub(crate) listeners: usize,
    /// The connection to it, if it holds promised connections.
    pub(crate) holder: Option<Arc<OwnedFd>>,
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
    /// The cookie of the namespace.
    pub(crate) cookie: u64,
    /// The cookies of the sockets.
    sockets: Vec<u64>,
    /// Other sockets may have joined the port by the time that the connection is established.
    pub(crate) shares: bool,
}

/// The numbers of what supervisors have registered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registered {
    pub(crate) supervisors: usize,
    pub(crate) namespaces: usize,
    pub(crate) listeners: usize,
}

impl Registry {
    /// Returns the namespaces that have supervisors.
    pub(crate) fn namespaces(&self) -> Vec<Arc<Namespace>> {
        lock(&self.state).namespaces.values().map(|(known, _)| known.clone()).collect()
    }

    /// Returns the namespaces that have supervisors, with their cookies.
    pub(crate) fn by_cookie(&self) -> Vec<(u64, Arc<Namespace>)> {
        let state = lock(&self.state);
        state.namespaces.iter().map(|(cookie, (known, _))| (*cookie, known.clone())).collect()
    }

    /// Returns the namespace with that cookie while it has a supervisor.
    pub(crate) fn namespace(&self, cookie: u64) -> Option<Arc<Namespace>> {
        lock(&self.state).namespaces.get(&cookie).map(|(known, _)| known.clone())
    }

    /// Waits until another supervisor connects.
    pub(crate) async fn changed(&self) {
        self.supervised.notified().await;
    }

    /// Waits until a supervisor connects that is the first in its namespace.
    pub(crate) async fn has_new_namespace(&self) {
        self.inhabited.notified().await;
    }

    /// Returns when the first of the supervisors came that the namespace has.
    pub(crate) fn since(&self, namespace: u64) -> Option<Instant> {
        lock(&self.state).since.get(&namespace).copied()
    }

    /// Returns when a supervisor came last that is the first in its namespace.
    pub(crate) fn newest(&self) -> Option<Instant> {
        lock(&self.state).since.values().copied().max()
    }

    /// Adds a supervisor to the namespace of the socket that it has shown. The caller removes it by
    /// [`Registry::remove`].
    pub(crate) fn add(&self, namespace: u64, socket: impl AsFd, process: Process) -> Result<u64, Errno> {
        let mut state = lock(&self.state);
        match state.namespaces.get_mut(&namespace) {
            Some((_, supervisors)) if *supervisors >= SUPERVISORS => return Err(Errno::MFILE),
            Some((_, supervisors)) => *supervisors += 1,
            None => {
                let known = Arc::new(Namespace::of(socket.as_fd())?);
                state.namespaces.insert(namespace, (known, 1));
                state.since.insert(namespace, Instant::now());
                self.inhabited.notify_one();
            }
        }
        let supervisor = state.next;
        state.next += 1;
        state.supervisors.insert(supervisor, Supervisor { namespace, process });
        self.supervised.notify_one();
        Ok(supervisor)
    }

    /// Removes a supervisor with all its listening sockets.
    pub(crate) fn remove(&self, supervisor: u64) {
        self.withdraw(supervisor);
        let mut state = lock(&self.state);
        let Some(Supervisor { namespace, .. }) = state.supervisors.remove(&supervisor) else { return };
        if let Some((_, supervisors)) = state.namespaces.get_mut(&namespace) {
            *supervisors -= 1;
            if *supervisors == 0 {
                state.namespaces.remove(&namespace);
                state.since.remove(&namespace);
            }
        }
    }

    /// Notes that a supervisor has shown one of the listening sockets that a former router knew.
    pub(crate) fn resumes_one(&self, supervisor: u64) {
        if let Some(known) = lock(&self.state).supervisors.get_mut(&supervisor) {
            known.process.listeners = known.process.listeners.saturating_sub(1);
        }
    }

    /// Returns `true` if a supervisor with that process id is here and has shown all sockets that a
    /// former router knew.
    pub(crate) fn has_resumed(&self, process: u32) -> bool {
        let is_it = |it: &Supervisor| it.process.id == Some(process) && it.process.listeners == 0;
        lock(&self.state).supervisors.values().any(is_it)
    }

    /// Returns the process ids of all supervisors that are visible from here.
    pub(crate) fn processes(&self) -> BTreeSet<u32> {
        lock(&self.state).supervisors.values().filter_map(|it| it.process.id).collect()
    }

    /// Adds a supervised listening socket with that cookie.
    pub(crate) fn listen(
        &self,
        supervisor: u64,
        socket: impl AsFd,
        (cookie, namespace): (u64, u64),
    ) -> Result<(), Errno> {
        // If the option cannot be read, assume that the port is shared.
        let shares = sockopt::socket_reuseport(&socket).unwrap_or(true);
        let is_ipv4 = sockopt::socket_domain(&socket)? == AddressFamily::INET;
        let mut state = lock(&self.state);
        let count = state.listeners.values().filter(|listener| listener.supervisor == supervisor).count();
        if count >= LISTENERS {
            // Connections to this one stay on the overlay.
            return Ok(());
        }
        state.listeners.insert(cookie, Listener { supervisor, namespace, shares, is_ipv4 });
        Ok(())
    }

    /// Removes the listening sockets that are closed, in namespaces that have many. A container may
    /// open and close them for as long as its supervisor lives.
    pub(crate) fn forget_closed(&self) {
        for namespace in self.to_be_checked() {
            let before: HashSet<u64> = {
                let state = lock(&self.state);
                let of_it = state.listeners.iter().filter(|(_, listener)| listener.namespace == namespace);
                of_it.map(|(cookie, _)| *cookie).collect()
            };
            // A socket that is added meanwhile is not in `before`.
            let Some(Ok(open)) = self.namespace(namespace).map(|known| known.all_listeners()) else {
                continue;
            };
            let is_closed = |cookie: &u64| before.contains(cookie) && !open.contains(cookie);
            lock(&self.state).listeners.retain(|cookie, _| !is_closed(cookie));
        }
    }

    /// Returns the namespaces in which closed sockets are to be looked for now. A container can
    /// make that take long, so each namespace has its turn only after [`PAUSE`].
    fn to_be_checked(&self) -> Vec<u64> {
        let mut state = lock(&self.state);
        let State { namespaces, listeners, checked, .. } = &mut *state;
        checked.retain(|namespace, since| since.elapsed() < PAUSE && namespaces.contains_key(namespace));
        let mut counts: HashMap<u64, usize> = HashMap::new();
        for listener in listeners.values() {
            *counts.entry(listener.namespace).or_default() += 1;
        }
        counts.retain(|namespace, count| *count > MANY && !checked.contains_key(namespace));
        checked.extend(counts.keys().map(|namespace| (*namespace, Instant::now())));
        counts.into_keys().collect()
    }

    /// Removes all listening sockets of a supervisor.
    pub(crate) fn withdraw(&self, supervisor: u64) {
        lock(&self.state).listeners.retain(|_, listener| listener.supervisor != supervisor);
    }

    /// Checks that the socket belongs to that namespace, and that only root can have made the
    /// namespace.
    pub(crate) fn lives_in(&self, socket: BorrowedFd<'_>, namespace: u64) -> bool {
        if identity::namespace(socket) != Ok(namespace) {
            return false;
        }
        let mut state = lock(&self.state);
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
    pub(crate) fn takers(&self, destination: SocketAddr, hosts_are_ipv6: bool) -> Result<Takers, Reason> {
        let namespaces: Vec<(u64, Arc<Namespace>)> = lock(&self.state)
            .namespaces
            .iter()
            .map(|(cookie, (known, _))| (*cookie, known.clone()))
            .collect();
        let mut having = namespaces.into_iter().filter(|(_, known)| known.has(destination.ip()));
        let (cookie, namespace) = having.next().ok_or(Reason::NotSupervised)?;
        if having.next().is_some() {
            return Err(Reason::Ambiguous);
        }
        let found = namespace.listener(destination).ok_or(Reason::NotSupervised)?;
        let shares = lock(&self.state).listeners.get(&found.cookie).is_some_and(|listener| listener.shares);
        let sockets = match shares {
            true => namespace.listeners(destination).map_err(|_| Reason::Failed)?,
            false => vec![found.cookie],
        };
        let state = lock(&self.state);
        let is_supervised =
            |socket| state.listeners.get(socket).is_some_and(|listener| listener.namespace == cookie);
        if sockets.is_empty() || !sockets.iter().all(is_supervised) {
            return Err(Reason::NotSupervised);
        }
        if hosts_are_ipv6 && sockets.iter().any(|socket| state.listeners[socket].is_ipv4) {
            return Err(Reason::Family);
        }
        Ok(Takers { namespace, cookie, sockets, shares })
    }

    /// Returns the cookie of the namespace in which a process can accept the connection. Returns
    /// `None` if one of the listening sockets is not supervised any more.
    pub(crate) fn all_listen(&self, takers: &Takers) -> Option<u64> {
        let state = lock(&self.state);
        let listeners = takers.sockets.iter().map(|socket| state.listeners.get(socket));
        listeners.collect::<Option<Vec<&Listener>>>()?.first().map(|listener| listener.namespace)
    }

    /// Returns the connection to the supervisor that has all of these listening sockets, if it holds
    /// promised connections.
    pub(crate) fn holder(&self, takers: &Takers) -> Option<Arc<OwnedFd>> {
        let state = lock(&self.state);
        let supervisor = |socket| state.listeners.get(socket).map(|listener| listener.supervisor);
        let mut supervisors = takers.sockets.iter().map(supervisor);
        let first = supervisors.next()??;
        let is_one = supervisors.all(|supervisor| supervisor == Some(first));
        state.supervisors.get(&first).filter(|_| is_one)?.process.holder.clone()
    }

    /// Returns `true` if at least one of the listening sockets is supervised.
    pub(crate) fn any_listens(&self, takers: &Takers) -> bool {
        let state = lock(&self.state);
        takers.sockets.iter().any(|socket| state.listeners.contains_key(socket))
    }

    pub(crate) fn counts(&self) -> Registered {
        let state = lock(&self.state);
        let namespaces: BTreeSet<u64> = state.supervisors.values().map(|it| it.namespace).collect();
        Registered {
            supervisors: state.supervisors.len(),
            namespaces: namespaces.len(),
            listeners: state.listeners.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn closed_listening_sockets_are_forgotten_while_their_supervisor_lives() {
        let registry = Registry::default();
        let open = TcpListener::bind("127.0.0.1:0").unwrap();
        let namespace = identity::namespace(open.as_fd()).unwrap();
        let process = Process { id: None, listeners: 0, holder: None };
        let supervisor = registry.add(namespace, &open, process).unwrap();
        let cookie = sockopt::socket_cookie(&open).unwrap();
        registry.listen(supervisor, &open, (cookie, namespace)).unwrap();
        // No socket has these cookies.
        for closed in 0..2 * LISTENERS as u64 {
            registry.listen(supervisor, &open, (u64::MAX - closed, namespace)).unwrap();
        }
        assert_eq!(registry.counts().listeners, LISTENERS, "further ones are not added");
        registry.forget_closed();
        assert_eq!(registry.counts().listeners, 1);
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let cookie = sockopt::socket_cookie(&other).unwrap();
        registry.listen(supervisor, &other, (cookie, namespace)).unwrap();
        assert_eq!(registry.counts().listeners, 2);
    }
}
