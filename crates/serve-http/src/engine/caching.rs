//! The way of a request through the cache of its route: an answer from there, the wait for another
//! request's reply, and the storing of a reply.
//!
//! ```text
//!  Leads ── the head of a reply that may be stored ──► Stores ── the body is complete ──► None, stored
//!    │                                                   └── it is too long ───► None
//!    ├───── a 304 for the stored reply ────────────────► None: answered with the stored reply
//!    └───── another one ───────────────────────────────► None
//!  Follows ── the other request has ended ──► answered, Leads, Follows or None
//!  Changes ── a reply that is no error ─────► None: the stored replies for the target are removed
//! ```

use std::mem::take;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use super::connection::{Exchange, Head, State};
use super::counts::Counts;
use super::log::Line;
use super::worker::Worker;
use crate::cache::entry::{StoredHead, What};
use crate::cache::held::Held;
use crate::cache::key::{Key, combined};
use crate::cache::policy::{self, Asked, Use};
use crate::cache::recall::{Asker, Recalled};
use crate::cache::store::Found;
use crate::cache::{End, Entry, Flight, Follower, Mail, Store, Woken};
use crate::config::duration;
use crate::message::reply::{After, parse as parse_reply};
use crate::message::request::parse;
use crate::message::{Body, Framing, Parsed, Reply, Request, no_fields};

/// The state of a request in the cache of its route.
#[derive(Debug, Default)]
pub(crate) enum Caching {
    /// The cache is not concerned.
    #[default]
    None,
    /// It may make the stored replies for its target useless.
    Changes(Box<Changing>),
    /// Its reply may be stored.
    Leads(Box<Leading>),
    /// It waits for the reply to another request.
    Follows(Box<Following>),
    /// Its reply is being stored.
    Stores(Box<Storing>),
}

/// A change whose reply has not begun.
#[derive(Debug)]
pub(crate) struct Changing {
    store: Arc<Store>,
    mail: Arc<Mail>,
    key: Key,
}

/// A request whose reply has not begun.
#[derive(Debug)]
pub(crate) struct Leading {
    flight: Flight,
    /// The head of the request, for the fields that the reply depends on.
    raw: Vec<u8>,
    began: Instant,
}

/// A request that waits.
#[derive(Debug)]
pub(crate) struct Following {
    store: Arc<Store>,
    raw: Vec<u8>,
}

/// A reply of which a part has arrived.
#[derive(Debug)]
pub(crate) struct Storing {
    flight: Flight,
    head: StoredHead,
    /// The rest of it, without chunks.
    rest: Body,
    body: Vec<u8>,
}

/// What the final head of a reply means for the client.
pub(super) enum Seen {
    /// It is for the client.
    Forward,
    /// A stored reply is.
    Answer(Arc<Entry>, What),
    /// It answers no question.
    Bad,
}

/// What a request needs on its way through the cache.
pub(super) struct Asking {
    pub(super) line: Option<Box<Line>>,
    pub(super) began: Instant,
    /// It has not waited for a reply that does not answer it.
    pub(super) may_follow: bool,
}

/// What becomes of a request.
pub(super) enum Consulted {
    /// It was answered.
    Answered,
    /// It is not to be forwarded, and there is no answer.
    Refused(Option<Box<Line>>),
    /// It goes to a backend.
    Goes(Caching, Option<Box<Line>>),
    /// It waits for another request.
    Waits(Caching, Option<Box<Line>>),
}

/// Returns what an answer has of a stored reply, or `None` if it has not the part that is asked for.
fn what(request: &Request<'_, '_>, asked: &Asked, entry: &Entry) -> Option<What> {
    if entry.is_at(request) {
        return Some(What::NotModified);
    }
    if asked.has_range { entry.part(request).map(What::Part) } else { Some(What::Whole) }
}

/// Parses a head that was parsed before.
fn again<T>(raw: &[u8], with: impl FnOnce(&Request<'_, '_>) -> T) -> Option<T> {
    let mut slots = no_fields();
    match parse(raw, &mut slots, usize::MAX) {
        Ok(Parsed::Complete(request)) => Some(with(&request)),
        _ => None,
    }
}

impl Caching {
    /// Returns what counts bytes of a reply that wait for the client, if more of them may be read: a reply that
    /// is stored is for other clients too, which a slow one must not delay.
    pub(super) fn ahead(&self) -> Option<Held> {
        match self {
            Caching::Stores(storing) => storing.flight.ahead(),
            _ => None,
        }
    }

    /// Returns true if all bytes of the reply are needed here.
    pub(super) fn stores(&self) -> bool {
        matches!(self, Caching::Stores(_))
    }

    /// Returns the fields of a request that validates a stored reply.
    pub(super) fn conditions(&self) -> Vec<u8> {
        match self {
            Caching::Leads(leading) => {
                leading.flight.former.as_ref().map(|former| former.conditions()).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    /// Takes the final head of a reply.
    pub(super) fn see_head(
        &mut self,
        reply: &Reply<'_, '_>,
        framing: Framing,
        now: Instant,
        counts: &Counts,
    ) -> Seen {
        *self = match take(self) {
            Caching::Changes(changing) => {
                if (200..400).contains(&reply.status) {
                    let Changing { store, mail, key } = *changing;
                    let others = ["location", "content-location"].iter().flat_map(|name| reply.values(name));
                    let others = others.filter_map(|reference| key.referred(reference));
                    others.chain([key.text().to_owned()]).for_each(|key| store.forget(&key, &mail));
                }
                Caching::None
            }
            Caching::Leads(leading) => match leading.flight.former.clone() {
                Some(former) if reply.status == 304 => return update(*leading, &former, reply, now, counts),
                _ => store_reply(*leading, reply, framing, now, counts),
            },
            other => other,
        };
        self.settle(now, counts);
        Seen::Forward
    }

    /// Takes bytes of a reply's body as they arrive.
    pub(super) fn see_body(&mut self, bytes: &[u8], now: Instant, counts: &Counts) {
        let Caching::Stores(storing) = self else { return };
        let (mut copy, mut tail) = (bytes.to_vec(), Vec::new());
        let passed = storing.rest.pass(&mut copy, &mut tail).map(|passed| passed.kept);
        let fits = passed.is_ok_and(|kept| {
            storing.body.extend_from_slice(&copy[..kept]);
            storing.flight.collect(kept)
        });
        if !fits && let Caching::Stores(storing) = take(self) {
            counts.cache_refused.add(1);
            storing.flight.give_up();
        }
        self.settle(now, counts);
    }

    /// Stores a reply that is complete.
    fn settle(&mut self, now: Instant, counts: &Counts) {
        *self = match take(self) {
            Caching::Stores(storing) if storing.rest.is_done() => {
                let Storing { flight, head, body, .. } = *storing;
                let entry = flight.entry(head, flight.body(body));
                if flight.store(entry, now) {
                    counts.cache_stored.add(1);
                }
                Caching::None
            }
            other => other,
        };
    }
}

/// Begins to store a reply, if it may be stored.
fn store_reply(
    leading: Leading,
    reply: &Reply<'_, '_>,
    framing: Framing,
    now: Instant,
    counts: &Counts,
) -> Caching {
    let Leading { flight, raw, began } = leading;
    let (default, most) = flight.limits();
    let time = SystemTime::now();
    let storable = policy::of_reply(reply, &flight.asked, time, now - began, default);
    let fits = match framing {
        Framing::Length(length) => length <= most as u64,
        Framing::None | Framing::Chunked => true,
        // Whether it is complete cannot be known.
        Framing::UntilClose => false,
    };
    let head = storable.filter(|_| fits).and_then(|storable| {
        again(&raw, |request| StoredHead::new(reply, storable, |name| combined(request, name), (now, time)))
    });
    match head {
        Some(head) => {
            let rest = Body::new(framing, true);
            Caching::Stores(Box::new(Storing { flight, head, rest, body: Vec::new() }))
        }
        None => {
            counts.cache_refused.add(1);
            // An error says nothing about the stored reply.
            if reply.status < 500 {
                flight.give_up_former();
            } else {
                flight.give_up();
            }
            Caching::None
        }
    }
}

/// Updates a stored reply after a 304, and returns it as the answer.
fn update(leading: Leading, former: &Entry, reply: &Reply<'_, '_>, now: Instant, counts: &Counts) -> Seen {
    let Leading { flight, raw, began } = leading;
    let (default, _) = flight.limits();
    let time = SystemTime::now();
    let updated = former.updated(reply);
    let mut slots = no_fields();
    let Ok(Parsed::Complete(reply)) = parse_reply(&updated, &mut slots, usize::MAX, false) else {
        flight.give_up_former();
        return Seen::Bad;
    };
    let storable = policy::of_reply(&reply, &flight.asked, time, now - began, default);
    let is_storable = storable.is_some();
    let made = again(&raw, |request| {
        let storable = storable.unwrap_or_default();
        let head = StoredHead::new(&reply, storable, |name| combined(request, name), (now, time));
        let entry = flight.entry(head, former.body.clone());
        // Its client asked for all of it.
        let what = what(request, &flight.asked, &entry).unwrap_or(What::Whole);
        (entry, what)
    });
    let Some((entry, what)) = made else { return Seen::Bad };
    counts.cache_validated.add(1);
    if is_storable {
        flight.store(entry.clone(), now);
    } else {
        counts.cache_refused.add(1);
        flight.give_up_former();
    }
    Seen::Answer(entry, what)
}

impl Worker {
    /// Answers a request from the cache, or returns how it goes on.
    pub(super) fn consult(
        &mut self,
        at: usize,
        store: &Arc<Store>,
        request: &Request<'_, '_>,
        raw: &[u8],
        asking: Asking,
    ) -> Consulted {
        let has_body = !matches!(request.framing, Framing::None | Framing::Length(0));
        let key = Key::of(request, self.config.forwarding.trust_clients);
        let asked = match policy::of_request(request, has_body) {
            Use::Pass => return Consulted::Goes(Caching::None, asking.line),
            Use::Change => {
                let (store, mail) = (store.clone(), self.shared.mail.clone());
                let changing = Changing { store, mail, key };
                return Consulted::Goes(Caching::Changes(Box::new(changing)), asking.line);
            }
            Use::Look(asked) => asked,
        };
        let (key, field) = (key.text(), |name: &str| combined(request, name));
        if asked.only_if_cached || asked.has_range {
            let found = store.find(key, &asked, &field, self.now);
            let found = found.and_then(|entry| {
                let what = what(request, &asked, &entry);
                Some((what.or(asked.only_if_cached.then_some(What::Whole))?, entry))
            });
            return match found {
                Some((what, entry)) => self.answer_stored(at, Asker::of(request), &entry, &what, asking),
                None if asked.only_if_cached => Consulted::Refused(asking.line),
                None => {
                    self.counts.cache_misses.add(1);
                    Consulted::Goes(Caching::None, asking.line)
                }
            };
        }
        let follower = Follower { thread: self.number, client: (at, self.clients[at].generation) };
        let follower = asking.may_follow.then_some(follower);
        match store.look(key, &asked, &field, follower, &self.shared.mail, self.now) {
            Found::Hit(entry) => {
                let what = what(request, &asked, &entry).unwrap_or(What::Whole);
                let asker = Asker::of(request);
                self.recall.note(raw, &asked, asker, &what, &entry);
                self.answer_stored(at, asker, &entry, &what, asking)
            }
            Found::Lead(flight) => {
                self.counts.cache_misses.add(1);
                let leading = Leading { flight, raw: raw.to_vec(), began: self.now };
                Consulted::Goes(Caching::Leads(Box::new(leading)), asking.line)
            }
            Found::Follows => {
                self.counts.cache_collapsed.add(1);
                let (store, raw) = (store.clone(), raw.to_vec());
                Consulted::Waits(Caching::Follows(Box::new(Following { store, raw })), asking.line)
            }
            Found::Alone => {
                self.counts.cache_misses.add(1);
                Consulted::Goes(Caching::None, asking.line)
            }
        }
    }

    /// Answers the head at the beginning of `bytes` as it was answered before, if nothing has changed since
    /// then, and returns its length. With a log, each request is parsed for its line.
    pub(super) fn answer_again(&mut self, at: usize, bytes: &[u8]) -> Option<usize> {
        if self.log.is_some() {
            return None;
        }
        let Recalled { length, entry, what, asker } = self.recall.find(bytes, self.now)?;
        self.counts.requests.add(1);
        self.counts.cache_recalled.add(1);
        self.clients[at].requests += 1;
        let asking = Asking { line: None, began: self.now, may_follow: true };
        self.answer_stored(at, asker, &entry, &what, asking);
        Some(length)
    }

    /// Answers with a stored reply.
    fn answer_stored(
        &mut self,
        at: usize,
        asker: Asker,
        entry: &Entry,
        what: &What,
        asking: Asking,
    ) -> Consulted {
        let client = &mut self.clients[at];
        let stays = asker.keeps_alive && client.requests < self.config.limits.requests && !self.is_stopping;
        let after = After::of(stays, asker.version);
        let status = entry.status(what);
        self.out.clear();
        entry.answer(after, what, self.now, &mut self.out);
        let bytes = if asker.is_head { 0..0 } else { entry.bytes(what) };
        let sent = bytes.len() as u64;
        // A client that has gone is noticed at the next read.
        let _ = client.output.send_shared(&mut client.socket, &mut self.out, &entry.body, bytes);
        client.state = State::Head(Head::New);
        match stays {
            true => self.await_request(at),
            false => self.end_after_output(at),
        }
        let micros = asking.began.elapsed().as_micros() as u64;
        self.counts.observe(micros);
        self.counts.cache_hits.add(1);
        self.counts.sent_bytes.add(sent);
        self.count_status(status);
        self.log_line(at, asking.line, status, sent, micros);
        Consulted::Answered
    }

    /// Has a request wait for the reply to another one, as long as for a place.
    pub(super) fn follow(&mut self, at: usize, exchange: Box<Exchange>, rest: &[u8]) {
        let client = &mut self.clients[at];
        client.input.extend_from_slice(rest);
        client.deadline = self.now + duration(self.config.timeouts.queue);
        client.state = State::Follows(exchange);
    }

    /// Continues with requests whose wait for another one is over.
    pub(super) fn take_woken(&mut self) {
        for Woken { client: (at, generation), end } in self.shared.mail.take(self.number) {
            if self.clients.get(at).is_some_and(|client| client.generation == generation) {
                self.stop_following(at, end);
            }
        }
    }

    /// Ends a request's wait for another one.
    pub(super) fn stop_following(&mut self, at: usize, end: End) {
        let client = &mut self.clients[at];
        let mut exchange = match std::mem::replace(&mut client.state, State::Closing) {
            State::Follows(exchange) => exchange,
            other => {
                client.state = other;
                return;
            }
        };
        let Caching::Follows(following) = take(&mut exchange.caching) else { return };
        if end == End::Alone {
            self.counts.cache_misses.add(1);
        } else {
            let Following { store, raw } = *following;
            let facts = &mut exchange.facts;
            let (line, may_follow) = (facts.line.take(), end == End::Failed);
            let asking = Asking { line, began: facts.began, may_follow };
            let consulted = again(&raw, |request| {
                let consulted = self.consult(at, &store, request, &raw, asking);
                // It may have become one that validates.
                if let Consulted::Goes(caching, _) = &consulted {
                    exchange.head = self.head_for(at, request, caching);
                }
                consulted
            });
            match consulted {
                None | Some(Consulted::Answered | Consulted::Refused(_)) => return self.drive(at),
                Some(Consulted::Waits(caching, line)) => {
                    (exchange.caching, exchange.facts.line) = (caching, line);
                    self.clients[at].state = State::Follows(exchange);
                    return;
                }
                Some(Consulted::Goes(caching, line)) => {
                    (exchange.caching, exchange.facts.line) = (caching, line);
                }
            }
        }
        let mut rest = take(&mut self.clients[at].input);
        self.dispatch(at, exchange, &mut rest);
        self.drive(at);
    }
}
