//! A client and the connections to backends that were opened for it, in user space. Messages are taken as they come, put
//! together for each backend, and written once in a round; answers go back in the order of the messages. Nothing grows
//! without bound: who does not read is not read for.

use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use shunt_sys::tcp;

use super::backends::Backends;
use super::buffer::Buffer;
use super::calm::Calm;
use super::counts::{Counts, Loss, USER};
use super::kernel::Kernel;
use super::limits;
use super::linger::Lingering;
use super::link::{Link, receive};
use super::place::Place;
use super::waiting::{self, Turn, Waiting};
use crate::service::{Answer, Key, Parse, Properties, Refusal, Service, Share, Verdict};

/// See the module.
#[derive(Debug)]
pub(crate) struct Conversation {
    pub(super) id: u32,
    pub(super) client: OwnedFd,
    /// What was read of the client and is no whole message, or waits for room.
    pub(super) input: Vec<u8>,
    pub(super) output: Buffer,
    pub(super) links: Vec<Option<Link>>,
    /// For each backend of the list, where in `links` its connection may be.
    places: Vec<Option<usize>>,
    pub(super) waiting: Waiting,
    /// There are messages in `input` for which there was no room.
    pub(super) blocked: bool,
    /// No message is taken any more: the service closes the connection.
    pub(super) stopped: bool,
    /// The client has sent its last byte.
    pub(super) ended: bool,
    /// The client is gone.
    pub(super) broken: bool,
    interest: EventFlags,
    generation: u16,
    accounted: i64,
    pub(super) calm: Calm,
    /// The last message was one that nobody answers: nothing but time keeps such messages apart.
    paced: bool,
    pub(super) place: Place,
    /// In the kernel a message waits for its answer: so many replies had come, and since when.
    pub(super) waits: Option<(u64, Instant)>,
}

/// What a conversation needs of its worker while something is done for it.
pub(crate) struct Round<'a> {
    pub(crate) service: &'a dyn Service,
    pub(crate) properties: Properties,
    pub(crate) backends: &'a Arc<Backends>,
    pub(crate) counts: &'a Counts,
    pub(crate) epoll: &'a OwnedFd,
    /// A read, behind the longest beginning of a message.
    pub(crate) scratch: &'a mut Vec<u8>,
    pub(crate) lingering: &'a mut Vec<Lingering>,
    pub(crate) kernel: &'a mut Option<Kernel>,
    pub(crate) now: Instant,
}

/// What is kept of a message for the case that it has to be refused.
pub(crate) const HEAD: usize = 128;
/// How often a message is sent at most.
const ATTEMPTS: u8 = 3;

impl Conversation {
    pub(crate) fn new(id: u32, client: OwnedFd, round: &mut Round<'_>) -> rustix::io::Result<Conversation> {
        let data = event_data(id, 0, 0);
        epoll::add(round.epoll, &client, data, EventFlags::empty())?;
        let mut new = Conversation {
            id,
            client,
            input: Vec::new(),
            output: Buffer::default(),
            links: Vec::new(),
            places: Vec::new(),
            waiting: Waiting::default(),
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
        };
        match round.service.accepted() {
            Answer::Nothing => {}
            Answer::Reply(bytes) => new.output.push(&bytes),
            Answer::Close(bytes) => {
                new.output.push(&bytes);
                new.stopped = true;
            }
        }
        Ok(new)
    }

    /// Whether it has been calm for so long that it belongs in the kernel.
    pub(crate) fn is_calm(&mut self, now: Instant) -> bool {
        self.calm.is_enough(self.paced, &self.client, now)
    }

    /// Whether it has been busy in user space for so long that its sockets had better leave the kernel's map.
    pub(crate) fn wants_out(&self) -> bool {
        self.calm.is_busy() && self.place.could_leave()
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    // ---- what epoll says

    /// The client has sent something, or is gone.
    pub(crate) fn client_ready(&mut self, flags: EventFlags, round: &mut Round<'_>) {
        if self.reads(round) {
            self.read_client(round);
        } else if flags.intersects(EventFlags::ERR | EventFlags::HUP) && !self.ended {
            self.broken = true;
        }
    }

    /// Reads once.
    pub(super) fn read_client(&mut self, round: &mut Round<'_>) {
        let mut scratch = mem::take(round.scratch);
        let left = self.input.len();
        scratch[..left].copy_from_slice(&self.input);
        match receive(self.client.as_fd(), &mut scratch[left..left + limits::READ]) {
            Ok(0) => self.ended = true,
            Ok(count) => {
                self.place.client_read(count);
                let quiet = self.waiting.is_empty() && self.output.is_empty() && left == 0;
                self.input.clear();
                let (used, messages) = self.take_messages(&scratch[..left + count], round);
                self.input.extend_from_slice(&scratch[used..left + count]);
                if round.kernel.is_some() {
                    let quiet = quiet && self.input.is_empty() && messages == 1;
                    self.calm.saw(quiet, count, &self.client, round.now);
                }
            }
            Err(Errno::AGAIN) => {}
            Err(_) => self.broken = true,
        }
        *round.scratch = scratch;
    }

    /// A connection to a backend is connected, has something to read or is gone.
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

    /// Reads once.
    pub(super) fn read_link(&mut self, at: usize, round: &mut Round<'_>) {
        let Some(Some(link)) = self.links.get_mut(at) else { return };
        let mut scratch = mem::take(round.scratch);
        let left = link.input.len();
        scratch[..left].copy_from_slice(&link.input);
        match link.read(&mut scratch[left..left + limits::READ]) {
            Ok(0) => {
                let fails = !link.is_idle();
                self.lose(at, fails, Refusal::BackendGone, round);
            }
            Ok(count) => {
                link.input.clear();
                link.silent_since = round.now;
                self.place.link_read(at, count);
                match self.take_replies(at, &scratch[..left + count], round) {
                    Some(used) => {
                        let link = self.links[at].as_mut().expect("it gave the replies");
                        link.input.extend_from_slice(&scratch[used..left + count]);
                    }
                    None => self.lose(at, true, Refusal::BackendGone, round),
                }
            }
            Err(Errno::AGAIN) => {}
            Err(_) => self.lose(at, true, Refusal::BackendGone, round),
        }
        *round.scratch = scratch;
    }

    // ---- messages

    /// Takes the whole messages that there is room for. Gives how many bytes they have, and how many they are.
    fn take_messages(&mut self, bytes: &[u8], round: &mut Round<'_>) -> (usize, u64) {
        let (mut at, mut messages) = (0, 0);
        while at < bytes.len() {
            if self.stopped {
                return (bytes.len(), messages);
            }
            match round.service.parse(&bytes[at..]) {
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
        round.counts.messages[USER].add(messages);
        round.counts.bytes[USER].add(at as u64);
        (at, messages)
    }

    /// False: there is no room at its backend.
    fn take_message(&mut self, message: &[u8], round: &mut Round<'_>) -> bool {
        match round.service.decide(message) {
            Verdict::Drop => round.counts.lost(Loss::Service),
            Verdict::Echo => self.answer(None, message, false, round),
            Verdict::Reply(bytes) => self.answer(None, &bytes, false, round),
            Verdict::Close(bytes) => self.answer(None, &bytes, true, round),
            Verdict::Forward { key, one_way } => return self.forward(message, &key, one_way, round),
            Verdict::Split => return self.split(message, round),
            Verdict::Refuse(why) => self.refuse(message, None, why, false, round),
            // The whole message was there.
            Verdict::More => self.refuse(message, None, Refusal::TooComplex, false, round),
        }
        true
    }

    fn forward(&mut self, message: &[u8], key: &Key, one_way: bool, round: &mut Round<'_>) -> bool {
        let Some(first) = round.backends.choose(key, message) else {
            self.refuse(message, None, Refusal::NoBackend, false, round);
            return true;
        };
        let Some(at) = self.link_for(first, round) else {
            self.refuse(message, None, Refusal::NoBackend, false, round);
            return true;
        };
        let link = self.links[at].as_mut().expect("just found");
        if !link.has_room() {
            return false;
        }
        self.paced = one_way || !round.properties.replies;
        let turn = (!self.paced).then(|| {
            let kept = if round.properties.retry { message.len() } else { message.len().min(HEAD) };
            self.waiting.push(&message[..kept])
        });
        link.push(message, turn, round.now);
        true
    }

    /// Where in `links` there is a connection for a message of this backend, or of another one if the service lets a
    /// message go elsewhere. It is opened if there is none yet.
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

    /// Sends a message in parts, each as a message of its own, if there is room for all of them.
    fn split(&mut self, message: &[u8], round: &mut Round<'_>) -> bool {
        let mut share = Share::default();
        let mut parts = Vec::new();
        while let Some(part) = round.service.part(message, &mut share) {
            share.index += 1;
            let Verdict::Forward { key, one_way: false } = round.service.decide(&part) else {
                // No message that can be sent: the service is wrong.
                self.refuse(message, None, Refusal::Malformed, false, round);
                return true;
            };
            if parts.len() == limits::PARTS {
                self.refuse(message, None, Refusal::TooComplex, false, round);
                return true;
            }
            let to = round.backends.choose(&key, &part).and_then(|first| self.link_for(first, round));
            let Some(at) = to else {
                self.refuse(message, None, Refusal::NoBackend, false, round);
                return true;
            };
            if !self.links[at].as_ref().expect("just found").has_room() {
                return false;
            }
            parts.push((at, part));
        }
        if parts.is_empty() {
            self.refuse(message, None, Refusal::Malformed, false, round);
            return true;
        }
        self.paced = false;
        let retry = round.properties.retry;
        let kept = |part: &Vec<u8>| if retry { part.len() } else { part.len().min(HEAD) };
        let first = self.waiting.push_parts(parts.iter().map(|(_, part)| &part[..kept(part)]));
        for ((at, part), turn) in parts.iter().zip(first..) {
            self.links[*at].as_mut().expect("just found").push(part, Some(turn), round.now);
        }
        true
    }

    /// Puts an answer to the message of a turn, or one that nobody else is asked for, into its place in the order.
    fn answer(&mut self, turn: Option<Turn>, bytes: &[u8], closes: bool, round: &Round<'_>) {
        let join = |kept: &[u8], answers: Option<_>| joined(kept, answers, round);
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
        match round.service.refuse(head, why) {
            Answer::Nothing if turn.is_some() || lost => self.answer(turn, &[], lost, round),
            Answer::Nothing => {}
            Answer::Reply(bytes) => self.answer(turn, &bytes, lost, round),
            Answer::Close(bytes) => self.answer(turn, &bytes, true, round),
        }
    }

    // ---- replies

    /// Takes the whole replies. None: what it sent is none.
    fn take_replies(&mut self, at: usize, bytes: &[u8], round: &mut Round<'_>) -> Option<usize> {
        if !round.properties.replies {
            round.counts.lost(Loss::Surplus);
            return Some(bytes.len());
        }
        let mut used = 0;
        while used < bytes.len() {
            let length = match round.service.parse_reply(&bytes[used..]) {
                Parse::Message(length) if length <= bytes.len() - used => length,
                Parse::Message(_) | Parse::More => break,
                Parse::Refused(_) => return None,
            };
            let reply = &bytes[used..used + length];
            match self.links[at].as_mut()?.unanswered.pop_front() {
                Some(turn) => self.answer(Some(turn), reply, false, round),
                None => round.counts.lost(Loss::Surplus),
            }
            round.counts.replies.add(1);
            used += length;
        }
        Some(used)
    }

    /// A connection to a backend is over: its messages are sent again where that is safe or the service wants it, and else
    /// answered.
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
        let written = link.unanswered.len() - unsent.iter().filter(|(_, turn, _)| turn.is_some()).count();
        for turn in link.unanswered.drain(..).take(written) {
            self.again(None, turn, why, round);
        }
        for (message, turn, is_cut) in unsent {
            match (turn, is_cut) {
                (Some(turn), true) => self.again(None, turn, why, round),
                (Some(turn), false) => self.again(Some(&message), turn, why, round),
                (None, true) => {
                    round.counts.lost(Loss::Cut);
                    self.refuse(&[], None, why, false, round);
                }
                (None, false) => {
                    // Nobody has seen it.
                    let verdict = round.service.decide(&message);
                    let Verdict::Forward { key, .. } = verdict else { continue };
                    let to = round.backends.choose(&key, &message).and_then(|to| self.link_for(to, round));
                    match to {
                        Some(to) => {
                            self.links[to].as_mut().expect("just found").push(&message, None, round.now)
                        }
                        None => self.refuse(&message, None, why, false, round),
                    }
                }
            }
        }
    }

    /// Sends a message that was under way once more, or answers it. `unseen`: as a whole, and no backend has any of it.
    fn again(&mut self, unseen: Option<&[u8]>, turn: Turn, why: Refusal, round: &mut Round<'_>) {
        let Some(kept) = self.waiting.kept(turn).map(<[u8]>::to_vec) else { return };
        let message = unseen.or(round.properties.retry.then_some(&kept[..]));
        if let Some(message) = message
            && self.waiting.attempt(turn) <= ATTEMPTS
            && let Verdict::Forward { key, .. } = round.service.decide(message)
            && let Some(first) = round.backends.choose(&key, message)
            && let Some(to) = self.link_for(first, round)
        {
            round.counts.retried.add(1);
            self.links[to].as_mut().expect("just found").push(message, Some(turn), round.now);
            return;
        }
        self.refuse(&kept[..kept.len().min(HEAD)], Some(turn), why, false, round);
    }

    /// Gives up the connections to backends that should have answered by now. In the kernel's hands nobody sees that a
    /// backend is silent but by what is counted there: true if the conversation has to be taken back for that.
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
            // One that is not read for want of room is not silent.
            if is_silent && link.connecting.is_none() && self.reads_replies(at) {
                self.lose(at, true, Refusal::NoReply, round);
            }
        }
        false
    }

    // ---- the end of a round

    /// Writes what there is, takes what there is room for now, and says whether the conversation is over.
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

    /// Nobody is there to be answered. What was taken is still delivered.
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

    /// What was written arrives, and then its end.
    fn leave(&mut self, round: &mut Round<'_>) {
        round.counts.queued.fetch_sub(mem::take(&mut self.accounted), std::sync::atomic::Ordering::Relaxed);
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

    /// Asks epoll for what can be used.
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

    /// What epoll is asked for stays the same; it looks whether there is any of it. 0 is the client.
    pub(super) fn watch_again(&mut self, at: usize, round: &mut Round<'_>) {
        if at == 0 && !self.broken {
            let _ = epoll::modify(round.epoll, &self.client, event_data(self.id, 0, 0), self.interest);
        }
        if let Some(Some(link)) = at.checked_sub(1).and_then(|at| self.links.get(at)) {
            let data = event_data(self.id, link.generation, at);
            let _ = epoll::modify(round.epoll, &link.socket, data, link.interest);
        }
    }

    /// Of the client and the connections to backends, only their ends are of interest, and once.
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

    fn account(&mut self, counts: &Counts) {
        let links: usize = self.links.iter().flatten().map(|link| link.output.len() + link.input.len()).sum();
        let size = (self.input.len() + self.output.len() + self.waiting.size() + links) as i64;
        if size != self.accounted {
            counts.queued.fetch_add(size - self.accounted, std::sync::atomic::Ordering::Relaxed);
            self.accounted = size;
        }
    }

    // ---- room

    /// For one more message, whomever it is for.
    fn has_room(&self) -> bool {
        self.output.len() < limits::BUFFER
            && self.waiting.len() < limits::WAITING
            && self.waiting.size() < limits::KEPT
    }

    pub(super) fn reads(&self, round: &Round<'_>) -> bool {
        let queued = round.counts.queued.load(std::sync::atomic::Ordering::Relaxed);
        !(self.ended || self.stopped || self.broken || self.blocked || self.place.is_kernels())
            && self.has_room()
            && (queued < limits::QUEUED || self.accounted == 0)
    }

    /// Answers that come early are held, but not without bound.
    pub(super) fn reads_replies(&self, at: usize) -> bool {
        let Some(Some(link)) = self.links.get(at) else { return false };
        let is_next = link.unanswered.front().is_some_and(|turn| self.waiting.is_next(*turn));
        self.output.len() < limits::BUFFER && (is_next || self.waiting.held() < limits::KEPT)
    }

    /// The list of backends is another one.
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

    /// The service ends: what was received is still served, and nothing after that.
    pub(crate) fn drain(&mut self) {
        self.ended = true;
    }
}

/// One answer of those to the parts of a message, of whose first part this was kept. One that is too long is refused.
fn joined(kept: &[u8], answers: Option<Vec<waiting::Answer>>, round: &Round<'_>) -> waiting::Answer {
    let Some(answers) = answers else {
        round.counts.refused(Refusal::TooLong);
        let (bytes, closes) = match round.service.refuse(&kept[..kept.len().min(HEAD)], Refusal::TooLong) {
            Answer::Nothing => (Vec::new(), false),
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

/// What epoll gives back: which conversation, which of its connections (0: the client), and of which generation.
pub(crate) fn event_data(id: u32, generation: u16, part: usize) -> EventData {
    EventData::new_u64(u64::from(id) << 32 | u64::from(generation) << 16 | part as u64)
}
