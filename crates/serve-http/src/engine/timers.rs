//! Time limits of clients and of unused connections to backends, in a timer wheel: a connection that
//! nothing happens on costs nothing until its time is over.
//!
//! A connection has at most one timer, which may be earlier than its limit. Limits move with each step
//! of a request, mostly to a later time, and then the timer stays. When it comes, it gets the time of
//! the limit:
//!
//! ```text
//!  limit earlier than the timer    the timer gets the time of the limit
//!  limit later                     nothing
//!  the timer comes                 limit over: the connection expires; else it gets that time
//! ```
//!
//! Clients whose request bodies are under way are in a set, because the rate of these is judged.

use std::time::{Duration, Instant};

use shunt_serve::engine::{Timer, Wheel};

use super::connection::{State, UpstreamState};
use super::worker::Worker;

/// What a timer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Client(usize),
    Upstream(usize),
}

/// The timer of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Set {
    timer: Timer,
    /// In milliseconds of the wheel.
    at: u64,
}

/// The timers of a thread.
#[derive(Debug)]
pub(super) struct Timers {
    wheel: Wheel<Due>,
    began: Instant,
}

/// The most timers that are handled before sockets have their turn.
const MOST: usize = 1024;

impl Timers {
    pub(super) fn new(now: Instant) -> Timers {
        Timers { wheel: Wheel::new(0), began: now }
    }

    fn milliseconds(&self, time: Instant) -> u64 {
        time.saturating_duration_since(self.began).as_millis() as u64
    }

    /// Returns the time until the next timer, at most.
    pub(super) fn pause(&self, now: Instant) -> Option<Duration> {
        let at = self.wheel.next()?;
        Some((self.began + Duration::from_millis(at)).saturating_duration_since(now))
    }

    /// Has a timer come at a limit, or before.
    fn watch(&mut self, set: &mut Option<Set>, due: Due, limit: Instant) {
        // The first millisecond at which the limit has passed.
        let at = self.milliseconds(limit) + 1;
        match set {
            Some(set) if set.at <= at => return,
            Some(set) => _ = self.wheel.remove(set.timer),
            None => {}
        }
        *set = Some(Set { timer: self.wheel.insert(at, due), at });
    }

    pub(super) fn forget(&mut self, set: Option<Set>) {
        if let Some(set) = set {
            self.wheel.remove(set.timer);
        }
    }
}

impl Worker {
    /// Has a timer come at a client's limit.
    pub(super) fn watch_client(&mut self, at: usize) {
        let Some(client) = self.clients.get_mut(at) else { return };
        self.timers.watch(&mut client.timer, Due::Client(at), client.deadline);
    }

    /// Has a timer come at the end of an unused connection's time.
    pub(super) fn watch_idle(&mut self, at: usize) {
        let upstream = &mut self.upstreams[at];
        self.timers.watch(&mut upstream.timer, Due::Upstream(at), upstream.idle_until);
    }

    /// Handles the timers that have come.
    pub(super) fn run_timers(&mut self) {
        let now = self.timers.milliseconds(self.now);
        for _ in 0..MOST {
            match self.timers.wheel.pop(now) {
                Some(Due::Client(at)) => {
                    self.clients[at].timer = None;
                    if self.clients[at].deadline <= self.now {
                        self.expire(at);
                    }
                    self.watch_client(at);
                }
                Some(Due::Upstream(at)) => {
                    self.upstreams[at].timer = None;
                    if self.upstreams[at].state != UpstreamState::Idle {
                        continue;
                    }
                    if self.upstreams[at].idle_until <= self.now {
                        self.close_upstream(at);
                    } else {
                        self.watch_idle(at);
                    }
                }
                None => return,
            }
        }
    }

    /// Notes that the body of a client's request is under way.
    pub(super) fn note_upload(&mut self, at: usize) {
        if self.uploads.is_empty() {
            self.ticked = self.now;
        }
        self.uploads.insert((at, self.clients[at].generation));
    }

    /// Forgets the clients whose bodies have arrived.
    pub(super) fn forget_uploads(&mut self) {
        let clients = &self.clients;
        self.uploads.retain(|(at, generation)| {
            let client = clients.get(*at).filter(|client| client.generation == *generation);
            client.is_some_and(|client| match &client.state {
                State::Waiting(exchange) | State::Follows(exchange) | State::Exchange(exchange) => {
                    !exchange.body.is_done()
                }
                _ => false,
            })
        });
    }
}
