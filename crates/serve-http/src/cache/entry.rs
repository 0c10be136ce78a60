//! A stored reply, and the answers that are made of it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Relaxed, Release},
};
use std::time::{Duration, Instant, SystemTime};

use super::held::StoredBody;
use super::policy::{self, Asked, Storable};
use crate::message::reply::{After, decimal};
use crate::message::{Reply, Request, fields};

/// A stored reply. What it answers does not change.
///
/// Each answer changes the count of its owners. With this alignment, the count shares its cache
/// line with nothing else.
#[derive(Debug)]
#[repr(align(64))]
pub struct Entry {
    pub(super) key: Arc<str>,
    head: StoredHead,
    pub(crate) body: Arc<StoredBody>,
    /// It was used since it was last considered for eviction.
    pub(super) is_used: AtomicBool,
    /// It was removed from its store.
    has_left: AtomicBool,
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
    /// Last-Modified, as it was sent and as a time.
    modified: Option<(Vec<u8>, SystemTime)>,
    date: Option<SystemTime>,
    arrived: Instant,
    age: Duration,
    lifetime: Duration,
    is_for_authorized: bool,
    is_for_cookies: bool,
    can_be_validated: bool,
}

impl StoredHead {
    /// Takes the parts of a reply's head that are stored. `request` has the values of a request's
    /// fields.
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
            fields::is_one_of(name, &KEPT)
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
            modified: reply
                .values("last-modified")
                .next()
                .and_then(|text| Some((text.to_vec(), policy::read_date(text)?))),
            date: reply.values("date").next().and_then(policy::read_date),
            arrived: now.0,
            age: storable.age,
            lifetime: storable.lifetime,
            is_for_authorized: storable.is_for_authorized,
            is_for_cookies: storable.is_for_cookies,
            can_be_validated: storable.can_be_validated,
        }
    }

    pub(super) fn finish(self, key: Arc<str>, body: Arc<StoredBody>) -> Entry {
        let [is_used, has_left] = [AtomicBool::new(false), AtomicBool::new(false)];
        Entry { key, head: self, body, is_used, has_left }
    }
}

/// What an answer has of a stored reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// Nothing: the client has it.
    NotModified,
    Whole,
    /// These bytes of the body.
    Part(Range<usize>),
}

impl Entry {
    /// Returns the status of an answer.
    pub(crate) fn status(&self, what: &What) -> u16 {
        match what {
            What::NotModified => 304,
            What::Part(_) => 206,
            What::Whole => self.head.status,
        }
    }

    /// Returns the positions of the bytes of an answer to a GET.
    pub(crate) fn bytes(&self, what: &What) -> Range<usize> {
        match what {
            What::NotModified => 0..0,
            What::Part(part) => part.clone(),
            What::Whole => 0..self.body.len(),
        }
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

    /// Notes that it was removed from its store: no thread recalls it any more.
    pub(super) fn leave(&self) {
        self.has_left.store(true, Release);
    }

    /// Returns true if it is stored and fresh, so that it answers a request that it has answered
    /// before.
    pub(super) fn still_answers(&self, now: Instant) -> bool {
        let answers = !self.has_left.load(Acquire) && !self.is_stale(now);
        if answers {
            self.note_use();
        }
        answers
    }

    fn note_use(&self) {
        // Threads share the cache line: it is written to only when something changes.
        if !self.is_used.load(Relaxed) {
            self.is_used.store(true, Relaxed);
        }
    }

    pub(super) fn is_stale(&self, now: Instant) -> bool {
        self.current_age(now) >= self.head.lifetime
    }

    /// Returns true if it may still answer a request, perhaps after a validation.
    pub(super) fn is_useful(&self, now: Instant) -> bool {
        self.head.can_be_validated || !self.is_stale(now)
    }

    fn current_age(&self, now: Instant) -> Duration {
        self.head.age + now.saturating_duration_since(self.head.arrived)
    }

    /// Returns true if it answers a request. `field` has the values of the request's fields.
    pub fn fits(&self, asked: &Asked, field: impl Fn(&str) -> Vec<u8>, now: Instant) -> bool {
        let age = self.current_age(now);
        let is_fresh = age + Duration::from_secs(asked.min_fresh) < self.head.lifetime
            && asked.max_age.is_none_or(|most| age.as_secs() <= most);
        if asked.refetches || !is_fresh || !self.matches(asked, field) {
            return false;
        }
        self.note_use();
        true
    }

    /// Returns true if it answers a request once a backend has said that it is still right.
    pub(super) fn fits_if_validated(&self, asked: &Asked, field: impl Fn(&str) -> Vec<u8>) -> bool {
        self.head.can_be_validated && self.matches(asked, field)
    }

    fn matches(&self, asked: &Asked, field: impl Fn(&str) -> Vec<u8>) -> bool {
        (!asked.is_authorized || self.head.is_for_authorized)
            && (!asked.has_cookie || self.head.is_for_cookies)
            && self.head.vary.iter().all(|(name, value)| field(name) == *value)
    }

    /// Returns the fields of a request that asks whether it is still right.
    pub(crate) fn conditions(&self) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(etag) = &self.head.etag {
            fields::write(&mut out, "If-None-Match", etag);
        }
        if let Some((text, _)) = &self.head.modified {
            fields::write(&mut out, "If-Modified-Since", text);
        }
        out
    }

    /// Returns the head of the reply that a 304 makes of it (RFC 9111, sections 3.2 and 4.3.4).
    pub(crate) fn updated(&self, reply: &Reply<'_, '_>) -> Vec<u8> {
        // These describe the stored body. Some backends send another tag than the one that they
        // were asked about, as without a coding.
        const KEPT: [&str; 4] = ["content-encoding", "content-range", "content-type", "etag"];
        let is_replaced = |name: &str| {
            name.eq_ignore_ascii_case("date")
                || reply.values(name).next().is_some() && !fields::is_one_of(name, &KEPT)
        };
        let mut out = Vec::with_capacity(self.head.text.len() + 64);
        for (number, line) in self.head.text.split_inclusive(|byte| *byte == b'\n').enumerate() {
            let name = line.split(|byte| *byte == b':').next().unwrap_or_default();
            if number == 0 || !std::str::from_utf8(name).is_ok_and(is_replaced) {
                out.extend_from_slice(line);
            }
        }
        reply.write_stored_fields(&mut out, |name| !fields::is_one_of(name, &KEPT));
        for age in reply.values("age") {
            fields::write(&mut out, "Age", age);
        }
        out.extend_from_slice(b"\r\n");
        out
    }

    /// Returns true if the request's client has this representation already.
    pub fn is_at(&self, request: &Request<'_, '_>) -> bool {
        self.head.status == 200
            && policy::is_not_modified(
                request,
                self.head.etag.as_deref(),
                self.head.modified.as_ref().map(|(_, time)| *time).or(self.head.date),
            )
    }

    /// Returns the part of it that a request asks for.
    pub(crate) fn part(&self, request: &Request<'_, '_>) -> Option<Range<usize>> {
        let modified = self.head.modified.as_ref().map(|(text, _)| &text[..]);
        let part = super::part(request, self.body.len(), self.head.etag.as_deref(), modified);
        part.filter(|_| self.head.status == 200)
    }

    /// Appends the head of an answer.
    pub(crate) fn answer(&self, after: After, what: &What, now: Instant, out: &mut Vec<u8>) {
        match what {
            What::NotModified => {
                out.extend_from_slice(b"HTTP/1.1 304 Not Modified\r\n");
                out.extend_from_slice(&self.head.validators);
            }
            What::Whole => out.extend_from_slice(&self.head.text),
            What::Part(part) => {
                let line = self.head.text.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                out.extend_from_slice(b"HTTP/1.1 206 Partial Content\r\n");
                out.extend_from_slice(&self.head.text[line..]);
                let (first, last, length) = (part.start, part.end - 1, self.body.len());
                let range = format!("Content-Range: bytes {first}-{last}/{length}\r\n");
                out.extend_from_slice(range.as_bytes());
            }
        }
        out.extend_from_slice(b"Age: ");
        decimal(self.current_age(now).as_secs(), out);
        out.extend_from_slice(b"\r\n");
        if !matches!(what, What::NotModified) && self.head.status != 204 {
            out.extend_from_slice(b"Content-Length: ");
            decimal(self.bytes(what).len() as u64, out);
            out.extend_from_slice(b"\r\n");
        }
        out.extend_from_slice(match after {
            After::Close => b"Connection: close\r\n\r\n",
            After::KeepAlive => b"Connection: keep-alive\r\n\r\n",
            After::Stays | After::Upgrade => b"\r\n",
        });
    }
}
