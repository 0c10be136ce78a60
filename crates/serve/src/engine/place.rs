//! A conversation's owner, user space or the kernel, and the moves between them.
//!
//! One of the two owns all sockets of a conversation; the other neither reads nor writes any of
//! them. docs/serve-protocol.md explains why no byte is lost or overtaken. tests/moves.rs explores
//! every interleaving of both sides' steps.
//!
//! ```text
//!        promote: word (n, user) -> (n, kernel), only if n = bytes read here
//!    ┌──────┐ ───────────────────────────────────────────────► ┌────────┐
//!    │ User │                                                  │ Kernel │
//!    └──────┘ ◄─────────────── ┌────────┐ ◄─────────────────── └────────┘
//!         take_back: TCP has   │ Neither│   demote: user space or the
//!         all redirected bytes └────────┘   program clears the mode bit
//! ```
//!
//! `n` is the count of bytes that the program has passed to user space. For example, a client's
//! message of 10 bytes that arrives during `promote` is passed and makes `n` larger than the bytes
//! read, so the exchange of the word fails and user space serves the message.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use shunt_sys::tcp;
use shunt_sys::tuning::set_receive_low_water;

use super::conversation::{Conversation, Decided, Round};
use super::counts::{KERNEL, Move};
use super::kernel::{Deciding, Has, Kernel, Of};
use super::link::Link;

/// The owner of a conversation, and its sockets in the kernel's map.
#[derive(Debug, Default)]
pub(crate) struct Place {
    owner: Owner,
    /// The conversation's number in the kernel, while a socket of it may be in the map.
    number: Option<u32>,
    client: Option<Seat>,
    /// Indexed like the conversation's `links`.
    links: Vec<Option<Seat>>,
    /// Bytes passed at sockets that have left the map. They count as read.
    forgiven: u64,
    /// The kernel rejected a socket of the conversation: it is never tried again.
    refused: bool,
    /// The reason of the move back that is in progress.
    why: Option<Move>,
    /// Messages, bytes and replies of the kernel that are already in the counters.
    harvested: [u64; 3],
    /// The count of messages when the kernel got the conversation.
    before: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Owner {
    #[default]
    User,
    Kernel,
    /// The kernel takes no more data, but some redirected bytes have not reached TCP yet.
    Neither,
}

/// A socket's place in the map.
#[derive(Clone, Copy, Debug, Default)]
struct Seat {
    position: usize,
    /// Bytes read since the socket was put into the map.
    read: u64,
    /// Messages and bytes that are already in the counters.
    harvested: [u64; 2],
}

/// SO_RCVLOWAT of sockets while they leave the map, in bytes.
const HELD: u32 = 128 * 1024;

impl Place {
    pub(crate) fn is_kernels(&self) -> bool {
        self.owner != Owner::User
    }

    /// Keeps the conversation in user space: the kernel's program is for sockets of TCP.
    pub(crate) fn stay(&mut self) {
        self.refused = true;
    }

    /// Returns true if the conversation never moves to the kernel.
    pub(crate) fn stays(&self) -> bool {
        self.refused
    }

    /// Returns true if the kernel owns the conversation, which is not on its way back.
    pub(crate) fn is_in_kernel(&self) -> bool {
        self.owner == Owner::Kernel
    }

    /// Returns the conversation's number in the kernel, if it has one.
    pub(crate) fn number(&self) -> Option<u32> {
        self.number
    }

    /// Returns the kernel's count of replies if a message is pending there.
    pub(super) fn waits(&self, kernel: &Kernel) -> Option<u64> {
        let number = self.number?;
        let is_waiting = kernel.of(number, Of::Outstanding).load(SeqCst) == 1;
        is_waiting.then(|| kernel.of(number, Of::Replies).load(SeqCst))
    }

    pub(super) fn client_read(&mut self, count: usize) {
        if let Some(seat) = &mut self.client {
            seat.read += count as u64;
        }
    }

    pub(super) fn link_read(&mut self, at: usize, count: usize) {
        if let Some(Some(seat)) = self.links.get_mut(at) {
            seat.read += count as u64;
        }
    }

    /// Returns true if the program has passed bytes of the client that were not read yet.
    ///
    /// They may be in a queue of the kernel, behind a redirected message. If the client has sent its
    /// end, recv meanwhile returns 0.
    pub(super) fn client_is_behind(&self, kernel: Option<&Kernel>) -> bool {
        self.is_behind(self.client, kernel)
    }

    /// Returns true if the program has passed bytes of a backend that were not read yet. `at` is the
    /// index of its connection in `links`.
    pub(super) fn link_is_behind(&self, at: usize, kernel: Option<&Kernel>) -> bool {
        self.is_behind(self.links.get(at).copied().flatten(), kernel)
    }

    fn is_behind(&self, seat: Option<Seat>, kernel: Option<&Kernel>) -> bool {
        let (Some(seat), Some(number), Some(kernel)) = (seat, self.number, kernel) else { return false };
        kernel.has(number, seat.position, Has::Passed).load(SeqCst) > seat.read
    }

    /// Removes the socket of a connection that is over from the map.
    pub(super) fn link_gone(&mut self, at: usize, socket: &OwnedFd, kernel: &mut Option<Kernel>) {
        let seat = self.links.get_mut(at).and_then(Option::take);
        if let (Some(seat), Some(number), Some(kernel)) = (seat, self.number, kernel) {
            kernel.remove(number, seat.position, socket);
            self.forgiven += kernel.has(number, seat.position, Has::Passed).swap(0, SeqCst);
        }
    }

    fn seats(&self) -> impl Iterator<Item = &Seat> {
        self.client.iter().chain(self.links.iter().flatten())
    }

    fn read(&self) -> u64 {
        self.forgiven + self.seats().map(|seat| seat.read).sum::<u64>()
    }

    /// Returns true if user space owns the conversation although its sockets are in the map.
    pub(crate) fn could_leave(&self) -> bool {
        self.owner == Owner::User && self.number.is_some()
    }

    /// Forgets the sockets that have left the map. Returns their indices: 0 is the client, others
    /// are one more than the index in `links`.
    fn forget_left(&mut self, kernel: &mut Kernel) -> Vec<usize> {
        let Some(number) = self.number else { return Vec::new() };
        let mut gone = Vec::new();
        for (at, place) in std::iter::once(&mut self.client).chain(&mut self.links).enumerate() {
            let Some(seat) = place else { continue };
            let has = |word| kernel.has(number, seat.position, word);
            if has(Has::IsThere).load(SeqCst) == 0 {
                self.forgiven += has(Has::Passed).swap(0, SeqCst);
                *place = None;
                gone.push(at);
            }
        }
        if self.seats().next().is_none() {
            kernel.give_number(number);
            (self.number, self.forgiven) = (None, 0);
        }
        gone
    }
}

impl Conversation {
    /// Moves the conversation to the kernel if that is possible now. On failure its sockets may be
    /// in the map while user space still owns it.
    pub(crate) fn promote(&mut self, round: &mut Round<'_>) {
        if !self.is_still() || self.place.refused || self.place.is_kernels() {
            return;
        }
        match self.take_seats(round) {
            Ok(true) => {}
            Ok(false) => return,
            Err(_) => {
                // For example, the peer of a socket has already closed.
                self.place.refused = true;
                return;
            }
        }
        // The program passed data that had arrived before the sockets were in the map. Serve it
        // here.
        self.read_client(round);
        for at in 0..self.links.len() {
            self.read_link(at, round);
        }
        let (Some(number), Some(kernel)) = (self.place.number, round.kernel.as_ref()) else { return };
        if !self.is_still() {
            return;
        }
        for (seat, socket) in self.seats() {
            let Ok(Some(sent)) = tcp::position(socket) else { return };
            let has = |word| kernel.has(number, seat.position, word);
            has(Has::Written).store(sent.wrapping_sub(has(Has::Redirected).load(SeqCst)), SeqCst);
            has(Has::Acknowledged).store(0, SeqCst);
        }
        for word in [Of::Outstanding, Of::Several, Of::Why] {
            kernel.of(number, word).store(0, SeqCst);
        }
        kernel.put_session(number, &self.session);
        self.timers.give(kernel, number);
        kernel.bucket(number).store(self.bucket, SeqCst);
        // The exchange succeeds only if every passed byte was read: bytes passed from now on change
        // the word.
        let passed = self.place.read() << 1;
        if kernel.of(number, Of::Word).compare_exchange(passed, passed | 1, SeqCst, SeqCst).is_ok() {
            self.place.owner = Owner::Kernel;
            self.place.before = kernel.of(number, Of::Messages).load(Relaxed);
            round.counts.moved(Move::Calm);
            round.counts.in_kernel.fetch_add(1, Relaxed);
            self.watch_ends(round);
        }
    }

    /// Starts the move back to user space, unless the program has started it. User space owns the
    /// conversation once [`Self::take_back`] returns true. Returns true if the caller must call
    /// that from now on.
    pub(crate) fn demote(&mut self, why: Move, kernel: &Kernel) -> bool {
        let (Some(number), Owner::Kernel) = (self.place.number, self.place.owner) else { return false };
        let was = kernel.of(number, Of::Word).fetch_and(!1, SeqCst);
        let said = kernel.of(number, Of::Why).load(SeqCst) as usize;
        let kernels = Move::ALL.get(said).copied().filter(|_| was & 1 == 0);
        self.place.why = Some(kernels.unwrap_or(why));
        self.place.owner = Owner::Neither;
        true
    }

    /// Completes the move back if TCP has all bytes that the program redirected. Returns true if
    /// user space owns the conversation.
    pub(crate) fn take_back(&mut self, round: &mut Round<'_>) -> bool {
        let (Some(number), Owner::Neither, Some(kernel)) =
            (self.place.number, self.place.owner, round.kernel.as_ref())
        else {
            return true;
        };
        let is_sent = |(seat, socket): (Seat, &OwnedFd)| {
            let has = |word| kernel.has(number, seat.position, word).load(SeqCst);
            let wanted = has(Has::Written).wrapping_add(has(Has::Redirected));
            match tcp::position(socket) {
                Ok(Some(sent)) => sent >= wanted,
                // A connection that is over sends nothing more.
                Ok(None) => true,
                // The counts did not settle, so nothing is known.
                Err(_) => false,
            }
        };
        let deciding = kernel.deciding(number);
        if deciding == Deciding::Now || !self.seats().all(is_sent) {
            return false;
        }
        self.session = kernel.session(number);
        kernel.forget_answer(number);
        if let Deciding::Done(verdict) = deciding {
            kernel.of(number, Of::Deciding).store(0, SeqCst);
            // Now, because a content that it answers with is pinned.
            let verdict = verdict.copied(&|stored| round.service.stored(stored));
            self.decided = Some(Decided::Whole(verdict));
        } else if deciding == Deciding::Paid {
            kernel.of(number, Of::Deciding).store(0, SeqCst);
            self.is_paid = true;
        }
        self.place.owner = Owner::User;
        round.counts.in_kernel.fetch_sub(1, Relaxed);
        let why = self.place.why.take().unwrap_or(Move::Ended);
        round.counts.moved(why);
        self.calm.left(why, kernel.of(number, Of::Messages).load(SeqCst) - self.place.before, round.now);
        if kernel.of(number, Of::Outstanding).load(SeqCst) == 1 {
            self.take_outstanding(number, kernel, round);
        }
        self.harvest(round);
        self.came_back(round);
        true
    }

    /// Adds the kernel's messages, bytes and replies since the last call to the counters.
    pub(crate) fn harvest(&mut self, round: &mut Round<'_>) {
        let (Some(number), Some(kernel)) = (self.place.number, round.kernel.as_ref()) else { return };
        let counts = [&round.counts.messages[KERNEL], &round.counts.bytes[KERNEL], &round.counts.replies];
        let words = [Of::Messages, Of::Bytes, Of::Replies];
        for (at, (word, count)) in words.into_iter().zip(counts).enumerate() {
            let now = kernel.of(number, word).load(Relaxed);
            let more = now.saturating_sub(self.place.harvested[at]);
            count.add(more);
            if at == 0 {
                *round.served += more;
            }
            self.place.harvested[at] = now;
        }
        for (seat, link) in self.place.links.iter_mut().zip(&self.links) {
            let (Some(seat), Some(link)) = (seat, link) else { continue };
            let sent = link.backend.sent.own();
            let counts = [&sent.messages, &sent.bytes];
            for (at, (word, count)) in [Has::Messages, Has::Redirected].into_iter().zip(counts).enumerate() {
                let now = kernel.has(number, seat.position, word).load(Relaxed);
                count.add(now.saturating_sub(seat.harvested[at]));
                seat.harvested[at] = now;
            }
        }
    }

    /// Removes the sockets of a conversation that is over from the map.
    pub(super) fn leave_seats(&mut self, kernel: &mut Option<Kernel>) {
        let (Some(number), Some(kernel)) = (self.place.number.take(), kernel) else { return };
        if self.place.client.is_some() {
            kernel.remove(number, 0, &self.client);
        }
        for (seat, link) in self.place.links.drain(..).zip(&self.links) {
            if let (Some(seat), Some(link)) = (seat, link) {
                kernel.remove(number, seat.position, &link.socket);
            }
        }
        kernel.give_number(number);
    }

    /// Allows the sockets to leave the map: each leaves if all passed bytes were read. Returns
    /// false if the conversation cannot leave now.
    pub(crate) fn offer(&mut self, round: &mut Round<'_>) -> bool {
        if !self.place.could_leave() {
            return false;
        }
        if self.reads(round) {
            self.read_client(round);
        }
        for at in 0..self.links.len() {
            if matches!(self.place.links.get(at), Some(Some(_))) && self.reads_replies(at) {
                self.read_link(at, round);
            }
        }
        let (Some(number), Some(kernel)) = (self.place.number, round.kernel.as_ref()) else { return false };
        for (seat, socket) in self.seats() {
            // A high SO_RCVLOWAT keeps most new data in TCP, unseen by the program. It only makes
            // success likelier.
            let _ = set_receive_low_water(socket, HELD);
            kernel.has(number, seat.position, Has::Leaves).store(seat.read + 1, SeqCst);
        }
        true
    }

    /// Records which sockets have left the map; the others stay. Returns true if one has left.
    pub(crate) fn see_left(&mut self, round: &mut Round<'_>) -> bool {
        self.harvest(round);
        let (Some(number), Some(kernel)) = (self.place.number, round.kernel.as_mut()) else { return false };
        for (seat, socket) in self.seats() {
            kernel.has(number, seat.position, Has::Leaves).store(0, SeqCst);
            let _ = set_receive_low_water(socket, 1);
        }
        let gone = self.place.forget_left(kernel);
        // No event was raised for data that arrived after a socket left the map.
        for at in &gone {
            self.watch_again(*at, round);
        }
        !gone.is_empty()
    }

    /// Returns true if nothing is buffered or pending in any direction.
    fn is_still(&self) -> bool {
        let is_still = |link: &Link| link.connecting.is_none() && link.is_idle() && !link.retired;
        !(self.ended || self.stopped || self.broken || self.blocked)
            && self.decided.is_none()
            && self.input.is_empty()
            && self.output.is_empty()
            && self.waiting.is_empty()
            && self.topics.is_empty()
            && self.links.iter().flatten().all(is_still)
    }

    /// Puts the missing sockets into the map. Connections to backends without a place stay outside.
    ///
    /// Returns false if that is impossible now: the program would see the whole of a segment that
    /// was read in part, so no socket with unread data may enter.
    fn take_seats(&mut self, round: &mut Round<'_>) -> std::io::Result<bool> {
        let Some(kernel) = round.kernel.as_mut() else { return Ok(false) };
        let number = match self.place.number {
            Some(number) => number,
            None => {
                let Some(number) = kernel.take_number() else { return Ok(false) };
                (self.place.number, self.place.harvested) = (Some(number), [0; 3]);
                number
            }
        };
        if self.place.client.is_none() {
            if tcp::has_unread(&self.client) {
                return Ok(false);
            }
            kernel.clear(number, 0);
            kernel.insert(number, 0, &self.client)?;
            self.place.client = Some(Seat::default());
        }
        self.place.links.resize(self.links.len(), None);
        for (seat, link) in self.place.links.iter_mut().zip(&self.links) {
            let (None, Some(link)) = (&seat, link) else { continue };
            let at = round.backends.list.iter().position(|backend| Arc::ptr_eq(backend, &link.backend));
            let Some(position) = at.map(|at| at + 1).filter(|position| *position <= kernel.reach()) else {
                continue;
            };
            if tcp::has_unread(&link.socket) {
                return Ok(false);
            }
            kernel.clear(number, position);
            kernel.insert(number, position, &link.socket)?;
            *seat = Some(Seat { position, ..Seat::default() });
        }
        Ok(true)
    }

    /// Returns the sockets that are in the map.
    fn seats(&self) -> impl Iterator<Item = (Seat, &OwnedFd)> {
        let links = self.place.links.iter().zip(&self.links);
        let links = links.filter_map(|(seat, link)| Some(((*seat)?, &link.as_ref()?.socket)));
        let client = self.place.client.map(|seat| (seat, &self.client));
        client.into_iter().chain(links)
    }

    /// Takes over a message whose reply was pending in the kernel.
    fn take_outstanding(&mut self, number: u32, kernel: &Kernel, round: &Round<'_>) {
        let backend = kernel.of(number, Of::Backend).load(SeqCst) as usize;
        let kept = kernel.kept(number);
        let length = kept.len().min(round.properties.kept());
        let at = self.place.links.iter().position(|seat| seat.is_some_and(|seat| seat.position == backend));
        // The connection still exists: only user space removes a connection from the map.
        if let Some(link) = at.and_then(|at| self.links[at].as_mut()) {
            let since = self.waits.take().map_or(round.now, |(_, since)| since);
            let turn = self.waiting.push(&kept[..length]);
            self.waiting.set_key(turn, kernel.kept_key(number));
            link.await_reply(turn, since);
        }
    }
}
