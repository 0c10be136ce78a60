//! Connections to a peer that are made before they are needed.
//!
//! A connection is first *making*, then *ready*, and then taken by one client, or closed if it is
//! *stale* or *expired*. The pool holds as many connections as were recently taken in a second,
//! plus a quarter, between two configured limits. For example, after a peak of 80 it keeps 100
//! connections. The peak decays by half in a minute.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::{Notify, Semaphore};

use crate::config::{Peer, Pool as Marks};
use crate::leg;
use crate::wire::{Parked, Wire};
use shunt_key::Key;

/// The ready connections to one peer. A connection that was taken belongs to the client and is not
/// returned.
#[derive(Debug)]
pub(crate) struct Pool {
    peer: Peer,
    key: Key,
    /// The name of this relay.
    name: String,
    state: Mutex<State>,
    changed: Notify,
    /// Limits the connections that are made for waiting clients.
    urgent: Semaphore,
}

#[derive(Debug, Default)]
struct State {
    marks: Marks,
    ready: VecDeque<Ready>,
    /// The number of connections that are being made.
    making: usize,
    demand: Demand,
    counts: Counts,
    /// The time before which no connection is made, after a failure.
    not_before: Option<Instant>,
    failures: u32,
}

#[derive(Debug)]
struct Ready {
    wire: Parked,
    since: Instant,
}

/// What happened to connections since the start.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Counts {
    /// A client took a ready connection.
    pub(crate) hits: u64,
    /// A client found no ready connection.
    pub(crate) misses: u64,
    /// A ready connection was found dead, when a client took it or before.
    pub(crate) stale: u64,
    /// A ready connection was closed because no client took it for so long.
    pub(crate) expired: u64,
    /// A connection could not be made.
    pub(crate) failed: u64,
}

/// The current state of a pool.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Level {
    pub(crate) ready: usize,
    pub(crate) making: usize,
    pub(crate) wanted: usize,
    #[serde(flatten)]
    pub(crate) counts: Counts,
}

/// How often levels and ages are checked.
const TICK: Duration = Duration::from_secs(1);
/// The largest number of ready connections that are made concurrently.
const PARALLEL: usize = 64;
/// The largest number of connections that are made for waiting clients. Together, both numbers are
/// lower than the handshakes that a relay accepts from one host.
const URGENT: usize = 512;
const MAX_PAUSE: Duration = Duration::from_secs(5);

impl Pool {
    pub(crate) fn new(peer: Peer, key: Key, name: String) -> Arc<Pool> {
        let state = State { marks: peer.pool, ..State::default() };
        Arc::new(Pool {
            peer,
            key,
            name,
            state: Mutex::new(state),
            changed: Notify::new(),
            urgent: Semaphore::new(URGENT),
        })
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Returns whether this pool fits a configured peer. Only the limits of the pool may differ.
    pub(crate) fn serves(&self, peer: &Peer, key: &Key, name: &str) -> bool {
        let same_key = key.sign(&[b"same"]) == self.key.sign(&[b"same"]);
        self.peer.address == peer.address && self.peer.leg == peer.leg && self.name == name && same_key
    }

    pub(crate) fn set_marks(&self, marks: Marks) {
        self.state().marks = marks;
        self.changed.notify_one();
    }

    /// Returns a ready connection that is alive, if there is one.
    pub(crate) fn take(&self) -> Option<Parked> {
        let mut state = self.state();
        state.demand.note();
        // The newest connection is taken first, so that surplus ones age and are replaced.
        let taken = loop {
            match state.ready.pop_back() {
                Some(ready) if ready.wire.is_silent() => break Some(ready.wire),
                Some(_) => state.counts.stale += 1,
                None => break None,
            }
        };
        match taken {
            Some(_) => state.counts.hits += 1,
            None => state.counts.misses += 1,
        }
        drop(state);
        self.changed.notify_one();
        taken
    }

    /// Makes a connection for a waiting client. It may have to wait until others are made.
    pub(crate) async fn make(&self) -> Result<Wire, leg::LegError> {
        let _turn = self.urgent.acquire().await.expect("nobody closes it");
        self.connect().await
    }

    async fn connect(&self) -> Result<Wire, leg::LegError> {
        leg::connect(&self.peer, &self.name, &self.key).await
    }

    pub(crate) fn level(&self) -> Level {
        let state = self.state();
        Level { ready: state.ready.len(), making: state.making, wanted: state.wanted(), counts: state.counts }
    }

    /// Keeps the pool filled. Does not return.
    pub(crate) async fn keep(self: Arc<Pool>) {
        let mut tick = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                _ = tick.tick() => self.state().age(),
                () = self.changed.notified() => {}
            }
            for _ in 0..self.state().begin() {
                let pool = self.clone();
                tokio::spawn(async move { pool.add().await });
            }
        }
    }

    async fn add(&self) {
        // Another thread may take the connection, so it is not registered with this runtime.
        let made = match self.connect().await {
            Ok(wire) => wire.park().map_err(leg::LegError::Connect),
            Err(error) => Err(error),
        };
        self.state().end(made.map_err(|error| {
            tracing::debug!(peer = self.peer.name, %error, "no connection to keep ready");
        }));
        self.changed.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics while it is locked")
    }
}

impl State {
    fn wanted(&self) -> usize {
        self.demand.wanted().clamp(self.marks.low, self.marks.high)
    }

    /// Returns how many connections to start now.
    fn begin(&mut self) -> usize {
        if self.not_before.is_some_and(|time| Instant::now() < time) {
            return 0;
        }
        // After a failure, a single connection is tried.
        let parallel = if self.failures > 0 { 1 } else { PARALLEL };
        let missing = self.wanted().saturating_sub(self.ready.len() + self.making);
        let now = missing.min(parallel.saturating_sub(self.making));
        self.making += now;
        now
    }

    fn end(&mut self, made: Result<Parked, ()>) {
        self.making -= 1;
        match made {
            Ok(wire) => {
                self.failures = 0;
                self.ready.push_back(Ready { wire, since: Instant::now() });
            }
            Err(()) => {
                self.counts.failed += 1;
                self.failures += 1;
                let pause = Duration::from_millis(100 << self.failures.min(6)).min(MAX_PAUSE);
                self.not_before = Some(Instant::now() + pause);
            }
        }
    }

    /// Updates demand and ages. This is called once a second.
    fn age(&mut self) {
        self.demand.decay();
        let before = self.ready.len();
        self.ready.retain(|ready| ready.wire.is_silent());
        self.counts.stale += (before - self.ready.len()) as u64;
        let idle = self.marks.idle.0;
        while self.ready.front().is_some_and(|oldest| oldest.since.elapsed() > idle) {
            self.ready.pop_front();
            self.counts.expired += 1;
        }
        let wanted = self.wanted();
        self.ready.drain(..self.ready.len().saturating_sub(wanted));
    }
}

/// The recent peak of connections taken in a second.
#[derive(Debug, Default)]
struct Demand {
    peak: f64,
    this_second: u32,
}

/// The factor by which the peak decays per second: by half in a minute.
const DECAY: f64 = 0.9885;
/// The margin for a peak that is higher than the last.
const MARGIN: f64 = 1.25;

impl Demand {
    fn note(&mut self) {
        self.this_second += 1;
        self.peak = self.peak.max(self.this_second.into());
    }

    fn decay(&mut self) {
        self.this_second = 0;
        self.peak *= DECAY;
    }

    fn wanted(&self) -> usize {
        (self.peak * MARGIN).ceil() as usize
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    fn state(low: usize, high: usize) -> State {
        State { marks: Marks { low, high, ..Marks::default() }, ..State::default() }
    }

    fn connected() -> (TcpStream, TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn a_burst_is_remembered_and_then_forgotten() {
        let mut state = state(4, 256);
        assert_eq!(state.wanted(), 4);
        for _ in 0..100 {
            state.demand.note();
        }
        assert_eq!(state.wanted(), 125);
        for _ in 0..60 {
            state.age();
        }
        assert!((60..70).contains(&state.wanted()), "{}", state.wanted());
        for _ in 0..600 {
            state.age();
        }
        assert_eq!(state.wanted(), 4);
        for _ in 0..1000 {
            state.demand.note();
        }
        assert_eq!(state.wanted(), 256);
    }

    #[test]
    fn after_a_failure_there_is_a_pause_and_then_one_attempt() {
        let mut state = state(8, 8);
        assert_eq!(state.begin(), 8);
        assert_eq!(state.begin(), 0);
        for _ in 0..8 {
            state.end(Err(()));
        }
        assert_eq!(state.begin(), 0);
        state.not_before = Some(Instant::now());
        assert_eq!(state.begin(), 1);
        let (stream, _peer) = connected();
        state.end(Ok(stream.into()));
        assert_eq!(state.begin(), 7);
    }

    #[test]
    fn none_is_handed_out_that_has_ended_or_says_something() {
        let (one, peer) = connected();
        let one = Parked::from(one);
        assert!(one.is_silent());
        drop(peer);
        std::thread::sleep(Duration::from_millis(50));
        assert!(!one.is_silent());
        let (one, mut peer) = connected();
        std::io::Write::write_all(&mut peer, b"x").unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(!Parked::from(one).is_silent());
    }

    #[test]
    fn nothing_is_kept_where_nothing_may_be() {
        let mut state = state(0, 0);
        state.demand.note();
        assert_eq!(state.begin(), 0);
    }
}
