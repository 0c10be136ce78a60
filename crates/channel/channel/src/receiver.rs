//! The receiving end: polls all its senders in turn.
//!
//! A sender is *awake* while the receiver polls its ring. Otherwise the sender sends a
//! doorbell. A busy sender so costs no system call, and a thousand idle ones cost nothing.
//!
//! Example: two of ten senders are busy. The receiver reads their rings in turn. One becomes idle,
//! and after `IDLE` empty checks the receiver announces in its memory that it sleeps. The sender's
//! next message sends a doorbell, epoll reports it, and the sender is awake again.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use shunt_sys::Errno;
use shunt_sys::seqpacket::{Credentials, peer_credentials};

use crate::borrowed::Borrowed;
use crate::error::{Cause, OpenError, ReceiveError};
use crate::frame::MAX_MESSAGE;
use crate::incoming::{Incoming, Step};
use crate::listener::Listener;
use crate::message::Message;
use crate::wait::{Spin, Wait};

/// The identifier of one sender of a receiver. It is never used again for another sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SenderId(u64);

impl SenderId {
    /// Returns the identifier with this number.
    pub fn from_number(number: u64) -> SenderId {
        SenderId(number)
    }

    /// Returns the identifier as a number.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// The result of [`Receiver::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message is in the caller's [`Message`].
    Message {
        /// The sender of the message.
        from: SenderId,
    },
    /// A sender has ended.
    Ended {
        /// The sender.
        sender: SenderId,
        /// The reason.
        cause: Cause,
    },
}

/// The options of a receiver.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The most senders at a time; further ones wait until one has gone.
    pub max_senders: usize,
    /// The most bytes of a message; a sender that exceeds it is ended. At most [`MAX_MESSAGE`].
    pub max_message: usize,
    /// The mode of the socket's file, which determines the users that may connect.
    pub mode: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options { max_senders: 1024, max_message: MAX_MESSAGE, mode: 0o600 }
    }
}

/// The receiving end of any number of senders.
#[derive(Debug)]
pub struct Receiver {
    epoll: OwnedFd,
    listener: Option<Listener>,
    senders: Vec<Option<Sender>>,
    /// Indexes of empty entries in `senders`.
    empty: Vec<usize>,
    count: usize,
    next_id: u64,
    /// Indexes of the senders that are awake. `turn` is the position of the next one.
    awake: Vec<usize>,
    turn: usize,
    /// Number of messages since the last epoll_wait.
    unasked: u32,
    ended: VecDeque<(SenderId, Cause)>,
    /// Readable when a call left work behind, independently of the senders.
    nudge: OwnedFd,
    spin: Spin,
    options: Options,
}

#[derive(Debug)]
struct Sender {
    id: SenderId,
    incoming: Incoming,
    credentials: Option<Credentials>,
    is_awake: bool,
    /// Number of consecutive checks that found nothing.
    idle: u32,
}

const LISTENER: u64 = u64::MAX;
const NUDGE: u64 = u64::MAX - 1;
/// After this number of messages, senders that have sent doorbells meanwhile get a turn.
const UNASKED: u32 = 64;
/// After this number of empty checks while others are busy, a sender must send a doorbell.
const IDLE: u32 = 256;
/// Most new senders that are accepted before others get a turn.
const ACCEPTS: usize = 16;
/// Most turns with a part of a message in one pass.
const MORE: u32 = 64;
/// Number of rounds of one call after which its time-out applies even if there is work.
const ROUNDS: u32 = 4;
const EVENTS: usize = 64;

impl Receiver {
    /// Returns a receiver without senders: see [`adopt`](Receiver::adopt).
    pub fn new(options: Options) -> Result<Receiver, OpenError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| OpenError::of("making an epoll instance", error))?;
        let nudge = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| OpenError::of("making an eventfd", error))?;
        let data = epoll::EventData::new_u64(NUDGE);
        epoll::add(&epoll, &nudge, data, epoll::EventFlags::IN)
            .map_err(|error| OpenError::of("watching an eventfd", error))?;
        let options = Options { max_message: options.max_message.min(MAX_MESSAGE), ..options };
        Ok(Receiver {
            epoll,
            listener: None,
            senders: Vec::new(),
            empty: Vec::new(),
            count: 0,
            next_id: 0,
            awake: Vec::new(),
            turn: 0,
            unasked: 0,
            ended: VecDeque::new(),
            nudge,
            spin: Spin::new(),
            options,
        })
    }

    /// Returns a receiver that listens at `path`, where no file may exist yet. The file is removed
    /// with the receiver.
    pub fn listen(path: impl AsRef<Path>, options: Options) -> Result<Receiver, OpenError> {
        let listener = Listener::bind(path.as_ref(), options.mode, LISTENER)?;
        let mut receiver = Receiver::new(options)?;
        listener.start(&receiver.epoll).map_err(|error| OpenError::of("listening", error))?;
        receiver.listener = Some(listener);
        Ok(receiver)
    }

    /// Takes the other end of a sender's socket, SOCK_SEQPACKET: one of a socket pair, or one that
    /// another process has passed.
    pub fn adopt(&mut self, socket: impl Into<OwnedFd>) -> Result<SenderId, OpenError> {
        let incoming = Incoming::new(socket.into(), self.options.max_message);
        self.take(incoming).map_err(|error| OpenError::of("taking a sender's socket", error))
    }

    /// Takes the other end of a publisher's socket.
    pub(crate) fn adopt_publisher(&mut self, socket: OwnedFd) -> Result<SenderId, OpenError> {
        let incoming = Incoming::of_publisher(socket, self.options.max_message);
        self.take(incoming).map_err(|error| OpenError::of("taking a publisher's socket", error))
    }

    fn take(&mut self, incoming: Incoming) -> Result<SenderId, Errno> {
        let place = self.empty.pop().unwrap_or_else(|| {
            self.senders.push(None);
            self.senders.len() - 1
        });
        let data = epoll::EventData::new_u64(place as u64);
        if let Err(error) = epoll::add(&self.epoll, &incoming, data, epoll::EventFlags::IN) {
            self.empty.push(place);
            return Err(error);
        }
        let id = SenderId(self.next_id);
        self.next_id += 1;
        self.count += 1;
        self.senders[place] = Some(Sender {
            id,
            credentials: peer_credentials(&incoming).ok(),
            incoming,
            is_awake: false,
            idle: 0,
        });
        Ok(id)
    }

    /// Returns the credentials of a sender, as the kernel recorded them when it connected.
    pub fn credentials(&self, sender: SenderId) -> Option<Credentials> {
        self.senders.iter().flatten().find(|other| other.id == sender)?.credentials
    }

    /// Returns the current number of senders.
    pub fn senders(&self) -> usize {
        self.count
    }

    /// Receives the next message into `message`, whose memory is reused, or reports the end of a
    /// sender.
    ///
    /// Messages of one sender come in the order in which it sent them. After
    /// [`ReceiveError::WouldBlock`], poll the receiver for input, and try again when it is
    /// readable. After [`ReceiveError::DescriptorsLost`] the bytes are in `message`.
    pub fn receive(&mut self, message: &mut Message, wait: Wait) -> Result<Event, ReceiveError> {
        let result = self.take_next(message, wait);
        let _ = message.settle();
        result
    }

    /// Receives as [`receive`](Receiver::receive) does, and does not copy a message that its sender
    /// has [lent](crate::Sender::loan). The memory goes back to the sender with the next borrow into
    /// `borrowed`, or when `borrowed` is cleared or dropped. Other messages are copied.
    pub fn borrow(&mut self, borrowed: &mut Borrowed, wait: Wait) -> Result<Event, ReceiveError> {
        // Memory goes back before the wait, because its sender may need it for the next message.
        borrowed.clear();
        self.take_next(borrowed.message(), wait)
    }

    pub(crate) fn take_next(&mut self, message: &mut Message, wait: Wait) -> Result<Event, ReceiveError> {
        if self.unasked >= UNASKED {
            self.ask(Some(Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        }
        let mut round = 0u32;
        loop {
            if let Some(result) = self.look(message) {
                self.unasked += 1;
                return result;
            }
            if self.listener.is_none() && self.count == 0 {
                return Err(ReceiveError::NoSenders);
            }
            if wait != Wait::Never && !self.awake.is_empty() {
                let mut spin = std::mem::replace(&mut self.spin, Spin::new());
                let found = spin.until(|| self.look(message));
                self.spin = spin;
                if let Some(result) = found {
                    self.unasked += 1;
                    return result;
                }
            }
            let sleeps = self.announce_sleep();
            let left = if sleeps { wait.left() } else { Some(Timespec { tv_sec: 0, tv_nsec: 0 }) };
            let heard = self.ask(left)?;
            // A sender may keep the receiver busy without ever completing a message.
            let is_idle = sleeps && heard == 0;
            if (is_idle || round >= ROUNDS) && wait.is_over() {
                if !is_idle {
                    self.nudge()?;
                }
                return Err(if wait == Wait::Never {
                    ReceiveError::WouldBlock
                } else {
                    ReceiveError::TimedOut
                });
            }
            round = round.saturating_add(1);
        }
    }

    /// Makes the receiver readable, because a call leaves work behind.
    pub(crate) fn nudge(&self) -> Result<(), ReceiveError> {
        rustix::io::write(&self.nudge, &1u64.to_ne_bytes()).map(drop).map_err(ReceiveError::System)
    }

    /// Ends a sender.
    pub(crate) fn refuse(&mut self, sender: SenderId, cause: Cause) {
        let is_it = |other: &Option<Sender>| other.as_ref().is_some_and(|other| other.id == sender);
        if let Some(place) = self.senders.iter().position(is_it) {
            self.end(place, cause);
        }
    }

    /// Gives each awake sender one turn, until there is a result.
    #[inline]
    fn look(&mut self, message: &mut Message) -> Option<Result<Event, ReceiveError>> {
        let mut left = self.awake.len();
        let mut more = 0;
        while left > 0 {
            left -= 1;
            if self.turn >= self.awake.len() {
                self.turn = 0;
            }
            let place = self.awake[self.turn];
            let sender = self.senders[place].as_mut().expect("who is awake is there");
            match sender.incoming.step(message) {
                Ok(Step::Whole(lost)) => {
                    sender.idle = 0;
                    self.turn += 1;
                    let from = sender.id;
                    return Some(match lost {
                        None => Ok(Event::Message { from }),
                        Some(lost) => Err(ReceiveError::DescriptorsLost {
                            from,
                            sent: lost.sent,
                            arrived: lost.arrived,
                        }),
                    });
                }
                Ok(Step::More) => {
                    sender.idle = 0;
                    self.turn += 1;
                    if more < MORE {
                        (left, more) = (left + 1, more + 1);
                    }
                }
                Ok(Step::Nothing) => {
                    sender.idle += 1;
                    // Only while others are awake: a single sender is polled until the receiver
                    // sleeps.
                    if sender.idle >= IDLE && self.awake.len() > 1 && !self.keeps_awake(place) {
                        self.awake.swap_remove(self.turn);
                    } else {
                        self.turn += 1;
                    }
                }
                Err(cause) => self.end(place, cause),
            }
        }
        let (sender, cause) = self.ended.pop_front()?;
        Some(Ok(Event::Ended { sender, cause }))
    }

    /// Announces the sleep to all senders. Returns `false` if one of them has sent something
    /// meanwhile.
    fn announce_sleep(&mut self) -> bool {
        let mut at = 0;
        while at < self.awake.len() {
            if self.keeps_awake(self.awake[at]) {
                at += 1;
            } else {
                self.awake.swap_remove(at);
            }
        }
        self.awake.is_empty() && self.ended.is_empty()
    }

    /// Announces the sleep to one sender, unless its ring has data. A ring in an impossible state
    /// counts as data.
    fn keeps_awake(&mut self, place: usize) -> bool {
        let sender = self.senders[place].as_mut().expect("who is awake is there");
        sender.idle = 0;
        sender.incoming.announce_sleep();
        sender.is_awake = sender.incoming.has_something().unwrap_or(true);
        if sender.is_awake {
            sender.incoming.awake();
        }
        sender.is_awake
    }

    /// Waits for doorbells and new senders until the time-out `left`, and wakes the senders that
    /// sent doorbells. Returns the number of events.
    fn ask(&mut self, left: Option<Timespec>) -> Result<usize, ReceiveError> {
        self.unasked = 0;
        let left = match &mut self.listener {
            Some(listener) => listener.retry(&self.epoll, left),
            None => left,
        };
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), left.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(1),
            Err(error) => return Err(ReceiveError::System(error)),
        }
        for event in &events {
            match event.data.u64() {
                LISTENER => self.accept(),
                // Only has to be reported.
                NUDGE => drop(rustix::io::read(&self.nudge, &mut [0; 8])),
                place => self.hear(place as usize),
            }
        }
        Ok(events.len())
    }

    fn hear(&mut self, place: usize) {
        let Some(Some(sender)) = self.senders.get_mut(place) else { return };
        if let Err(cause) = sender.incoming.listen() {
            return self.end(place, cause);
        }
        if !sender.is_awake {
            sender.incoming.awake();
            (sender.is_awake, sender.idle) = (true, 0);
            self.awake.push(place);
        }
    }

    fn end(&mut self, place: usize, cause: Cause) {
        self.awake.retain(|other| *other != place);
        if let Some(sender) = self.senders[place].take() {
            // The socket may have other holders too, and would then stay in the epoll instance.
            let _ = epoll::delete(&self.epoll, &sender.incoming);
            self.ended.push_back((sender.id, cause));
            self.empty.push(place);
            self.count -= 1;
        }
        if let Some(listener) = &mut self.listener {
            listener.resume(&self.epoll);
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            let has_room = self.count < self.options.max_senders;
            let Some(listener) = &mut self.listener else { return };
            let Some(socket) = listener.accept(&self.epoll, has_room) else { return };
            if self.take(Incoming::new(socket, self.options.max_message)).is_err()
                && let Some(listener) = &mut self.listener
            {
                return listener.fail(&self.epoll);
            }
        }
    }
}

impl AsFd for Receiver {
    /// Returns a descriptor for poll. It becomes readable when a [`receive`](Receiver::receive)
    /// that returned [`ReceiveError::WouldBlock`] should be tried again.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
