//! Reads the head of a request, checks it, and begins to serve it.

use std::mem::take;
use std::net::IpAddr;
use std::time::SystemTime;

use super::answers;
use super::caching::{Asking, Caching, Consulted};
use super::connection::{Exchange, Facts, Head, ReplyState, Routed, State};
use super::counts::Failure;
use super::log::{Line, Outcome};
use super::socket::Received;
use super::worker::{READ, Worker};
use crate::config::duration;
use crate::message::request::{Additions, parse};
use crate::message::{Body, Framing, Parsed, Refusal, Request, Version, no_fields};

/// What becomes of a request whose head is complete.
enum Begun {
    /// It needs a backend.
    Goes(Box<Exchange>),
    /// It waits for another request.
    Follows(Box<Exchange>),
    /// It was answered from the cache.
    Answered,
    /// It cannot be served.
    Failed(Failure, Option<Box<Line>>),
}

impl Worker {
    /// Takes a step of a client that waits for a head.
    pub(super) fn read_head(&mut self, at: usize) -> bool {
        let client = &mut self.clients[at];
        let Ok(has_progress) = client.output.flush(&mut client.socket) else {
            self.remove(at);
            return false;
        };
        let is_empty = client.output.is_empty();
        if has_progress {
            self.await_request(at);
        }
        if !is_empty {
            return false;
        }
        let mut scratch = take(&mut self.scratch);
        let has_progress = self.read_head_into(at, &mut scratch);
        self.scratch = scratch;
        has_progress
    }

    fn read_head_into(&mut self, at: usize, scratch: &mut [u8]) -> bool {
        let limit = self.config.limits.head;
        let client = &mut self.clients[at];
        let mut filled = client.input.len();
        scratch[..filled].copy_from_slice(&client.input);
        client.input = Vec::new();
        let mut may_be_complete = filled > 0 && matches!(client.state, State::Head(Head::New));
        loop {
            // Only a line feed completes a head, so fewer bytes need not be examined.
            if may_be_complete || filled >= limit {
                if let Some(length) = self.answer_again(at, &scratch[..filled]) {
                    self.clients[at].input.extend_from_slice(&scratch[length..filled]);
                    return true;
                }
                let mut slots = no_fields();
                match parse(&scratch[..filled], &mut slots, limit) {
                    Err(refusal) => {
                        self.refuse(at, refusal);
                        return true;
                    }
                    Ok(Parsed::Complete(request)) => {
                        let (length, is_head) = (request.length, request.method == "HEAD");
                        let stays = request.keeps_alive
                            && request.framing == Framing::None
                            && request.version == Version::Http11;
                        let begun = self.begin(at, &request, &scratch[..length]);
                        let rest = &mut scratch[length..filled];
                        match begun {
                            Begun::Goes(exchange) => self.dispatch(at, exchange, rest),
                            Begun::Follows(exchange) => self.follow(at, exchange, rest),
                            Begun::Answered => self.clients[at].input.extend_from_slice(rest),
                            Begun::Failed(failure, line) => {
                                self.clients[at].input.extend_from_slice(rest);
                                self.counts.failures[failure as usize].add(1);
                                self.answer(at, failure.status(), failure.text(), !stays, is_head, line);
                            }
                        }
                        return true;
                    }
                    Ok(Parsed::Incomplete) => {}
                }
            }
            let client = &mut self.clients[at];
            let end = (filled + READ).min(scratch.len());
            match client.socket.receive(&mut scratch[filled..end]) {
                Received::Bytes(count) => {
                    // The first bytes are examined in any case, in case that they are not HTTP.
                    let part = &scratch[filled..filled + count];
                    may_be_complete = filled == 0 || memchr::memchr(b'\n', part).is_some();
                    filled += count;
                }
                Received::Nothing => {
                    if filled > 0 {
                        client.input.extend_from_slice(&scratch[..filled]);
                        if matches!(client.state, State::Head(Head::New)) {
                            client.state = State::Head(Head::Partial);
                            client.deadline = self.now + duration(self.config.timeouts.head);
                        }
                    }
                    return false;
                }
                Received::End | Received::Failed => {
                    self.remove(at);
                    return false;
                }
            }
        }
    }

    /// Returns the state of a request that is to be served, or serves it. `raw` is its head.
    fn begin(&mut self, at: usize, request: &Request<'_, '_>, raw: &[u8]) -> Begun {
        self.counts.requests.add(1);
        let client = &mut self.clients[at];
        client.requests += 1;
        let config = &self.config;
        let line = self.log.is_some().then(|| Box::new(Line::of(request)));
        let Some(path) = request.target.route_path() else {
            return Begun::Failed(Failure::BadPath, line);
        };
        let Some(to) = config.routes.route(request.host.unwrap_or_default(), &path) else {
            return Begun::Failed(Failure::NoRoute, line);
        };
        if let Framing::Length(length) = request.framing
            && config.limits.body != 0
            && length > config.limits.body
        {
            return Begun::Failed(Failure::TooLarge, line);
        }
        let pool = Routed::Current(to.pool);
        let consulted = match to.cache.clone() {
            Some(store) => {
                let asking = Asking { line, began: self.now, may_follow: true };
                self.consult(at, &store, request, raw, asking)
            }
            None => Consulted::Goes(Caching::None, line),
        };
        let (caching, line, follows) = match consulted {
            Consulted::Answered => return Begun::Answered,
            Consulted::Refused(line) => return Begun::Failed(Failure::NotStored, line),
            Consulted::Goes(caching, line) => (caching, line, false),
            Consulted::Waits(caching, line) => (caching, line, true),
        };
        let head = self.head_for(at, request, &caching);
        let (client, config) = (&mut self.clients[at], &self.config);
        let body = Body::new(request.framing, false);
        let exchange = Box::new(Exchange {
            upstream: None,
            pool,
            head,
            has_body: !body.is_done(),
            body,
            reply: ReplyState::Head,
            is_head: request.method == "HEAD",
            is_idempotent: request.is_idempotent(),
            version: request.version,
            keeps_alive: request.keeps_alive && client.requests < config.limits.requests && !self.is_stopping,
            upgrade: wanted(request, &config.forwarding.upgrades).map(str::to_owned),
            attempts: 0,
            queued_until: None,
            failed: None,
            request_pipe: None,
            reply_pipe: None,
            facts: Facts { began: self.now, status: 0, received: 0, sent: 0, waited_ms: 0, line },
            caching,
        });
        if exchange.has_body {
            self.note_upload(at);
        }
        if follows { Begun::Follows(exchange) } else { Begun::Goes(exchange) }
    }

    /// Returns the head of a request as a backend gets it.
    pub(super) fn head_for(&self, at: usize, request: &Request<'_, '_>, caching: &Caching) -> Vec<u8> {
        let forwarding = &self.config.forwarding;
        let (client, conditions) = (text(self.clients[at].address), caching.conditions());
        let additions = Additions {
            client: &client,
            trusts_client: forwarding.trust_clients,
            x_forwarded: forwarding.x_forwarded,
            forwarded: forwarding.forwarded,
            via: forwarding.via.as_deref(),
            host: "localhost",
            upgrade: wanted(request, &forwarding.upgrades),
            conditions: &conditions,
        };
        let mut head = Vec::with_capacity(request.length + 160 + conditions.len());
        request.write(&additions, &mut head);
        head
    }

    /// Answers a request that is not valid HTTP, after which nothing is known about the next one.
    pub(super) fn refuse(&mut self, at: usize, refusal: Refusal) {
        let position = Refusal::ALL.iter().position(|other| *other == refusal).unwrap_or_default();
        self.counts.refusals[position].add(1);
        self.answer_and_close(at, refusal.status(), refusal.text(), None);
    }

    /// Sends an answer of the proxy's own, after which the connection ends.
    pub(super) fn answer_and_close(&mut self, at: usize, status: u16, text: &str, line: Option<Box<Line>>) {
        self.answer(at, status, text, true, false, line);
    }

    /// Sends an answer of the proxy's own.
    fn answer(
        &mut self,
        at: usize,
        status: u16,
        text: &str,
        closes: bool,
        is_head: bool,
        line: Option<Box<Line>>,
    ) {
        self.out.clear();
        answers::write(status, text, closes, is_head, &mut self.out);
        self.count_status(status);
        let unknown = || self.config.log.is_some().then(|| Box::new(Line::unknown()));
        let line = line.or_else(unknown);
        self.log_line(at, line, status, 0, 0);
        let client = &mut self.clients[at];
        let _ = client.output.send(&mut client.socket, &self.out);
        if closes || self.is_stopping {
            return self.end_after_output(at);
        }
        let client = &mut self.clients[at];
        client.state = State::Head(Head::New);
        client.deadline = self.now + duration(self.config.timeouts.idle);
    }

    /// Writes the line of a request in the log, if there is a log.
    pub(super) fn log_line(
        &mut self,
        at: usize,
        line: Option<Box<Line>>,
        status: u16,
        bytes: u64,
        micros: u64,
    ) {
        if let Some((line, log)) = line.zip(self.config.log.as_ref()) {
            let outcome = Outcome { client: self.clients[at].address, status, bytes, micros };
            line.write(log.format, outcome, SystemTime::now(), &mut self.lines);
        }
    }

    pub(super) fn count_status(&self, status: u16) {
        self.counts.statuses[usize::from(status / 100).clamp(1, 5) - 1].add(1);
    }
}

/// Returns the protocol that a request asks to switch to, if it is one of these.
fn wanted<'a>(request: &Request<'a, '_>, known: &[String]) -> Option<&'a str> {
    request.upgrade.filter(|asked| known.iter().any(|known| known.eq_ignore_ascii_case(asked)))
}

/// Returns the text of an address.
fn text(address: IpAddr) -> String {
    use std::fmt::Write;
    // The longest one has 39 characters.
    let mut text = String::with_capacity(40);
    let _ = write!(text, "{address}");
    text
}

/// Returns true if chunks are forwarded to the client as their content only.
pub(super) fn decodes(version: Version) -> bool {
    version == Version::Http10
}
