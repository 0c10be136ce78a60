//! The heads of requests that stored replies have answered. A head with equal bytes gets that answer for as
//! long as the reply is stored and fresh, so a thread need not parse it, and takes no lock.
//!
//! A head has one slot, by its hash. It is noted when a stored reply answers it, and kept the second time:
//!
//! ```text
//!  empty ──► noted ── answered again ──► kept ── the reply is gone or stale, and another one answers ──┐
//!              │                          │ ▲                                                          │
//!              └── another head ─► noted ◄┘ └──────────────────────────────────────────────────────────┘
//! ```
//!
//! The bytes of a head, the configuration and the stored replies decide about the answer. So all heads are
//! forgotten with a configuration, and an entry says itself when it is not stored any more.

use std::sync::{Arc, Weak};
use std::time::Instant;

use memchr::memmem::Finder;

use super::entry::{Entry, What};
use super::policy::Asked;
use crate::message::{Request, Version};

/// The heads that a thread has kept.
#[derive(Debug)]
pub(crate) struct Recall {
    slots: Vec<Slot>,
    end: Finder<'static>,
}

#[derive(Clone, Debug, Default)]
struct Slot {
    hash: u64,
    kept: Option<Box<Kept>>,
}

#[derive(Clone, Debug)]
struct Kept {
    head: Box<[u8]>,
    /// It does not keep the reply in memory.
    entry: Weak<Entry>,
    what: What,
    asker: Asker,
}

/// What an answer from the cache depends on, besides the stored reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asker {
    pub(crate) version: Version,
    /// The client expects the connection to stay open.
    pub(crate) keeps_alive: bool,
    pub(crate) is_head: bool,
}

impl Asker {
    pub(crate) fn of(request: &Request<'_, '_>) -> Asker {
        let is_head = request.method == "HEAD";
        Asker { version: request.version, keeps_alive: request.keeps_alive, is_head }
    }
}

/// An answer to a head that was kept.
#[derive(Debug)]
pub(crate) struct Recalled {
    /// The bytes of the head.
    pub(crate) length: usize,
    pub(crate) entry: Arc<Entry>,
    pub(crate) what: What,
    pub(crate) asker: Asker,
}

const SLOTS: usize = 1024;
/// Longer heads are not kept, so a thread's slots have at most 2 MiB.
const LONGEST: usize = 2048;
const END: &[u8] = b"\r\n\r\n";

impl Recall {
    pub(crate) fn new() -> Recall {
        Recall { slots: vec![Slot::default(); SLOTS], end: Finder::new(END) }
    }

    /// Forgets all heads.
    pub(crate) fn clear(&mut self) {
        self.slots.fill(Slot::default());
    }

    /// Returns the answer to the head at the beginning of `bytes`, if it was kept and its reply is still
    /// right.
    pub(crate) fn find(&self, bytes: &[u8], now: Instant) -> Option<Recalled> {
        let length = self.end.find(&bytes[..bytes.len().min(LONGEST)])? + END.len();
        let hash = hash(&bytes[..length]);
        let slot = &self.slots[place(hash)];
        let kept = slot.kept.as_ref().filter(|_| slot.hash == hash)?;
        if *kept.head != bytes[..length] {
            return None;
        }
        let entry = kept.entry.upgrade().filter(|entry| entry.still_answers(now))?;
        Some(Recalled { length, entry, what: kept.what.clone(), asker: kept.asker })
    }

    /// Notes or keeps a head that a stored reply has just answered.
    pub(crate) fn note(&mut self, head: &[u8], asked: &Asked, asker: Asker, what: &What, entry: &Arc<Entry>) {
        // With these, the reply may be too old before it is stale.
        if head.len() > LONGEST || asked.max_age.is_some() || asked.min_fresh > 0 {
            return;
        }
        let hash = hash(head);
        let slot = &mut self.slots[place(hash)];
        let is_again = slot.hash == hash;
        let kept = || {
            let (head, entry, what) = (head.into(), Arc::downgrade(entry), what.clone());
            Box::new(Kept { head, entry, what, asker })
        };
        *slot = Slot { hash, kept: is_again.then(kept) };
    }
}

fn place(hash: u64) -> usize {
    hash as usize % SLOTS
}

/// Hashes a head. Clients may choose heads with equal hashes, which only compete for one slot.
fn hash(head: &[u8]) -> u64 {
    use std::hash::Hasher;
    let mut hasher = rustc_hash::FxHasher::default();
    hasher.write(head);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::store::tests::entry;
    use super::*;

    const HEAD: &[u8] = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n";
    const ASKER: Asker = Asker { version: Version::Http11, keeps_alive: true, is_head: false };

    fn note(recall: &mut Recall, head: &[u8], entry: &Arc<Entry>) {
        recall.note(head, &Asked::default(), ASKER, &What::Whole, entry);
    }

    #[test]
    fn a_head_is_kept_the_second_time() {
        let (mut recall, now) = (Recall::new(), Instant::now());
        let entry = entry(now);
        note(&mut recall, HEAD, &entry);
        assert!(recall.find(HEAD, now).is_none());
        note(&mut recall, HEAD, &entry);
        let bytes = [HEAD, b"GET /next"].concat();
        let found = recall.find(&bytes, now).expect("it is kept");
        assert_eq!((found.length, found.asker), (HEAD.len(), ASKER));
        assert!(Arc::ptr_eq(&found.entry, &entry));
        for other in [&HEAD[..HEAD.len() - 1], b"\r\n\r\n", b"", b"GET /b HTTP/1.1\r\nHost: h\r\n\r\n"] {
            assert!(recall.find(other, now).is_none());
        }
        recall.clear();
        assert!(recall.find(HEAD, now).is_none());
    }

    #[test]
    fn stale_replies_and_those_that_have_gone_are_not_recalled() {
        let (mut recall, now) = (Recall::new(), Instant::now());
        let kept = |recall: &mut Recall| {
            let entry = entry(now);
            recall.clear();
            (0..2).for_each(|_| note(recall, HEAD, &entry));
            entry
        };
        let stale = kept(&mut recall);
        assert!(recall.find(HEAD, now + Duration::from_secs(59)).is_some());
        assert!(recall.find(HEAD, now + Duration::from_secs(60)).is_none());
        stale.leave();
        assert!(recall.find(HEAD, now).is_none());
        drop(kept(&mut recall));
        assert!(recall.find(HEAD, now).is_none());
        // A new reply takes its place.
        let new = entry(now);
        note(&mut recall, HEAD, &new);
        assert!(recall.find(HEAD, now).is_some());
    }

    #[test]
    fn requests_that_want_young_replies_are_not_kept() {
        let (mut recall, now) = (Recall::new(), Instant::now());
        let entry = entry(now);
        let (max_age, min_fresh) = (Some(5), 5);
        for asked in [Asked { max_age, ..Asked::default() }, Asked { min_fresh, ..Asked::default() }] {
            (0..3).for_each(|_| recall.note(HEAD, &asked, ASKER, &What::Whole, &entry));
            assert!(recall.find(HEAD, now).is_none());
        }
    }
}
