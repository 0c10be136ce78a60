//! The stored replies of one route, and the requests for replies that are not stored.
//!
//! Entries are bounded in bytes together. A new one evicts those that were not used since they were
//! last considered (second chance). A reload of the configuration makes new stores, without entries.
//!
//! A *flight* is a request to a backend whose reply may be stored. Others for the same target follow
//! it:
//!
//! ```text
//!  look: none ──► Leader(Flight) ── the reply is stored ──► followers look again: answered
//!                       │
//!                       ├── it may not be stored ─────────► each follower asks the backend
//!                       └── it fails, or is dropped ──────► followers look again: one of them leads
//! ```

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;
use shunt_serve::engine::Inboxes;

use super::entry::{Entry, StoredHead};
use super::policy::Asked;

/// The settings of a route's cache.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Settings {
    /// Bytes of all stored replies.
    pub bytes: usize,
    /// The most bytes of a body that is stored.
    pub object_bytes: usize,
    /// Seconds for which a reply without a lifetime is fresh.
    pub lifetime: f64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { bytes: 64 << 20, object_bytes: 1 << 20, lifetime: 0.0 }
    }
}

impl Settings {
    pub(crate) fn check(&self) -> Result<(), String> {
        if !(64 * 1024..=1 << 40).contains(&self.bytes) {
            return Err("bytes in cache is from 65536 on".to_owned());
        }
        if self.object_bytes == 0 || self.object_bytes > self.bytes / 8 || self.object_bytes > 64 << 20 {
            return Err("object-bytes in cache is from 1 to an eighth of bytes, and to 64 MiB".to_owned());
        }
        if !(0.0..=31_536_000.0).contains(&self.lifetime) {
            return Err("lifetime in cache is from 0 to 31536000 seconds".to_owned());
        }
        Ok(())
    }
}

/// A client of a thread that waits for a flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Follower {
    /// The thread's number.
    pub thread: usize,
    /// The client's place there, and its generation.
    pub client: (usize, u32),
}

/// A follower whose flight has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Woken {
    /// The client's place, and its generation.
    pub client: (usize, u32),
    /// The reply may not be stored, so there is no use in looking again.
    pub goes_alone: bool,
}

/// The followers that each thread has to continue with.
pub type Mail = Inboxes<Woken>;

/// The replies of a route.
#[derive(Debug)]
pub struct Store {
    pub(crate) settings: Settings,
    inner: Mutex<Inner>,
    pub(crate) evicted: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    entries: HashMap<Arc<str>, Vec<Arc<Entry>>>,
    /// All entries, and some that were removed, in the order of their eviction.
    order: VecDeque<Arc<Entry>>,
    bytes: usize,
    count: usize,
    flights: HashMap<Arc<str>, Vec<Follower>>,
}

/// What becomes of a request.
#[derive(Debug)]
pub enum Found {
    /// A stored reply answers it.
    Hit(Arc<Entry>),
    /// It asks the backend, and its reply may be stored.
    Lead(Flight),
    /// It waits for another request.
    Follows,
    /// It asks the backend, and its reply is not stored.
    Alone,
}

/// The most representations of a target, and followers of a flight.
const VARIANTS: usize = 16;
const FOLLOWERS: usize = 4096;

impl Store {
    /// Makes a store without entries.
    pub fn new(settings: Settings) -> Store {
        Store { settings, inner: Mutex::default(), evicted: AtomicU64::new(0) }
    }

    /// Returns a stored reply that answers a request.
    pub fn find(
        &self,
        key: &str,
        asked: &Asked,
        field: &impl Fn(&str) -> Vec<u8>,
        now: Instant,
    ) -> Option<Arc<Entry>> {
        self.inner().find(key, asked, field, now)
    }

    /// Finds a reply, or makes the request a leader or a follower.
    pub fn look(
        self: &Arc<Store>,
        key: &str,
        asked: &Asked,
        field: &impl Fn(&str) -> Vec<u8>,
        follower: Follower,
        mail: &Arc<Mail>,
        now: Instant,
    ) -> Found {
        let mut inner = self.inner();
        if let Some(entry) = inner.find(key, asked, field, now) {
            return Found::Hit(entry);
        }
        match inner.flights.get_mut(key) {
            // It cannot use the reply to another request.
            Some(_) if asked.refetches || asked.is_authorized => Found::Alone,
            Some(followers) if followers.len() >= FOLLOWERS => Found::Alone,
            Some(followers) => {
                followers.push(follower);
                Found::Follows
            }
            // Their replies are not stored.
            None if asked.is_head || asked.is_conditional => Found::Alone,
            None => {
                let key: Arc<str> = key.into();
                inner.flights.insert(key.clone(), Vec::new());
                let (store, mail) = (self.clone(), mail.clone());
                Found::Lead(Flight { store, mail, key, asked: *asked, end: End::Again })
            }
        }
    }

    /// Removes the replies for a target.
    pub fn forget(&self, key: &str) {
        let mut inner = self.inner();
        for entry in inner.entries.remove(key).unwrap_or_default() {
            inner.gone(&entry);
        }
    }

    /// Returns the number of entries and their bytes.
    pub fn fill(&self) -> (usize, usize) {
        let inner = self.inner();
        (inner.count, inner.bytes)
    }

    fn insert(&self, entry: Entry, now: Instant) {
        let entry = Arc::new(entry);
        let mut inner = self.inner();
        let known = inner.entries.remove(&entry.key).unwrap_or_default().into_iter();
        let (mut same, mut former): (Vec<_>, Vec<_>) =
            known.partition(|other| !entry.replaces(other) && !other.is_stale(now));
        if same.len() >= VARIANTS {
            former.push(same.remove(0));
        }
        former.iter().for_each(|entry| inner.gone(entry));
        same.push(entry.clone());
        inner.bytes += entry.size();
        inner.count += 1;
        inner.entries.insert(entry.key.clone(), same);
        inner.order.push_back(entry);
        while inner.bytes > self.settings.bytes {
            let Some(oldest) = inner.order.pop_front() else { break };
            if !inner.has(&oldest) {
                continue;
            }
            if oldest.is_used.swap(false, Relaxed) && !oldest.is_stale(now) {
                inner.order.push_back(oldest);
                continue;
            }
            inner.remove(&oldest);
            self.evicted.fetch_add(1, Relaxed);
        }
        // Entries that were replaced stay in the order for a while.
        if inner.order.len() > 2 * inner.count + 64 {
            let mut order = std::mem::take(&mut inner.order);
            order.retain(|entry| inner.has(entry));
            inner.order = order;
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn find(
        &self,
        key: &str,
        asked: &Asked,
        field: &impl Fn(&str) -> Vec<u8>,
        now: Instant,
    ) -> Option<Arc<Entry>> {
        self.entries.get(key)?.iter().find(|entry| entry.fits(asked, field, now)).cloned()
    }

    fn has(&self, entry: &Arc<Entry>) -> bool {
        self.entries.get(&entry.key).is_some_and(|all| all.iter().any(|one| Arc::ptr_eq(one, entry)))
    }

    fn remove(&mut self, entry: &Arc<Entry>) {
        if let Some(all) = self.entries.get_mut(&entry.key) {
            all.retain(|one| !Arc::ptr_eq(one, entry));
            if all.is_empty() {
                self.entries.remove(&entry.key);
            }
        }
        self.gone(entry);
    }

    fn gone(&mut self, entry: &Entry) {
        self.bytes -= entry.size();
        self.count -= 1;
    }
}

/// A request to a backend whose reply may be stored. Its followers continue when it is dropped.
#[derive(Debug)]
pub struct Flight {
    store: Arc<Store>,
    mail: Arc<Mail>,
    key: Arc<str>,
    pub(crate) asked: Asked,
    end: End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Followers look again.
    Again,
    /// They go to the backend.
    Alone,
}

impl Flight {
    /// Returns the lifetime of replies that have none, and the most bytes of a body.
    pub(crate) fn limits(&self) -> (Duration, usize) {
        (Duration::from_secs_f64(self.store.settings.lifetime), self.store.settings.object_bytes)
    }

    /// Ends the flight: its reply may not be stored.
    pub(crate) fn give_up(mut self) {
        self.end = End::Alone;
    }

    /// Stores the reply, and ends the flight.
    pub(crate) fn store(self, head: StoredHead, body: Vec<u8>, now: Instant) {
        self.store.insert(head.finish(self.key.clone(), body), now);
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let followers = self.store.inner().flights.remove(&self.key).unwrap_or_default();
        for Follower { thread, client } in followers {
            self.mail.send(thread, Woken { client, goes_alone: self.end == End::Alone });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::of_reply;
    use crate::message::reply::parse;
    use crate::message::{Parsed, no_fields};
    use std::time::SystemTime;

    const NOTHING: fn(&str) -> Vec<u8> = |_| Vec::new();

    fn begun(fields: &str, request: impl Fn(&str) -> Vec<u8>, now: Instant) -> StoredHead {
        let bytes = format!("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n{fields}\r\n");
        let mut slots = no_fields();
        let Ok(Parsed::Complete(reply)) = parse(bytes.as_bytes(), &mut slots, 4096, false) else { panic!() };
        let time = SystemTime::now();
        let storable = of_reply(&reply, &Asked::default(), time, Duration::ZERO, Duration::from_secs(60));
        StoredHead::new(&reply, storable.expect("storable"), request, (now, time))
    }

    fn lab(bytes: usize) -> (Arc<Store>, Arc<Mail>, Instant) {
        let wake = Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap());
        let settings = Settings { bytes, object_bytes: bytes / 8, lifetime: 0.0 };
        (Arc::new(Store::new(settings)), Arc::new(Mail::new(&[wake])), Instant::now())
    }

    fn look(store: &Arc<Store>, mail: &Arc<Mail>, key: &str, client: usize, now: Instant) -> Found {
        let follower = Follower { thread: 0, client: (client, 0) };
        store.look(key, &Asked::default(), &NOTHING, follower, mail, now)
    }

    fn fetch(store: &Arc<Store>, mail: &Arc<Mail>, key: &str, length: usize, now: Instant) {
        let Found::Lead(flight) = look(store, mail, key, 0, now) else { panic!("{key} is there") };
        flight.store(begun("", NOTHING, now), vec![b'x'; length], now);
    }

    #[test]
    fn one_request_leads_and_the_others_follow() {
        let (store, mail, now) = lab(1 << 20);
        let Found::Lead(flight) = look(&store, &mail, "a/", 1, now) else { panic!() };
        assert!(matches!(look(&store, &mail, "a/", 2, now), Found::Follows));
        assert!(matches!(look(&store, &mail, "b/", 3, now), Found::Lead(_)));
        assert_eq!(mail.take(0), []);
        flight.store(begun("", NOTHING, now), b"text".to_vec(), now);
        assert_eq!(mail.take(0), [Woken { client: (2, 0), goes_alone: false }]);
        assert!(matches!(look(&store, &mail, "a/", 2, now), Found::Hit(entry) if *entry.body == *b"text"));
        // Stale after its lifetime.
        assert!(matches!(look(&store, &mail, "a/", 2, now + Duration::from_secs(60)), Found::Lead(_)));
    }

    #[test]
    fn followers_of_what_is_not_stored_go_alone() {
        let (store, mail, now) = lab(1 << 20);
        let Found::Lead(flight) = look(&store, &mail, "a/", 1, now) else { panic!() };
        assert!(matches!(look(&store, &mail, "a/", 2, now), Found::Follows));
        flight.give_up();
        assert_eq!(mail.take(0), [Woken { client: (2, 0), goes_alone: true }]);
        // One that fails lets another one lead.
        let Found::Lead(flight) = look(&store, &mail, "a/", 1, now) else { panic!() };
        assert!(matches!(look(&store, &mail, "a/", 2, now), Found::Follows));
        drop(flight);
        assert_eq!(mail.take(0), [Woken { client: (2, 0), goes_alone: false }]);
        assert!(matches!(look(&store, &mail, "a/", 2, now), Found::Lead(_)));
    }

    #[test]
    fn bytes_are_bounded_and_what_is_used_stays() {
        let (store, mail, now) = lab(100 * 1024);
        for number in 0..1000 {
            fetch(&store, &mail, &format!("key-{number}"), 1000, now);
            let (count, bytes) = store.fill();
            assert!(bytes <= 100 * 1024 && count <= 68, "{count} {bytes}");
            // It is used again and again.
            assert!(matches!(look(&store, &mail, "key-0", 1, now), Found::Hit(_)), "after {number}");
        }
        assert_eq!(store.evicted.load(Relaxed) as usize + store.fill().0, 1000);
        store.forget("key-0");
        assert!(store.find("key-0", &Asked::default(), &NOTHING, now).is_none());
    }

    #[test]
    fn representations_are_told_apart() {
        let (store, mail, now) = lab(1 << 20);
        let french = |name: &str| if name == "accept-language" { b"fr".to_vec() } else { Vec::new() };
        let german = |name: &str| if name == "accept-language" { b"de".to_vec() } else { Vec::new() };
        let follower = Follower { thread: 0, client: (1, 0) };
        for (language, text) in [(&french as &dyn Fn(&str) -> Vec<u8>, "oui"), (&german, "ja")] {
            let field = |name: &str| language(name);
            let found = store.look("a/", &Asked::default(), &field, follower, &mail, now);
            let Found::Lead(flight) = found else { panic!("{found:?}") };
            let begun = begun("Vary: Accept-Language\r\n", field, now);
            flight.store(begun, text.as_bytes().to_vec(), now);
        }
        let find = |field: &dyn Fn(&str) -> Vec<u8>| {
            store.find("a/", &Asked::default(), &|name: &str| field(name), now).map(|it| it.body.to_vec())
        };
        assert_eq!(find(&french), Some(b"oui".to_vec()));
        assert_eq!(find(&german), Some(b"ja".to_vec()));
        assert_eq!(find(&NOTHING), None);
        assert_eq!(store.fill().0, 2);
    }
}
