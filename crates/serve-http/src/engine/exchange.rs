//! Forwards the rest of a request, and its reply. Each direction reads only once all that was read
//! before has been sent, so a slow reader slows the writer, and memory is bounded.

use std::mem::{replace, take};

use super::connection::{Exchange, Head, ReplyState, State, Tunnel, UpstreamState};
use super::counts::Failure;
use super::head::decodes;
use super::log::Outcome;
use super::socket::Received;
use super::worker::{READ, Worker};
use crate::config::duration;
use crate::message::reply::{After, parse};
use crate::message::{Body, Framing, Parsed, Refusal, Version, no_fields};

/// Bodies of which so many bytes are left stay in the kernel.
const SPLICED: u64 = 64 * 1024;

/// Parts of a body that are forwarded before another connection has its turn.
const ROUNDS: usize = 16;

/// What a step of an exchange has led to.
enum Step {
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
    /// ended its direction after a request looks the same, and is treated so.
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

    /// Sends a part of the request's body.
    fn send_body(&mut self, at: usize, exchange: &mut Exchange, upstream: usize) -> Step {
        let (client, upstream) = (&mut self.clients[at], &mut self.upstreams[upstream]);
        if upstream.is_write_broken {
            return Step::Waits;
        }
        let Ok(mut has_progress) = upstream.output.flush(&mut upstream.socket) else {
            upstream.is_write_broken = true;
            return Step::Waits;
        };
        let mut rounds = 0;
        while upstream.output.is_empty() && upstream.socket.is_writable && rounds < ROUNDS {
            rounds += 1;
            if let Some(pipe) = &mut exchange.request_pipe
                && pipe.filled > 0
            {
                match upstream.socket.splice_from(pipe) {
                    Ok(0) => break,
                    Ok(_) => has_progress = true,
                    Err(_) => {
                        upstream.is_write_broken = true;
                        return Step::Waits;
                    }
                }
                continue;
            }
            if exchange.body.is_done() {
                break;
            }
            if client.input.is_empty() && exchange.body.plain() >= SPLICED && !client.socket.is_readable {
                break;
            }
            if client.input.is_empty() && exchange.body.plain() >= SPLICED {
                if exchange.request_pipe.is_none() {
                    exchange.request_pipe = self.pipes.pop().or_else(super::socket::Pipe::new);
                }
                if let Some(pipe) = &mut exchange.request_pipe {
                    match client.socket.splice_to(pipe, exchange.body.plain()) {
                        Received::Bytes(count) => {
                            exchange.body.skip(count as u64);
                            exchange.facts.received += count as u64;
                            self.counts.spliced_bytes.add(count as u64);
                            has_progress = true;
                        }
                        Received::Nothing => break,
                        Received::End | Received::Failed => return Step::Lost,
                    }
                    continue;
                }
            }
            let filled = client.input.len().min(READ);
            self.scratch[..filled].copy_from_slice(&client.input[..filled]);
            client.input.drain(..filled);
            let filled = if filled > 0 {
                filled
            } else {
                match client.socket.receive(&mut self.scratch[..READ]) {
                    Received::Bytes(count) => count,
                    Received::Nothing => break,
                    Received::End | Received::Failed => return Step::Lost,
                }
            };
            self.tail.clear();
            let Ok(passed) = exchange.body.pass(&mut self.scratch[..filled], &mut self.tail) else {
                return Step::BadBody;
            };
            has_progress = true;
            exchange.facts.received += passed.kept as u64;
            // What follows the body is the next request.
            client.input.splice(..0, self.scratch[passed.taken..filled].iter().copied());
            if self.config.limits.body != 0 && exchange.facts.received > self.config.limits.body {
                return Step::Failed(Failure::TooLarge);
            }
            let sent = upstream.output.send(&mut upstream.socket, &self.scratch[..passed.kept]);
            let sent = sent.and_then(|()| upstream.output.send(&mut upstream.socket, &self.tail));
            if sent.is_err() {
                upstream.output.clear();
                upstream.is_write_broken = true;
                return Step::Waits;
            }
        }
        if has_progress { Step::Went } else { Step::Waits }
    }

    /// Forwards a part of the reply.
    fn forward_reply(&mut self, at: usize, exchange: &mut Exchange, upstream: usize) -> Step {
        let client = &mut self.clients[at];
        let Ok(mut has_progress) = client.output.flush(&mut client.socket) else { return Step::Lost };
        for _ in 0..ROUNDS {
            let (client, from) = (&mut self.clients[at], &mut self.upstreams[upstream]);
            if let Some(pipe) = &mut exchange.reply_pipe
                && pipe.filled > 0
            {
                match client.socket.splice_from(pipe) {
                    Ok(0) => break,
                    Ok(_) => has_progress = true,
                    Err(_) => return Step::Lost,
                }
                continue;
            }
            if !client.output.is_empty() {
                break;
            }
            let body = match &mut exchange.reply {
                ReplyState::Done => return Step::Finished,
                ReplyState::Head => match self.forward_head(at, exchange, upstream) {
                    Step::Went => {
                        has_progress = true;
                        continue;
                    }
                    Step::Waits => break,
                    end => return end,
                },
                ReplyState::Body(body) => body,
            };
            if body.is_done() {
                exchange.reply = ReplyState::Done;
                return Step::Finished;
            }
            let received = if body.plain() >= SPLICED && from.socket.is_readable {
                if exchange.reply_pipe.is_none() {
                    exchange.reply_pipe = self.pipes.pop().or_else(super::socket::Pipe::new);
                }
                exchange.reply_pipe.as_mut().map(|pipe| from.socket.splice_to(pipe, body.plain()))
            } else {
                None
            };
            match received {
                Some(Received::Bytes(count)) => {
                    body.skip(count as u64);
                    exchange.facts.sent += count as u64;
                    self.counts.spliced_bytes.add(count as u64);
                    has_progress = true;
                    continue;
                }
                Some(Received::Nothing) => break,
                Some(Received::End) if matches!(body, Body::UntilClose) => {
                    *body = Body::Done;
                    continue;
                }
                Some(Received::End | Received::Failed) => return Step::Lost,
                None => {}
            }
            match from.socket.receive(&mut self.scratch[..READ]) {
                Received::Bytes(count) => {
                    self.tail.clear();
                    let Ok(passed) = body.pass(&mut self.scratch[..count], &mut self.tail) else {
                        return Step::Lost;
                    };
                    exchange.facts.sent += passed.kept as u64;
                    // More than a reply was sent: what the rest means is not known.
                    from.is_reusable &= passed.taken == count;
                    has_progress = true;
                    let sent = client.output.send(&mut client.socket, &self.scratch[..passed.kept]);
                    let sent = sent.and_then(|()| client.output.send(&mut client.socket, &self.tail));
                    if sent.is_err() {
                        return Step::Lost;
                    }
                }
                Received::Nothing => break,
                Received::End if matches!(body, Body::UntilClose) => *body = Body::Done,
                Received::End | Received::Failed => return Step::Lost,
            }
        }
        if has_progress { Step::Went } else { Step::Waits }
    }

    /// Reads the head of a reply, and forwards it with what has arrived of the body.
    fn forward_head(&mut self, at: usize, exchange: &mut Exchange, upstream: usize) -> Step {
        let mut scratch = take(&mut self.scratch);
        let step = self.forward_head_from(at, exchange, upstream, &mut scratch);
        self.scratch = scratch;
        step
    }

    fn forward_head_from(
        &mut self,
        at: usize,
        exchange: &mut Exchange,
        upstream: usize,
        scratch: &mut [u8],
    ) -> Step {
        let (client, from) = (&mut self.clients[at], &mut self.upstreams[upstream]);
        let mut filled = from.input.len();
        if filled > 0 {
            scratch[..filled].copy_from_slice(&from.input);
            from.input = Vec::new();
        }
        match from.socket.receive(&mut scratch[filled..filled + READ]) {
            Received::Bytes(count) => {
                filled += count;
                exchange.head = Vec::new();
            }
            Received::Nothing if filled == 0 => return Step::Waits,
            // It may hold the head after an interim reply.
            Received::Nothing => {}
            Received::End | Received::Failed => return Step::Failed(Failure::BackendGone),
        }
        let mut begin = 0;
        self.out.clear();
        let end = loop {
            let mut slots = no_fields();
            let reply =
                match parse(&scratch[begin..filled], &mut slots, self.config.limits.head, exchange.is_head) {
                    Ok(Parsed::Complete(reply)) => reply,
                    Ok(Parsed::Incomplete) => {
                        from.input.extend_from_slice(&scratch[begin..filled]);
                        break None;
                    }
                    Err(_) => {
                        from.is_reusable = false;
                        return Step::Failed(Failure::BadReply);
                    }
                };
            begin += reply.length;
            if reply.is_interim() {
                if exchange.version == Version::Http11 {
                    reply.write(After::Stays, true, &mut self.out);
                }
                continue;
            }
            exchange.facts.status = reply.status;
            if reply.status == 101 {
                let is_wanted = matches!((&exchange.upgrade, reply.upgrade), (Some(asked), Some(given))
                    if asked.as_bytes().eq_ignore_ascii_case(given));
                if !is_wanted {
                    return Step::Failed(Failure::BadReply);
                }
                reply.write(After::Upgrade, true, &mut self.out);
                break Some(Body::UntilClose);
            }
            let framing = reply.body(exchange.is_head);
            let decodes = decodes(exchange.version) && framing == Framing::Chunked;
            // The end of these is the end of the connection.
            let is_open = framing == Framing::UntilClose || decodes;
            exchange.keeps_alive &= !is_open && exchange.body.is_done() && !self.is_stopping;
            from.is_reusable = reply.keeps_alive && framing != Framing::UntilClose && exchange.body.is_done();
            let after = match (exchange.keeps_alive, exchange.version) {
                (false, _) => After::Close,
                (true, Version::Http11) => After::Stays,
                (true, Version::Http10) => After::KeepAlive,
            };
            reply.write(after, !decodes, &mut self.out);
            break Some(Body::new(framing, decodes));
        };
        let is_switched = exchange.facts.status == 101;
        if let Some(mut body) = end {
            self.tail.clear();
            let Ok(passed) = body.pass(&mut scratch[begin..filled], &mut self.tail) else {
                return Step::Failed(Failure::BadReply);
            };
            exchange.facts.sent += passed.kept as u64;
            from.is_reusable &= passed.taken == filled - begin;
            self.out.extend_from_slice(&scratch[begin..begin + passed.kept]);
            self.out.extend_from_slice(&self.tail);
            exchange.reply = ReplyState::Body(body);
        }
        if self.out.is_empty() {
            return Step::Waits;
        }
        match client.output.send(&mut client.socket, &self.out) {
            Ok(()) if is_switched => Step::Switched,
            Ok(()) => Step::Went,
            Err(_) => Step::Lost,
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
            client.deadline = self.now + duration(self.config.timeouts.idle);
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
        if let Some((line, log)) = facts.line.take().zip(self.config.log.as_ref()) {
            let outcome = Outcome { client: self.clients[at].address, status, bytes: facts.sent, micros };
            line.write(log.format, outcome, std::time::SystemTime::now(), &mut self.lines);
        }
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
