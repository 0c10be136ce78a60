//! Ends clients' connections: after their last answer, by a deadline, or immediately.

use std::mem::replace;
use std::time::Duration;

use crate::cache::End;

use super::connection::{Client, Head, ReplyState, State, UpstreamState};
use super::counts::Failure;
use super::socket::Received;
use super::worker::Worker;
use crate::config::duration;

/// How long a client may take to close its side.
const LINGER: Duration = Duration::from_secs(2);
/// The time before the rate of a body is judged.
const GRACE_MS: u64 = 10_000;

impl Worker {
    /// Ends a connection once its output is sent.
    pub(super) fn end_after_output(&mut self, at: usize) {
        let client = &mut self.clients[at];
        client.state = State::Closing;
        client.deadline = self.now + duration(self.config.timeouts.body);
    }

    /// Gives a client between two requests its time: for the next one, or for what it has not read yet.
    pub(super) fn await_request(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let timeouts = &self.config.timeouts;
        let time = if client.output.is_empty() { timeouts.idle } else { timeouts.body };
        client.deadline = self.now + duration(time);
    }

    /// Takes a step of a client whose last answer is being sent.
    pub(super) fn flush_last(&mut self, at: usize) -> bool {
        let client = &mut self.clients[at];
        let Ok(has_progress) = client.output.flush(&mut client.socket) else {
            self.remove(at);
            return false;
        };
        if !client.output.is_empty() {
            if has_progress {
                client.deadline = self.now + duration(self.config.timeouts.body);
            }
            return has_progress;
        }
        client.socket.shut_down();
        client.input = Vec::new();
        client.state = State::Lingering;
        client.deadline = self.now + LINGER;
        true
    }

    /// Discards what still arrives.
    pub(super) fn linger(&mut self, at: usize) -> bool {
        let client = &mut self.clients[at];
        match client.socket.receive(&mut self.scratch[..]) {
            Received::Bytes(_) => true,
            Received::Nothing => false,
            Received::End | Received::Failed => {
                self.remove(at);
                false
            }
        }
    }

    /// Intervenes because a client's deadline has passed.
    pub(super) fn expire(&mut self, at: usize) {
        let client = &mut self.clients[at];
        match replace(&mut client.state, State::Closing) {
            State::Head(Head::Partial) => {
                self.counts.failures[Failure::ClientTooSlow as usize].add(1);
                let (status, text) = (Failure::ClientTooSlow.status(), Failure::ClientTooSlow.text());
                self.answer_and_close(at, status, text, None);
                self.drive(at);
            }
            State::Head(Head::New) => self.close(at),
            State::Follows(exchange) => {
                // The other request takes too long.
                self.clients[at].state = State::Follows(exchange);
                self.stop_following(at, End::Alone);
            }
            State::Waiting(exchange) => {
                self.fail(at, exchange, Failure::Full);
                self.drive(at);
            }
            State::Exchange(exchange) => {
                let upstream = exchange.upstream.map(|upstream| &self.upstreams[upstream]);
                let is_connecting =
                    upstream.is_some_and(|it| matches!(it.state, UpstreamState::Connecting(_)));
                let client_delays =
                    !exchange.body.is_done() && upstream.is_none_or(|it| it.output.is_empty());
                let backend = upstream.map(|it| it.backend.clone());
                match exchange.reply {
                    ReplyState::Head if is_connecting => {
                        if let Some(backend) = &backend {
                            backend.fails("no connection in time");
                        }
                        self.try_again_or_fail(at, exchange, backend, Failure::Connect);
                    }
                    ReplyState::Head => {
                        let why =
                            if client_delays { Failure::ClientTooSlow } else { Failure::BackendTooSlow };
                        self.give_up(at, exchange, why);
                    }
                    ReplyState::Body(_) | ReplyState::Done => {
                        let mut exchange = exchange;
                        self.counts.aborted.add(1);
                        self.report(at, &mut exchange);
                        self.drop_exchange(*exchange);
                        self.clients[at].socket.reset_on_close();
                        return self.remove(at);
                    }
                }
                self.drive(at);
            }
            State::Tunnel(tunnel) => {
                self.close_upstream(tunnel.upstream);
                self.remove(at);
            }
            State::Closing | State::Lingering => self.remove(at),
        }
    }

    /// Answers a request whose backend gets no more time.
    fn give_up(&mut self, at: usize, mut exchange: Box<super::connection::Exchange>, why: Failure) {
        if let Some(upstream) = exchange.upstream.take() {
            self.close_upstream(upstream);
        }
        exchange.head = Vec::new();
        self.fail(at, exchange, why);
    }

    /// Closes the connections of clients whose body arrives below the permitted rate. Only the time
    /// counts in which nothing else delayed the body.
    pub(super) fn check_rates(&mut self, elapsed: Duration) {
        let rate = self.config.limits.body_rate;
        let mut slow = Vec::new();
        self.forget_uploads();
        for (at, _) in &self.uploads {
            let Some(Client { state: State::Exchange(exchange), socket, .. }) = self.clients.get_mut(*at)
            else {
                continue;
            };
            let upstream = exchange.upstream.map(|upstream| &self.upstreams[upstream]);
            let is_waiting = !exchange.body.is_done()
                && !socket.is_readable
                && upstream.is_some_and(|it| it.output.is_empty());
            if is_waiting && matches!(exchange.reply, ReplyState::Head) {
                let facts = &mut exchange.facts;
                facts.waited_ms += elapsed.as_millis() as u64;
                if facts.waited_ms > GRACE_MS && facts.received < rate * facts.waited_ms / 1000 {
                    slow.push(*at);
                }
            }
        }
        for at in slow {
            if let State::Exchange(exchange) = replace(&mut self.clients[at].state, State::Closing) {
                self.give_up(at, exchange, Failure::ClientTooSlow);
                self.drive(at);
            }
        }
    }

    /// Closes a client's connection between two requests.
    pub(super) fn close(&mut self, at: usize) {
        self.clients[at].socket.shut_down();
        self.remove(at);
    }

    /// Forgets a client, whose exchange or tunnel has been ended before.
    pub(super) fn remove(&mut self, at: usize) {
        let client = self.clients.remove(at);
        self.timers.forget(client.timer);
        match client.state {
            State::Exchange(exchange) => self.drop_exchange(*exchange),
            State::Tunnel(tunnel) => self.close_upstream(tunnel.upstream),
            _ => {}
        }
        self.counts.open.subtract(1);
        self.shared.clients.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
    }
}
