//! The promises of this router, the server's, to the clients' routers: each gives the host
//! connection to the process that accepts the overlay connection.
//!
//! The life of a promise, by the calls of this module:
//!
//! ```text
//! expect ──► promise ──► commit ──► claim: the accepting process has the connection
//!               │           └─────► sweep: no process asks for it, it is reset
//!               └► give_up, or the client's router gives up: it is withdrawn
//! ```
//!
//! From before the promise is sent until the claim, the supervisor holds a duplicate of the host
//! connection ([`Hold`]).
//!
//! A socket that was accepted before any of this is known waits ([`Promises::wait_for`]), or stays
//! on the overlay for good ([`Promises::stay`]). The two exclude each other: a socket that stays
//! gets no promise, and a promised one cannot stay.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use shunt_kernel::sequence::Origin;
use shunt_sys::tcp;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::channel::Turn;
use crate::follows::{Follows, Key};
use crate::lock::lock;
use crate::marks::Mark;
use crate::message::{self, Answer, Held};
use crate::namespace::Namespace;
use crate::policy::Flow;
use crate::reason::Reason;
use crate::registry::{Registry, Takers};
use crate::wire::Ask;

/// The number of sockets that are remembered as having stayed on the overlay.
const STAYED: usize = 65_536;
/// The time within which a supervisor asks about a socket that its program has accepted, even on a
/// busy machine. After it, no process is assumed to be there that could ask.
const ASKS: Duration = Duration::from_secs(15);
/// The time after which a socket that the kernel does not find is taken to be closed.
const GONE: Duration = Duration::from_secs(2);

/// All promises of a router. Its lock is taken before that of the registry.
#[derive(Debug)]
pub(crate) struct Promises {
    registry: Arc<Registry>,
    state: Mutex<State>,
    /// Notified at a promise, a commitment or the end of one. Tasks that wait for one check again.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// The number of Asks that were answered with yes and not yet offered, by destination and
    /// client. Each Ask is counted under all names of its client.
    asked: HashMap<Key, usize>,
    /// Where Asks come later than their connections.
    follows: Follows,
    /// Promises, by the cookie of the socket that the server's program accepts.
    promises: HashMap<u64, Promise>,
    /// Accepted sockets whose supervisor has asked for an answer, by cookie.
    waiting: BTreeMap<u64, Arc<Turn>>,
    /// Sockets that have stayed on the overlay, by cookie.
    stayed: BTreeSet<u64>,
    stayed_order: VecDeque<u64>,
    /// The router ends, and supervisors keep the connections that they hold.
    is_ending: bool,
}

#[derive(Debug)]
struct Promise {
    takers: Takers,
    local: SocketAddr,
    remote: SocketAddr,
    origin: Origin,
    /// The connection as the policy sees it.
    flow: Flow,
    /// The host connection, once it is committed.
    committed: Option<OwnedFd>,
    /// Shared with [`Promised`]: set when the supervisor that has accepted the socket stops
    /// waiting.
    unwanted: Arc<Unwanted>,
    /// The time since which no process seems to be there that could take the connection.
    lost: Option<Instant>,
    /// Makes the supervisor that accepts the socket await this router's answer.
    mark: Mark,
    hold: Option<Hold>,
}

/// A duplicate of a promised host connection that a supervisor holds. So the connection outlives
/// this router, and a later one continues.
#[derive(Debug)]
struct Hold {
    supervisor: Arc<OwnedFd>,
    cookie: u64,
}

impl Hold {
    /// Gives the supervisor the connection.
    fn begin(supervisor: Arc<OwnedFd>, cookie: u64, held: Held, connection: BorrowedFd<'_>) -> Option<Hold> {
        message::send(&supervisor, &Answer::Hold { cookie, held }, Some(connection)).ok()?;
        Some(Hold { supervisor, cookie })
    }

    /// Lets the supervisor close its duplicate: the connection is not promised any more.
    fn release(self) {
        let _ = message::send(&self.supervisor, &Answer::Release { cookie: self.cookie }, None);
    }
}

/// A host connection that replaces an accepted socket.
#[derive(Debug)]
pub(crate) struct Committed {
    pub(crate) connection: OwnedFd,
    /// The client's first sequence numbers.
    pub(crate) origin: Origin,
    /// The connection as the policy sees it.
    pub(crate) flow: Flow,
    /// Kept until the connection has been sent to the supervisor.
    pub(crate) mark: Mark,
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
    /// One whose address has been translated to one that has no known host.
    Translated,
}

/// The state of a socket that was accepted.
#[derive(Debug)]
pub(crate) enum Claim {
    /// Committed: this host connection replaces the socket.
    Taken(Committed),
    /// Promised, and not committed yet.
    Promised,
    /// Neither, but an offer may be on its way.
    Expected,
    /// There is no host connection for it.
    Unknown,
}

impl Promises {
    pub(crate) fn new(registry: Arc<Registry>) -> Promises {
        Promises { registry, state: Mutex::default(), changed: Notify::new() }
    }

    /// Returns a future that completes at the next promise, commitment or end of one.
    pub(crate) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Expects an offer until the returned value is dropped. `follows`: its overlay connection is under
    /// way already.
    pub(crate) fn expect(self: &Arc<Promises>, ask: Ask, host: IpAddr, follows: bool) -> Expected {
        let mut clients = vec![Client::Host(host), Client::Container(ask.source)];
        clients.extend(follows.then_some(Client::Translated));
        let keys: Vec<Key> = clients.into_iter().map(|client| (ask.destination, client)).collect();
        let mut state = self.state();
        for key in &keys {
            *state.asked.entry(*key).or_default() += 1;
        }
        Expected { promises: self.clone(), keys }
    }

    /// Promises the host connection to the process that accepts the socket `cookie`, until the
    /// returned value is dropped. One of `takers` has that socket in its backlog, or has accepted
    /// it.
    pub(crate) fn promise(
        self: &Arc<Promises>,
        cookie: u64,
        takers: Takers,
        (local, remote): (SocketAddr, SocketAddr),
        (origin, flow): (Origin, Flow),
    ) -> Result<Promised, Reason> {
        let mut state = self.state();
        if state.stayed.contains(&cookie) {
            return Err(Reason::Late);
        }
        // Checked under the lock, so that a supervisor which leaves now finds the promise.
        let namespace = self.registry.all_listen(&takers).ok_or(Reason::NotSupervised)?;
        if state.promises.contains_key(&cookie) {
            return Err(Reason::Mismatch);
        }
        let mark = takers.namespace.marks().add(cookie).map_err(|_| Reason::Failed)?;
        let unwanted = Arc::<Unwanted>::default();
        let promise = Promise {
            takers,
            local,
            remote,
            origin,
            flow,
            committed: None,
            unwanted: unwanted.clone(),
            lost: None,
            mark,
            hold: None,
        };
        state.promises.insert(cookie, promise);
        drop(state);
        self.changed.notify_waiters();
        Ok(Promised { promises: self.clone(), cookie, namespace, unwanted })
    }

    /// Returns the state of an accepted socket. `expected` are the names of its connection: destination
    /// and client.
    pub(crate) fn claim(&self, cookie: u64, expected: &[Key]) -> Claim {
        let mut state = self.state();
        if let Some(promise) = state.promises.get_mut(&cookie) {
            let Some(connection) = promise.committed.take() else { return Claim::Promised };
            // Whatever the answer to the supervisor is, it closes its duplicate then.
            if let Some(Promise { origin, flow, mark, .. }) = state.promises.remove(&cookie) {
                return Claim::Taken(Committed { connection, origin, flow, mark });
            }
        }
        let is_expected = expected.iter().any(|expected| state.asked.contains_key(expected));
        if is_expected { Claim::Expected } else { Claim::Unknown }
    }

    /// Notes that an Ask has come after its connection had been accepted, and had stayed.
    pub(crate) fn came_late(&self, key: Key) {
        self.state().follows.late(key, Instant::now());
    }

    /// Returns `true` if an accepted connection without an Ask may wait for it.
    pub(crate) fn may_follow(&self, key: Key) -> bool {
        self.state().follows.wait(key, Instant::now())
    }

    /// Notes that an accepted connection has been promised after it had waited for its Ask.
    pub(crate) fn has_followed(&self, key: Key) {
        self.state().follows.came(key, Instant::now());
    }

    /// Forgets where Asks have not come late for long.
    pub(crate) fn forget_old(&self) {
        self.state().follows.sweep(Instant::now());
    }

    /// Notes that a supervisor waits for the answer about an accepted socket, until the returned
    /// value is dropped.
    pub(crate) fn wait_for(self: &Arc<Promises>, cookie: u64, turn: Arc<Turn>) -> Waiting {
        self.state().waiting.insert(cookie, turn);
        self.changed.notify_waiters();
        Waiting { promises: self.clone(), cookie }
    }

    /// Returns `true` if a supervisor waits for an answer about that socket, or was answered that
    /// it stays on the overlay.
    pub(crate) fn has_asked(&self, cookie: u64) -> bool {
        let state = self.state();
        let is_awaited = state.waiting.get(&cookie).is_some_and(|turn| turn.is_awaited());
        is_awaited || state.stayed.contains(&cookie)
    }

    /// Asks the task that keeps the promise to withdraw it, if that is still possible. `changed` is
    /// notified when it has decided.
    pub(crate) fn give_up(&self, cookie: u64) {
        if let Some(promise) = self.state().promises.get(&cookie) {
            promise.unwanted.say();
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

    /// Ends the promises of which no listening socket is supervised any more.
    pub(crate) fn abandon(&self) {
        let left: Vec<(u64, Promise)> = {
            let mut state = self.state();
            if state.is_ending {
                return;
            }
            state.promises.extract_if(|_, promise| !self.registry.any_listens(&promise.takers)).collect()
        };
        for (_, promise) in left {
            promise.unwanted.say();
            promise.reset();
        }
    }

    /// Resets committed connections that no process can accept any more or asks about. Returns how
    /// many there were.
    pub(crate) fn sweep(&self) -> usize {
        let committed: Vec<(u64, Arc<Namespace>, SocketAddr, SocketAddr)> = self
            .state()
            .promises
            .iter()
            .filter(|(_, promise)| promise.committed.is_some())
            .map(|(cookie, it)| (*cookie, it.takers.namespace.clone(), it.local, it.remote))
            .collect();
        let mut resets = 0;
        for (cookie, namespace, local, remote) in committed {
            let found = namespace.connection(local, remote).filter(|found| found.cookie == cookie);
            let (waits, limit) = match found {
                Some(found) => (!found.held, ASKS),
                None => (false, GONE),
            };
            let mut state = self.state();
            let is_waited_for = state.waiting.contains_key(&cookie);
            let Some(promise) = state.promises.get_mut(&cookie) else { continue };
            if waits || is_waited_for {
                promise.lost = None;
            } else if promise.lost.get_or_insert_with(Instant::now).elapsed() > limit {
                let lost = state.promises.remove(&cookie);
                drop(state);
                lost.into_iter().for_each(Promise::reset);
                resets += 1;
            }
        }
        resets
    }

    /// Returns `true` if that socket is promised.
    pub(crate) fn has(&self, cookie: u64) -> bool {
        self.state().promises.contains_key(&cookie)
    }

    /// Leaves the promised connections to their supervisors from now on.
    pub(crate) fn end(&self) {
        self.state().is_ending = true;
    }

    pub(crate) fn count(&self) -> usize {
        self.state().promises.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Unwanted {
    fn say(&self) {
        self.is_so.store(true, Relaxed);
        self.changed.notify_one();
    }
}

impl Promise {
    /// Resets the connection: no process will take it. A reset is reported to the other end
    /// immediately; a mere close would leave it able to write.
    fn reset(self) {
        if let Some(connection) = self.committed {
            let _ = tcp::abort(&connection);
        }
        self.hold.into_iter().for_each(Hold::release);
    }
}

/// An expected offer, from [`Promises::expect`].
#[derive(Debug)]
pub(crate) struct Expected {
    promises: Arc<Promises>,
    keys: Vec<Key>,
}

impl Drop for Expected {
    fn drop(&mut self) {
        let mut state = self.promises.state();
        for key in &self.keys {
            if let Some(count) = state.asked.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    state.asked.remove(key);
                }
            }
        }
        drop(state);
        self.promises.changed.notify_waiters();
    }
}

/// A waiting supervisor, from [`Promises::wait_for`].
#[derive(Debug)]
pub(crate) struct Waiting {
    promises: Arc<Promises>,
    cookie: u64,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.promises.state().waiting.remove(&self.cookie);
    }
}

/// A promise that is not committed yet, from [`Promises::promise`].
#[derive(Debug)]
pub(crate) struct Promised {
    promises: Arc<Promises>,
    cookie: u64,
    /// The network namespace of the accepting program.
    namespace: u64,
    unwanted: Arc<Unwanted>,
}

impl Promised {
    pub(crate) fn cookie(&self) -> u64 {
        self.cookie
    }

    pub(crate) fn namespace(&self) -> u64 {
        self.namespace
    }

    /// Gives the connection to the supervisor that will accept the socket, before the promise is sent.
    /// Fails if that supervisor cannot take it. One that does not hold connections needs none.
    pub(crate) fn hold(&self, held: Held, connection: BorrowedFd<'_>) -> Result<(), Reason> {
        let mut state = self.promises.state();
        let Some(promise) = state.promises.get_mut(&self.cookie) else { return Err(Reason::Late) };
        if let Some(supervisor) = self.promises.registry.holder(&promise.takers) {
            let hold = Hold::begin(supervisor, self.cookie, held, connection);
            promise.hold = Some(hold.ok_or(Reason::Busy)?);
        }
        Ok(())
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
        let mut state = self.promises.state();
        let Some(promise) = state.promises.get_mut(&self.cookie) else { return Some(connection) };
        promise.committed = Some(connection);
        None
    }
}

impl Drop for Promised {
    fn drop(&mut self) {
        let mut state = self.promises.state();
        let is_withdrawn =
            state.promises.get(&self.cookie).is_some_and(|promise| promise.committed.is_none());
        let withdrawn = is_withdrawn.then(|| state.promises.remove(&self.cookie)).flatten();
        let is_ending = state.is_ending;
        drop(state);
        self.promises.changed.notify_waiters();
        // At the end of the router it is the supervisor that has the connection.
        withdrawn.and_then(|it| it.hold).filter(|_| !is_ending).into_iter().for_each(Hold::release);
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    const DESTINATION: &str = "10.50.2.2:80";

    #[test]
    fn an_offer_is_expected_under_both_names_until_each_ask_is_over() {
        let promises = Arc::new(Promises::new(Arc::default()));
        let (host, container) = ("192.168.0.1".parse().unwrap(), "10.50.1.2".parse().unwrap());
        let destination: SocketAddr = DESTINATION.parse().unwrap();
        let is_expected = |client| matches!(promises.claim(1, &[(destination, client)]), Claim::Expected);
        let ask = Ask { source: container, destination };
        let (first, second) = (promises.expect(ask, host, false), promises.expect(ask, host, true));
        assert!(is_expected(Client::Translated));
        drop(first);
        assert!(is_expected(Client::Host(host)) && is_expected(Client::Container(container)));
        assert!(!is_expected(Client::Host(container)));
        drop(second);
        assert!(!is_expected(Client::Host(host)) && !is_expected(Client::Container(container)));
        assert!(promises.state().asked.is_empty());
    }

    #[test]
    fn a_socket_that_stays_is_remembered_for_a_bounded_number_of_others() {
        let promises = Arc::new(Promises::new(Arc::default()));
        assert!(!promises.has_asked(0));
        let pair = || {
            let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
            socketpair(AddressFamily::UNIX, kind, flags, None).unwrap()
        };
        let (supervisor, conversation) = pair();
        let waiting = promises.wait_for(0, Arc::new(Turn::new(Arc::new(conversation))));
        assert!(promises.has_asked(0));
        rustix::net::shutdown(&supervisor, rustix::net::Shutdown::Write).unwrap();
        assert!(!promises.has_asked(0), "its supervisor does not wait any more");
        drop(waiting);
        assert!(!promises.has_asked(0));
        for cookie in 0..STAYED as u64 {
            assert!(promises.stay(cookie) && promises.stay(cookie));
        }
        assert!(promises.has_asked(0));
        assert!(promises.stay(u64::MAX));
        assert!(!promises.has_asked(0) && promises.has_asked(1));
    }
}
