//! The end that sends each message to all of its subscribers, and waits for none of them.
//!
//! ```text
//!                     history: the last N messages
//! publish ──> number ──┬──> ring of subscriber 1 ──> current
//!                      ├──> ring of subscriber 2, full ──> behind: the message waits in the history
//!                      └──> ring of subscriber 3, new ──> the history first, then this one
//! ```
//!
//! A subscriber has its own ring, as the receiver of a [`Sender`](crate::Sender) has, and differs
//! from one only by the numbers of messages. A short message is copied into each ring. A
//! long one is in a slot that all subscribers map for reading only, and its rings have the frame.
//!
//! **States of a subscriber.** It is *current* if it was sent everything, and *behind* otherwise.
//! Messages leave the history while it is behind: it misses them, and the number of its next message
//! shows how many. It *ends* if it closes or breaks the protocol.
//!
//! **States of a slot.** *Free*, *held* by the program, or *used*: its message is in the history, or
//! subscribers have it, each until it gives it back. If no slot is free, and there is no memory for
//! more, the oldest message that has left the history is *revoked* from the subscribers that have it.
//! If there is none, the history gives up its oldest ones. `docs/channel-protocol.md` has the tables.

mod memory;
mod outgoing;

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use shunt_sys::Errno;
use shunt_sys::seqpacket::Credentials;

use crate::error::{OpenError, SendError};
use crate::frame::MAX_MESSAGE;
use crate::listener::Listener;
use crate::sender::Loan;
use crate::wait::{Spin, Wait};
use memory::Memory;
use outgoing::Outgoing;

/// The most bytes of a message that is copied into each ring.
const COPIED: usize = 2048;
/// The least number of long messages that a subscriber may have at a time.
const HELD: usize = 4;
const LISTENER: u64 = u64::MAX;
/// While messages are published, subscribers are attended to once in this time, or in this number of
/// messages.
const ATTEND: Duration = Duration::from_millis(1);
const UNATTENDED: u32 = 64;
/// Number of turns of one call after which its time-out applies even if there is work.
const ROUNDS: u32 = 16;
/// Most events and new subscribers in a turn between two messages, and in one of `attend`.
const BRIEF: Turn = Turn { events: 4, accepts: 1 };
const FULL: Turn = Turn { events: 64, accepts: 16 };

/// The most work of one turn. What a hostile subscriber causes takes so long at the most.
#[derive(Clone, Copy, Debug)]
struct Turn {
    events: usize,
    accepts: usize,
}

/// The identifier of one subscriber of a publisher. It is never used again for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SubscriberId(u64);

impl SubscriberId {
    /// Returns the identifier with this number.
    pub fn from_number(number: u64) -> SubscriberId {
        SubscriberId(number)
    }

    /// Returns the identifier as a number.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// The options of a publisher.
#[derive(Clone, Copy, Debug)]
pub struct PublisherOptions {
    /// How many of the last messages are kept, for subscribers that come later or are slow. The
    /// default is none.
    pub history: usize,
    /// The most subscribers at a time; further ones wait until one has gone. The default is 64.
    pub max_subscribers: usize,
    /// Bytes of each subscriber's ring, allocated when it comes: a power of two from 4 KiB to 16 MiB.
    /// The default is 64 KiB.
    pub ring_bytes: usize,
    /// The most bytes of memory for messages of more than 2 KiB, without the first of each length. At
    /// most 256 MiB; the default is 64 MiB.
    pub lent_bytes: usize,
    /// The mode of the socket's file, which determines the users that may subscribe.
    pub mode: u32,
}

impl Default for PublisherOptions {
    fn default() -> PublisherOptions {
        PublisherOptions {
            history: 0,
            max_subscribers: 64,
            ring_bytes: 64 * 1024,
            lent_bytes: 64 << 20,
            mode: 0o600,
        }
    }
}

/// The state of a subscriber.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubscriberState {
    /// It was sent all messages.
    Current,
    /// It has no room for the next message, or keeps too many long ones.
    Behind,
}

/// A subscriber, as its publisher sees it.
#[derive(Clone, Copy, Debug)]
pub struct SubscriberStatus {
    /// The subscriber.
    pub id: SubscriberId,
    /// Its state.
    pub state: SubscriberState,
    /// How many messages it was not sent, because they had left the history before it had room.
    pub missed: u64,
    /// How many messages it was sent, and did not give back before their memory was needed.
    pub revoked: u64,
    /// Its credentials, as the kernel recorded them when it connected.
    pub credentials: Option<Credentials>,
}

/// Counts since the last [`Publisher::attend`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attended {
    /// Number of new subscribers.
    pub joined: u64,
    /// Number of subscribers that have closed or died.
    pub left: u64,
    /// Number of subscribers that were disconnected, because they broke the protocol.
    pub refused: u64,
}

/// The last messages.
#[derive(Debug, Default)]
struct History {
    kept: VecDeque<Kept>,
    /// The number of the next message.
    next: u64,
}

#[derive(Debug)]
enum Kept {
    Copied(Vec<u8>),
    Lent { slot: usize, len: usize },
}

impl History {
    /// Returns the number of the first message that is kept.
    fn first(&self) -> u64 {
        self.next - self.kept.len() as u64
    }

    fn message(&self, number: u64) -> Option<&Kept> {
        self.kept.get(usize::try_from(number.checked_sub(self.first())?).ok()?)
    }
}

/// The end that sends each message to all of its subscribers.
///
/// ```
/// use shunt_channel::{Message, Publisher, PublisherOptions, Subscriber, Wait};
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("prices");
/// let mut publisher = Publisher::listen(&path, PublisherOptions { history: 2, ..Default::default() })?;
/// for price in ["10", "11", "12"] {
///     publisher.publish(price.as_bytes())?;
/// }
/// let mut late = Subscriber::connect(&path, Wait::Forever)?;
/// publisher.attend(Wait::Forever)?;
/// let mut message = Message::new();
/// for price in ["11", "12"] {
///     late.receive(&mut message, Wait::Forever)?;
///     assert_eq!(message.bytes(), price.as_bytes());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Publisher {
    epoll: OwnedFd,
    listener: Option<Listener>,
    subscribers: Vec<Option<Outgoing>>,
    /// Indexes of empty entries in `subscribers`.
    empty: Vec<usize>,
    count: usize,
    next_id: u64,
    history: History,
    memory: Memory,
    /// Buffer of a message that has left the history.
    spare: Vec<u8>,
    attended: Attended,
    last_turn: Instant,
    unattended: u32,
    spin: Spin,
    options: PublisherOptions,
}

impl Publisher {
    /// Returns a publisher without subscribers: see [`adopt`](Publisher::adopt).
    pub fn new(options: PublisherOptions) -> Result<Publisher, OpenError> {
        if shunt_ring::split::sender_bytes(options.ring_bytes).is_none() {
            let doing = "making rings that are not a power of two from 4 KiB to 16 MiB";
            return Err(OpenError::of(doing, Errno::INVAL));
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| OpenError::of("making an epoll instance", error))?;
        Ok(Publisher {
            epoll,
            listener: None,
            subscribers: Vec::new(),
            empty: Vec::new(),
            count: 0,
            next_id: 0,
            history: History::default(),
            memory: Memory::new(options.lent_bytes),
            spare: Vec::new(),
            attended: Attended::default(),
            last_turn: Instant::now(),
            unattended: 0,
            spin: Spin::new(),
            options,
        })
    }

    /// Returns a publisher that listens at `path`, where no file may exist yet. The file is removed
    /// with the publisher.
    pub fn listen(path: impl AsRef<Path>, options: PublisherOptions) -> Result<Publisher, OpenError> {
        let mut publisher = Publisher::new(options)?;
        let listener = Listener::bind(path.as_ref(), options.mode, LISTENER)?;
        listener.start(&publisher.epoll).map_err(|error| OpenError::of("listening", error))?;
        publisher.listener = Some(listener);
        Ok(publisher)
    }

    /// Takes the other end of a subscriber's socket, SOCK_SEQPACKET: one of a socket pair, or one that
    /// another process has passed. The subscriber gets the history.
    pub fn adopt(&mut self, socket: impl Into<OwnedFd>) -> Result<SubscriberId, OpenError> {
        let id = SubscriberId(self.next_id);
        let outgoing = Outgoing::new(id, socket.into(), self.options.ring_bytes, self.history.first())?;
        let place = self.empty.pop().unwrap_or_else(|| {
            self.subscribers.push(None);
            self.subscribers.len() - 1
        });
        let data = epoll::EventData::new_u64(place as u64);
        if let Err(error) = epoll::add(&self.epoll, outgoing.socket(), data, epoll::EventFlags::IN) {
            self.empty.push(place);
            return Err(OpenError::of("watching a subscriber's socket", error));
        }
        self.next_id += 1;
        self.count += 1;
        self.attended.joined += 1;
        self.subscribers[place] = Some(outgoing);
        self.deliver(place);
        Ok(id)
    }

    /// Publishes a copy of a message, and returns its number. Waits for no subscriber.
    pub fn publish(&mut self, bytes: &[u8]) -> Result<u64, SendError> {
        if bytes.len() > COPIED.min(self.options.ring_bytes / 4) {
            let mut loan = self.loan(bytes.len())?;
            loan.copy_from_slice(bytes);
            return self.commit(loan);
        }
        let mut copy = std::mem::take(&mut self.spare);
        copy.clear();
        copy.extend_from_slice(bytes);
        Ok(self.send(Kept::Copied(copy)))
    }

    /// Returns memory for a message of `len` bytes, which [`commit`](Publisher::commit) publishes
    /// without a copy. It has bytes of an earlier message. **Subscribers can read it before it is
    /// published.** Waits for no subscriber: memory that one keeps for too long is taken from it.
    pub fn loan(&mut self, len: usize) -> Result<Loan, SendError> {
        if len > MAX_MESSAGE {
            return Err(SendError::TooLong(len));
        }
        loop {
            if let Some(loan) = self.memory.lend(len) {
                return Ok(loan);
            }
            self.take_what_is_over();
            if let Some(loan) = self.memory.lend(len) {
                return Ok(loan);
            }
            let error = match self.memory.grow(len) {
                Ok(true) => continue,
                Ok(false) => SendError::TooManyLoans,
                Err(error) => error,
            };
            if let Some(loan) = self.memory.lend_longer(len) {
                return Ok(loan);
            }
            if !self.reclaim(len) {
                return Err(error);
            }
        }
    }

    /// Publishes a loan, and returns the number of the message. Waits for no subscriber.
    pub fn commit(&mut self, mut loan: Loan) -> Result<u64, SendError> {
        let len = loan.len();
        let slot = self.memory.keep(&mut loan).ok_or(SendError::NotLent)?;
        Ok(self.send(Kept::Lent { slot, len }))
    }

    /// Numbers a message, and sends it to all subscribers that have room for it.
    fn send(&mut self, message: Kept) -> u64 {
        self.unattended += 1;
        if self.unattended >= UNATTENDED || self.last_turn.elapsed() >= ATTEND {
            // An error will be reported by `attend`.
            let _ = self.turn(Some(Timespec { tv_sec: 0, tv_nsec: 0 }), BRIEF);
        }
        let number = self.history.next;
        self.history.kept.push_back(message);
        self.history.next += 1;
        self.deliver_to_all();
        while self.history.kept.len() > self.options.history {
            self.forget_oldest();
        }
        number
    }

    /// Sends each subscriber what it lacks, as far as there is room. Costs no system call for those
    /// that are behind and have none.
    fn deliver_to_all(&mut self) {
        for place in 0..self.subscribers.len() {
            if let Some(outgoing) = &mut self.subscribers[place]
                && outgoing.is_worth_trying(&mut self.memory, self.options.history.max(HELD))
            {
                self.deliver(place);
            }
        }
    }

    /// Returns whether a subscriber is behind.
    pub fn is_behind(&self) -> bool {
        self.subscribers.iter().flatten().any(|outgoing| outgoing.state() == SubscriberState::Behind)
    }

    /// Sends a subscriber what it lacks, as far as there is room.
    fn deliver(&mut self, place: usize) {
        let limit = self.options.history.max(HELD);
        if let Some(outgoing) = &mut self.subscribers[place]
            && let Err(error) = outgoing.deliver(&self.history, &mut self.memory, limit)
        {
            self.end(place, error);
        }
    }

    fn forget_oldest(&mut self) {
        match self.history.kept.pop_front() {
            Some(Kept::Copied(buffer)) => self.spare = buffer,
            Some(Kept::Lent { slot, .. }) => self.memory.forget(slot),
            None => {}
        }
    }

    /// Notices which slots subscribers have given back.
    fn take_what_is_over(&mut self) {
        for place in 0..self.subscribers.len() {
            if let Some(outgoing) = &mut self.subscribers[place]
                && let Err(error) = outgoing.take_what_is_over(&mut self.memory)
            {
                self.end(place, error);
            }
        }
    }

    /// Makes a slot for `len` bytes free sooner: revokes the oldest message from its subscribers, or
    /// gives up a part of the history. Returns whether it has done either.
    fn reclaim(&mut self, len: usize) -> bool {
        let first = self.history.first();
        let subscribers = self.subscribers.iter().flatten();
        let oldest = subscribers.filter_map(|outgoing| outgoing.oldest(&self.memory, len)).min();
        if let Some(oldest) = oldest.filter(|oldest| *oldest < first) {
            for outgoing in self.subscribers.iter_mut().flatten() {
                outgoing.revoke(oldest, &mut self.memory);
            }
            return true;
        }
        let is_long = |kept: &Kept| matches!(kept, Kept::Lent { slot, .. } if self.memory.fits(*slot, len));
        let Some(at) = self.history.kept.iter().position(is_long) else { return false };
        (0..=at).for_each(|_| self.forget_oldest());
        true
    }

    /// Accepts new subscribers, sends those that are behind what they lack, and notices those that
    /// have ended. Returns when there is a subscriber more or less, or when the time is over.
    ///
    /// [`publish`](Publisher::publish) does a part of that too. A publisher that does not publish
    /// for a while attends when it is readable for poll.
    pub fn attend(&mut self, wait: Wait) -> Result<Attended, Errno> {
        loop {
            let is_due = self.attended != Attended::default();
            self.turn(if is_due { Wait::Never.left() } else { wait.left() }, FULL)?;
            if self.attended != Attended::default() || wait.is_over() {
                return Ok(std::mem::take(&mut self.attended));
            }
        }
    }

    /// Attends for one turn. Returns the counts, and the number of events.
    #[cfg(feature = "tokio")]
    pub(crate) fn attend_once(&mut self) -> Result<(Attended, usize), Errno> {
        let heard = self.turn(Wait::Never.left(), FULL)?;
        Ok((std::mem::take(&mut self.attended), heard))
    }

    /// Attends for one turn, and leaves the counts to the next [`attend`](Self::attend).
    #[cfg(feature = "tokio")]
    pub(crate) fn turn_once(&mut self) -> Result<usize, Errno> {
        self.turn(Wait::Never.left(), FULL)
    }

    /// Attends to the subscribers until none is behind. Returns `false` if one still is when the time
    /// is over. A message that was sent reaches its subscriber also after the publisher has closed.
    pub fn flush(&mut self, wait: Wait) -> Result<bool, Errno> {
        for round in 0u32.. {
            if self.is_behind() && wait != Wait::Never {
                let mut spin = std::mem::replace(&mut self.spin, Spin::new());
                spin.until(|| {
                    self.deliver_to_all();
                    (!self.is_behind()).then_some(())
                });
                self.spin = spin;
            }
            if !self.is_behind() {
                return Ok(true);
            }
            let heard = self.turn(wait.left(), FULL)?;
            // One may keep the publisher busy without ever reading anything.
            if (heard == 0 || round >= ROUNDS) && wait.is_over() {
                break;
            }
        }
        Ok(!self.is_behind())
    }

    /// Waits for events until the time-out `left`, and handles some. Returns how many there were.
    fn turn(&mut self, left: Option<Timespec>, most: Turn) -> Result<usize, Errno> {
        self.unattended = 0;
        let left = match &mut self.listener {
            Some(listener) => listener.retry(&self.epoll, left),
            None => left,
        };
        let mut space = [const { MaybeUninit::uninit() }; FULL.events];
        let events = match epoll::wait(&self.epoll, &mut space[..most.events], left.as_ref()) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(1),
            Err(error) => return Err(error),
        };
        for event in &*events {
            match event.data.u64() {
                LISTENER => self.accept(most.accepts),
                place => self.hear(place as usize),
            }
        }
        self.last_turn = Instant::now();
        Ok(events.len())
    }

    fn hear(&mut self, place: usize) {
        let Some(Some(outgoing)) = self.subscribers.get_mut(place) else { return };
        match outgoing.hear() {
            Ok(()) => self.deliver(place),
            Err(error) => self.end(place, error),
        }
    }

    fn accept(&mut self, most: usize) {
        for _ in 0..most {
            let has_room = self.count < self.options.max_subscribers;
            let Some(listener) = &mut self.listener else { return };
            let Some(socket) = listener.accept(&self.epoll, has_room) else { return };
            match self.adopt(socket) {
                Ok(_) => {}
                // It has gone already.
                Err(error) if matches!(error.errno(), Errno::PIPE | Errno::CONNRESET) => {}
                Err(_) => {
                    if let Some(listener) = &mut self.listener {
                        listener.fail(&self.epoll);
                    }
                    return;
                }
            }
        }
    }

    fn end(&mut self, place: usize, error: SendError) {
        let Some(outgoing) = self.subscribers[place].take() else { return };
        // The socket may have other holders too, and would then stay in the epoll instance.
        let _ = epoll::delete(&self.epoll, outgoing.socket());
        outgoing.release_all(&mut self.memory);
        self.empty.push(place);
        self.count -= 1;
        match error {
            SendError::Gone => self.attended.left += 1,
            _ => self.attended.refused += 1,
        }
        if let Some(listener) = &mut self.listener {
            listener.resume(&self.epoll);
        }
    }

    /// Returns the subscribers.
    pub fn subscribers(&self) -> impl Iterator<Item = SubscriberStatus> {
        self.subscribers.iter().flatten().map(|outgoing| outgoing.status(self.history.first()))
    }

    /// Returns the number of the next message.
    pub fn next_number(&self) -> u64 {
        self.history.next
    }

    /// Returns how many messages are kept for subscribers that come later.
    pub fn kept(&self) -> usize {
        self.history.kept.len()
    }
}

impl AsFd for Publisher {
    /// Returns a descriptor for poll. It is readable when [`attend`](Publisher::attend) has something
    /// to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
