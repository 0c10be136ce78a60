//! The receiving end: all its senders, in turn.
//!
//! A sender is *awake* while the receiver looks at its ring by itself, and rings when it is not. So a busy sender costs no system
//! call, and a thousand idle ones cost nothing.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::fs::{Mode, fchmod};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};
use shunt_sys::Errno;
use shunt_sys::seqpacket::{Credentials, peer_credentials};

use crate::error::{Cause, OpenError, ReceiveError};
use crate::frame::MAX_MESSAGE;
use crate::incoming::{Incoming, Step};
use crate::message::Message;
use crate::wait::{Spin, Wait};

/// One sender of one receiver. Never used again for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SenderId(u64);

impl SenderId {
    /// As a number.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// What [`Receiver::receive`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message is in the caller's [`Message`].
    Message {
        /// Whose it is.
        from: SenderId,
    },
    /// A sender is no more.
    Ended {
        /// Which.
        sender: SenderId,
        /// Why.
        cause: Cause,
    },
}

/// How a receiver is made.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Senders at once; more wait until one has gone.
    pub max_senders: usize,
    /// Bytes of a message; who sends more is ended. At most [`MAX_MESSAGE`].
    pub max_message: usize,
    /// Who may connect, as the mode of the socket's file.
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
    /// Places in `senders` that are empty.
    empty: Vec<usize>,
    count: usize,
    next_id: u64,
    /// Places of those who are looked at, and whose turn is next.
    awake: Vec<usize>,
    turn: usize,
    /// Messages since epoll was asked last.
    unasked: u32,
    ended: VecDeque<(SenderId, Cause)>,
    /// Readable when there is more to do, whatever the senders say.
    nudge: OwnedFd,
    spin: Spin,
    options: Options,
}

#[derive(Debug)]
struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    state: Listening,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listening {
    Yes,
    /// There are as many senders as there may be.
    Full,
    /// Accepting failed then: there are no descriptors left, perhaps.
    Failed(Instant),
}

#[derive(Debug)]
struct Sender {
    id: SenderId,
    incoming: Incoming,
    credentials: Option<Credentials>,
    is_awake: bool,
    /// Looks in a row that found nothing.
    idle: u32,
}

const LISTENER: u64 = u64::MAX;
const NUDGE: u64 = u64::MAX - 1;
const BACKLOG: i32 = 1024;
/// After so many messages, who has rung meanwhile has a turn.
const UNASKED: u32 = 64;
/// After so many looks for nothing, while others are busy, a sender has to ring.
const IDLE: u32 = 256;
/// New senders that are taken before others have their turn.
const ACCEPTS: usize = 16;
/// Turns with a part of a message in one look.
const MORE: u32 = 64;
/// Rounds of one call after which its time counts even if there is something.
const ROUNDS: u32 = 4;
/// When accepting is tried again.
const RETRY: Duration = Duration::from_millis(100);
const EVENTS: usize = 64;

impl Receiver {
    /// One without senders: see [`adopt`](Receiver::adopt).
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

    /// One that senders find at `path`, where nothing must be yet. The file goes when the receiver does.
    pub fn listen(path: impl AsRef<Path>, options: Options) -> Result<Receiver, OpenError> {
        let path = path.as_ref();
        let failed = |doing| move |error| OpenError::of(doing, error);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(failed("making a socket"))?;
        // Before it has a name: nobody else can connect meanwhile.
        fchmod(&socket, Mode::from_raw_mode(options.mode))
            .map_err(failed("setting the mode of the socket"))?;
        let address =
            SocketAddrUnix::new(path.as_os_str().as_bytes()).map_err(failed("naming the socket"))?;
        bind(&socket, &address).map_err(failed("binding the socket to its path"))?;
        let mut receiver = Receiver::new(options)?;
        let data = epoll::EventData::new_u64(LISTENER);
        listen(&socket, BACKLOG)
            .and_then(|()| epoll::add(&receiver.epoll, &socket, data, epoll::EventFlags::IN))
            .map_err(failed("listening"))?;
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        receiver.listener = Some(Listener { socket, path, state: Listening::Yes });
        Ok(receiver)
    }

    /// Takes the other end of a sender's socket, SOCK_SEQPACKET: of a socket pair, or passed by somebody.
    pub fn adopt(&mut self, socket: impl Into<OwnedFd>) -> Result<SenderId, OpenError> {
        self.take(socket.into()).map_err(|error| OpenError::of("taking a sender's socket", error))
    }

    fn take(&mut self, socket: OwnedFd) -> Result<SenderId, Errno> {
        let place = self.empty.pop().unwrap_or_else(|| {
            self.senders.push(None);
            self.senders.len() - 1
        });
        let data = epoll::EventData::new_u64(place as u64);
        if let Err(error) = epoll::add(&self.epoll, &socket, data, epoll::EventFlags::IN) {
            self.empty.push(place);
            return Err(error);
        }
        let id = SenderId(self.next_id);
        self.next_id += 1;
        self.count += 1;
        self.senders[place] = Some(Sender {
            id,
            credentials: peer_credentials(&socket).ok(),
            incoming: Incoming::new(socket, self.options.max_message),
            is_awake: false,
            idle: 0,
        });
        Ok(id)
    }

    /// Who a sender is, as the kernel recorded it when it connected.
    pub fn credentials(&self, sender: SenderId) -> Option<Credentials> {
        self.senders.iter().flatten().find(|other| other.id == sender)?.credentials
    }

    /// Senders now.
    pub fn senders(&self) -> usize {
        self.count
    }

    /// Receives the next message into `message`, whose memory is used again, or says that a sender is no more.
    ///
    /// Messages of one sender come in the order in which it sent them. After [`ReceiveError::WouldBlock`] the receiver,
    /// polled for input, says when to try again. After [`ReceiveError::DescriptorsLost`] the bytes are in `message`.
    pub fn receive(&mut self, message: &mut Message, wait: Wait) -> Result<Event, ReceiveError> {
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
            // Somebody may keep us busy with what never becomes a message.
            let is_idle = sleeps && heard == 0;
            if (is_idle || round >= ROUNDS) && wait.is_over() {
                if !is_idle {
                    rustix::io::write(&self.nudge, &1u64.to_ne_bytes()).map_err(ReceiveError::System)?;
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

    /// One turn of each of those who are awake, until there is something to return.
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
                    // Only beside others: alone, it is looked at until the receiver sleeps.
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

    /// Has everybody ring. `false`: somebody has sent something meanwhile.
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

    /// Has one sender ring, unless there is something of it. An impossible ring is something, too.
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

    /// Waits for doorbells and new senders no longer than this, and wakes those who rang. How many there were.
    fn ask(&mut self, left: Option<Timespec>) -> Result<usize, ReceiveError> {
        self.unasked = 0;
        let left = self.listen_again(left);
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), left.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(1),
            Err(error) => return Err(ReceiveError::System(error)),
        }
        for event in &events {
            match event.data.u64() {
                LISTENER => self.accept(),
                // Only to be seen.
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
            // Its socket may be somebody else's too, and then stays in the set.
            let _ = epoll::delete(&self.epoll, &sender.incoming);
            self.ended.push_back((sender.id, cause));
            self.empty.push(place);
            self.count -= 1;
        }
        if self.listener.as_ref().is_some_and(|listener| listener.state != Listening::Yes) {
            self.set_listening(Listening::Yes);
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            if self.count >= self.options.max_senders {
                return self.set_listening(Listening::Full);
            }
            let Some(listener) = &self.listener else { return };
            match accept_with(&listener.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    if self.take(socket).is_err() {
                        return self.set_listening(Listening::Failed(Instant::now()));
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => return self.set_listening(Listening::Failed(Instant::now())),
            }
        }
    }

    fn set_listening(&mut self, state: Listening) {
        let Some(listener) = &mut self.listener else { return };
        listener.state = state;
        let flags = if state == Listening::Yes { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        // It can fail only for want of a set or a socket, and both are ours.
        let _ = epoll::modify(&self.epoll, &listener.socket, epoll::EventData::new_u64(LISTENER), flags);
    }

    /// Listens again if it is time, and else sees to it that one does not sleep longer.
    fn listen_again(&mut self, left: Option<Timespec>) -> Option<Timespec> {
        let Some(Listener { state: Listening::Failed(then), .. }) = &self.listener else { return left };
        if then.elapsed() >= RETRY {
            self.set_listening(Listening::Yes);
            return left;
        }
        let most = Timespec { tv_sec: 0, tv_nsec: RETRY.as_nanos() as i64 };
        Some(match left {
            Some(left) if left.tv_sec == 0 && left.tv_nsec < most.tv_nsec => left,
            _ => most,
        })
    }
}

impl AsFd for Receiver {
    /// For poll: readable when [`receive`](Receiver::receive), which returned [`ReceiveError::WouldBlock`], should be tried
    /// again.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if let Some(listener) = &self.listener {
            let _ = std::fs::remove_file(&listener.path);
        }
    }
}
