//! A conversation in user space: a client's connection and the connections to backends that were
//! opened for it.
//!
//! In each round the worker reads its sockets, takes whole messages, appends each to the buffer of
//! its backend, and writes each buffer once. That write is the batch. Answers go to the client in
//! the order of its messages. All buffers are bounded (see `limits`): the engine stops reading from
//! a client, or from a backend, whose output does not drain.
//!
//! Example with two backends A and B:
//!
//! ```text
//!  client sends  m1(A) m2(B) m3(A)      one read
//!  A gets        m1 m3                  one write
//!  B gets        m2                     one write
//!  B answers r2                         held: m1 has no answer yet
//!  A answers r1 r3                      the client gets r1 r2 r3
//! ```

use std::cell::RefCell;
use std::collections::VecDeque;
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, Shutdown, send, shutdown, sockopt};
use shunt_sys::tcp;

use super::backends::Backends;
use super::buffer::Buffer;
use super::calm::Calm;
use super::counts::{Counts, Loss, USER};
use super::events::{Due, Timers};
use super::hub::{Hub, Item};
use super::kernel::{KEPT, Kernel};
use super::limiter::Limit;
use super::limits;
use super::linger::Lingering;
use super::link::{Left, Link, Recipient, receive};
use super::place::Place;
use super::shared::Shared;
use super::waiting::{self, Turn, Waiting};
use super::wheel::Wheel;
use crate::service::store::{Session, Store};
use crate::service::{Answer, Key, Parse, Properties, Refusal, Service, Share, Verdict};

/// A client's connection and its connections to backends.
#[derive(Debug)]
pub(crate) struct Conversation {
    pub(super) id: u32,
    handle: u64,
    pub(super) client: OwnedFd,
    /// Bytes read from the client that are an incomplete message, or wait for room.
    pub(super) input: Vec<u8>,
    pub(super) output: Buffer,
    pub(super) links: Vec<Option<Link>>,
    /// For each backend of the list, the index in `links` of its connection, if it has one.
    places: Vec<Option<usize>>,
    pub(super) waiting: Waiting,
    /// The service's state of this connection, unless the kernel owns the conversation.
    pub(super) session: Session,
    /// The decision about the first message of `input`, if there is one already. A service never
    /// decides twice about a message, because it counts.
    pub(super) decided: Option<Decided>,
    /// `input` has whole messages for which there was no room.
    pub(super) blocked: bool,
    /// No more messages are taken, because the service closes the connection.
    pub(super) stopped: bool,
    /// The client has sent its last byte.
    pub(super) ended: bool,
    /// The client's connection has failed.
    pub(super) broken: bool,
    interest: EventFlags,
    generation: u16,
    accounted: i64,
    pub(super) calm: Calm,
    /// The last message has no answer, so only the client's timing separates such messages.
    paced: bool,
    pub(crate) place: Place,
    /// For a message that waits in the kernel: the count of replies so far, and since when it
    /// waits.
    pub(super) waits: Option<(u64, Instant)>,
    /// The client's bucket of the rate limit.
    pub(super) bucket: u64,
    /// The rate limit has counted the first message of `input`, which is not decided about.
    pub(super) is_paid: bool,
    pub(super) timers: Timers,
    pub(super) topics: Vec<u64>,
    /// The turns of messages that are answered later, by a timer or by another connection.
    pub(super) deferred: VecDeque<Turn>,
    /// Bytes from others that came while the kernel owned the conversation, and whether they are
    /// answers; and the sum of their lengths.
    pub(super) mail: Vec<(Arc<[u8]>, bool)>,
    pub(super) mail_size: usize,
}

/// A decision that could not be carried out yet.
#[derive(Debug)]
pub(super) enum Decided {
    /// About the message.
    Whole(Verdict),
    /// About the parts of the message, which was split.
    Parts(Vec<(Key, Vec<u8>)>),
}

/// The parts of the worker that a conversation uses during one call.
pub(crate) struct Round<'a> {
    pub(crate) service: &'a dyn Service,
    pub(crate) properties: Properties,
    pub(crate) backends: &'a Arc<Backends>,
    pub(crate) counts: &'a Counts,
    pub(crate) epoll: &'a OwnedFd,
    /// A read buffer, with room for the longest incomplete message in front of one read.
    pub(crate) scratch: &'a mut Vec<u8>,
    pub(crate) lingering: &'a mut Vec<Lingering>,
    pub(crate) kernel: &'a mut Option<Kernel>,
    /// Messages that this thread has served, in both engines.
    pub(crate) served: &'a mut u64,
    /// Calm periods matter.
    pub(crate) wants_calm: bool,
    pub(crate) limit: Option<(&'a Limit, &'a Store)>,
    pub(crate) hub: &'a Hub,
    pub(crate) shared: &'a Shared,
    /// Effects of this round, for any thread.
    pub(crate) items: &'a mut Vec<Item>,
    pub(crate) wheel: &'a mut Wheel<Due>,
    pub(crate) now: Instant,
}

/// Bytes of a message that are kept in order to refuse it later.
pub(crate) const HEAD: usize = 128;
/// Bytes of an incomplete message from which on it is not copied for each read.
const APPEND: usize = 16 * 1024;
/// The most attempts to send one message.
const ATTEMPTS: u8 = 3;

impl Properties {
    /// Returns how many bytes of a message are kept until it is answered.
    pub(super) fn kept(&self) -> usize {
        match (self.retry, self.sees_replies) {
            (true, _) => usize::MAX,
            (false, true) => KEPT,
            (false, false) => HEAD,
        }
    }
}

impl Conversation {
    pub(crate) fn new(
        id: u32,
        handle: u64,
        client: OwnedFd,
        round: &mut Round<'_>,
    ) -> rustix::io::Result<Conversation> {
        let data = event_data(id, 0, 0);
        epoll::add(round.epoll, &client, data, EventFlags::empty())?;
        let mut new = Conversation {
            id,
            handle,
            client,
            input: Vec::new(),
            output: Buffer::default(),
            links: Vec::new(),
            places: Vec::new(),
            waiting: Waiting::default(),
            session: Session::new(handle),
            decided: None,
            blocked: false,
            stopped: false,
            ended: false,
            broken: false,
            interest: EventFlags::empty(),
            generation: 0,
            accounted: 0,
            calm: Calm::new(round.now),
            paced: false,
            place: Place::default(),
            waits: None,
            bucket: 0,
            is_paid: false,
            timers: Timers::default(),
            topics: Vec::new(),
            deferred: VecDeque::new(),
            mail: Vec::new(),
            mail_size: 0,
        };
        if let Some((limit, _)) = round.limit {
            new.bucket = limit.bucket_of(&new.client);
        }
        if sockopt::socket_domain(&new.client) == Ok(AddressFamily::UNIX) {
            new.place.stay();
        }
        let answer = round.service.accepted_in(&mut new.session);
        new.act(answer, round);
        Ok(new)
    }

    /// Returns true if the conversation should move to the kernel.
    pub(crate) fn is_calm(&mut self, now: Instant) -> bool {
        self.calm.is_enough(self.paced, &self.client, now)
    }

    /// Returns true if the sockets should leave the kernel's map, because user space serves them.
    pub(crate) fn wants_out(&self) -> bool {
        self.calm.is_busy() && self.place.could_leave()
    }

    /// Returns the handle by which others send to this connection.
    pub(crate) fn handle(&self) -> u64 {
        self.handle
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    // ---- epoll events

    /// Handles an event of the client's socket.
    pub(crate) fn client_ready(&mut self, flags: EventFlags, round: &mut Round<'_>) {
        if self.reads(round) {
            self.read_client(round);
        } else if flags.intersects(EventFlags::ERR | EventFlags::HUP) && !self.ended {
            self.broken = true;
        }
    }

    /// Reads from the client once, and takes the messages.
    pub(super) fn read_client(&mut self, round: &mut Round<'_>) {
        if self.input.len() > APPEND {
            return self.read_more(round);
        }
        let mut scratch = mem::take(round.scratch);
        let left = self.input.len();
        scratch[..left].copy_from_slice(&self.input);
        match receive(self.client.as_fd(), &mut scratch[left..left + limits::READ]) {
            Ok(0) => self.end(round),
            Ok(count) => {
                self.place.client_read(count);
                let quiet = self.waiting.is_empty() && self.output.is_empty() && left == 0;
                self.input.clear();
                let (used, messages) = self.take_messages(&scratch[..left + count], round);
                self.input.extend_from_slice(&scratch[used..left + count]);
                if round.wants_calm && !self.place.stays() {
                    let quiet = quiet && self.input.is_empty() && messages == 1;
                    self.calm.saw(quiet, count, &self.client, round.now);
                }
            }
            Err(Errno::AGAIN) => {}
            Err(_) => self.broken = true,
        }
        *round.scratch = scratch;
    }

    /// Reads from the client once, behind a long incomplete message, which is not copied.
    fn read_more(&mut self, round: &mut Round<'_>) {
        let mut scratch = mem::take(round.scratch);
        let mut input = mem::take(&mut self.input);
        match receive(self.client.as_fd(), &mut scratch[..limits::READ]) {
            Ok(0) => self.end(round),
            Ok(count) => {
                self.place.client_read(count);
                input.extend_from_slice(&scratch[..count]);
                let (used, _) = self.take_messages(&input, round);
                input.drain(..used);
                input.shrink_to(input.len().max(APPEND));
                if round.wants_calm && !self.place.stays() {
                    self.calm.saw(false, count, &self.client, round.now);
                }
            }
            Err(Errno::AGAIN) => {}
            Err(_) => self.broken = true,
        }
        self.input = input;
        *round.scratch = scratch;
    }

    /// Handles the end of the client's stream. If bytes before it are still on their way through the
    /// kernel, epoll reports the client again.
    fn end(&mut self, round: &Round<'_>) {
        if !self.place.client_is_behind(round.kernel.as_ref()) {
            self.ended = true;
        } else if !is_sound(&self.client) {
            // The kernel drops them after an error.
            self.broken = true;
        }
    }

    /// Handles an event of the connection at index `at`: connected, readable or failed.
    pub(crate) fn link_ready(&mut self, at: usize, generation: u16, round: &mut Round<'_>) {
        let Some(Some(link)) = self.links.get_mut(at) else { return };
        if link.generation != generation {
            return;
        }
        match link.connected() {
            Ok(false) => return,
            Ok(true) => {}
            Err(_) => return self.lose(at, true, Refusal::BackendGone, round),
        }
        if self.reads_replies(at) {
            self.read_link(at, round);
        }
    }

    /// Reads from the backend once, and takes the replies.
    pub(super) fn read_link(&mut self, at: usize, round: &mut Round<'_>) {
        let Some(Some(link)) = self.links.get_mut(at) else { return };
        let mut scratch = mem::take(round.scratch);
        let left = link.input.len();
        scratch[..left].copy_from_slice(&link.input);
        match link.read(&mut scratch[left..left + limits::READ]) {
            // As in `end`.
            Ok(0) if self.place.link_is_behind(at, round.kernel.as_ref()) && is_sound(&link.socket) => {}
            Ok(0) => {
                let fails = !link.is_idle();
                self.lose(at, fails, Refusal::BackendGone, round);
            }
            Ok(count) => {
                link.input.clear();
                link.silent_since = round.now;
                self.place.link_read(at, count);
                match self.take_replies(at, &scratch[..left + count], round) {
                    Ok(used) => {
                        let link = self.links[at].as_mut().expect("it gave the replies");
                        link.input.extend_from_slice(&scratch[used..left + count]);
                    }
                    Err(why) => self.lose_refused(at, why, round),
                }
            }
            Err(Errno::AGAIN) => {}
            Err(_) => self.lose(at, true, Refusal::BackendGone, round),
        }
        *round.scratch = scratch;
    }

    // ---- messages

    /// Takes the whole messages for which there is room. Returns their bytes and their count.
    fn take_messages(&mut self, bytes: &[u8], round: &mut Round<'_>) -> (usize, u64) {
        let (mut at, mut messages) = (0, 0);
        while at < bytes.len() && !self.stopped {
            match round.service.parse_in(&self.session, &bytes[at..]) {
                Parse::More => break,
                Parse::Message(length) if length > bytes.len() - at => break,
                Parse::Message(length) => {
                    if !self.has_room() || !self.take_message(&bytes[at..at + length], round) {
                        self.blocked = true;
                        break;
                    }
                    at += length;
                    messages += 1;
                }
                Parse::Refused(why) => {
                    let head = &bytes[at..bytes.len().min(at + HEAD)];
                    self.refuse(head, None, why, true, round);
                    at = bytes.len();
                }
            }
        }
        *round.served += messages;
        round.counts.messages[USER].add(messages);
        round.counts.bytes[USER].add(at as u64);
        // Bytes after the message that closed the conversation are discarded.
        (if self.stopped { bytes.len() } else { at }, messages)
    }

    /// Takes one message. Returns false if its backend's buffer has no room.
    fn take_message(&mut self, message: &[u8], round: &mut Round<'_>) -> bool {
        let verdict = match self.decided.take() {
            Some(Decided::Parts(parts)) => return self.send_parts(message, parts, round),
            Some(Decided::Whole(verdict)) => verdict.within(message.len()),
            None if !self.may(round) => Verdict::Refuse(Refusal::TooMany),
            None => {
                let verdict = round.service.decide_in(&mut self.session, message);
                self.arm(round);
                verdict
            }
        };
        self.follow(verdict, message, round)
    }

    /// Returns true if the rate limit allows one more message.
    fn may(&mut self, round: &Round<'_>) -> bool {
        let Some((limit, store)) = round.limit else { return true };
        mem::take(&mut self.is_paid) || limit.allows(store, self.bucket)
    }

    /// Does what the service has decided about a message. Returns false if its backend's buffer has no
    /// room.
    fn follow(&mut self, verdict: Verdict, message: &[u8], round: &mut Round<'_>) -> bool {
        match verdict {
            Verdict::With(effects, verdict) => {
                self.carry_out_all(effects, round);
                return self.follow(*verdict, message, round);
            }
            Verdict::Defer => {
                let turn = self.waiting.push(&[]);
                self.deferred.push_back(turn);
            }
            Verdict::Drop => round.counts.lost(Loss::Service),
            Verdict::Echo => self.answer(None, message, false, round),
            Verdict::Reply(bytes) => self.answer(None, &bytes, false, round),
            Verdict::Stored(stored) => {
                let bytes = round.service.stored(stored);
                self.answer(None, &bytes, false, round);
            }
            Verdict::Close(bytes) => self.answer(None, &bytes, true, round),
            Verdict::Forward { key, one_way } => return self.forward(message, key, one_way, round),
            Verdict::Split => return self.split(message, round),
            Verdict::Refuse(why) => self.refuse(message, None, why, false, round),
            // The service had the whole message, so asking for more of it is an error.
            Verdict::More => self.refuse(message, None, Refusal::TooComplex, false, round),
        }
        true
    }

    fn forward(&mut self, message: &[u8], key: Key, one_way: bool, round: &mut Round<'_>) -> bool {
        let Some(first) = round.backends.choose(&key, message) else {
            self.refuse(message, None, Refusal::NoBackend, false, round);
            return true;
        };
        let Some(at) = self.link_for(first, round) else {
            self.refuse(message, None, Refusal::NoBackend, false, round);
            return true;
        };
        let link = self.links[at].as_mut().expect("just found");
        if !link.has_room() {
            self.decided = Some(Decided::Whole(Verdict::Forward { key, one_way }));
            return false;
        }
        self.paced = one_way || !round.properties.replies;
        let recipient = if self.paced {
            Recipient::OneWay(key)
        } else {
            let kept = message.len().min(round.properties.kept());
            let turn = self.waiting.push(&message[..kept]);
            self.waiting.set_key(turn, key);
            Recipient::Turn(turn)
        };
        link.push(message, recipient, round.now);
        true
    }

    /// Returns the index in `links` of a connection to the backend `first`, which is opened if
    /// there is none. If the service allows retries, any other backend may take its place.
    fn link_for(&mut self, first: usize, round: &mut Round<'_>) -> Option<usize> {
        let count = round.backends.list.len();
        let candidates = if round.properties.retry { count } else { 1 };
        (0..candidates).find_map(|step| self.link_to((first + step) % count, round))
    }

    fn link_to(&mut self, backend: usize, round: &mut Round<'_>) -> Option<usize> {
        if self.places.len() != round.backends.list.len() {
            self.places = vec![None; round.backends.list.len()];
        }
        let wanted = &round.backends.list[backend];
        if let Some(at) = self.places[backend]
            && self.links[at].as_ref().is_some_and(|link| !link.retired && Arc::ptr_eq(&link.backend, wanted))
        {
            return Some(at);
        }
        if !wanted.may_be_tried() {
            return None;
        }
        let at = self.links.iter().position(Option::is_none).unwrap_or_else(|| {
            self.links.push(None);
            self.links.len() - 1
        });
        self.generation = self.generation.wrapping_add(1);
        let opened = Link::open(wanted.clone(), self.generation, round.now).and_then(|link| {
            let data = event_data(self.id, link.generation, at + 1);
            epoll::add(round.epoll, &link.socket, data, EventFlags::empty())?;
            Ok(link)
        });
        match opened {
            Ok(link) => {
                if wanted.address.is_unix() {
                    self.place.stay();
                }
                self.links[at] = Some(link);
                self.places[backend] = Some(at);
                Some(at)
            }
            Err(_) => {
                wanted.fails();
                None
            }
        }
    }

    /// Sends a message in parts, each to its own backend. Returns false, and sends nothing, if one
    /// of the backends has no room.
    fn split(&mut self, message: &[u8], round: &mut Round<'_>) -> bool {
        match self.parts(message, round) {
            Ok(parts) => self.send_parts(message, parts, round),
            Err(why) => {
                self.refuse(message, None, why, false, round);
                true
            }
        }
    }

    /// Returns the parts of a message and the keys of their backends.
    fn parts(&mut self, message: &[u8], round: &Round<'_>) -> Result<Vec<(Key, Vec<u8>)>, Refusal> {
        let mut share = Share::default();
        let mut parts = Vec::new();
        while let Some(part) = round.service.part(message, &mut share) {
            share.index += 1;
            let verdict = round.service.decide_in(&mut self.session, &part);
            let Verdict::Forward { key, one_way: false } = verdict else {
                // A part must be forwarded and answered: anything else is a fault of the service.
                return Err(Refusal::Malformed);
            };
            if parts.len() == limits::PARTS {
                return Err(Refusal::TooComplex);
            }
            parts.push((key, part));
        }
        if parts.is_empty() { Err(Refusal::Malformed) } else { Ok(parts) }
    }

    fn send_parts(&mut self, message: &[u8], parts: Vec<(Key, Vec<u8>)>, round: &mut Round<'_>) -> bool {
        let mut places = Vec::with_capacity(parts.len());
        for (key, part) in &parts {
            let to = round.backends.choose(key, part).and_then(|first| self.link_for(first, round));
            let Some(at) = to else {
                self.refuse(message, None, Refusal::NoBackend, false, round);
                return true;
            };
            if !self.links[at].as_ref().expect("just found").has_room() {
                self.decided = Some(Decided::Parts(parts));
                return false;
            }
            places.push(at);
        }
        self.paced = false;
        let most = round.properties.kept();
        let kept = |part: &Vec<u8>| part.len().min(most);
        let first = self.waiting.push_parts(parts.iter().map(|(_, part)| &part[..kept(part)]));
        for ((at, (key, part)), turn) in places.into_iter().zip(parts).zip(first..) {
            self.waiting.set_key(turn, key);
            let link = self.links[at].as_mut().expect("just found");
            link.push(&part, Recipient::Turn(turn), round.now);
        }
        true
    }

    /// Puts an answer into its place in the order: that of `turn`, or the last for a message that
    /// no backend has.
    pub(super) fn answer(&mut self, turn: Option<Turn>, bytes: &[u8], closes: bool, round: &Round<'_>) {
        let session = RefCell::new(&mut self.session);
        let join = |kept: &[u8], answers: Option<_>| joined(&mut session.borrow_mut(), kept, answers, round);
        let done = match turn {
            None if self.waiting.is_empty() => {
                self.output.push(bytes);
                closes
            }
            None => self.waiting.push_answer(bytes, closes, &join, &mut self.output),
            Some(turn) => self.waiting.answer(turn, bytes, closes, &join, &mut self.output),
        };
        self.stopped |= closes || done;
        if done {
            self.waiting.forget();
        }
    }

    fn refuse(&mut self, head: &[u8], turn: Option<Turn>, why: Refusal, lost: bool, round: &mut Round<'_>) {
        round.counts.refused(why);
        let answer = round.service.refuse_in(&mut self.session, head, why);
        self.arm(round);
        match self.carry_out(answer, round) {
            Answer::Nothing if turn.is_some() || lost => self.answer(turn, &[], lost, round),
            Answer::Nothing | Answer::With(..) => {}
            Answer::Reply(bytes) => self.answer(turn, &bytes, lost, round),
            Answer::Close(bytes) => self.answer(turn, &bytes, true, round),
        }
    }

    // ---- replies

    /// Takes the whole replies from `bytes` and returns their length, or why the service refuses
    /// the next one.
    fn take_replies(&mut self, at: usize, bytes: &[u8], round: &mut Round<'_>) -> Result<usize, Refusal> {
        if !round.properties.replies {
            round.counts.lost(Loss::Surplus);
            return Ok(bytes.len());
        }
        let mut used = 0;
        while used < bytes.len() {
            let length = match round.service.parse_reply(&bytes[used..]) {
                Parse::Message(length) if length <= bytes.len() - used => length,
                Parse::Message(_) | Parse::More => break,
                Parse::Refused(why) => return Err(why),
            };
            let reply = &bytes[used..used + length];
            let link = self.links[at].as_mut().expect("it has been read");
            match link.unanswered.pop_front() {
                Some(turn) => {
                    self.see_reply(turn, reply, round);
                    self.answer(Some(turn), reply, false, round);
                }
                None => round.counts.lost(Loss::Surplus),
            }
            round.counts.replies.add(1);
            used += length;
        }
        Ok(used)
    }

    /// Shows the service a reply, if it wants to see it and its client is still there.
    fn see_reply(&mut self, turn: Turn, reply: &[u8], round: &mut Round<'_>) {
        if !round.properties.sees_replies {
            return;
        }
        let Some(message) = self.waiting.kept(turn) else { return };
        let message = &message[..message.len().min(KEPT)];
        let answer = round.service.replied_in(&mut self.session, message, reply);
        self.arm(round);
        let _ = self.carry_out(answer, round);
    }

    /// Removes a connection whose next reply the service refuses, and refuses the message of that
    /// reply. Another backend would give the same reply, so the message is not sent again. Nor does
    /// it count as a failure: the backend works, and other clients need it.
    fn lose_refused(&mut self, at: usize, why: Refusal, round: &mut Round<'_>) {
        let Some(link) = self.links[at].as_mut() else { return };
        if let Some(turn) = link.unanswered.pop_front()
            && let Some(kept) = self.waiting.kept(turn).map(<[u8]>::to_vec)
        {
            self.refuse(&kept[..kept.len().min(HEAD)], Some(turn), why, false, round);
        }
        self.lose(at, false, Refusal::BackendGone, round);
    }

    /// Removes a connection to a backend. Its unanswered messages are sent again if no backend has
    /// seen them or the service allows it, and refused otherwise.
    pub(super) fn lose(&mut self, at: usize, fails: bool, why: Refusal, round: &mut Round<'_>) {
        let Some(mut link) = self.links[at].take() else { return };
        self.place.link_gone(at, &link.socket, round.kernel);
        if fails {
            link.backend.fails();
        }
        let unsent = link.unsent();
        if !round.properties.replies {
            round.counts.unacknowledged.add(tcp::outq(link.socket.as_fd()).unwrap_or(0));
        }
        let awaits = |left: &&Left| matches!(left.recipient, Recipient::Turn(_));
        let sent_later = unsent.iter().filter(awaits).count();
        // A backend may answer a message of which a part is still unsent.
        let written = link.unanswered.len().saturating_sub(sent_later);
        for turn in link.unanswered.drain(..).take(written) {
            self.again(None, Recipient::Turn(turn), why, round);
        }
        for Left { message, recipient, is_cut } in unsent {
            if is_cut && matches!(recipient, Recipient::OneWay(_)) {
                round.counts.lost(Loss::Cut);
            }
            self.again((!is_cut).then_some(&message[..]), recipient, why, round);
        }
    }

    /// Sends a message again, or refuses it. `unseen` is the whole message if no backend has any
    /// byte of it.
    fn again(&mut self, unseen: Option<&[u8]>, recipient: Recipient, why: Refusal, round: &mut Round<'_>) {
        let (turn, key, kept) = match &recipient {
            Recipient::OneWay(key) => (None, Some(key.clone()), Vec::new()),
            Recipient::Turn(turn) => {
                // A message that was answered meanwhile needs nothing more.
                let Some(kept) = self.waiting.kept(*turn) else { return };
                (Some(*turn), self.waiting.key(*turn).cloned(), kept.to_vec())
            }
        };
        let may_repeat = turn.is_some() && round.properties.retry;
        if let Some(message) = unseen.or(may_repeat.then_some(&kept[..]))
            && turn.is_none_or(|turn| self.waiting.attempt(turn) <= ATTEMPTS)
            && let Some(first) = key.and_then(|key| round.backends.choose(&key, message))
            && let Some(to) = self.link_for(first, round)
        {
            round.counts.retried.add(1);
            self.links[to].as_mut().expect("just found").push(message, recipient, round.now);
            return;
        }
        let head = if turn.is_some() { &kept[..] } else { unseen.unwrap_or_default() };
        self.refuse(&head[..head.len().min(HEAD)], turn, why, false, round);
    }

    /// Closes connections to backends that have not replied within `limit`.
    ///
    /// In the kernel no event reports a silent backend, so its counters are compared with the last
    /// call's. Returns true if the conversation must come back from the kernel for that reason.
    pub(crate) fn look_for_silence(&mut self, limit: Duration, round: &mut Round<'_>) -> bool {
        if self.place.is_kernels() {
            let waits = round.kernel.as_ref().and_then(|kernel| self.place.waits(kernel));
            if waits != self.waits.map(|(replies, _)| replies) {
                self.waits = waits.map(|replies| (replies, round.now));
            }
            return self.waits.is_some_and(|(_, since)| round.now - since >= limit);
        }
        for at in 0..self.links.len() {
            let Some(link) = &self.links[at] else { continue };
            let is_silent = !link.unanswered.is_empty() && round.now - link.silent_since >= limit;
            // A backend that is not read from, for lack of room, is not silent.
            if is_silent && link.connecting.is_none() && self.reads_replies(at) {
                self.lose(at, true, Refusal::NoReply, round);
            }
        }
        false
    }

    // ---- the end of a round

    /// Ends a round: writes the buffers, takes messages for which there is room now, and updates
    /// the epoll interest. Returns true if the conversation is over.
    pub(crate) fn settle(&mut self, round: &mut Round<'_>) -> bool {
        if self.place.is_kernels() {
            return false;
        }
        loop {
            self.flush(round);
            if self.broken {
                self.forget_client(round);
            }
            if !self.blocked || !self.has_room() {
                break;
            }
            self.blocked = false;
            let input = mem::take(&mut self.input);
            let (used, _) = self.take_messages(&input, round);
            self.input = input;
            self.input.drain(..used);
            if used == 0 {
                break;
            }
        }
        if self.is_over(round) {
            self.leave(round);
            return true;
        }
        self.watch(round);
        self.account(round.counts);
        false
    }

    fn flush(&mut self, round: &mut Round<'_>) {
        for at in 0..self.links.len() {
            let Some(link) = &mut self.links[at] else { continue };
            let is_lost = match link.connecting {
                Some(until) => round.now >= until,
                None => link.flush().is_err(),
            };
            if is_lost {
                self.lose(at, true, Refusal::BackendGone, round);
            } else if link.retired && link.is_idle() {
                let link = self.links[at].take().expect("it is idle");
                self.place.link_gone(at, &link.socket, round.kernel);
                let _ = shutdown(&link.socket, Shutdown::Write);
                round.lingering.push(Lingering::new(link.socket, round.now));
            }
        }
        while !self.output.is_empty() && !self.broken {
            match send(&self.client, self.output.as_slice(), SendFlags::NOSIGNAL) {
                Ok(count) => self.output.take(count),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => self.broken = true,
            }
        }
    }

    /// Discards the answers after the client's connection failed. Messages already taken are still
    /// delivered.
    fn forget_client(&mut self, round: &mut Round<'_>) {
        if self.ended && self.stopped {
            return;
        }
        let _ = epoll::delete(round.epoll, &self.client);
        for _ in 0..self.waiting.forget() {
            round.counts.lost(Loss::LateReply);
        }
        self.output.clear();
        self.ended = true;
        self.stopped = true;
    }

    fn is_over(&mut self, round: &mut Round<'_>) -> bool {
        if !(self.ended || self.stopped)
            || self.blocked
            || !self.waiting.is_empty()
            || !self.output.is_empty()
        {
            return false;
        }
        if !self.input.is_empty() {
            round.counts.lost(Loss::CutShort);
            self.input.clear();
        }
        self.links.iter().flatten().all(|link| link.output.is_empty())
    }

    /// Shuts the sockets down for writing and hands them to `Lingering`, so that written bytes
    /// arrive.
    fn leave(&mut self, round: &mut Round<'_>) {
        self.end_events(round);
        round.counts.queued.fetch_sub(mem::take(&mut self.accounted), Relaxed);
        self.leave_seats(round.kernel);
        for link in self.links.drain(..).flatten() {
            let _ = epoll::delete(round.epoll, &link.socket);
            let _ = shutdown(&link.socket, Shutdown::Write);
            round.lingering.push(Lingering::new(link.socket, round.now));
        }
        if !self.broken {
            let _ = epoll::delete(round.epoll, &self.client);
            let _ = shutdown(&self.client, Shutdown::Write);
            if let Ok(client) = self.client.try_clone() {
                round.lingering.push(Lingering::new(client, round.now));
            }
        }
    }

    /// Sets the epoll interest of each socket to the events that can be handled now.
    pub(super) fn watch(&mut self, round: &mut Round<'_>) {
        if !self.broken {
            let mut wanted = EventFlags::empty();
            wanted.set(EventFlags::IN, self.reads(round));
            wanted.set(EventFlags::OUT, !self.output.is_empty());
            if wanted != self.interest {
                let _ = epoll::modify(round.epoll, &self.client, event_data(self.id, 0, 0), wanted);
                self.interest = wanted;
            }
        }
        for at in 0..self.links.len() {
            let reads = self.reads_replies(at);
            let Some(link) = &mut self.links[at] else { continue };
            let mut wanted = EventFlags::empty();
            wanted.set(EventFlags::IN, reads);
            wanted.set(EventFlags::OUT, link.connecting.is_some() || !link.output.is_empty());
            if wanted != link.interest {
                let data = event_data(self.id, link.generation, at + 1);
                let _ = epoll::modify(round.epoll, &link.socket, data, wanted);
                link.interest = wanted;
            }
        }
    }

    /// Renews the same epoll interest, so that epoll checks the socket's readiness again. `at` is 0
    /// for the client, and otherwise one more than the index in `links`.
    pub(super) fn watch_again(&mut self, at: usize, round: &mut Round<'_>) {
        if at == 0 && !self.broken {
            let _ = epoll::modify(round.epoll, &self.client, event_data(self.id, 0, 0), self.interest);
        }
        if let Some(Some(link)) = at.checked_sub(1).and_then(|at| self.links.get(at)) {
            let data = event_data(self.id, link.generation, at);
            let _ = epoll::modify(round.epoll, &link.socket, data, link.interest);
        }
    }

    /// Restricts the epoll interest to the end of each connection, edge-triggered, while the kernel
    /// serves the conversation.
    pub(super) fn watch_ends(&mut self, round: &mut Round<'_>) {
        self.interest = EventFlags::RDHUP | EventFlags::ET;
        let _ = epoll::modify(round.epoll, &self.client, event_data(self.id, 0, 0), self.interest);
        for (at, link) in self.links.iter_mut().enumerate() {
            let Some(link) = link else { continue };
            link.interest = EventFlags::RDHUP | EventFlags::ET;
            let data = event_data(self.id, link.generation, at + 1);
            let _ = epoll::modify(round.epoll, &link.socket, data, link.interest);
        }
    }

    pub(super) fn account(&mut self, counts: &Counts) {
        let links: usize = self.links.iter().flatten().map(|link| link.output.len() + link.input.len()).sum();
        let size = (self.input.len() + self.output.len() + self.waiting.size() + links) as i64;
        if size != self.accounted {
            counts.queued.fetch_add(size - self.accounted, Relaxed);
            self.accounted = size;
        }
    }

    // ---- room

    /// Returns true if one more message may be taken, for any backend.
    fn has_room(&self) -> bool {
        self.output.len() < limits::BUFFER
            && self.waiting.len() < limits::WAITING
            && self.waiting.size() < limits::KEPT
    }

    pub(super) fn reads(&self, round: &Round<'_>) -> bool {
        let queued = round.counts.queued.load(Relaxed);
        !(self.ended || self.stopped || self.broken || self.blocked || self.place.is_kernels())
            && self.has_room()
            && (queued < round.shared.queue_limit || self.accounted == 0)
    }

    /// Returns true if replies of this connection may be read. Early replies are held up to a
    /// bound.
    pub(super) fn reads_replies(&self, at: usize) -> bool {
        let Some(Some(link)) = self.links.get(at) else { return false };
        let is_next = link.unanswered.front().is_some_and(|turn| self.waiting.is_next(*turn));
        self.output.len() < limits::BUFFER && (is_next || self.waiting.held() < limits::KEPT)
    }

    /// Adapts to a new list of backends: connections to removed ones are retired.
    pub(crate) fn backends_changed(&mut self, backends: &Backends) {
        self.places.clear();
        self.places.resize(backends.list.len(), None);
        for (at, link) in self.links.iter_mut().enumerate() {
            let Some(link) = link else { continue };
            let place = backends.list.iter().position(|backend| Arc::ptr_eq(backend, &link.backend));
            link.retired = place.is_none();
            if let Some(place) = place {
                self.places[place] = Some(at);
            }
        }
    }

    /// Stops reading from the client. Messages already received are still served.
    pub(crate) fn drain(&mut self) {
        self.ended = true;
    }
}

/// Returns true if a connection has had no error.
fn is_sound(socket: &OwnedFd) -> bool {
    matches!(sockopt::socket_error(socket), Ok(Ok(())))
}

/// Joins the answers to the parts of a message into one. `kept` is the kept beginning of the first
/// part. A joined answer that is too long (`None`) becomes a refusal.
fn joined(
    session: &mut Session,
    kept: &[u8],
    answers: Option<Vec<waiting::Answer>>,
    round: &Round<'_>,
) -> waiting::Answer {
    let Some(answers) = answers else {
        round.counts.refused(Refusal::TooLong);
        let head = &kept[..kept.len().min(HEAD)];
        let answer = match round.service.refuse_in(session, head, Refusal::TooLong) {
            Answer::With(_, answer) => *answer,
            answer => answer,
        };
        let (bytes, closes) = match answer {
            Answer::Nothing | Answer::With(..) => (Vec::new(), false),
            Answer::Reply(bytes) => (bytes, false),
            Answer::Close(bytes) => (bytes, true),
        };
        return waiting::Answer { bytes, closes };
    };
    let mut share = Share { count: answers.len() as u32, ..Share::default() };
    let mut all = Vec::new();
    for answer in answers {
        let joined = round.service.join(&answer.bytes, &mut share);
        share.index += 1;
        if answer.closes || joined.is_alone {
            return waiting::Answer { bytes: joined.bytes, closes: answer.closes };
        }
        all.extend(joined.bytes);
    }
    waiting::Answer { bytes: all, closes: false }
}

/// Packs an event's origin: the conversation, its connection (0 is the client, otherwise one more
/// than the index in `links`), and the connection's generation.
pub(crate) fn event_data(id: u32, generation: u16, part: usize) -> EventData {
    EventData::new_u64(u64::from(id) << 32 | u64::from(generation) << 16 | part as u64)
}
