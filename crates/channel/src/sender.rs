//! The sending end.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use shunt_ring::bytes::Ring;
use shunt_ring::{Misbehaved, PrivateLane, Producer, Published, Source};
use shunt_sys::mapping::Mapping;
use shunt_sys::{Errno, memfd, seqpacket};

use crate::error::{OpenError, SendError};
use crate::frame::{ABORT, FIRST, Frame, HEADER, LAST, MAX_DESCRIPTORS, MAX_MESSAGE, MEMORY};
use crate::notice::{self, Notice};
use crate::wait::{Spin, Wait};

/// Bytes of a ring. Both ends copy at the same time, and what one has copied is still in the cache when the other does.
const RING: usize = 512 * 1024;
/// How long a receiver may take to have room for one more connection, or for descriptors, between two tries.
const PAUSE: Duration = Duration::from_millis(1);

/// The sending end. Many may send to one receiver, each by one of these.
#[derive(Debug)]
pub struct Sender {
    socket: OwnedFd,
    memory: PrivateLane,
    producer: Producer,
    /// Messages with descriptors so far.
    passed: u64,
    /// The receiver has begun to receive a message that was given up.
    owes_abort: bool,
    broken: Option<SendError>,
    spin: Spin,
}

impl From<Misbehaved> for SendError {
    fn from(_: Misbehaved) -> SendError {
        SendError::Misbehaved
    }
}

impl Sender {
    /// Connects to the receiver that listens at `path`. If that has more new senders than it can take at once, it waits.
    pub fn connect(path: impl AsRef<Path>, wait: Wait) -> Result<Sender, OpenError> {
        let path = path.as_ref().as_os_str().as_bytes();
        loop {
            match seqpacket::connect(path) {
                Ok(socket) => return Sender::over(socket),
                Err(Errno::AGAIN) if !wait.is_over() => std::thread::sleep(PAUSE),
                Err(error) => return Err(OpenError::of("connecting to the receiver", error)),
            }
        }
    }

    /// Sends over a socket, SOCK_SEQPACKET, whose other end a receiver has, or will have.
    pub fn over(socket: impl Into<OwnedFd>) -> Result<Sender, OpenError> {
        let failed = |doing| move |error| OpenError::of(doing, error);
        let len = PrivateLane::bytes(RING).expect("a size that there can be");
        let file = memfd::create_fixed("shunt-channel", len).map_err(failed("making shared memory"))?;
        let mapping = Mapping::map(&file, len).map_err(failed("mapping shared memory"))?;
        let memory = PrivateLane::over(mapping)
            .ok_or_else(|| OpenError::of("putting memory behind it", Errno::NOMEM))?;
        let socket = socket.into();
        notice::greet(&socket, RING, file.as_fd()).map_err(failed("greeting the receiver"))?;
        Ok(Sender {
            socket,
            memory,
            producer: Producer::new(),
            passed: 0,
            owes_abort: false,
            broken: None,
            spin: Spin::new(),
        })
    }

    /// Sends a message: these bytes, and copies of these descriptors. The receiver gets all of it, or, after an error, nothing.
    ///
    /// It returns when the message is in memory that the receiver reads, or, if it is longer than that memory, mostly. A
    /// message that is too long to be there and must not wait is copied into memory of its own.
    pub fn send(
        &mut self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<(), SendError> {
        let result = self.try_send(bytes, descriptors, wait);
        self.note(result)
    }

    /// Sends a message that is in memory already, as it is: a memfd that holds nothing else, sealed against shrinking,
    /// growing and writing. Nothing is copied at either end.
    pub fn send_memory(
        &mut self,
        memory: impl AsFd,
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<(), SendError> {
        let result = self.try_send_memory(memory.as_fd(), descriptors, wait);
        self.note(result)
    }

    fn try_send(
        &mut self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<(), SendError> {
        self.check(bytes.len(), descriptors.len())?;
        self.abort(wait)?;
        let half = self.memory.len() / 2;
        if HEADER + bytes.len() <= half {
            self.make_room(HEADER + bytes.len(), wait)?;
            self.pass(descriptors, wait)?;
            let (len, count) = (bytes.len() as u32, descriptors.len() as u32);
            let frame = Frame { flags: FIRST | LAST, len, total: len, descriptors: count };
            return self.put(frame, bytes);
        }
        if wait == Wait::Never {
            let memory = memfd::create_with("shunt-message", bytes).map_err(|_| SendError::NoMemory)?;
            return self.try_send_memory(memory.as_fd(), descriptors, wait);
        }
        self.send_in_pieces(bytes, descriptors, wait, half / 2 - HEADER)
    }

    fn send_in_pieces(
        &mut self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
        piece: usize,
    ) -> Result<(), SendError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let is_first = rest.len() == bytes.len();
            let (now, later) = rest.split_at(piece.min(rest.len()));
            if let Err(error) = self.make_room(HEADER + now.len(), wait) {
                self.owes_abort = !is_first;
                return Err(error);
            }
            let mut frame = Frame { flags: 0, len: now.len() as u32, total: 0, descriptors: 0 };
            if is_first {
                self.pass(descriptors, wait)?;
                frame.flags = FIRST;
                (frame.total, frame.descriptors) = (bytes.len() as u32, descriptors.len() as u32);
            } else if later.is_empty() {
                frame.flags = LAST;
            }
            self.put(frame, now)?;
            rest = later;
        }
        Ok(())
    }

    fn try_send_memory(
        &mut self,
        memory: BorrowedFd<'_>,
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<(), SendError> {
        let len = rustix::fs::fstat(memory).map_err(|_| SendError::NotFinal)?.st_size;
        let len = usize::try_from(len).map_err(|_| SendError::NotFinal)?;
        self.check(len, descriptors.len() + 1)?;
        memfd::verify_final(memory, len).map_err(|_| SendError::NotFinal)?;
        self.abort(wait)?;
        self.make_room(HEADER, wait)?;
        let all: Vec<BorrowedFd<'_>> = std::iter::once(memory).chain(descriptors.iter().copied()).collect();
        self.pass(&all, wait)?;
        let flags = FIRST | LAST | MEMORY;
        self.put(Frame { flags, len: 0, total: len as u32, descriptors: all.len() as u32 }, &[])
    }

    fn check(&self, len: usize, descriptors: usize) -> Result<(), SendError> {
        match self.broken {
            Some(error) => Err(error),
            None if len > MAX_MESSAGE => Err(SendError::TooLong(len)),
            None if descriptors > MAX_DESCRIPTORS => Err(SendError::TooManyDescriptors(descriptors)),
            None => Ok(()),
        }
    }

    fn note(&mut self, result: Result<(), SendError>) -> Result<(), SendError> {
        if let Err(error @ (SendError::Gone | SendError::Misbehaved)) = result {
            self.broken = Some(error);
        }
        result
    }

    /// Tells the receiver of a message that was given up.
    fn abort(&mut self, wait: Wait) -> Result<(), SendError> {
        if self.owes_abort {
            self.make_room(HEADER, wait)?;
            self.put(Frame { flags: ABORT, len: 0, total: 0, descriptors: 0 }, &[])?;
            self.owes_abort = false;
        }
        Ok(())
    }

    /// Sees to it that so many bytes, no more than half of the ring, can be written, and that there is memory behind them.
    #[inline]
    fn make_room(&mut self, needed: usize, wait: Wait) -> Result<(), SendError> {
        if self.producer.room(self.memory.lane(), &self.memory, needed)? < needed {
            self.wait_for_room(needed, wait)?;
        }
        let backed = self.memory.back(self.producer.position(), needed);
        backed.map_err(|_| SendError::NoMemory)
    }

    #[cold]
    fn wait_for_room(&mut self, needed: usize, wait: Wait) -> Result<(), SendError> {
        let (memory, producer) = (&self.memory, &mut self.producer);
        let mut room = || match producer.room(memory.lane(), memory, needed) {
            Ok(room) if room < needed => None,
            other => Some(other.map(drop)),
        };
        if wait != Wait::Never
            && let Some(found) = self.spin.until(&mut room)
        {
            return Ok(found?);
        }
        loop {
            // Old doorbells are taken out first: after this, one means that there is room.
            listen(&self.socket)?;
            memory.sender().announce_sleep();
            if let Some(found) = room() {
                memory.sender().awake();
                return Ok(found?);
            }
            if wait == Wait::Never {
                return Err(SendError::WouldBlock);
            }
            sleep(&self.socket, PollFlags::IN, wait)?;
            memory.sender().awake();
            if let Some(found) = room() {
                return Ok(found?);
            }
            if wait.is_over() {
                return Err(SendError::TimedOut);
            }
        }
    }

    /// Sends descriptors ahead of the frame that they belong to. They wake the receiver, so that it need not be rung for too.
    fn pass(&mut self, descriptors: &[BorrowedFd<'_>], wait: Wait) -> Result<(), SendError> {
        if descriptors.is_empty() {
            return Ok(());
        }
        self.memory.receiver().awake();
        loop {
            let error = match notice::pass(&self.socket, self.passed, descriptors) {
                Ok(()) => {
                    self.passed += 1;
                    return Ok(());
                }
                Err(error) => error,
            };
            let failed = match error {
                Errno::INTR => continue,
                // The socket is full, or more descriptors of this user are under way than one process may have open.
                Errno::AGAIN | Errno::TOOMANYREFS if wait == Wait::Never => SendError::WouldBlock,
                Errno::AGAIN | Errno::TOOMANYREFS if wait.is_over() => SendError::TimedOut,
                Errno::AGAIN => {
                    sleep(&self.socket, PollFlags::OUT, wait)?;
                    continue;
                }
                Errno::TOOMANYREFS => {
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Errno::PIPE | Errno::CONNRESET => SendError::Gone,
                error => SendError::System(error),
            };
            // Nothing has woken it.
            let _ = notice::ring(&self.socket);
            return Err(failed);
        }
    }

    /// Publishes a frame for which there is room.
    #[inline]
    fn put(&mut self, frame: Frame, bytes: &[u8]) -> Result<(), SendError> {
        let header = frame.bytes();
        let pieces = [IoSlice::new(&header), IoSlice::new(bytes)];
        let mut source = Source::of(&pieces);
        while source.remaining() > 0 {
            match self.producer.write(self.memory.lane(), &self.memory, &mut source)? {
                Published::Bytes(_) => self.tell_receiver()?,
                // Nobody ends such a lane, and there was room and memory.
                _ => return Err(SendError::Misbehaved),
            }
        }
        Ok(())
    }

    #[inline]
    fn tell_receiver(&mut self) -> Result<(), SendError> {
        if self.memory.notify_receiver() {
            match notice::ring(&self.socket) {
                Ok(()) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(SendError::Gone),
                Err(error) => return Err(SendError::System(error)),
            }
        }
        Ok(())
    }
}

impl AsFd for Sender {
    /// For poll: readable when [`send`](Sender::send), which returned [`SendError::WouldBlock`], should be tried again.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Takes doorbells out of the socket.
fn listen(socket: &OwnedFd) -> Result<(), SendError> {
    loop {
        match notice::receive(socket).map_err(SendError::System)? {
            None => return Ok(()),
            Some(Notice::Bell) => {}
            Some(Notice::End) => return Err(SendError::Gone),
            Some(_) => return Err(SendError::Misbehaved),
        }
    }
}

/// Until the socket is ready, or it is time.
fn sleep(socket: &OwnedFd, flags: PollFlags, wait: Wait) -> Result<(), SendError> {
    let mut fds = [PollFd::new(socket, flags)];
    match poll(&mut fds, wait.left().as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(SendError::System(error)),
    }
}
