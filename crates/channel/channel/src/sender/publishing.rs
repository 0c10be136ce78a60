//! A sender as a publisher uses it, one for each subscriber. No call here waits.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use shunt_ring::split::Producer;
use shunt_sys::{Errno, seqpacket};

use super::{Awaited, Sender, SenderOptions};
use crate::error::{OpenError, SendError};
use crate::frame::{FIRST, Frame, HEADER, LAST, LENT, USE, Use};
use crate::notice;
use crate::wait::Wait;

/// Most bytes that a correct subscriber leaves in its socket, as the kernel counts them: a few
/// notices. One that leaves more gets no further descriptors, which would count for this user.
const UNREAD: i32 = 16 * 1024;

impl Sender {
    /// Returns the sender of one subscriber, which the publisher's epoll instance watches.
    pub(crate) fn to_subscriber(socket: OwnedFd, ring_bytes: usize) -> Result<Sender, OpenError> {
        let options = SenderOptions { ring_bytes, ..SenderOptions::default() };
        Ok(Sender { publishes: true, ..Sender::greet(socket, options)? })
    }

    /// Publishes a message in the ring, and before it the number of the message if there is a gap.
    #[inline]
    pub(crate) fn publish_copied(&mut self, number: Option<u64>, bytes: &[u8]) -> Result<(), SendError> {
        self.prepare(number, HEADER + bytes.len())?;
        let len = bytes.len() as u32;
        self.put(Frame { flags: FIRST | LAST, len, total: len, descriptors: 0 }, bytes)
    }

    /// Publishes a message of `len` bytes in a slot, as [`publish_copied`](Self::publish_copied) does.
    pub(crate) fn publish_lent(&mut self, number: Option<u64>, of: Use, len: u32) -> Result<(), SendError> {
        self.prepare(number, HEADER + USE)?;
        let frame = Frame { flags: FIRST | LAST | LENT, len: USE as u32, total: len, descriptors: 0 };
        self.put(frame, &of.bytes())
    }

    /// Makes sure that there is room, and publishes the number.
    #[inline]
    fn prepare(&mut self, number: Option<u64>, needed: usize) -> Result<(), SendError> {
        let all = needed + if number.is_some() { HEADER } else { 0 };
        self.make_room(all, Wait::Never)?;
        match number {
            Some(number) => self.put(Frame::of_number(number), &[]),
            None => Ok(()),
        }
    }

    /// Passes memory that holds `slots` slots.
    pub(crate) fn pass_slots(
        &mut self,
        slots: usize,
        bytes: usize,
        file: BorrowedFd<'_>,
    ) -> Result<(), SendError> {
        let is_read = |sender: &Sender| {
            let unread = seqpacket::unread(&sender.socket).map_err(SendError::System)?;
            Ok(unread <= UNREAD)
        };
        if !is_read(self)? {
            self.ask_for_doorbell(is_read)?;
        }
        self.hand_over(|socket| notice::lend(socket, slots, bytes, file), Wait::Never)
    }

    /// Returns the number of the last use of a slot that the subscriber has ended.
    #[inline]
    pub(crate) fn last_over(&self, slot: usize) -> u64 {
        self.memory.slot(slot).map_or(0, |word| word.last_over())
    }

    /// Revokes the messages before this number.
    pub(crate) fn revoke_before(&self, number: u64) {
        self.memory.words().sender.revoke_before(number);
    }

    /// Returns whether the ring has room for a short message, without a system call.
    #[inline]
    pub(crate) fn may_have_room(&mut self) -> Result<bool, SendError> {
        self.has_room(2 * HEADER + USE)
    }

    /// Has the subscriber ring when it has read something or has given a slot back, unless `is_due`
    /// already.
    pub(crate) fn ask_for_doorbell(
        &mut self,
        mut is_due: impl FnMut(&Sender) -> Result<bool, SendError>,
    ) -> Result<(), SendError> {
        self.wait_for(Awaited::Room, Wait::Never, |sender| Ok(is_due(sender)?.then_some(())))
    }

    /// Takes the subscriber's notices.
    pub(crate) fn hear(&mut self) -> Result<(), SendError> {
        match self.listen() {
            // The subscriber has closed with unread notices.
            Err(SendError::System(Errno::CONNRESET | Errno::PIPE)) => Err(SendError::Gone),
            heard => heard,
        }
    }

    /// Ends an announced sleep: the subscriber need not ring.
    pub(crate) fn stop_asking(&self) {
        let producer: &Producer = &self.producer;
        producer.awake(self.memory.words());
    }

    /// Returns the socket.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
