//! The way of a request through the cache of its route: an answer from there, the wait for another
//! request's reply, and the storing of a reply.
//!
//! ```text
//!  Leads ── the head of a reply that may be stored ──► Stores ── the body is complete ──► None, stored
//!    └───── another one ───────────────────────────────► None     └── it is too long ───► None
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
use crate::cache::entry::StoredHead;
use crate::cache::policy::{self, Use};
use crate::cache::store::Found;
use crate::cache::{Entry, Flight, Follower, Store, Woken};
use crate::config::duration;
use crate::message::reply::After;
use crate::message::request::parse;
use crate::message::{Body, Framing, Parsed, Reply, Request, no_fields};

/// The state of a request in the cache of its route.
#[derive(Debug, Default)]
pub(crate) enum Caching {
    /// The cache is not concerned.
    #[default]
    None,
    /// It may make the stored replies for its target useless.
    Changes(Arc<Store>, String),
    /// Its reply may be stored.
    Leads(Box<Leading>),
    /// It waits for the reply to another request.
    Follows(Box<Following>),
    /// Its reply is being stored.
    Stores(Box<Storing>),
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
    most: usize,
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

/// Returns the key of a request's target: its host, in one form, and the target.
fn key(request: &Request<'_, '_>) -> String {
    let host = request.host.unwrap_or("localhost").to_ascii_lowercase();
    let host = host.strip_suffix(":80").or_else(|| host.strip_suffix(':')).unwrap_or(&host);
    let mut key = host.as_bytes().to_vec();
    request.target.write(&mut key);
    String::from_utf8_lossy(&key).into_owned()
}

/// Returns the values of a field, combined.
fn combined(request: &Request<'_, '_>, name: &str) -> Vec<u8> {
    request.values(name).map(<[u8]>::trim_ascii).collect::<Vec<_>>().join(&b", "[..])
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
    /// Returns true if all bytes of the reply are needed here.
    pub(super) fn stores(&self) -> bool {
        matches!(self, Caching::Stores(_))
    }

    /// Takes the final head of a reply.
    pub(super) fn see_head(
        &mut self,
        reply: &Reply<'_, '_>,
        framing: Framing,
        now: Instant,
        counts: &Counts,
    ) {
        *self = match take(self) {
            Caching::Changes(store, key) => {
                if (200..400).contains(&reply.status) {
                    store.forget(&key);
                }
                Caching::None
            }
            Caching::Leads(leading) => store_reply(*leading, reply, framing, now, counts),
            other => other,
        };
        self.settle(now, counts);
    }

    /// Takes bytes of a reply's body as they arrive.
    pub(super) fn see_body(&mut self, bytes: &[u8], now: Instant, counts: &Counts) {
        let Caching::Stores(storing) = self else { return };
        let (mut copy, mut tail) = (bytes.to_vec(), Vec::new());
        let passed = storing.rest.pass(&mut copy, &mut tail).map(|passed| passed.kept);
        let fits = passed.is_ok_and(|kept| {
            storing.body.extend_from_slice(&copy[..kept]);
            storing.body.len() <= storing.most
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
                flight.store(head, body, now);
                counts.cache_stored.add(1);
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
            Caching::Stores(Box::new(Storing { flight, head, rest, body: Vec::new(), most }))
        }
        None => {
            counts.cache_refused.add(1);
            flight.give_up();
            Caching::None
        }
    }
}

impl Worker {
    /// Answers a request from the cache, or returns how it goes on.
    pub(super) fn consult(
        &mut self,
        at: usize,
        store: &Arc<Store>,
        request: &Request<'_, '_>,
        raw: &[u8],
        line: Option<Box<Line>>,
    ) -> Consulted {
        let has_body = !matches!(request.framing, Framing::None | Framing::Length(0));
        let asked = match policy::of_request(request, has_body) {
            Use::Pass => return Consulted::Goes(Caching::None, line),
            Use::Change => return Consulted::Goes(Caching::Changes(store.clone(), key(request)), line),
            Use::Look(asked) => asked,
        };
        let key = key(request);
        let field = |name: &str| combined(request, name);
        if asked.only_if_cached {
            return match store.find(&key, &asked, &field, self.now) {
                Some(entry) => self.answer_stored(at, request, &entry, line),
                None => Consulted::Refused(line),
            };
        }
        let follower = Follower { thread: self.number, client: (at, self.clients[at].generation) };
        match store.look(&key, &asked, &field, follower, &self.shared.mail, self.now) {
            Found::Hit(entry) => self.answer_stored(at, request, &entry, line),
            Found::Lead(flight) => {
                self.counts.cache_misses.add(1);
                let leading = Leading { flight, raw: raw.to_vec(), began: self.now };
                Consulted::Goes(Caching::Leads(Box::new(leading)), line)
            }
            Found::Follows => {
                self.counts.cache_collapsed.add(1);
                let (store, raw) = (store.clone(), raw.to_vec());
                Consulted::Waits(Caching::Follows(Box::new(Following { store, raw })), line)
            }
            Found::Alone => {
                self.counts.cache_misses.add(1);
                Consulted::Goes(Caching::None, line)
            }
        }
    }

    /// Answers with a stored reply.
    fn answer_stored(
        &mut self,
        at: usize,
        request: &Request<'_, '_>,
        entry: &Entry,
        line: Option<Box<Line>>,
    ) -> Consulted {
        let client = &mut self.clients[at];
        let stays = request.keeps_alive && client.requests < self.config.limits.requests && !self.is_stopping;
        let after = After::of(stays, request.version);
        let is_not_modified = entry.is_at(request);
        let status = if is_not_modified { 304 } else { entry.status() };
        let has_body = !is_not_modified && request.method != "HEAD" && entry.status() != 204;
        self.out.clear();
        entry.answer(after, is_not_modified, self.now, &mut self.out);
        let sent = if has_body { entry.body.len() as u64 } else { 0 };
        // A client that has gone is noticed at the next read.
        let _ = match has_body {
            true => client.output.send_shared(&mut client.socket, &mut self.out, &entry.body),
            false => client.output.send(&mut client.socket, &self.out),
        };
        client.state = State::Head(Head::New);
        client.deadline = self.now + duration(self.config.timeouts.idle);
        if !stays {
            self.end_after_output(at);
        }
        let micros = self.now.elapsed().as_micros() as u64;
        self.counts.observe(micros);
        self.counts.cache_hits.add(1);
        self.counts.sent_bytes.add(sent);
        self.count_status(status);
        self.log_line(at, line, status, sent, micros);
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
        for Woken { client: (at, generation), goes_alone } in self.shared.mail.take(self.number) {
            if self.clients.get(at).is_some_and(|client| client.generation == generation) {
                self.stop_following(at, goes_alone);
            }
        }
    }

    /// Ends a request's wait for another one.
    pub(super) fn stop_following(&mut self, at: usize, goes_alone: bool) {
        let client = &mut self.clients[at];
        let mut exchange = match std::mem::replace(&mut client.state, State::Closing) {
            State::Follows(exchange) => exchange,
            other => {
                client.state = other;
                return;
            }
        };
        let Caching::Follows(following) = take(&mut exchange.caching) else { return };
        if !goes_alone {
            let Following { store, raw } = *following;
            let line = exchange.facts.line.take();
            let consulted = again(&raw, |request| self.consult(at, &store, request, &raw, line));
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
        } else {
            self.counts.cache_misses.add(1);
        }
        let mut rest = take(&mut self.clients[at].input);
        self.dispatch(at, exchange, &mut rest);
        self.drive(at);
    }
}
