//! The sending end.

mod gather;
mod loans;
mod publishing;

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, epoll, poll};
use shunt_ring::bytes::Ring;
use shunt_ring::split::{Producer, RECEIVER_BYTES, SendMemory, sender_bytes};
use shunt_ring::{Misbehaved, Published, Source};
use shunt_sys::mapping::Shown;
use shunt_sys::memfd::SealError;
use shunt_sys::{Errno, memfd, seqpacket};

use crate::error::{OpenError, SendError};
use crate::frame::{ABORT, FIRST, Frame, HEADER, LAST, MAX_DESCRIPTORS, MAX_MESSAGE, MEMORY};
use crate::notice::{self, Notice};
use crate::wait::{PAUSE, Spin, Wait};
use gather::Gather;
use loans::Pool;

pub(crate) use loans::{CLASSES, FILE, LEAST, MOST, Returned, class_of};
pub use loans::{Loan, Uncommitted};

/// Most notices that are read in a turn. A receiver that sends more does not keep the sender from
/// its time-out.
const NOTICES: usize = 16;

/// The options of a sender.
#[derive(Clone, Copy, Debug)]
pub struct SenderOptions {
    /// Bytes of the ring, all of which are allocated with the sender: a power of two from 4 KiB to 16
    /// MiB. Longer messages than half of it go through it in pieces.
    ///
    /// In the default of 512 KiB, bytes that one end has copied are still in the cache when the other
    /// copies them.
    pub ring_bytes: usize,
    /// The most bytes of memory for [loans](Sender::loan), beyond which there is one loan at a time
    /// for each power of two of their length. At most 256 MiB; the default is 64 MiB. Nothing is
    /// allocated before it is needed, and nothing freed before the sender is dropped.
    pub lent_bytes: usize,
}

impl Default for SenderOptions {
    fn default() -> SenderOptions {
        SenderOptions { ring_bytes: 512 * 1024, lent_bytes: 64 << 20 }
    }
}

impl SenderOptions {
    /// Returns the bytes of the sender's file.
    fn file_bytes(self) -> Result<usize, OpenError> {
        let doing = "making a ring that is not a power of two from 4 KiB to 16 MiB";
        sender_bytes(self.ring_bytes).ok_or_else(|| OpenError::of(doing, Errno::INVAL))
    }
}

/// The sending end. Many may send to one receiver, each with its own sender.
#[derive(Debug)]
pub struct Sender {
    socket: OwnedFd,
    /// An epoll instance with everything that ends a wait, for a sender that may lend.
    ready: Option<OwnedFd>,
    memory: SendMemory,
    producer: Producer,
    pool: Pool,
    /// Number of messages with descriptors so far.
    passed: u64,
    /// Whether the receiver has begun to receive a message that was given up.
    owes_abort: bool,
    broken: Option<SendError>,
    /// Whether the other end is a subscriber.
    publishes: bool,
    /// Whether the last call would have waited for the kernel to accept more descriptors, which
    /// no descriptor reports.
    must_pause: bool,
    spin: Spin,
}

/// What a call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    /// Room in the ring, which the receiver makes.
    Room,
    /// A loan, which the receiver or another thread of this process gives back.
    Loan,
}

impl From<Misbehaved> for SendError {
    fn from(_: Misbehaved) -> SendError {
        SendError::Misbehaved
    }
}

impl Sender {
    /// Connects to the receiver that listens at `path`. Waits while the receiver's queue of new
    /// senders is full.
    pub fn connect(path: impl AsRef<Path>, wait: Wait) -> Result<Sender, OpenError> {
        Sender::connect_with(path, SenderOptions::default(), wait)
    }

    /// Connects as [`connect`](Sender::connect) does, with options.
    pub fn connect_with(
        path: impl AsRef<Path>,
        options: SenderOptions,
        wait: Wait,
    ) -> Result<Sender, OpenError> {
        options.file_bytes()?;
        let path = path.as_ref().as_os_str().as_bytes();
        loop {
            match seqpacket::connect(path) {
                Ok(socket) => return Sender::over_with(socket, options),
                Err(Errno::AGAIN) if !wait.is_over() => std::thread::sleep(PAUSE),
                Err(error) => return Err(OpenError::of("connecting to the receiver", error)),
            }
        }
    }

    /// Returns a sender over a SOCK_SEQPACKET socket whose other end a receiver has, or will have.
    pub fn over(socket: impl Into<OwnedFd>) -> Result<Sender, OpenError> {
        Sender::over_with(socket, SenderOptions::default())
    }

    /// Returns a sender as [`over`](Sender::over) does, with options.
    pub fn over_with(socket: impl Into<OwnedFd>, options: SenderOptions) -> Result<Sender, OpenError> {
        let failed = |doing| move |error| OpenError::of(doing, error);
        let mut sender = Sender::greet(socket.into(), options)?;
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("making an epoll instance"))?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&ready, &sender.socket, data, epoll::EventFlags::IN)
            .map_err(failed("watching a socket"))?;
        sender.ready = Some(ready);
        Ok(sender)
    }

    /// Returns the sender of a server's responses to one client. It lends nothing, so its socket is all
    /// that it waits for.
    pub(crate) fn for_server(socket: OwnedFd, options: SenderOptions) -> Result<Sender, OpenError> {
        Sender::greet(socket, options)
    }

    /// Makes the ring, and greets the receiver.
    fn greet(socket: OwnedFd, options: SenderOptions) -> Result<Sender, OpenError> {
        let failed = |doing| move |error| OpenError::of(doing, error);
        let SenderOptions { ring_bytes, lent_bytes } = options;
        let len = options.file_bytes()?;
        let (file, mapping) =
            memfd::create_whole("shunt-channel", len).map_err(failed("making shared memory"))?;
        let memory =
            SendMemory::over(mapping).ok_or_else(|| OpenError::of("mapping shared memory", Errno::NOMEM))?;
        notice::greet(&socket, ring_bytes, file.as_fd()).map_err(failed("greeting the receiver"))?;
        Ok(Sender {
            socket,
            ready: None,
            memory,
            producer: Producer::new(),
            pool: Pool::new(lent_bytes),
            passed: 0,
            owes_abort: false,
            broken: None,
            publishes: false,
            must_pause: false,
            spin: Spin::new(),
        })
    }

    /// Sends a message: the bytes, and copies of the descriptors. The receiver gets all of it, or
    /// nothing after an error.
    ///
    /// Returns when the message is in memory that the receiver reads. If the message is longer than
    /// that memory, the receiver has read the beginning by then. A message that is too long for it
    /// and must not wait is copied into a separate memfd.
    pub fn send(
        &mut self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<(), SendError> {
        self.send_gathered(&[IoSlice::new(bytes)], descriptors, wait)
    }

    /// Sends one message as [`send`](Sender::send) does, whose bytes are in several places.
    pub fn send_gathered(
        &mut self,
        pieces: &[IoSlice<'_>],
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<(), SendError> {
        let result = self.try_send(Gather::of(pieces), descriptors, wait);
        self.note(result)
    }

    /// Sends a message that is already in a memfd, in place. The memfd contains nothing else, and
    /// is sealed against shrinking, growing and writing. Neither end copies anything.
    pub fn send_memory(
        &mut self,
        memory: impl AsFd,
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<(), SendError> {
        let result = self.try_send_memory(memory.as_fd(), descriptors, wait);
        self.note(result)
    }

    #[inline]
    fn try_send(
        &mut self,
        bytes: Gather<'_>,
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
            return match bytes.single() {
                Some(bytes) => self.put(frame, bytes),
                None => self.put_gathered(frame, bytes),
            };
        }
        if wait == Wait::Never {
            let memory =
                memfd::create_with("shunt-message", &bytes.whole()).map_err(|_| SendError::NoMemory)?;
            return self.try_send_memory(memory.as_fd(), descriptors, wait);
        }
        self.send_in_pieces(bytes, descriptors, wait, half / 2 - HEADER)
    }

    fn send_in_pieces(
        &mut self,
        bytes: Gather<'_>,
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
        piece: usize,
    ) -> Result<(), SendError> {
        let mut rest = bytes;
        while rest.len() > 0 {
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
            } else if later.len() == 0 {
                frame.flags = LAST;
            }
            self.put_gathered(frame, now)?;
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
        match memfd::verify_final(memory, len) {
            Err(SealError::Holes) if memfd::fill(memory, len).is_err() => return Err(SendError::NoMemory),
            Ok(()) | Err(SealError::Holes) => {}
            Err(_) => return Err(SendError::NotFinal),
        }
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

    fn note<T>(&mut self, result: Result<T, SendError>) -> Result<T, SendError> {
        if let Err(error @ (SendError::Gone | SendError::Misbehaved | SendError::Unsealed)) = result {
            self.broken = Some(error);
        }
        result
    }

    /// Notifies the receiver of a message that was given up.
    fn abort(&mut self, wait: Wait) -> Result<(), SendError> {
        if self.owes_abort {
            self.make_room(HEADER, wait)?;
            self.put(Frame { flags: ABORT, len: 0, total: 0, descriptors: 0 }, &[])?;
            self.owes_abort = false;
        }
        Ok(())
    }

    /// Waits until `needed` bytes, no more than half of the ring, can be written.
    #[inline]
    fn make_room(&mut self, needed: usize, wait: Wait) -> Result<(), SendError> {
        if self.has_room(needed)? { Ok(()) } else { self.wait_for_room(needed, wait) }
    }

    #[inline]
    fn has_room(&mut self, needed: usize) -> Result<bool, SendError> {
        Ok(self.producer.room(self.memory.words(), &self.memory, needed)? >= needed)
    }

    #[cold]
    fn wait_for_room(&mut self, needed: usize, wait: Wait) -> Result<(), SendError> {
        self.wait_for(Awaited::Room, wait, |sender| Ok(sender.has_room(needed)?.then_some(())))
    }

    /// Waits until `find` returns something, which the receiver's words make so, or a loan that
    /// another thread drops.
    #[cold]
    fn wait_for<T>(
        &mut self,
        awaited: Awaited,
        wait: Wait,
        mut find: impl FnMut(&mut Sender) -> Result<Option<T>, SendError>,
    ) -> Result<T, SendError> {
        if wait != Wait::Never && self.memory.has_receiver() {
            let mut spin = std::mem::replace(&mut self.spin, Spin::new());
            let found = spin.until(|| find(self).transpose());
            self.spin = spin;
            if let Some(found) = found {
                return found;
            }
        }
        loop {
            if let Some(error) = self.broken {
                return Err(error);
            }
            // Old doorbells are taken first, so that a later one means that something has changed.
            // The answer has the same meaning.
            self.listen()?;
            self.producer.announce_sleep(self.memory.words());
            self.pool.expect_returned(awaited == Awaited::Loan);
            self.must_pause = false;
            let found = find(self);
            if !matches!(found, Ok(None)) {
                self.producer.awake(self.memory.words());
                return found.map(|found| found.expect("checked above"));
            }
            if wait == Wait::Never {
                return Err(SendError::WouldBlock);
            }
            match (awaited, self.pool.eventfd()) {
                (Awaited::Loan, Some(eventfd)) => sleep(
                    &mut [PollFd::new(&self.socket, PollFlags::IN), PollFd::new(eventfd, PollFlags::IN)],
                    wait,
                )?,
                _ => sleep(&mut [PollFd::new(&self.socket, PollFlags::IN)], wait)?,
            }
            self.producer.awake(self.memory.words());
            if let Some(found) = find(self)? {
                return Ok(found);
            }
            if wait.is_over() {
                return Err(SendError::TimedOut);
            }
        }
    }

    /// Returns whether a call that would have waited is tried again after a pause.
    #[cfg(feature = "tokio")]
    pub(crate) fn must_pause(&self) -> bool {
        self.must_pause
    }

    /// Takes doorbells and the receiver's answer from the socket.
    fn listen(&mut self) -> Result<(), SendError> {
        for _ in 0..NOTICES {
            let notice = notice::receive(&self.socket).map_err(|error| {
                let error = SendError::System(error);
                if error == SendError::System(Errno::MFILE) {
                    self.broken = Some(error);
                }
                error
            });
            match notice? {
                None => return Ok(()),
                Some(Notice::Bell) => {}
                Some(Notice::Answer { version, memory }) if !self.memory.has_receiver() => {
                    self.open(version, memory)?;
                }
                Some(Notice::Subscription { version: notice::VERSION }) if self.publishes => {}
                Some(Notice::End) => return Err(SendError::Gone),
                Some(_) => return Err(SendError::Misbehaved),
            }
        }
        Ok(())
    }

    /// Maps the receiver's words. Checks the seals before it touches the memory.
    #[cold]
    fn open(&mut self, version: u32, memory: Option<OwnedFd>) -> Result<(), SendError> {
        let memory = memory.filter(|_| version == notice::VERSION).ok_or(SendError::Misbehaved)?;
        memfd::verify_whole(&memory, RECEIVER_BYTES).map_err(|_| SendError::Unsealed)?;
        let shown = Shown::map(&memory, RECEIVER_BYTES).ok();
        if shown.is_some_and(|shown| self.memory.set_receiver(shown)) {
            return Ok(());
        }
        // The receiver answers only once.
        self.broken = Some(SendError::NoMemory);
        Err(SendError::NoMemory)
    }

    /// Sends descriptors ahead of the frame that they belong to. They wake the receiver, so that no
    /// doorbell is needed.
    fn pass(&mut self, descriptors: &[BorrowedFd<'_>], wait: Wait) -> Result<(), SendError> {
        if descriptors.is_empty() {
            return Ok(());
        }
        let _ = self.producer.notify(self.memory.words());
        let number = self.passed;
        let passed = self.hand_over(|socket| notice::pass(socket, number, descriptors), wait);
        match passed {
            Ok(()) => self.passed += 1,
            // No descriptors have woken the receiver.
            Err(_) => drop(notice::ring(&self.socket)),
        }
        passed
    }

    /// Sends a notice with descriptors, and waits while there is no room for it.
    fn hand_over(
        &mut self,
        send: impl Fn(&OwnedFd) -> Result<(), Errno>,
        wait: Wait,
    ) -> Result<(), SendError> {
        let mut is_announced = false;
        self.must_pause = false;
        loop {
            match send(&self.socket) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                // The socket is full: of notices of messages that the receiver has not read. Its
                // doorbell for room in the ring is one for room in the socket too.
                Err(Errno::AGAIN) if wait == Wait::Never && !is_announced => {
                    self.listen()?;
                    self.producer.announce_sleep(self.memory.words());
                    self.pool.expect_returned(false);
                    is_announced = true;
                }
                // This user has more descriptors in flight than one process may have open.
                Err(error @ (Errno::AGAIN | Errno::TOOMANYREFS)) if wait == Wait::Never => {
                    self.must_pause = error == Errno::TOOMANYREFS;
                    return Err(SendError::WouldBlock);
                }
                Err(Errno::AGAIN | Errno::TOOMANYREFS) if wait.is_over() => return Err(SendError::TimedOut),
                Err(Errno::AGAIN) => sleep(&mut [PollFd::new(&self.socket, PollFlags::OUT)], wait)?,
                Err(Errno::TOOMANYREFS) => std::thread::sleep(PAUSE),
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(SendError::Gone),
                Err(error) => return Err(SendError::System(error)),
            }
        }
    }

    /// Publishes a frame for which there is room.
    #[inline]
    fn put(&mut self, frame: Frame, bytes: &[u8]) -> Result<(), SendError> {
        let header = frame.bytes();
        self.publish(&[IoSlice::new(&header), IoSlice::new(bytes)])
    }

    /// Publishes a frame whose bytes are in several places.
    fn put_gathered(&mut self, frame: Frame, bytes: Gather<'_>) -> Result<(), SendError> {
        let header = frame.bytes();
        let pieces: Vec<IoSlice<'_>> =
            std::iter::once(&header[..]).chain(bytes.pieces()).map(IoSlice::new).collect();
        self.publish(&pieces)
    }

    #[inline]
    fn publish(&mut self, pieces: &[IoSlice<'_>]) -> Result<(), SendError> {
        let mut source = Source::of(pieces);
        while source.remaining() > 0 {
            match self.producer.write(self.memory.words(), &self.memory, &mut source)? {
                Published::Bytes(_) => self.tell_receiver()?,
                // The caller has checked that there was room.
                _ => return Err(SendError::Misbehaved),
            }
        }
        Ok(())
    }

    #[inline]
    fn tell_receiver(&mut self) -> Result<(), SendError> {
        if !self.memory.has_receiver() {
            return self.tell_new_receiver();
        }
        if self.producer.notify(self.memory.words()) { self.ring() } else { Ok(()) }
    }

    /// Notifies a receiver whose answer may not have arrived yet. The receiver checks the ring
    /// after it has answered, so it finds a message that was published before its answer came.
    #[cold]
    fn tell_new_receiver(&mut self) -> Result<(), SendError> {
        match self.listen() {
            Ok(()) if self.broken.is_none() => {}
            Err(error @ (SendError::Gone | SendError::Misbehaved | SendError::Unsealed)) => {
                return Err(error);
            }
            // The receiver has answered, and gets this message. Later ones are not sent.
            _ => return self.ring(),
        }
        if self.producer.notify(self.memory.words()) { self.ring() } else { Ok(()) }
    }

    #[cold]
    fn ring(&self) -> Result<(), SendError> {
        match notice::ring(&self.socket) {
            Ok(()) => Ok(()),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(SendError::Gone),
            Err(error) => Err(SendError::System(error)),
        }
    }
}

impl AsFd for Sender {
    /// Returns a descriptor for poll. It becomes readable when a call that returned
    /// [`SendError::WouldBlock`] should be tried again.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_ref().unwrap_or(&self.socket).as_fd()
    }
}

/// Sleeps until a descriptor is ready or the time is over.
fn sleep(fds: &mut [PollFd<'_>], wait: Wait) -> Result<(), SendError> {
    match poll(fds, wait.left().as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(SendError::System(error)),
    }
}
