//! The states of a client's connection, and of a connection to a backend.
//!
//! ```text
//!          head complete             all places in use
//!   Head ----------------> Exchange <-----------------> Waiting
//!    ^  |                   |  |  |                        |
//!    |  |  reply complete   |  |  | 101                    | no place in time, or no backend
//!    +--|-------------------+  |  v                        v
//!       |                      | Tunnel               an answer of the proxy's own
//!       | refused, or the last |  |                    (Head, or Closing)
//!       v                      v  v
//!      Closing --flushed--> Lingering --client ended, or time is over--> gone
//! ```
//!
//! A request of a route with a cache may be answered in `Head`, or wait in `Follows`, from which it
//! goes on like one that comes from `Head`.
//!
//! In `Exchange`, the two directions are independent: the rest of the request goes to the backend
//! while the reply arrives. The request is sent again only if no byte of a reply has arrived, and
//! only if the connection had not been established, or it has no body and an idempotent method.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use super::backends::{Backend, Pool};
use super::caching::Caching;
use super::log::Line;
use super::socket::{Output, Pipe, Socket};
use super::timers::Set;
use crate::config::Config;
use crate::message::{Body, Version};

/// A client's connection.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) socket: Socket,
    /// Distinguishes it from earlier clients at the same place.
    pub(crate) generation: u32,
    pub(crate) address: IpAddr,
    /// Bytes that were read and not taken yet.
    pub(crate) input: Vec<u8>,
    pub(crate) output: Output,
    pub(crate) state: State,
    /// The time of the next intervention.
    pub(crate) deadline: Instant,
    /// It comes then, or before.
    pub(crate) timer: Option<Set>,
    /// Requests so far.
    pub(crate) requests: u64,
}

/// The state of a client's connection.
#[derive(Debug)]
pub(crate) enum State {
    /// It waits for the head of a request.
    Head(Head),
    /// A request waits for a connection to a backend.
    Waiting(Box<Exchange>),
    /// A request waits for the reply to another one, which may be stored.
    Follows(Box<Exchange>),
    /// A request is being served.
    Exchange(Box<Exchange>),
    /// It has switched to another protocol.
    Tunnel(Tunnel),
    /// It ends once its output is sent.
    Closing,
    /// The write side has ended. What still arrives is discarded, so that the last answer is not
    /// lost by a reset.
    Lingering,
}

impl State {
    /// Returns the request, if a complete head of one has arrived and its connection has not
    /// switched.
    pub(crate) fn exchange_mut(&mut self) -> Option<&mut Exchange> {
        match self {
            State::Waiting(exchange) | State::Follows(exchange) | State::Exchange(exchange) => Some(exchange),
            State::Head(_) | State::Tunnel(_) | State::Closing | State::Lingering => None,
        }
    }
}

/// How far the head of a request has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Head {
    /// No byte of it, or only such that were not examined yet.
    New,
    /// A part.
    Partial,
}

/// A request that is being served.
#[derive(Debug)]
pub(crate) struct Exchange {
    /// The connection to the backend.
    pub(crate) upstream: Option<usize>,
    pub(crate) pool: Routed,
    /// The head as it is sent. Empty once it cannot be sent again.
    pub(crate) head: Vec<u8>,
    /// The rest of the request's body.
    pub(crate) body: Body,
    pub(crate) has_body: bool,
    pub(crate) reply: ReplyState,
    pub(crate) is_head: bool,
    pub(crate) is_idempotent: bool,
    pub(crate) version: Version,
    /// The client's connection stays open afterwards.
    pub(crate) keeps_alive: bool,
    /// The protocol that may be switched to.
    pub(crate) upgrade: Option<String>,
    pub(crate) attempts: u8,
    /// The end of the wait for a place.
    pub(crate) queued_until: Option<Instant>,
    /// The backend that has failed for this request.
    pub(crate) failed: Option<Arc<Backend>>,
    pub(crate) request_pipe: Option<Pipe>,
    pub(crate) reply_pipe: Option<Pipe>,
    pub(crate) facts: Facts,
    /// The request's way through the cache.
    pub(crate) caching: Caching,
}

/// The pool of a request.
#[derive(Debug)]
pub(crate) enum Routed {
    /// The pool at this position of the thread's configuration. Threads share pools, so a request
    /// does not count as an owner.
    Current(usize),
    /// A pool of a former configuration.
    Former(Arc<Pool>),
}

impl Routed {
    pub(crate) fn pool<'a>(&'a self, config: &'a Config) -> &'a Arc<Pool> {
        match self {
            Routed::Current(position) => &config.pools[*position],
            Routed::Former(pool) => pool,
        }
    }

    /// Keeps the pool, because `config` is replaced by another configuration.
    pub(crate) fn outlive(&mut self, config: &Config) {
        *self = Routed::Former(self.pool(config).clone());
    }

    /// Returns the position of the pool in the present configuration, or `None` if that has none of
    /// this name.
    pub(crate) fn renew(&mut self, config: &Config) -> Option<usize> {
        let position = match self {
            Routed::Current(position) => *position,
            Routed::Former(former) => config.pools.iter().position(|pool| pool.name == former.name)?,
        };
        *self = Routed::Current(position);
        Some(position)
    }
}

/// What the log and the metrics have of a request.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) began: Instant,
    pub(crate) status: u16,
    /// Bytes of the request's body, so far.
    pub(crate) received: u64,
    /// Bytes of the reply's body, so far.
    pub(crate) sent: u64,
    /// How long nothing but the client delayed the body.
    pub(crate) waited_ms: u64,
    pub(crate) line: Option<Box<Line>>,
}

/// How far a reply has arrived.
#[derive(Debug)]
pub(crate) enum ReplyState {
    /// Its final head has not arrived.
    Head,
    /// Its head was forwarded.
    Body(Body),
    /// It was forwarded, or waits in the client's output.
    Done,
}

/// Two connections that are forwarded to each other.
#[derive(Debug)]
pub(crate) struct Tunnel {
    pub(crate) upstream: usize,
    pub(crate) client_has_ended: bool,
    pub(crate) backend_has_ended: bool,
}

/// A connection to a backend.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) socket: Socket,
    pub(crate) generation: u32,
    pub(crate) backend: Arc<Backend>,
    /// Part of a reply's head.
    pub(crate) input: Vec<u8>,
    pub(crate) output: Output,
    pub(crate) state: UpstreamState,
    /// It has served a request before.
    pub(crate) is_reused: bool,
    /// Nothing can be sent any more, but there may be a reply.
    pub(crate) is_write_broken: bool,
    /// It may serve another request.
    pub(crate) is_reusable: bool,
    /// The end of the time in the pool.
    pub(crate) idle_until: Instant,
    /// It comes then, or before.
    pub(crate) timer: Option<Set>,
}

/// The user of a connection to a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpstreamState {
    /// It is not established; this client waits for it.
    Connecting(usize),
    /// This client uses it.
    Busy(usize),
    /// It is in the pool.
    Idle,
}

impl UpstreamState {
    pub(crate) fn client(self) -> Option<usize> {
        match self {
            UpstreamState::Connecting(client) | UpstreamState::Busy(client) => Some(client),
            UpstreamState::Idle => None,
        }
    }
}
