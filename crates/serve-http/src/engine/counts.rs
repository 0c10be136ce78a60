//! Counters. Each thread has separate ones, on separate cache lines, and no other thread writes to
//! them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::message::Refusal;

/// A counter with one writer.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, more: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(more), Relaxed);
    }

    pub(crate) fn subtract(&self, less: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_sub(less), Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Why the proxy itself answers a request that it has not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    BadPath,
    NoRoute,
    TooLarge,
    ClientTooSlow,
    AllDown,
    Full,
    Connect,
    BackendGone,
    BadReply,
    BackendTooSlow,
    NotStored,
}

impl Failure {
    pub(crate) const ALL: [Failure; 11] = [
        Failure::BadPath,
        Failure::NoRoute,
        Failure::TooLarge,
        Failure::ClientTooSlow,
        Failure::AllDown,
        Failure::Full,
        Failure::Connect,
        Failure::BackendGone,
        Failure::BadReply,
        Failure::BackendTooSlow,
        Failure::NotStored,
    ];

    pub(crate) fn label(self) -> &'static str {
        self.row().1
    }

    pub(crate) fn status(self) -> u16 {
        self.row().0
    }

    pub(crate) fn text(self) -> &'static str {
        self.row().2
    }

    fn row(self) -> (u16, &'static str, &'static str) {
        match self {
            Failure::BadPath => (400, "bad-path", "the path leaves the root"),
            Failure::NoRoute => (404, "no-route", "no route has this host and path"),
            Failure::TooLarge => (413, "too-large", "the body is longer than the limit"),
            Failure::ClientTooSlow => (408, "client-too-slow", "the request did not arrive in time"),
            Failure::AllDown => (503, "all-down", "no backend works"),
            Failure::Full => (503, "full", "all connections to backends are in use"),
            Failure::Connect => (502, "connect", "the backend does not accept connections"),
            Failure::BackendGone => (502, "backend-gone", "the backend closed the connection"),
            Failure::BadReply => (502, "bad-reply", "the backend's reply is malformed"),
            Failure::NotStored => {
                (504, "not-stored", "the request asks for a stored reply only, and there is none")
            }
            Failure::BackendTooSlow => (504, "backend-too-slow", "the backend did not reply in time"),
        }
    }
}

/// Buckets of the duration of requests: below 2^n microseconds, and any.
pub(crate) const BUCKETS: usize = 27;

/// The counters of a thread.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counts {
    pub(crate) clients: Count,
    pub(crate) open: Count,
    /// Clients that were closed because descriptors or places for clients ran out.
    pub(crate) evicted: Count,
    pub(crate) requests: Count,
    /// By the first digit of the status.
    pub(crate) statuses: [Count; 5],
    pub(crate) received_bytes: Count,
    pub(crate) sent_bytes: Count,
    pub(crate) spliced_bytes: Count,
    pub(crate) retries: Count,
    pub(crate) upgrades: Count,
    /// Replies that ended early, or clients that went away meanwhile.
    pub(crate) aborted: Count,
    pub(crate) lost_log_lines: Count,
    /// Requests that a stored reply answered.
    pub(crate) cache_hits: Count,
    /// Those whose head was answered before, and not parsed again.
    pub(crate) cache_recalled: Count,
    /// Stored replies that a backend has said are still right.
    pub(crate) cache_validated: Count,
    /// Requests of routes with a cache that went to a backend.
    pub(crate) cache_misses: Count,
    /// Requests that waited for the reply to another one.
    pub(crate) cache_collapsed: Count,
    /// Replies that were stored.
    pub(crate) cache_stored: Count,
    /// Replies that must not be stored, or are too long.
    pub(crate) cache_refused: Count,
    pub(crate) refusals: [Count; Refusal::ALL.len()],
    pub(crate) failures: [Count; Failure::ALL.len()],
    pub(crate) durations: [Count; BUCKETS],
    pub(crate) duration_sum: Count,
}

impl Counts {
    pub(crate) fn observe(&self, micros: u64) {
        let bucket = (u64::BITS - micros.leading_zeros()) as usize;
        self.durations[bucket.min(BUCKETS - 1)].add(1);
        self.duration_sum.add(micros);
    }
}

/// A thread's counters of a backend.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct BackendCounts {
    pub(crate) requests: Count,
    pub(crate) connections: Count,
    pub(crate) open: Count,
    pub(crate) idle: Count,
}
