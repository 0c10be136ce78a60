//! Gives a request a connection to a backend: one of the pool of unused ones, a new one, or a place
//! in the queue.

use std::mem::take;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, ipproto, socket_with, sockopt};

use super::backends::{Backend, Choice};
use super::connection::{Exchange, ReplyState, State, Upstream, UpstreamState};
use super::counts::{BackendCounts, Failure};
use super::socket::{Output, Received, Socket};
use super::worker::Worker;
use crate::config::duration;

/// A thread's connections to one backend.
#[derive(Debug, Default)]
pub(super) struct Place {
    /// Unused connections, the last used last.
    pub(super) idle: Vec<usize>,
    /// All connections.
    open: usize,
    pub(super) counts: Arc<BackendCounts>,
}

impl Place {
    /// Takes an unused connection.
    fn take(&mut self) -> Option<usize> {
        let unused = self.idle.pop()?;
        self.counts.idle.subtract(1);
        Some(unused)
    }
}

/// Returns the requests under way at a backend, or `None` if it has as many connections as it may.
fn busy(places: &Places, threads: usize, backend: &Backend) -> Option<usize> {
    let (open, idle) = places.get(&backend.id).map_or((0, 0), |place| (place.open, place.idle.len()));
    let most = backend.max_connections.map_or(usize::MAX, |most| most.div_ceil(threads));
    (idle > 0 || open < most).then_some(open - idle)
}

/// The places of all backends, by their ids.
pub(super) type Places = FxHashMap<usize, Place>;

/// The most connections that are tried for a request.
const ATTEMPTS: u8 = 3;

impl Worker {
    /// Serves a request. `rest` begins with its body.
    pub(super) fn dispatch(&mut self, at: usize, mut exchange: Box<Exchange>, rest: &mut [u8]) {
        exchange.attempts += 1;
        // A reload makes other pools. One that has gone still serves requests that were routed to it.
        let Some(position) = exchange.pool.renew(&self.config) else {
            return self.dispatch_to(at, exchange, rest, 0);
        };
        let (pool, places, threads) = (&self.config.pools[position], &self.places, self.threads);
        let avoided = exchange.failed.as_ref().map(|backend| backend.id);
        let choice = self.turns[position].choose(pool, avoided, |backend| busy(places, threads, backend));
        match choice {
            Choice::Backend(chosen) => self.dispatch_to(at, exchange, rest, chosen),
            Choice::AllDown => {
                self.clients[at].input.extend_from_slice(rest);
                self.fail(at, exchange, Failure::AllDown);
            }
            Choice::Full => {
                let client = &mut self.clients[at];
                client.input.extend_from_slice(rest);
                if self.waiting[position].len() >= self.config.limits.waiting {
                    return self.fail(at, exchange, Failure::Full);
                }
                exchange.attempts -= 1;
                let until = self.now + duration(self.config.timeouts.queue);
                client.deadline = *exchange.queued_until.get_or_insert(until);
                self.waiting[position].push_back((at, client.generation));
                client.state = State::Waiting(exchange);
            }
        }
    }

    /// Sends a request to the backend at the position `chosen` of its pool.
    fn dispatch_to(&mut self, at: usize, mut exchange: Box<Exchange>, rest: &mut [u8], chosen: usize) {
        let id = exchange.pool.pool(&self.config).backends[chosen].id;
        let is_safe = !exchange.has_body && exchange.is_idempotent;
        let place = self.places.entry(id).or_insert_with(|| {
            let place = Place::default();
            self.shared
                .backend_counts
                .lock()
                .expect("no thread panics with it")
                .push((id, place.counts.clone()));
            place
        });
        place.counts.requests.add(1);
        while let Some(unused) = self.places.get_mut(&id).and_then(Place::take) {
            let upstream = &mut self.upstreams[unused];
            // What cannot be sent twice needs a connection that has certainly not been closed.
            if upstream.socket.is_readable || !is_safe && !upstream.socket.is_quiet() {
                self.remove_upstream(unused);
                continue;
            }
            upstream.state = UpstreamState::Busy(at);
            upstream.is_reused = true;
            exchange.upstream = Some(unused);
            return self.send_at_once(at, exchange, rest, is_safe);
        }
        self.clients[at].input.extend_from_slice(rest);
        let backend = exchange.pool.pool(&self.config).backends[chosen].clone();
        match self.connect(at, &backend) {
            Ok(upstream) => {
                exchange.upstream = Some(upstream);
                let client = &mut self.clients[at];
                client.deadline = self.now + duration(self.config.timeouts.connect);
                client.state = State::Exchange(exchange);
            }
            Err(error) => {
                // Descriptors of this process are no fault of the backend's.
                if !matches!(error, Errno::MFILE | Errno::NFILE) {
                    backend.fails(&error.to_string());
                }
                self.try_again_or_fail(at, exchange, Some(backend), Failure::Connect);
            }
        }
    }

    /// Sends the head and what there is of the body over an established connection.
    fn send_at_once(&mut self, at: usize, mut exchange: Box<Exchange>, rest: &mut [u8], is_safe: bool) {
        let mut out = take(&mut self.out);
        let head = take(&mut exchange.head);
        let client = &mut self.clients[at];
        let upstream = &mut self.upstreams[exchange.upstream.expect("the caller has set it")];
        out.clear();
        if rest.is_empty() && !exchange.has_body {
            // The usual request needs no copy.
            upstream.is_write_broken = upstream.output.send(&mut upstream.socket, &head).is_err();
        } else {
            out.extend_from_slice(&head);
            self.tail.clear();
            let Ok(passed) = exchange.body.pass(rest, &mut self.tail) else {
                self.out = out;
                return self.refuse_body(at, exchange);
            };
            exchange.facts.received += passed.kept as u64;
            out.extend_from_slice(&rest[..passed.kept]);
            out.extend_from_slice(&self.tail);
            client.input.extend_from_slice(&rest[passed.taken..]);
            upstream.is_write_broken = upstream.output.send(&mut upstream.socket, &out).is_err();
        }
        if is_safe {
            exchange.head = head;
        }
        self.out = out;
        let timeouts = &self.config.timeouts;
        client.deadline =
            self.now + duration(if exchange.body.is_done() { timeouts.reply } else { timeouts.body });
        client.state = State::Exchange(exchange);
    }

    /// Begins a connection to a backend.
    fn connect(&mut self, client: usize, backend: &Arc<Backend>) -> Result<usize, Errno> {
        let family = if backend.address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(
            family,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            Some(ipproto::TCP),
        )?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        match connect(&socket, &backend.address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error),
        }
        let generation = self.generation();
        let at = self.upstreams.vacant_key();
        self.watch_upstream(&socket, at, generation)?;
        self.insert_upstream(socket, generation, backend, client);
        Ok(at)
    }

    fn insert_upstream(&mut self, socket: OwnedFd, generation: u32, backend: &Arc<Backend>, client: usize) {
        if let Some(place) = self.places.get_mut(&backend.id) {
            place.open += 1;
            place.counts.open.add(1);
            place.counts.connections.add(1);
        }
        self.upstreams.insert(Upstream {
            socket: Socket::new(socket, false),
            generation,
            backend: backend.clone(),
            input: Vec::new(),
            output: Output::default(),
            state: UpstreamState::Connecting(client),
            is_reused: false,
            is_write_broken: false,
            is_reusable: false,
            idle_until: self.now,
            timer: None,
        });
    }

    /// Continues once a connection is established, or has failed. Returns false if neither.
    pub(super) fn check_connection(&mut self, at: usize, exchange: &mut Exchange) -> Result<bool, Failure> {
        let upstream = &mut self.upstreams[exchange.upstream.expect("it is connecting")];
        if !upstream.socket.is_writable {
            return Ok(false);
        }
        match sockopt::socket_error(&upstream.socket) {
            Ok(Ok(())) => {}
            Ok(Err(error)) | Err(error) => {
                upstream.backend.fails(&error.to_string());
                return Err(Failure::Connect);
            }
        }
        if exchange.pool.pool(&self.config).health.path.is_none() {
            upstream.backend.works();
        }
        upstream.state = UpstreamState::Busy(at);
        upstream.is_write_broken = upstream.output.send(&mut upstream.socket, &exchange.head).is_err();
        let is_safe = !exchange.has_body && exchange.is_idempotent;
        if !is_safe {
            exchange.head = Vec::new();
        }
        let timeouts = &self.config.timeouts;
        self.clients[at].deadline =
            self.now + duration(if exchange.body.is_done() { timeouts.reply } else { timeouts.body });
        Ok(true)
    }

    /// Sends a request to another connection if that is safe, and otherwise answers it.
    pub(super) fn try_again_or_fail(
        &mut self,
        at: usize,
        mut exchange: Box<Exchange>,
        failed: Option<Arc<Backend>>,
        why: Failure,
    ) {
        // A connection of the pool may have been closed by a backend that works.
        let was_reused = exchange.upstream.take().is_some_and(|upstream| {
            let was_reused = self.upstreams[upstream].is_reused;
            self.close_upstream(upstream);
            was_reused
        });
        let may_be_sent = !exchange.head.is_empty() && (was_reused || why == Failure::Connect);
        if !may_be_sent || exchange.attempts >= ATTEMPTS {
            return self.fail(at, exchange, why);
        }
        self.counts.retries.add(1);
        if !was_reused {
            exchange.failed = failed;
        }
        let mut rest = take(&mut self.clients[at].input);
        self.dispatch(at, exchange, &mut rest);
    }

    /// Serves a request that has waited for a place, and returns false if it does not wait any more.
    pub(super) fn dispatch_again(&mut self, at: usize, generation: u32) -> bool {
        let Some(client) = self.clients.get_mut(at).filter(|client| client.generation == generation) else {
            return false;
        };
        match std::mem::replace(&mut client.state, State::Closing) {
            State::Waiting(exchange) => {
                let mut rest = take(&mut client.input);
                self.dispatch(at, exchange, &mut rest);
            }
            other => {
                client.state = other;
                return false;
            }
        }
        self.drive(at);
        true
    }

    /// Ends the wait of a client that has gone.
    pub(super) fn check_waiting(&mut self, at: usize) -> bool {
        let client = &mut self.clients[at];
        if client.socket.has_ended && client.input.is_empty() {
            let mut bytes = [0; 4096];
            match client.socket.receive(&mut bytes) {
                Received::Bytes(count) => client.input.extend_from_slice(&bytes[..count]),
                Received::Nothing => {}
                Received::End | Received::Failed => self.remove(at),
            }
        }
        false
    }

    /// Returns a connection to the pool, or closes it.
    pub(super) fn release_upstream(&mut self, at: usize) {
        let upstream = &mut self.upstreams[at];
        // After a splice, it is not known whether anything is left.
        let is_quiet =
            !upstream.socket.has_ended && (!upstream.socket.is_readable || upstream.socket.is_quiet());
        let is_unused = upstream.output.is_empty() && is_quiet;
        let place = self.places.get_mut(&upstream.backend.id);
        let Some(place) = place.filter(|place| {
            upstream.is_reusable && is_unused && place.idle.len() < self.config.limits.idle_connections
        }) else {
            return self.close_upstream(at);
        };
        upstream.state = UpstreamState::Idle;
        upstream.socket.is_readable = false;
        upstream.idle_until = self.now + duration(self.config.timeouts.backend_idle);
        place.idle.push(at);
        place.counts.idle.add(1);
        self.watch_idle(at);
        self.has_room = true;
    }

    /// Closes a connection, whose place another request may take.
    pub(super) fn close_upstream(&mut self, at: usize) {
        self.remove_upstream(at);
        self.has_room = true;
    }

    pub(super) fn remove_upstream(&mut self, at: usize) {
        let upstream = self.upstreams.remove(at);
        self.timers.forget(upstream.timer);
        if let Some(place) = self.places.get_mut(&upstream.backend.id) {
            place.open -= 1;
            place.counts.open.subtract(1);
            if upstream.state == UpstreamState::Idle {
                let before = place.idle.len();
                place.idle.retain(|other| *other != at);
                place.counts.idle.subtract((before - place.idle.len()) as u64);
            }
        }
    }

    /// Serves requests that wait for a place, as far as there are places.
    pub(super) fn serve_waiting(&mut self) {
        for position in 0..self.waiting.len() {
            while !self.waiting[position].is_empty() {
                let pool = &self.config.pools[position];
                if !pool.backends.iter().any(|backend| busy(&self.places, self.threads, backend).is_some()) {
                    break;
                }
                let (client, generation) = self.waiting[position].pop_front().expect("it is not empty");
                self.dispatch_again(client, generation);
                // It waits again if the backends with places are down.
                if self.waiting[position].back() == Some(&(client, generation)) {
                    break;
                }
            }
        }
    }

    /// Closes unused connections to backends that the configuration does not have any more.
    pub(super) fn close_unknown_idle(&mut self) {
        let config = self.config.clone();
        let is_known = |one: &Upstream| config.backends().any(|(_, backend)| backend.id == one.backend.id);
        let unknown: Vec<usize> = self
            .upstreams
            .iter()
            .filter(|(_, one)| one.state == UpstreamState::Idle && !is_known(one))
            .map(|(at, _)| at)
            .collect();
        unknown.into_iter().for_each(|at| self.remove_upstream(at));
    }

    /// Answers a request that no backend has answered. The client's connection stays open if the
    /// whole request has arrived.
    pub(super) fn fail(&mut self, at: usize, mut exchange: Box<Exchange>, failure: Failure) {
        self.counts.failures[failure as usize].add(1);
        let closes = !exchange.keeps_alive
            || !exchange.body.is_done()
            || exchange.version == crate::message::Version::Http10;
        exchange.facts.status = failure.status();
        exchange.reply = ReplyState::Done;
        exchange.keeps_alive = !closes;
        self.out.clear();
        super::answers::write(failure.status(), failure.text(), closes, exchange.is_head, &mut self.out);
        let client = &mut self.clients[at];
        let _ = client.output.send(&mut client.socket, &self.out);
        client.state = State::Exchange(exchange);
        self.finish(at);
    }
}
