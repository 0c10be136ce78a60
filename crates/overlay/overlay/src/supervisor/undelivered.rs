//! Accepted connections that no call of the program has got yet.
//!
//! | state | ends with |
//! | --- | --- |
//! | parked: promised, the router has not answered | its answer, bytes on the overlay, or the time limit |
//! | decided, or its call ended first | the next call on its listening socket, or a minute |
//!
//! The kernel does not report a listening socket as ready for such a connection. So when a parked
//! one is decided, the supervisor connects to the listening socket itself. That wakes the program,
//! whose accept gets the decided connection. The supervisor drops its own connection when it
//! accepts it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use socket2::{Domain, Socket, Type};

use super::NEVER;
use super::accept::{Accepted, Parked};

/// The time for which an undelivered connection is kept.
const FORGOTTEN: Duration = Duration::from_secs(60);
/// The largest number of undelivered connections that are kept.
const MOST: usize = 256;
/// The time that a connection to a listening socket with a full backlog may take. The program has
/// others to accept then.
const WAKE: Duration = Duration::from_secs(1);
/// The number of attempts to wake the program if other sockets share the port (SO_REUSEPORT). The
/// kernel chooses one for each connection.
const SHARED: usize = 16;
/// The pause between the attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// All undelivered connections of a supervisor.
#[derive(Debug, Default)]
pub(super) struct Undelivered(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    parked: Vec<Parked>,
    /// The number of parked connections, including those that a thread waits for.
    waiting: usize,
    /// Connections for the next call, by the cookies of their listening sockets.
    decided: HashMap<u64, Vec<(Accepted, Instant)>>,
    /// The addresses of connections that wake the program and were not accepted yet.
    wakes: HashMap<SocketAddr, Instant>,
}

/// The listening socket of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    cookie: u64,
    /// An address at which it listens.
    address: SocketAddr,
    shares: bool,
}

impl Place {
    pub(super) fn new(listener: &OwnedFd, cookie: u64, address: SocketAddr) -> Place {
        Place { cookie, address, shares: sockopt::socket_reuseport(listener).unwrap_or(true) }
    }
}

impl Undelivered {
    /// Returns `true` if accept needs the supervisor for none.
    pub(super) fn is_empty(&self) -> bool {
        let state = self.state();
        state.waiting == 0 && state.decided.is_empty() && state.wakes.is_empty()
    }

    pub(super) fn forget_old(&self) {
        let mut state = self.state();
        // Another socket that shares the port has accepted it.
        state.wakes.retain(|_, since| since.elapsed() < FORGOTTEN);
        state.decided.retain(|_, decided| {
            decided.retain(|(_, since)| since.elapsed() < FORGOTTEN);
            !decided.is_empty()
        });
    }

    /// Keeps a connection for the next call on that listening socket.
    pub(super) fn keep(&self, listener: u64, accepted: Accepted) {
        let mut state = self.state();
        if state.decided.values().map(Vec::len).sum::<usize>() < MOST {
            state.decided.entry(listener).or_default().push((accepted, Instant::now()));
        }
    }

    /// Takes the oldest connection that a call on that listening socket can get.
    pub(super) fn take(&self, listener: u64) -> Option<Accepted> {
        let mut state = self.state();
        let of_listener = state.decided.get_mut(&listener)?;
        let accepted = (!of_listener.is_empty()).then(|| of_listener.remove(0).0);
        if of_listener.is_empty() {
            state.decided.remove(&listener);
        }
        accepted
    }

    pub(super) fn park(&self, parked: Parked) {
        let mut state = self.state();
        state.waiting += 1;
        state.parked.push(parked);
    }

    /// Keeps a connection of a killed supervisor that needs no answer, and wakes the program.
    pub(super) fn restore(&self, place: Place, accepted: Accepted) {
        self.state().waiting += 1;
        self.decide(place, Some(accepted));
    }

    /// Returns a parked connection that no thread waits for.
    pub(super) fn next_parked(&self) -> Option<Parked> {
        self.state().parked.pop()
    }

    /// Ends the wait of a parked connection. The program gets it, unless it was denied.
    pub(super) fn decide(&self, place: Place, accepted: Option<Accepted>) {
        if let Some(accepted) = accepted {
            self.keep(place.cookie, accepted);
            for attempt in 0..if place.shares { SHARED } else { 1 } {
                if attempt > 0 {
                    std::thread::sleep(PAUSE);
                }
                if !self.state().decided.contains_key(&place.cookie) {
                    break;
                }
                // Without it, the connection is delivered with the next one.
                let _ = self.wake(place.address);
            }
        }
        self.state().waiting -= 1;
    }

    /// Connects to a listening socket.
    fn wake(&self, address: SocketAddr) -> std::io::Result<()> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.bind(&SocketAddr::new(address.ip(), 0).into())?;
        let own = socket.local_addr()?.as_socket().ok_or(std::io::ErrorKind::InvalidInput)?;
        // Before the program can accept it.
        self.state().wakes.insert(own, Instant::now());
        let connected = socket.connect_timeout(&address.into(), WAKE);
        if connected.is_err() {
            self.state().wakes.remove(&own);
        }
        connected
    }

    /// Returns `true` if the accepted connection of that address was made to wake the program.
    pub(super) fn has_woken(&self, peer: SocketAddr) -> bool {
        self.state().wakes.remove(&peer).is_some()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect(NEVER)
    }
}
