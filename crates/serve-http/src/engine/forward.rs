//! Forwards parts of a request's body and of its reply. Each direction reads only once all that was
//! read before has been sent, so a slow reader slows the writer, and memory is bounded.

use std::mem::take;

use super::caching::Seen;
use super::connection::{Exchange, ReplyState};
use super::counts::Failure;
use super::exchange::Step;
use super::head::decodes;
use super::socket::{Pipe, Received};
use super::worker::{READ, Worker};
use crate::message::reply::{After, parse};
use crate::message::{Body, Framing, Parsed, Version, no_fields};

/// Bodies of which so many bytes are left stay in the kernel.
const SPLICED: u64 = 64 * 1024;

/// Parts of a body that are forwarded before another connection has its turn.
const ROUNDS: usize = 16;

impl Worker {
    /// Sends a part of the request's body.
    pub(super) fn send_body(&mut self, at: usize, exchange: &mut Exchange, upstream: usize) -> Step {
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
                    exchange.request_pipe = self.pipes.pop().or_else(Pipe::new);
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
    pub(super) fn forward_reply(&mut self, at: usize, exchange: &mut Exchange, upstream: usize) -> Step {
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
                match exchange.caching.ahead() {
                    Some(held) => client.output.hold(held),
                    None => break,
                }
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
            let stores = exchange.caching.stores();
            let received = if body.plain() >= SPLICED && from.socket.is_readable && !stores {
                if exchange.reply_pipe.is_none() {
                    exchange.reply_pipe = self.pipes.pop().or_else(Pipe::new);
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
                    exchange.caching.see_body(&self.scratch[..count], self.now, &self.counts);
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

    /// Reads the head of a reply, and forwards it with the part of the body that has arrived.
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
        let (mut begin, mut stored) = (0, None);
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
            match exchange.caching.see_head(&reply, framing, self.now, &self.counts) {
                Seen::Forward => {}
                Seen::Answer(entry, what) => {
                    exchange.keeps_alive &= exchange.body.is_done() && !self.is_stopping;
                    from.is_reusable = reply.keeps_alive && exchange.body.is_done();
                    exchange.facts.status = entry.status(&what);
                    entry.answer(
                        After::of(exchange.keeps_alive, exchange.version),
                        &what,
                        self.now,
                        &mut self.out,
                    );
                    stored = Some((entry, what));
                    break Some(Body::Done);
                }
                Seen::Bad => return Step::Failed(Failure::BadReply),
            }
            let decodes = decodes(exchange.version) && framing == Framing::Chunked;
            // The end of these is the end of the connection.
            let is_open = framing == Framing::UntilClose || decodes;
            exchange.keeps_alive &= !is_open && exchange.body.is_done() && !self.is_stopping;
            from.is_reusable = reply.keeps_alive && framing != Framing::UntilClose && exchange.body.is_done();
            let after = After::of(exchange.keeps_alive, exchange.version);
            reply.write(after, !decodes, &mut self.out);
            break Some(Body::new(framing, decodes));
        };
        let is_switched = exchange.facts.status == 101;
        if let Some(mut body) = end {
            self.tail.clear();
            exchange.caching.see_body(&scratch[begin..filled], self.now, &self.counts);
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
        let sent = match stored {
            None => client.output.send(&mut client.socket, &self.out),
            Some((entry, what)) => {
                let bytes = entry.bytes(&what);
                exchange.facts.sent += bytes.len() as u64;
                client.output.send_shared(&mut client.socket, &mut self.out, &entry.body, bytes)
            }
        };
        match sent {
            Ok(()) if is_switched => Step::Switched,
            Ok(()) => Step::Went,
            Err(_) => Step::Lost,
        }
    }
}
