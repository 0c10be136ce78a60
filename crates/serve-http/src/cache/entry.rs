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
    head: StoredHead,
    pub(crate) body: Arc<[u8]>,
    /// It was used since it was last considered for eviction.
    pub(super) is_used: AtomicBool,
}

/// The parts of a reply's head that are stored.
#[derive(Debug)]
pub struct StoredHead {
    /// The status line and the fields, without those that [`Entry::answer`] adds.
    text: Vec<u8>,
    /// The fields of an answer 304.
    validators: Vec<u8>,
    status: u16,
    /// The fields of the request that the reply depends on, with their values.
    vary: Vec<(String, Vec<u8>)>,
    etag: Option<Vec<u8>>,
    modified: Option<SystemTime>,
    arrived: Instant,
    age: Duration,
    lifetime: Duration,
    is_for_authorized: bool,
}

impl StoredHead {
    /// Takes the parts of a reply's head that are stored. `request` has the values of a request's fields.
    pub fn new(
        reply: &Reply<'_, '_>,
        storable: Storable,
        request: impl Fn(&str) -> Vec<u8>,
        now: (Instant, SystemTime),
    ) -> StoredHead {
        let (mut text, mut validators) = (Vec::new(), Vec::new());
        reply.write_stored(&mut text, |_| true);
        reply.write_stored_fields(&mut validators, |name| {
            const KEPT: [&str; 7] =
                ["cache-control", "content-location", "date", "etag", "expires", "last-modified", "vary"];
            KEPT.iter().any(|kept| name.eq_ignore_ascii_case(kept))
        });
        if storable.lacks_date {
            let date = format!("Date: {}\r\n", httpdate::fmt_http_date(now.1));
            text.extend_from_slice(date.as_bytes());
            validators.extend_from_slice(date.as_bytes());
        }
        StoredHead {
            text,
            validators,
            status: reply.status,
            vary: storable.vary.iter().map(|name| (name.clone(), request(name))).collect(),
            etag: reply.values("etag").next().map(<[u8]>::to_vec),
            modified: reply.values("last-modified").next().and_then(policy::read_date),
            arrived: now.0,
            age: storable.age,
            lifetime: storable.lifetime,
            is_for_authorized: storable.is_for_authorized,
        }
    }

    pub(super) fn finish(self, key: Arc<str>, body: Vec<u8>) -> Entry {
        Entry { key, head: self, body: body.into(), is_used: AtomicBool::new(false) }
    }
}

impl Entry {
    pub(crate) fn status(&self) -> u16 {
        self.head.status
    }

    /// Returns the bytes that it takes, with what the store needs for it.
    pub(super) fn size(&self) -> usize {
        let vary: usize = self.head.vary.iter().map(|(name, value)| name.len() + value.len() + 64).sum();
        512 + self.key.len() + self.head.text.len() + self.head.validators.len() + self.body.len() + vary
    }

    /// Returns true if both answer the same requests.
    pub(super) fn replaces(&self, other: &Entry) -> bool {
        self.head.vary == other.head.vary
    }

    pub(super) fn is_stale(&self, now: Instant) -> bool {
        self.current_age(now) >= self.head.lifetime
    }

    fn current_age(&self, now: Instant) -> Duration {
        self.head.age + now.saturating_duration_since(self.head.arrived)
    }

    /// Returns true if it answers a request. `field` has the values of the request's fields.
    pub fn fits(&self, asked: &Asked, field: impl Fn(&str) -> Vec<u8>, now: Instant) -> bool {
        if !self.head.vary.iter().all(|(name, value)| field(name) == *value) {
            return false;
        }
        let age = self.current_age(now);
        let is_fresh = age + Duration::from_secs(asked.min_fresh) < self.head.lifetime
            && asked.max_age.is_none_or(|most| age.as_secs() <= most);
        if asked.refetches || !is_fresh || asked.is_authorized && !self.head.is_for_authorized {
            return false;
        }
        self.is_used.store(true, Relaxed);
        true
    }

    /// Returns true if the request's client has this representation already.
    pub fn is_at(&self, request: &Request<'_, '_>) -> bool {
        self.head.status == 200
            && policy::is_not_modified(request, self.head.etag.as_deref(), self.head.modified)
    }

    /// Appends the head of an answer. With `is_not_modified` it is a 304.
    pub fn answer(&self, after: After, is_not_modified: bool, now: Instant, out: &mut Vec<u8>) {
        if is_not_modified {
            out.extend_from_slice(b"HTTP/1.1 304 Not Modified\r\n");
            out.extend_from_slice(&self.head.validators);
        } else {
            out.extend_from_slice(&self.head.text);
        }
        out.extend_from_slice(b"Age: ");
        decimal(self.current_age(now).as_secs(), out);
        out.extend_from_slice(b"\r\n");
        if !is_not_modified && self.head.status != 204 {
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
