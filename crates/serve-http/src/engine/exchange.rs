//! Takes a request that has a backend from step to step until its reply is complete. `forward` moves
//! the bytes.

use std::mem::{replace, take};

use super::connection::{Exchange, Head, ReplyState, State, Tunnel, UpstreamState};
use super::counts::Failure;
use super::socket::Received;
use super::worker::Worker;
use crate::config::duration;
use crate::message::Refusal;

/// The result of a step of an exchange.
pub(super) enum Step {
    /// Nothing can be done until an event.
    Waits,
    /// Something was done.
    Went,
    /// The reply is complete.
    Finished,
    /// The client has gone, or cannot get the rest of the reply.
    Lost,
    /// The body of the request is malformed.
    BadBody,
    /// There is no reply.
    Failed(Failure),
    /// The backend has switched to another protocol.
    Switched,
}

impl Worker {
    /// Takes a step of an exchange.
    pub(super) fn exchange(&mut self, at: usize) -> bool {
        let State::Exchange(mut exchange) = replace(&mut self.clients[at].state, State::Closing) else {
            return false;
        };
        match self.step(at, &mut exchange) {
            Step::Waits => {
                self.clients[at].state = State::Exchange(exchange);
                false
            }
            Step::Went => {
                self.clients[at].state = State::Exchange(exchange);
                true
            }
            Step::Finished => {
                self.clients[at].state = State::Exchange(exchange);
                self.finish(at);
                true
            }
            Step::Lost => {
                self.counts.aborted.add(1);
                self.report(at, &mut exchange);
                self.clients[at].socket.reset_on_close();
                self.drop_exchange(*exchange);
                self.remove(at);
                false
            }
            Step::BadBody => {
                self.refuse_body(at, exchange);
                true
            }
            Step::Failed(why) => {
                let failed = exchange.upstream.map(|upstream| self.upstreams[upstream].backend.clone());
                self.try_again_or_fail(at, exchange, failed, why);
                true
            }
            Step::Switched => {
                self.switch(at, *exchange);
                true
            }
        }
    }

    fn step(&mut self, at: usize, exchange: &mut Exchange) -> Step {
        let Some(upstream) = exchange.upstream else { return Step::Finished };
        if matches!(self.upstreams[upstream].state, UpstreamState::Connecting(_)) {
            match self.check_connection(at, exchange) {
                Ok(true) => {}
                Ok(false) if self.client_has_gone(at) => return Step::Lost,
                Ok(false) => return Step::Waits,
                Err(failure) => return Step::Failed(failure),
            }
        }
        let mut has_progress = false;
        for direction in [Worker::send_body, Worker::forward_reply] {
            match direction(self, at, exchange, upstream) {
                Step::Waits => {}
                Step::Went => has_progress = true,
                end => return end,
            }
        }
        if has_progress {
            let timeouts = &self.config.timeouts;
            let is_waiting = exchange.body.is_done() && matches!(exchange.reply, ReplyState::Head);
            self.clients[at].deadline =
                self.now + duration(if is_waiting { timeouts.reply } else { timeouts.body });
            return Step::Went;
        }
        if exchange.body.is_done() && self.client_has_gone(at) { Step::Lost } else { Step::Waits }
    }

    /// Returns true if the client has closed its connection while it waits. A client that has only
    /// ended its direction after a request is not distinguished.
    fn client_has_gone(&mut self, at: usize) -> bool {
        let client = &mut self.clients[at];
        if !client.socket.has_ended || !client.socket.is_readable || !client.input.is_empty() {
            return false;
        }
        let mut bytes = [0; 4096];
        match client.socket.receive(&mut bytes) {
            Received::Bytes(count) => {
                client.input.extend_from_slice(&bytes[..count]);
                false
            }
            // A half-closed client still gets its reply.
            Received::Nothing | Received::End => false,
            Received::Failed => true,
        }
    }

    /// Ends an exchange whose reply was forwarded.
    pub(super) fn finish(&mut self, at: usize) {
        let State::Exchange(mut exchange) = replace(&mut self.clients[at].state, State::Head(Head::New))
        else {
            return;
        };
        self.report(at, &mut exchange);
        let client = &mut self.clients[at];
        if exchange.keeps_alive && exchange.body.is_done() && !self.is_stopping {
            self.await_request(at);
        } else {
            client.state = State::Closing;
            client.deadline = self.now + duration(self.config.timeouts.body);
        }
        let is_whole =
            exchange.body.is_done() && exchange.request_pipe.as_ref().is_none_or(|pipe| pipe.filled == 0);
        if let Some(upstream) = exchange.upstream.take() {
            self.upstreams[upstream].is_reusable &= is_whole && !self.upstreams[upstream].is_write_broken;
            self.drop_pipes(&mut exchange);
            self.release_upstream(upstream);
        }
    }

    /// Refuses a request whose body is malformed. The backend sees a request that ends early.
    pub(super) fn refuse_body(&mut self, at: usize, mut exchange: Box<Exchange>) {
        let has_begun = matches!(exchange.reply, ReplyState::Body(_));
        let line = exchange.facts.line.take();
        self.drop_exchange(*exchange);
        if has_begun {
            self.clients[at].socket.reset_on_close();
            return self.remove(at);
        }
        let position = Refusal::ALL.iter().position(|other| *other == Refusal::Chunk).unwrap_or_default();
        self.counts.refusals[position].add(1);
        self.answer_and_close(at, Refusal::Chunk.status(), Refusal::Chunk.text(), line);
    }

    /// Closes the connection to the backend in the middle of an exchange.
    pub(super) fn drop_exchange(&mut self, mut exchange: Exchange) {
        self.drop_pipes(&mut exchange);
        if let Some(upstream) = exchange.upstream {
            self.close_upstream(upstream);
        }
    }

    fn drop_pipes(&mut self, exchange: &mut Exchange) {
        let pipes = [exchange.request_pipe.take(), exchange.reply_pipe.take()];
        pipes.into_iter().for_each(|pipe| self.release_pipe(pipe));
    }

    /// Counts a request that has ended, and writes its line in the log.
    pub(super) fn report(&mut self, at: usize, exchange: &mut Exchange) {
        let facts = &mut exchange.facts;
        let micros = facts.began.elapsed().as_micros() as u64;
        self.counts.observe(micros);
        self.counts.received_bytes.add(facts.received);
        self.counts.sent_bytes.add(facts.sent);
        // 499 is what others write if the client has gone before the reply.
        let status = if facts.status == 0 { 499 } else { facts.status };
        self.count_status(status);
        self.log_line(at, facts.line.take(), status, facts.sent, micros);
    }

    /// Turns an exchange into a tunnel.
    fn switch(&mut self, at: usize, mut exchange: Exchange) {
        self.report(at, &mut exchange);
        self.counts.upgrades.add(1);
        self.drop_pipes(&mut exchange);
        let upstream = exchange.upstream.expect("it has replied");
        let client = &mut self.clients[at];
        client.deadline = self.now + duration(self.config.timeouts.tunnel);
        client.state = State::Tunnel(Tunnel { upstream, client_has_ended: false, backend_has_ended: false });
        // What the client has sent after its request belongs to the other protocol.
        let early = take(&mut client.input);
        let upstream = &mut self.upstreams[upstream];
        let _ = upstream.output.send(&mut upstream.socket, &early);
    }
}
