//! A stored reply, and the answers that are made of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use super::policy::{self, Asked, Storable};
use crate::message::reply::{After, decimal};
use crate::message::{Reply, Request};

/// A stored reply. It does not change.
#[derive(Debug)]
pub struct Entry {
    pub(super) key: Arc<str>,
    /// The status line and the fields, without those that [`Entry::answer`] adds.
    head: Vec<u8>,
    /// The fields of an answer 304.
    validators: Vec<u8>,
    pub(crate) status: u16,
    pub(crate) body: Arc<[u8]>,
    /// The fields of the request that the reply depends on, with their values.
    vary: Vec<(String, Vec<u8>)>,
    etag: Option<Vec<u8>>,
    modified: Option<SystemTime>,
    arrived: Instant,
    age: Duration,
    lifetime: Duration,
    is_for_authorized: bool,
    /// It was used since it was last considered for eviction.
    pub(super) is_used: AtomicBool,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// The reply answers it.
    Answers,
    /// It is of another representation.
    Other,
    /// It is not fresh enough.
    Stale,
}

/// The head of a reply that is being stored, until its body is complete.
#[derive(Debug)]
pub struct Begun {
    head: Vec<u8>,
    validators: Vec<u8>,
    status: u16,
    vary: Vec<(String, Vec<u8>)>,
    etag: Option<Vec<u8>>,
    modified: Option<SystemTime>,
    arrived: Instant,
    storable: Storable,
}

impl Begun {
    /// Takes the parts of a reply's head that are stored. `request` has the values of a request's fields.
    pub fn new(
        reply: &Reply<'_, '_>,
        storable: Storable,
        request: impl Fn(&str) -> Vec<u8>,
        now: (Instant, SystemTime),
    ) -> Begun {
        let (mut head, mut validators) = (Vec::new(), Vec::new());
        reply.write_stored(&mut head, |_| true);
        reply.write_stored_fields(&mut validators, |name| {
            const KEPT: [&str; 7] =
                ["cache-control", "content-location", "date", "etag", "expires", "last-modified", "vary"];
            KEPT.iter().any(|kept| name.eq_ignore_ascii_case(kept))
        });
        if storable.lacks_date {
            let date = format!("Date: {}\r\n", httpdate::fmt_http_date(now.1));
            head.extend_from_slice(date.as_bytes());
            validators.extend_from_slice(date.as_bytes());
        }
        Begun {
            head,
            validators,
            status: reply.status,
            vary: storable.vary.iter().map(|name| (name.clone(), request(name))).collect(),
            etag: reply.values("etag").next().map(<[u8]>::to_vec),
            modified: reply.values("last-modified").next().and_then(policy::read_date),
            arrived: now.0,
            storable,
        }
    }

    pub(super) fn finish(self, key: Arc<str>, body: Vec<u8>) -> Entry {
        Entry {
            key,
            head: self.head,
            validators: self.validators,
            status: self.status,
            body: body.into(),
            vary: self.vary,
            etag: self.etag,
            modified: self.modified,
            arrived: self.arrived,
            age: self.storable.age,
            lifetime: self.storable.lifetime,
            is_for_authorized: self.storable.is_for_authorized,
            is_used: AtomicBool::new(false),
        }
    }
}

impl Entry {
    /// Returns the bytes that it takes, with what the store needs for it.
    pub(super) fn size(&self) -> usize {
        let vary: usize = self.vary.iter().map(|(name, value)| name.len() + value.len() + 64).sum();
        512 + self.key.len() + self.head.len() + self.validators.len() + self.body.len() + vary
    }

    /// Returns true if both answer the same requests.
    pub(super) fn replaces(&self, other: &Entry) -> bool {
        self.vary == other.vary
    }

    pub(super) fn is_stale(&self, now: Instant) -> bool {
        self.current_age(now) >= self.lifetime
    }

    fn current_age(&self, now: Instant) -> Duration {
        self.age + now.saturating_duration_since(self.arrived)
    }

    /// Returns whether it answers a request. `field` has the values of the request's fields.
    pub fn fits(&self, asked: &Asked, field: impl Fn(&str) -> Vec<u8>, now: Instant) -> Fit {
        if !self.vary.iter().all(|(name, value)| field(name) == *value) {
            return Fit::Other;
        }
        let age = self.current_age(now);
        let is_fresh = age + Duration::from_secs(asked.min_fresh) < self.lifetime
            && asked.max_age.is_none_or(|most| age.as_secs() <= most);
        if asked.refetches || !is_fresh || asked.is_authorized && !self.is_for_authorized {
            return Fit::Stale;
        }
        self.is_used.store(true, Relaxed);
        Fit::Answers
    }

    /// Returns true if the request's client has this representation already.
    pub fn is_at(&self, request: &Request<'_, '_>) -> bool {
        self.status == 200 && policy::is_not_modified(request, self.etag.as_deref(), self.modified)
    }

    /// Appends the head of an answer. With `is_not_modified` it is a 304.
    pub fn answer(&self, after: After, is_not_modified: bool, now: Instant, out: &mut Vec<u8>) {
        if is_not_modified {
            out.extend_from_slice(b"HTTP/1.1 304 Not Modified\r\n");
            out.extend_from_slice(&self.validators);
        } else {
            out.extend_from_slice(&self.head);
        }
        out.extend_from_slice(b"Age: ");
        decimal(self.current_age(now).as_secs(), out);
        out.extend_from_slice(b"\r\n");
        if !is_not_modified && self.status != 204 {
            out.extend_from_slice(b"Content-Length: ");
            decimal(self.body.len() as u64, out);
            out.extend_from_slice(b"\r\n");
        }
        out.extend_from_slice(match after {
            After::Close => b"Connection: close\r\n\r\n",
            After::KeepAlive => b"Connection: keep-alive\r\n\r\n",
            After::Stays | After::Upgrade => b"\r\n",
        });
    }
}
