//! One sender on the receiver's side: reads its ring and its socket, and checks them. Wrong values
//! from a sender end that sender, and have no other effect.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use shunt_ring::bytes::Ring;
use shunt_ring::split::{Consumer, RECEIVER_BYTES, ReceiveMemory, sender_bytes};
use shunt_ring::{Misbehaved, ReadError, Sink};
use shunt_sys::Errno;
use shunt_sys::mapping::Shown;
use shunt_sys::memfd::{self, Final, SealError};

use crate::borrowed::Slots;
use crate::error::Cause;
use crate::frame::{ABORT, Frame, HEADER, LAST, LENT, MEMORY, USE, Use};
use crate::message::{Message, make_room};
use crate::notice::{self, Descriptors, Notice};

/// Most bytes of a large message that are copied before other senders get a turn.
const TURN: usize = 1 << 20;
/// Most notices that are read before other senders get a turn.
const NOTICES: usize = 32;
/// Most doorbells that may precede descriptors: far more than a correct sender ever leaves there.
const BELLS: usize = 4096;

/// The outcome of one turn.
#[derive(Debug)]
pub(crate) enum Step {
    /// There is nothing to read.
    Nothing,
    /// A message is incomplete, and more of it was or can be read.
    More,
    /// A message is complete. If not all of its descriptors arrived, the numbers that were sent and
    /// that arrived.
    Whole(Option<Lost>),
}

/// Descriptors that this process had no room for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lost {
    pub(crate) sent: usize,
    pub(crate) arrived: usize,
}

/// One sender on the receiver's side.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// Loans of the sender's memory notify it, and do not keep the socket open.
    socket: Arc<OwnedFd>,
    /// The ring; present after the greeting. Loans keep it mapped.
    lane: Option<Arc<ReceiveMemory>>,
    slots: Slots,
    consumer: Consumer,
    /// Descriptors that have arrived before the frame that they belong to.
    held: Option<Descriptors>,
    /// Descriptors of the message after that, if they have arrived. No descriptors of later
    /// messages are kept.
    ahead: Option<Descriptors>,
    /// Number of messages with descriptors so far.
    passed: u64,
    partial: Option<Partial>,
    hung_up: bool,
    max_message: usize,
    numbering: Numbering,
}

/// The numbers of the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbering {
    /// A sender's messages have none.
    None,
    /// A publisher has not named the first number.
    Unnamed,
    /// The number of a publisher's next message.
    Next(u64),
}

/// A message that has been read in part.
#[derive(Debug)]
struct Partial {
    buffer: Vec<u8>,
    total: usize,
    filled: usize,
    /// Number of missing bytes of this frame.
    frame: usize,
    descriptors: Vec<OwnedFd>,
    lost: Option<Lost>,
    number: Option<u64>,
}

impl From<Misbehaved> for Cause {
    fn from(_: Misbehaved) -> Cause {
        Cause::Misbehaved("the ring's cursors are impossible")
    }
}

impl From<ReadError> for Cause {
    fn from(error: ReadError) -> Cause {
        match error {
            ReadError::Misbehaved => Misbehaved.into(),
            ReadError::Fault => Cause::NoMemory,
        }
    }
}

impl Incoming {
    pub(crate) fn new(socket: OwnedFd, max_message: usize) -> Incoming {
        Incoming {
            socket: Arc::new(socket),
            lane: None,
            slots: Slots::default(),
            consumer: Consumer::new(),
            held: None,
            ahead: None,
            passed: 0,
            partial: None,
            hung_up: false,
            max_message,
            numbering: Numbering::None,
        }
    }

    /// Returns the other end of a publisher, whose messages are numbered.
    pub(crate) fn of_publisher(socket: OwnedFd, max_message: usize) -> Incoming {
        Incoming { numbering: Numbering::Unnamed, ..Incoming::new(socket, max_message) }
    }

    /// Reads the notices of the socket that are due, up to the first doorbell. A correct sender sends
    /// one for each sleep, and the socket stays readable while there are others.
    pub(crate) fn listen(&mut self) -> Result<(), Cause> {
        for _ in 0..NOTICES {
            if self.held.is_some() || self.hung_up {
                return Ok(());
            }
            match notice::receive(&self.socket).map_err(Cause::Socket)? {
                None => return Ok(()),
                Some(Notice::Bell) if self.lane.is_some() => return Ok(()),
                Some(Notice::Descriptors(descriptors)) if self.lane.is_some() => {
                    self.held = Some(descriptors)
                }
                Some(Notice::Greeting { version, ring_bytes, memory }) if self.lane.is_none() => {
                    self.lane = Some(Arc::new(self.open(version, ring_bytes, memory)?));
                }
                Some(Notice::Pages { slots, bytes, memory }) => self.add_pages(slots, bytes, memory)?,
                Some(Notice::End) => self.hung_up = true,
                Some(_) => return Err(Cause::Misbehaved("a notice that has no place here")),
            }
        }
        Ok(())
    }

    /// Maps the ring of a greeting, and answers it. Checks the seals before it touches the memory.
    fn open(&self, version: u32, ring_bytes: u64, memory: Option<OwnedFd>) -> Result<ReceiveMemory, Cause> {
        if version != notice::VERSION {
            return Err(Cause::Misbehaved("it speaks another version: build both ends with the same shunt"));
        }
        let len = usize::try_from(ring_bytes).ok().and_then(sender_bytes);
        let len = len.ok_or(Cause::Misbehaved("a ring of an impossible size"))?;
        let memory = memory.ok_or(Cause::Misbehaved("a greeting without memory"))?;
        memfd::verify_whole(&memory, len).map_err(|error| Cause::Misbehaved(refusal(error)))?;
        let ring = Shown::map(&memory, len).map_err(|_| Cause::NoMemory)?;
        let own = memfd::create_whole("shunt-channel", RECEIVER_BYTES);
        let (answer, own) = own.map_err(|_| Cause::NoMemory)?;
        let lane = ReceiveMemory::over(ring, own).ok_or(Cause::NoMemory)?;
        match notice::answer(&self.socket, answer.as_fd()) {
            // The messages of a sender that has gone are received nevertheless.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(lane),
            Err(error) => Err(Cause::Socket(error)),
        }
    }

    /// Maps memory that the sender lends. Checks the seals before it touches the memory.
    fn add_pages(&mut self, slots: u32, bytes: u64, memory: Option<OwnedFd>) -> Result<(), Cause> {
        let lane = self.lane.as_ref().ok_or(Cause::Misbehaved("memory is lent before the greeting"))?;
        let memory = memory.ok_or(Cause::Misbehaved("a notice of lent memory without memory"))?;
        self.slots.add(lane, &self.socket, slots, bytes, memory)
    }

    /// Reads a message, or more of an incomplete one.
    pub(crate) fn step(&mut self, message: &mut Message) -> Result<Step, Cause> {
        match self.read(message)? {
            Step::Nothing if self.hung_up || self.held.is_some() => self.conclude(),
            Step::Whole(lost) => self.count().map(|()| Step::Whole(lost)),
            step => Ok(step),
        }
    }

    /// Handles an empty ring whose sender has closed its socket, or has sent descriptors that no
    /// frame has followed yet.
    #[cold]
    fn conclude(&mut self) -> Result<Step, Cause> {
        if !self.hung_up {
            // A notice behind descriptors is sent when their frame is in the ring. The frame may
            // have come after the last check of the ring.
            match notice::receive(&self.socket).map_err(Cause::Socket)? {
                None => return Ok(Step::Nothing),
                Some(Notice::End) => self.hung_up = true,
                Some(Notice::Bell) => {}
                Some(Notice::Pages { slots, bytes, memory }) => self.add_pages(slots, bytes, memory)?,
                Some(Notice::Descriptors(descriptors)) if self.ahead.is_none() => {
                    self.ahead = Some(descriptors);
                }
                Some(_) => return Err(Cause::Misbehaved("descriptors that belong to nothing")),
            }
        }
        // Everything that was published before this notice is visible now.
        if self.has_something()? {
            return Ok(Step::More);
        }
        match self.hung_up {
            false => Err(Cause::Misbehaved("descriptors that belong to nothing")),
            true if self.partial.is_some() || self.held.is_some() || self.consumer.known() > 0 => {
                Err(Cause::Midway)
            }
            true => Err(Cause::Closed),
        }
    }

    /// Returns whether a turn would make progress.
    pub(crate) fn has_something(&mut self) -> Result<bool, Cause> {
        let Some(lane) = self.lane.as_deref() else { return Ok(false) };
        let needed = match &self.partial {
            Some(partial) if partial.frame > 0 => 1,
            _ => HEADER,
        };
        Ok(self.consumer.available(lane.words(), lane)? >= needed)
    }

    /// Announces that the sender must send a doorbell from now on. The caller then checks the ring
    /// once more.
    pub(crate) fn announce_sleep(&mut self) {
        if let Some(lane) = self.lane.as_deref() {
            self.consumer.announce_sleep(lane.words());
        }
    }

    /// Cancels the announcement.
    pub(crate) fn awake(&self) {
        if let Some(lane) = self.lane.as_deref() {
            self.consumer.awake(lane.words());
        }
    }

    #[inline]
    fn read(&mut self, message: &mut Message) -> Result<Step, Cause> {
        let Some(lane) = self.lane.as_deref() else { return Ok(Step::Nothing) };
        if self.partial.is_some() {
            return self.go_on(message);
        }
        let available = match self.consumer.known() {
            known if known >= HEADER => known,
            _ => self.consumer.available(lane.words(), lane)?,
        };
        if available < HEADER {
            return Ok(Step::Nothing);
        }
        let mut header = [0; HEADER];
        self.consumer.peek_known(lane.words(), lane, &mut Sink::of(&mut [IoSliceMut::new(&mut header)]))?;
        if self.numbering != Numbering::None
            && let Some(number) = Frame::number(&header)
        {
            return self.skip_to(number);
        }
        let frame = Frame::first(&header)?;
        let (len, total) = (frame.len as usize, frame.total as usize);
        if total > self.max_message {
            return Err(Cause::TooLong(total));
        }
        message.clear();
        message.number = self.next_number()?;
        if frame.flags & LENT != 0 {
            return self.borrow(frame, message);
        }
        let lost = self.take_descriptors(frame.descriptors as usize, &mut message.descriptors)?;
        let lane = self.lane.as_deref().expect("looked at above");
        if frame.flags & MEMORY != 0 {
            self.read_header(&mut header)?;
            return self.open_memory(message, total, lost);
        }
        let whole = frame.flags & LAST != 0
            && (available >= HEADER + len || self.consumer.available(lane.words(), lane)? >= HEADER + len);
        make_room(&mut message.buffer, total);
        if whole && len <= TURN {
            let mut pieces = [IoSliceMut::new(&mut header), IoSliceMut::new(&mut message.buffer[..len])];
            self.consumer.read(lane.words(), lane, &mut Sink::of(&mut pieces))?;
            self.tell_sender()?;
            message.len = len;
            return Ok(Step::Whole(lost));
        }
        self.read_header(&mut header)?;
        // The caller's memory: with one sender, this buffer is the only one in use.
        self.partial = Some(Partial {
            buffer: std::mem::take(&mut message.buffer),
            total,
            filled: 0,
            frame: len,
            descriptors: std::mem::take(&mut message.descriptors),
            lost,
            number: message.number,
        });
        self.go_on(message)
    }

    /// Reads a frame that names the number of a publisher's next message.
    #[cold]
    fn skip_to(&mut self, number: u64) -> Result<Step, Cause> {
        self.read_header(&mut [0; HEADER])?;
        if matches!(self.numbering, Numbering::Next(next) if next >= number) {
            return Err(Cause::Misbehaved("numbers of messages that do not grow"));
        }
        self.numbering = Numbering::Next(number);
        Ok(Step::More)
    }

    /// Returns the number of the message that begins now, if its sender is a publisher.
    fn next_number(&self) -> Result<Option<u64>, Cause> {
        match self.numbering {
            Numbering::None => Ok(None),
            Numbering::Unnamed => Err(Cause::Misbehaved("a message without a number")),
            Numbering::Next(next) => Ok(Some(next)),
        }
    }

    /// Counts a message that is complete.
    #[inline]
    fn count(&mut self) -> Result<(), Cause> {
        if let Numbering::Next(next) = self.numbering {
            let next = next.checked_add(1).ok_or(Cause::Misbehaved("the last number there is"))?;
            self.numbering = Numbering::Next(next);
        }
        Ok(())
    }

    /// Reads the frame of a message whose bytes are in a lent slot.
    fn borrow(&mut self, frame: Frame, message: &mut Message) -> Result<Step, Cause> {
        let lane = self.lane.as_deref().expect("asked by those who have one");
        let (mut header, mut of) = ([0; HEADER], [0; USE]);
        // A correct sender publishes so short a frame as a whole.
        if self.consumer.available(lane.words(), lane)? < HEADER + USE {
            return Ok(Step::Nothing);
        }
        let mut pieces = [IoSliceMut::new(&mut header), IoSliceMut::new(&mut of)];
        self.consumer.read(lane.words(), lane, &mut Sink::of(&mut pieces))?;
        self.tell_sender()?;
        let of = Use::of(of);
        // The memory was passed before the frame was published, and before its descriptors.
        for _ in 0..BELLS {
            if self.slots.has(of) {
                break;
            }
            match notice::receive(&self.socket).map_err(Cause::Socket)? {
                Some(Notice::Bell) => {}
                Some(Notice::Pages { slots, bytes, memory }) => self.add_pages(slots, bytes, memory)?,
                _ => break,
            }
        }
        let lent = self.slots.take(of, frame.total as usize, message.number)?;
        let lost = self.take_descriptors(frame.descriptors as usize, &mut message.descriptors)?;
        message.lent = Some(lent);
        Ok(Step::Whole(lost))
    }

    /// Continues an incomplete message.
    fn go_on(&mut self, message: &mut Message) -> Result<Step, Cause> {
        let mut budget = TURN;
        loop {
            let lane = self.lane.as_deref().expect("there is something partial");
            let partial = self.partial.as_mut().expect("as above");
            if partial.frame > 0 {
                let wanted = partial.frame.min(budget);
                let place = &mut partial.buffer[partial.filled..partial.filled + wanted];
                let mut pieces = [IoSliceMut::new(place)];
                let count = self.consumer.read(lane.words(), lane, &mut Sink::of(&mut pieces))?;
                partial.filled += count;
                partial.frame -= count;
                budget -= count;
                if count > 0 {
                    self.tell_sender()?;
                }
                if count < wanted {
                    return Ok(if budget < TURN { Step::More } else { Step::Nothing });
                }
            } else if partial.filled == partial.total {
                let partial = self.partial.take().expect("as above");
                message.clear();
                message.buffer = partial.buffer;
                message.len = partial.total;
                message.descriptors = partial.descriptors;
                message.number = partial.number;
                return Ok(Step::Whole(partial.lost));
            } else {
                if self.consumer.available(lane.words(), lane)? < HEADER {
                    return Ok(if budget < TURN { Step::More } else { Step::Nothing });
                }
                let missing = partial.total - partial.filled;
                let mut header = [0; HEADER];
                self.read_header(&mut header)?;
                let frame = Frame::next(&header, missing)?;
                if frame.flags == ABORT {
                    self.partial = None;
                    return Ok(Step::More);
                }
                self.partial.as_mut().expect("as above").frame = frame.len as usize;
            }
            if budget == 0 {
                return Ok(Step::More);
            }
        }
    }

    fn read_header(&mut self, header: &mut [u8; HEADER]) -> Result<(), Cause> {
        let lane = self.lane.as_deref().expect("asked by those who have one");
        let mut pieces = [IoSliceMut::new(header)];
        self.consumer.read(lane.words(), lane, &mut Sink::of(&mut pieces))?;
        self.tell_sender()
    }

    /// Notifies the sender after room was made, if due. A sender waits for no more than half of the
    /// ring.
    #[inline]
    fn tell_sender(&mut self) -> Result<(), Cause> {
        let lane = self.lane.as_deref().expect("asked by those who have one");
        if !self.consumer.is_notification_due(lane.words()) {
            return Ok(());
        }
        if self.consumer.available(lane.words(), lane)? <= lane.len() / 2
            && self.consumer.notify(lane.words())
        {
            match notice::ring(&self.socket) {
                Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => {}
                Err(error) => return Err(Cause::Socket(error)),
            }
        }
        Ok(())
    }

    /// Takes the descriptors of the message whose first frame has just been read. They were sent
    /// before it was published.
    fn take_descriptors(&mut self, count: usize, into: &mut Vec<OwnedFd>) -> Result<Option<Lost>, Cause> {
        if count == 0 {
            return Ok(None);
        }
        for _ in 0..BELLS {
            if self.held.is_some() {
                break;
            }
            match notice::receive(&self.socket).map_err(Cause::Socket)? {
                Some(Notice::Bell) => {}
                Some(Notice::Pages { slots, bytes, memory }) => self.add_pages(slots, bytes, memory)?,
                Some(Notice::Descriptors(descriptors)) => self.held = Some(descriptors),
                Some(Notice::End) => {
                    self.hung_up = true;
                    break;
                }
                _ => break,
            }
        }
        let held = self.held.take().ok_or(Cause::Misbehaved("a message without its descriptors"))?;
        self.held = self.ahead.take();
        let (sent, arrived) = (held.sent, held.arrived.len());
        let number = self.passed;
        self.passed += 1;
        if sent != count || held.number != number || arrived > sent || arrived < sent && !held.lost {
            return Err(Cause::Misbehaved("descriptors that belong to another message"));
        }
        if held.lost {
            return Ok(Some(Lost { sent, arrived }));
        }
        *into = held.arrived;
        Ok(None)
    }

    /// Opens a message whose bytes are in its first descriptor.
    fn open_memory(&mut self, message: &mut Message, len: usize, lost: Option<Lost>) -> Result<Step, Cause> {
        if lost.is_some() {
            return Ok(Step::Whole(lost));
        }
        let memory = message.descriptors.remove(0);
        let memory = Final::map(memory, len).map_err(|error| match error {
            SealError::NoMemory => Cause::NoMemory,
            SealError::Holes => Cause::Misbehaved("memory with holes: all of it must be allocated"),
            _ => Cause::Misbehaved("memory that could still change, or of another size"),
        })?;
        message.memory = Some(memory);
        Ok(Step::Whole(None))
    }
}

impl AsFd for Incoming {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Returns the reason why memory of a sender is not touched.
pub(crate) fn refusal(error: SealError) -> &'static str {
    match error {
        SealError::NotMemfd => "its memory is no memfd",
        SealError::NotSealed => "its memory is not sealed against shrinking and growing",
        SealError::Writable => "its memory is not sealed against punching: F_SEAL_FUTURE_WRITE, F_SEAL_SEAL",
        SealError::NotTmpfs => "its memory is of huge pages",
        SealError::Holes => "its memory has holes: all of it must be allocated",
        SealError::NoMemory | SealError::Size(_) => "its memory is of another size",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sender;
    use crate::wait::Wait;

    fn incoming() -> (Incoming, OwnedFd) {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None);
        let (ours, theirs) = pair.unwrap();
        (Incoming::new(ours, 1024), theirs)
    }

    /// Sends a message with as many descriptors as its number.
    fn send(sender: &mut Sender, number: u8) {
        let file = memfd::create_with("shunt-test", &[number]).unwrap();
        sender.send(&[number], &vec![file.as_fd(); number.into()], Wait::Never).unwrap();
    }

    /// The receiver checks the ring before the first message is there, and then finds the
    /// descriptors of the second.
    #[test]
    fn messages_that_come_between_a_look_at_the_ring_and_one_at_the_socket() {
        let (mut incoming, theirs) = incoming();
        let mut message = Message::new();
        let mut sender = Sender::over(theirs).unwrap();
        incoming.listen().unwrap();
        assert!(matches!(incoming.read(&mut message), Ok(Step::Nothing)));
        (1..=3).for_each(|number| send(&mut sender, number));
        // The descriptors of the first message, as a check of the socket alone finds them.
        incoming.listen().unwrap();
        assert!(matches!(incoming.conclude(), Ok(Step::More)));
        for number in 1..=3 {
            assert!(matches!(incoming.step(&mut message), Ok(Step::Whole(None))));
            assert_eq!((message.bytes(), message.descriptors().len()), (&[number][..], number.into()));
        }
        drop(sender);
        incoming.listen().unwrap();
        assert!(matches!(incoming.step(&mut message), Err(Cause::Closed)));
    }

    /// Descriptors of two messages arrive, and neither message does.
    #[test]
    fn descriptors_that_nothing_follows() {
        let (mut incoming, theirs) = incoming();
        let mut message = Message::new();
        let sender = Sender::over(theirs).unwrap();
        let file = memfd::create_with("shunt-test", b"!").unwrap();
        for number in 0..2 {
            notice::pass(sender.socket(), number, &[file.as_fd()]).unwrap();
        }
        incoming.listen().unwrap();
        assert!(matches!(incoming.step(&mut message), Err(Cause::Misbehaved(_))));
    }
}
