//! The stored replies of one route, and the requests for replies that are not stored.
//!
//! Entries are bounded in bytes together. A new one evicts those that were not used since they were
//! last considered (second chance). A reload of the configuration makes new stores, without entries.
//!
//! A *flight* is a request to a backend whose reply may be stored, or that validates a stored one. Others
//! for the same target follow it:
//!
//! ```text
//!  look: none ──► Leader(Flight) ── the reply is stored ──► followers look again: answered; else one
//!                       │                                   leads, and none of them follows again
//!                       ├── it answers no other request ──► each follower asks the backend
//!                       └── it fails, or is dropped ──────► followers look again: one of them leads
//! ```
//!
//! A change of the target makes its flights *void*: their replies may be older than the change, so they
//! are not stored, and no request follows them any more.
//!
//! Bodies that arrive, and those that wait for slow clients when they are not stored any more, are bounded
//! by as many bytes again: while there are more, nothing is stored.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;
use shunt_serve::engine::Inboxes;

use super::entry::{Entry, StoredHead};
use super::held::{Held, StoredBody};
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
    /// How the flight has ended.
    pub end: End,
}

/// How a flight ends for its followers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// A reply was stored, which may be for them.
    Stored,
    /// The reply answers no other request, so there is no use in looking again.
    Alone,
    /// There is no reply. One of them leads.
    Failed,
}

/// The followers that each thread has to continue with.
pub type Mail = Inboxes<Woken>;

/// The replies of a route.
#[derive(Debug)]
pub struct Store {
    pub(crate) settings: Settings,
    inner: Mutex<Inner>,
    held: Arc<AtomicUsize>,
    pub(crate) evicted: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    entries: HashMap<Arc<str>, Vec<Arc<Entry>>>,
    /// All entries, and some that were removed, in the order of their eviction.
    order: VecDeque<Arc<Entry>>,
    bytes: usize,
    count: usize,
    flights: HashMap<Arc<str>, Underway>,
    /// The number of the next flight.
    next: u64,
}

/// A flight that others may follow.
#[derive(Debug)]
struct Underway {
    number: u64,
    followers: Vec<Follower>,
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
        Store { settings, inner: Mutex::default(), held: Arc::default(), evicted: AtomicU64::new(0) }
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

    /// Finds a reply, or makes the request a leader or a follower. It does not follow again if it has
    /// followed a flight whose reply does not answer it.
    pub fn look(
        self: &Arc<Store>,
        key: &str,
        asked: &Asked,
        field: &impl Fn(&str) -> Vec<u8>,
        follower: Option<Follower>,
        mail: &Arc<Mail>,
        now: Instant,
    ) -> Found {
        let mut guard = self.inner();
        let inner = &mut *guard;
        if let Some(entry) = inner.find(key, asked, field, now) {
            return Found::Hit(entry);
        }
        match inner.flights.get_mut(key) {
            // It cannot use the reply to another request.
            Some(_) if asked.refetches || asked.is_authorized => Found::Alone,
            Some(flight) if flight.followers.len() >= FOLLOWERS => Found::Alone,
            Some(flight) => match follower {
                Some(follower) => {
                    flight.followers.push(follower);
                    Found::Follows
                }
                None => Found::Alone,
            },
            // Their replies are not stored.
            None if asked.is_head || asked.has_range => Found::Alone,
            None => {
                let former = inner.former(key, asked, field);
                // A backend may answer the client's conditions with a 304.
                if asked.is_conditional && former.is_none() {
                    return Found::Alone;
                }
                let (key, number): (Arc<str>, u64) = (key.into(), inner.next);
                inner.next += 1;
                inner.flights.insert(key.clone(), Underway { number, followers: Vec::new() });
                let (store, mail, asked) = (self.clone(), mail.clone(), *asked);
                let (collected, end) = (Held::new(&self.held), End::Failed);
                Found::Lead(Flight { store, mail, key, number, asked, former, collected, end })
            }
        }
    }

    /// Removes the replies for a target, and makes its flight void. The followers are for the caller to
    /// continue with.
    pub fn forget(&self, key: &str, mail: &Mail) {
        let mut inner = self.inner();
        for entry in inner.entries.remove(key).unwrap_or_default() {
            inner.gone(&entry);
        }
        let flight = inner.flights.remove(key);
        drop(inner);
        if let Some(flight) = flight {
            wake(mail, flight, End::Failed);
        }
    }

    /// Removes the reply that a flight was to validate.
    fn forget_former(&self, flight: &Flight) {
        let mut inner = self.inner();
        if let Some(former) = flight.former.as_ref().filter(|former| inner.has(former)) {
            inner.remove(former);
        }
    }

    /// Returns the number of entries and their bytes.
    pub fn fill(&self) -> (usize, usize) {
        let inner = self.inner();
        (inner.count, inner.bytes)
    }

    /// Inserts the reply to a flight, unless that is void.
    fn insert(&self, entry: Arc<Entry>, flight: u64, now: Instant) -> bool {
        let mut inner = self.inner();
        if inner.flights.get(&entry.key).is_none_or(|it| it.number != flight) {
            return false;
        }
        let known = inner.entries.remove(&entry.key).unwrap_or_default().into_iter();
        let (mut same, mut former): (Vec<_>, Vec<_>) =
            known.partition(|other| !entry.replaces(other) && other.is_useful(now));
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
            if oldest.is_used.swap(false, Relaxed) && oldest.is_useful(now) {
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
        true
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

    /// Returns a reply that answers a request once it was validated.
    fn former(&self, key: &str, asked: &Asked, field: &impl Fn(&str) -> Vec<u8>) -> Option<Arc<Entry>> {
        self.entries.get(key)?.iter().find(|entry| entry.fits_if_validated(asked, field)).cloned()
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
        entry.leave();
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
    number: u64,
    pub(crate) asked: Asked,
    /// The stored reply that it validates.
    pub(crate) former: Option<Arc<Entry>>,
    /// The bytes of the body that have arrived.
    collected: Held,
    end: End,
}

impl Flight {
    /// Returns the lifetime of replies that have none, and the most bytes of a body.
    pub(crate) fn limits(&self) -> (Duration, usize) {
        (Duration::from_secs_f64(self.store.settings.lifetime), self.store.settings.object_bytes)
    }

    /// Counts bytes of a body that arrives. Returns false if there are too many.
    pub(crate) fn collect(&mut self, more: usize) -> bool {
        let bytes = self.collected.bytes() + more;
        let all = self.collected.set(bytes);
        bytes <= self.store.settings.object_bytes && all <= 2 * self.store.settings.bytes
    }

    /// Returns what counts the bytes that wait for the client, if they may become more.
    pub(crate) fn ahead(&self) -> Option<Held> {
        (self.store.held.load(Relaxed) < 2 * self.store.settings.bytes).then(|| Held::new(&self.store.held))
    }

    /// Returns a body that has arrived.
    pub(crate) fn body(&self, bytes: Vec<u8>) -> Arc<StoredBody> {
        Arc::new(StoredBody::new(bytes, Held::new(&self.store.held)))
    }

    /// Ends the flight: its reply may not be stored.
    pub(crate) fn give_up(mut self) {
        self.end = End::Alone;
    }

    /// Ends the flight, and removes the stored reply that it was to validate: a reply that may not be stored
    /// has replaced it.
    pub(crate) fn give_up_former(mut self) {
        self.end = End::Alone;
        self.store.forget_former(&self);
    }

    /// Stores the reply, unless the flight is void, and ends the flight. Returns true if it was stored.
    pub(crate) fn store(mut self, entry: Arc<Entry>, now: Instant) -> bool {
        let is_stored = self.store.insert(entry.clone(), self.number, now);
        // What each use validates is of no use to those that wait for it.
        self.end = if entry.is_stale(now) { End::Alone } else { End::Stored };
        is_stored
    }

    /// Returns the entry that a reply becomes.
    pub(crate) fn entry(&self, head: StoredHead, body: Arc<StoredBody>) -> Arc<Entry> {
        Arc::new(head.finish(self.key.clone(), body))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let mut inner = self.store.inner();
        // A void one was removed, and there may be another one.
        if inner.flights.get(&self.key).is_some_and(|it| it.number == self.number) {
            let flight = inner.flights.remove(&self.key);
            drop(inner);
            if let Some(flight) = flight {
                wake(&self.mail, flight, self.end);
            }
        }
    }
}

/// Continues with the followers of a flight.
fn wake(mail: &Mail, flight: Underway, end: End) {
    for Follower { thread, client } in flight.followers {
        mail.send(thread, Woken { client, end });
    }
}

#[cfg(test)]
pub(super) mod tests {
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

    /// Returns a reply that is fresh for a minute.
    pub(in crate::cache) fn entry(now: Instant) -> Arc<Entry> {
        let body = StoredBody::new(b"text".to_vec(), Held::new(&Arc::default()));
        Arc::new(begun("", NOTHING, now).finish("a/".into(), Arc::new(body)))
    }

    fn lab(bytes: usize) -> (Arc<Store>, Arc<Mail>, Instant) {
        let wake = Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap());
        let settings = Settings { bytes, object_bytes: bytes / 8, lifetime: 0.0 };
        (Arc::new(Store::new(settings)), Arc::new(Mail::new(&[wake])), Instant::now())
    }

    fn look(store: &Arc<Store>, mail: &Arc<Mail>, key: &str, client: usize, now: Instant) -> Found {
        let follower = Follower { thread: 0, client: (client, 0) };
        store.look(key, &Asked::default(), &NOTHING, Some(follower), mail, now)
    }

    fn store_reply(flight: Flight, head: StoredHead, body: &[u8], now: Instant) -> bool {
        let entry = flight.entry(head, flight.body(body.to_vec()));
        flight.store(entry, now)
    }

    fn fetch(store: &Arc<Store>, mail: &Arc<Mail>, key: &str, length: usize, now: Instant) {
        let Found::Lead(flight) = look(store, mail, key, 0, now) else { panic!("{key} is there") };
        store_reply(flight, begun("", NOTHING, now), &vec![b'x'; length], now);
    }

    #[test]
    fn one_request_leads_and_the_others_follow() {
        let (store, mail, now) = lab(1 << 20);
        let Found::Lead(flight) = look(&store, &mail, "a/", 1, now) else { panic!() };
        assert!(matches!(look(&store, &mail, "a/", 2, now), Found::Follows));
        assert!(matches!(look(&store, &mail, "b/", 3, now), Found::Lead(_)));
        assert_eq!(mail.take(0), []);
        store_reply(flight, begun("", NOTHING, now), b"text", now);
        assert_eq!(mail.take(0), [Woken { client: (2, 0), end: End::Stored }]);
        assert!(matches!(look(&store, &mail, "a/", 2, now), Found::Hit(entry) if **entry.body == *b"text"));
        // Stale after its lifetime.
        assert!(matches!(look(&store, &mail, "a/", 2, now + Duration::from_secs(60)), Found::Lead(_)));
    }

    #[test]
    fn followers_of_what_is_not_stored_go_alone() {
        let (store, mail, now) = lab(1 << 20);
        let Found::Lead(flight) = look(&store, &mail, "a/", 1, now) else { panic!() };
        assert!(matches!(look(&store, &mail, "a/", 2, now), Found::Follows));
        flight.give_up();
        assert_eq!(mail.take(0), [Woken { client: (2, 0), end: End::Alone }]);
        // One that fails lets another one lead.
        let Found::Lead(flight) = look(&store, &mail, "a/", 1, now) else { panic!() };
        assert!(matches!(look(&store, &mail, "a/", 2, now), Found::Follows));
        drop(flight);
        assert_eq!(mail.take(0), [Woken { client: (2, 0), end: End::Failed }]);
        assert!(matches!(look(&store, &mail, "a/", 2, now), Found::Lead(_)));
    }

    #[test]
    fn a_change_makes_flights_void() {
        let (store, mail, now) = lab(1 << 20);
        let Found::Lead(old) = look(&store, &mail, "a/", 1, now) else { panic!() };
        assert!(matches!(look(&store, &mail, "a/", 2, now), Found::Follows));
        store.forget("a/", &mail);
        assert_eq!(mail.take(0), [Woken { client: (2, 0), end: End::Failed }]);
        // Another one is under way when the void one ends.
        let Found::Lead(new) = look(&store, &mail, "a/", 2, now) else { panic!() };
        assert!(!store_reply(old, begun("", NOTHING, now), b"old", now));
        assert_eq!(store.fill(), (0, 0));
        assert!(matches!(look(&store, &mail, "a/", 3, now), Found::Follows));
        assert!(store_reply(new, begun("", NOTHING, now), b"new", now));
        assert_eq!(mail.take(0), [Woken { client: (3, 0), end: End::Stored }]);
        assert!(matches!(look(&store, &mail, "a/", 3, now), Found::Hit(entry) if **entry.body == *b"new"));
    }

    #[test]
    fn who_has_followed_a_reply_for_others_does_not_follow_again() {
        let (store, mail, now) = lab(1 << 20);
        let again = || store.look("a/", &Asked::default(), &NOTHING, None, &mail, now);
        let Found::Lead(_first) = again() else { panic!() };
        assert!(matches!(again(), Found::Alone));
    }

    #[test]
    fn bodies_in_memory_are_bounded() {
        let (store, mail, now) = lab(100 * 1024);
        let lead = |key: &str| match look(&store, &mail, key, 1, now) {
            Found::Lead(flight) => flight,
            other => panic!("{other:?}"),
        };
        let mut flights: Vec<Flight> = (0..20).map(|number| lead(&format!("{number}"))).collect();
        let collected = flights.iter_mut().map(|flight| flight.collect(12 * 1024)).collect::<Vec<_>>();
        assert_eq!(collected.iter().filter(|fits| **fits).count(), 16);
        assert!(flights[0].ahead().is_none());
        flights.truncate(3);
        assert!(flights[0].collect(100) && !flights[1].collect(12 * 1024) && flights[0].ahead().is_some());
        drop(flights);
        assert_eq!(store.held.load(Relaxed), 0);
        // What clients still read counts, although it was evicted.
        let slow: Vec<Arc<StoredBody>> = (0..30)
            .filter_map(|number| {
                let mut flight = lead(&format!("slow-{number}"));
                flight.collect(10 * 1024).then(|| {
                    let body = flight.body(vec![0; 10 * 1024]);
                    let entry = flight.entry(begun("", NOTHING, now), body.clone());
                    flight.store(entry, now);
                    body
                })
            })
            .collect();
        assert_eq!((slow.len(), store.held.load(Relaxed)), (20, 200 * 1024));
        drop(slow);
        assert!(store.held.load(Relaxed) <= 100 * 1024 && lead("other").collect(10 * 1024));
    }

    #[test]
    fn a_stale_reply_with_a_validator_is_updated_by_a_304() {
        let (store, mail, now) = lab(1 << 20);
        let fields =
            "ETag: \"a\"\r\nCache-Control: max-age=10\r\nX: 1\r\nX: 2\r\nContent-Type: text/html\r\n";
        let Found::Lead(flight) = look(&store, &mail, "a/", 1, now) else { panic!() };
        assert!(flight.former.is_none());
        store_reply(flight, begun(fields, NOTHING, now), b"text", now);
        let later = now + Duration::from_secs(20);
        let Found::Lead(flight) = look(&store, &mail, "a/", 1, later) else { panic!() };
        let former = flight.former.clone().expect("it has a validator");
        assert_eq!(former.conditions(), b"If-None-Match: \"a\"\r\n");
        let updated = |fields: &str| {
            let bytes = format!("HTTP/1.1 304 Not Modified\r\n{fields}\r\n");
            let mut slots = no_fields();
            let Ok(Parsed::Complete(reply)) = parse(bytes.as_bytes(), &mut slots, 4096, false) else {
                panic!()
            };
            String::from_utf8(former.updated(&reply)).expect("text")
        };
        let new = "ETag: \"b\"\r\nX: 3\r\nContent-Length: 99\r\nContent-Type: none\r\nAge: 4\r\nY: 5\r\n";
        assert_eq!(
            updated(new),
            "HTTP/1.1 200 OK\r\nETag: \"a\"\r\nCache-Control: max-age=10\r\n\
             Content-Type: text/html\r\nX: 3\r\nY: 5\r\nAge: 4\r\n\r\n"
        );
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
        store.forget("key-0", &mail);
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
            let found = store.look("a/", &Asked::default(), &field, Some(follower), &mail, now);
            let Found::Lead(flight) = found else { panic!("{found:?}") };
            let begun = begun("Vary: Accept-Language\r\n", field, now);
            store_reply(flight, begun, text.as_bytes(), now);
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
