//! The sending direction of an endpoint.

use std::ops::Range;

use shunt_abi::reason::{Reason, Transport};
use shunt_ring::bytes::Ring;
use shunt_ring::copy::Method;
use shunt_ring::{LaneHeader, Producer, Published, Source, Spill};

use crate::Kernel;

#[derive(Debug, Default)]
enum State {
    #[default]
    Tcp,
    /// The direction has a lane, but the receiver is not watching yet, or a thread is inside a
    /// kernel send.
    Adopted(Producer),
    Lane(Producer),
    /// The receiver returned the unread bytes at these positions, of the ring and of its spill.
    /// They must go to TCP before anything else.
    Returning([Range<u64>; 2]),
}

/// The outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// This number of bytes is in the lane; the caller must notify the receiver.
    Bytes(usize),
    /// The lane is full.
    Full,
    /// The receiver has ended the lane, and may not have read all of it. The caller must
    /// [reclaim](Tx::take_back) the unread bytes, or [close](Tx::close) the lane where TCP could
    /// not transmit them. The rest then goes by TCP.
    Ended,
    /// The rest goes by TCP.
    UseTcp,
    /// The bytes of [`Tx::returning`] go by TCP, and then the rest.
    SendAgain,
    /// Nothing was written: the program passed memory that it must not touch. EFAULT.
    Fault,
}

/// Room in the ring for bytes on the fast path.
#[derive(Debug)]
pub struct AtOnce<'a> {
    /// The position in the ring.
    pub place: u64,
    count: usize,
    producer: &'a mut Producer,
    done: &'a u64,
}

impl AtOnce<'_> {
    /// Returns the method by which the caller copies the bytes. Returns `None` if [`Tx::write`] must
    /// time the copy.
    #[inline(always)]
    pub fn method(&self) -> Option<Method> {
        self.producer.method_at_once(self.count)
    }

    /// Publishes the bytes, which the caller has copied there, and returns [`Tx::lane_total`]. If
    /// it returns `None`, nothing has happened, and [`Tx::write`] finds the cause.
    #[inline(always)]
    pub fn publish(self, lane: &LaneHeader) -> Option<u64> {
        self.producer.publish(lane, self.count).ok()?;
        Some(self.done + self.producer.published())
    }
}

/// The sending direction of one endpoint.
#[derive(Debug, Default)]
pub struct Tx {
    state: State,
    reason: Reason,
    done: u64,
    /// The producer of a lane that this side has left. The receiver may not have read all of it
    /// yet.
    left: Option<Producer>,
}

impl Tx {
    /// Gives the direction a lane. Nothing changes until [`transport`](Self::transport) finds the
    /// receiver watching.
    pub fn adopt(&mut self) {
        self.left = None;
        self.state = State::Adopted(Producer::new());
        self.reason = Reason::Idle;
    }

    /// Returns the transport of the next write. Moves onto the lane if the receiver watches and
    /// `quiet`: no thread of this process is inside a kernel send on the socket.
    #[inline]
    pub fn transport(&mut self, lane: &LaneHeader, kernel: &impl Kernel, quiet: bool) -> Transport {
        match self.state {
            State::Lane(_) | State::Returning(..) => Transport::Shm,
            State::Tcp => Transport::Tcp,
            State::Adopted(_) => self.try_begin(lane, kernel, quiet),
        }
    }

    fn try_begin(&mut self, lane: &LaneHeader, kernel: &impl Kernel, quiet: bool) -> Transport {
        if lane.is_closed() {
            self.leave(Reason::PeerWentBack);
            return Transport::Tcp;
        }
        if !quiet || !lane.is_watched() {
            return Transport::Tcp;
        }
        let Some(offset) = kernel.sent() else {
            self.close(lane, Reason::OffsetUnclear);
            return Transport::Tcp;
        };
        // L4: everything after `offset` goes to the lane. The lock around this call excludes every
        // other sender of this process, and `quiet` means that none is still inside the kernel.
        lane.begin(offset);
        if let State::Adopted(producer) = std::mem::take(&mut self.state) {
            self.state = State::Lane(producer);
            self.reason = Reason::None;
        }
        Transport::Shm
    }

    /// Writes to the lane, if the direction is on it.
    #[inline]
    pub fn write(&mut self, lane: &LaneHeader, ring: &impl Ring, source: &mut Source<'_>) -> Sent {
        let producer = match &mut self.state {
            State::Lane(producer) => producer,
            State::Returning(..) => return Sent::SendAgain,
            _ => return Sent::UseTcp,
        };
        let outcome = match producer.write(lane, ring, source) {
            // Behind the end of a lane TCP answers, which may have an error to report first.
            Ok(Published::Fault) if lane.is_closed() => producer.commit(lane, 0),
            outcome => outcome,
        };
        self.judge(lane, outcome)
    }

    /// Returns room for `count` bytes on one page with memory behind it, if sending them takes only
    /// a copy and a [publish](AtOnce::publish), as most sends do. Returns `None` if
    /// [`write`](Self::write) must handle the case.
    #[inline(always)]
    pub fn place_at_once(&mut self, lane: &LaneHeader, ring: &impl Ring, count: usize) -> Option<AtOnce<'_>> {
        let State::Lane(producer) = &mut self.state else { return None };
        let place = producer.place_at_once(lane, ring, count)?;
        Some(AtOnce { place, count, producer, done: &self.done })
    }

    /// Returns room for `count` bytes if they fit on the page that is being written.
    #[inline(always)]
    pub fn place_on_page(&mut self, count: usize) -> Option<AtOnce<'_>> {
        let State::Lane(producer) = &mut self.state else { return None };
        let place = producer.place_on_page(count)?;
        Some(AtOnce { place, count, producer, done: &self.done })
    }

    /// Has `fill` put bytes straight into the ring, for a source that only the kernel can read.
    /// `fill` gets the position and the room, and returns how many bytes it put there.
    pub fn write_with<E>(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        wanted: usize,
        fill: impl FnOnce(u64, usize) -> Result<usize, E>,
    ) -> Result<Sent, E> {
        let producer = match &mut self.state {
            State::Lane(producer) => producer,
            State::Returning(..) => return Ok(Sent::SendAgain),
            _ => return Ok(Sent::UseTcp),
        };
        let outcome = match producer.room(lane, ring, wanted) {
            Ok(0) if !lane.is_closed() => Ok(Published::Full),
            Ok(room) => match ring.back(producer.position(), room.min(wanted)) {
                Err(reason) => Ok(Published::NoMemory(reason)),
                Ok(()) => {
                    let count = fill(producer.position(), room.min(wanted))?;
                    producer.commit(lane, count)
                }
            },
            Err(misbehaved) => Err(misbehaved),
        };
        Ok(self.judge(lane, outcome))
    }

    fn judge(&mut self, lane: &LaneHeader, outcome: Result<Published, shunt_ring::Misbehaved>) -> Sent {
        match outcome {
            Ok(Published::Bytes(count)) => Sent::Bytes(count),
            Ok(Published::Full) => Sent::Full,
            Ok(Published::Closed) => Sent::Ended,
            Ok(Published::Returned) => self.begin_returning(Reason::PeerWentBack),
            Ok(Published::Fault) => Sent::Fault,
            Ok(Published::NoMemory(reason)) => {
                self.take_back(lane, reason);
                if self.returning().is_some() { Sent::SendAgain } else { Sent::UseTcp }
            }
            Err(shunt_ring::Misbehaved) => {
                // `close` would load the lane's state again and return here.
                lane.leave();
                self.leave(Reason::PeerMisbehaved);
                Sent::UseTcp
            }
        }
    }

    fn begin_returning(&mut self, reason: Reason) -> Sent {
        let State::Lane(producer) = std::mem::take(&mut self.state) else { return Sent::UseTcp };
        let ranges = producer.unread_ranges();
        let unread: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        if unread == 0 {
            self.state = State::Lane(producer);
            self.leave(reason);
            return Sent::UseTcp;
        }
        self.reason = reason;
        // The unread bytes have not gone through the lane after all.
        self.done += producer.published() - unread;
        self.state = State::Returning(ranges);
        Sent::SendAgain
    }

    /// Checks whether the receiver has returned its unread bytes, for a sender that has nothing to
    /// send.
    pub fn notice_return(&mut self, lane: &LaneHeader) {
        if let State::Lane(producer) = &mut self.state
            && lane.is_returned()
        {
            let outcome = producer.commit(lane, 0);
            self.judge(lane, outcome);
        }
    }

    /// L9: leaves the lane and reclaims the bytes that the receiver has not read;
    /// [`returning`](Self::returning) lists them then. Returns `false` if the direction is not on a
    /// lane.
    pub fn take_back(&mut self, lane: &LaneHeader, reason: Reason) -> bool {
        let State::Lane(producer) = &mut self.state else { return false };
        lane.take_back();
        match producer.commit(lane, 0) {
            Ok(Published::Returned) => self.begin_returning(reason),
            outcome => self.judge(lane, outcome),
        };
        true
    }

    /// Returns the positions of the bytes that must go to TCP next.
    pub fn returning(&self) -> Option<Range<u64>> {
        match &self.state {
            State::Returning(ranges) => ranges.iter().find(|range| !range.is_empty()).cloned(),
            _ => None,
        }
    }

    /// Returns the positions of all bytes that must go to TCP.
    pub fn all_returning(&self) -> [Range<u64>; 2] {
        match &self.state {
            State::Returning(ranges) => ranges.clone(),
            _ => [0..0, 0..0],
        }
    }

    /// Records that `count` of those bytes have gone to TCP.
    pub fn returned(&mut self, count: usize) {
        if let State::Returning(ranges) = &mut self.state {
            if let Some(range) = ranges.iter_mut().find(|range| !range.is_empty()) {
                range.start += count as u64;
            }
            if ranges.iter().all(Range::is_empty) {
                self.leave(self.reason);
            }
        }
    }

    /// Forgets the bytes that TCP has yet to take, because another process sends them.
    pub fn forget_returning(&mut self) {
        if let State::Returning(_) = self.state {
            self.leave(self.reason);
        }
    }

    /// L2: ends the lane after the published bytes; everything else goes to TCP. Bytes that the
    /// receiver has returned are still sent first.
    pub fn close(&mut self, lane: &LaneHeader, reason: Reason) {
        if matches!(self.state, State::Tcp | State::Returning(..)) {
            return;
        }
        lane.leave();
        // Only now is it certain whether the receiver returned bytes before.
        self.notice_return(lane);
        if !matches!(self.state, State::Tcp | State::Returning(..)) {
            self.leave(reason);
        }
    }

    fn leave(&mut self, reason: Reason) {
        self.done += self.lane_bytes();
        if let State::Lane(producer) = std::mem::take(&mut self.state) {
            self.left = Some(producer);
        }
        self.reason = reason;
    }

    /// Ends the lane together with the stream. Returns whether the lane contains all of the stream
    /// since it began, as long as no byte follows: the receiver has returned none.
    pub fn finish(&mut self, lane: &LaneHeader, reason: Reason) -> bool {
        let was_on_lane = matches!(self.state, State::Lane(_));
        self.close(lane, reason);
        was_on_lane && matches!(self.state, State::Tcp)
    }

    /// Ends a lane that no process will read any more.
    pub fn abandon(&mut self, lane: &LaneHeader, reason: Reason) {
        self.close(lane, reason);
        self.left = None;
    }

    /// Returns whether a write could make progress now. Returns `None` if TCP must be asked.
    pub fn is_writable(&mut self, lane: &LaneHeader, ring: &impl Ring) -> Option<bool> {
        let State::Lane(producer) = &mut self.state else { return None };
        if lane.is_closed() {
            return None;
        }
        // A third, as TCP does it: a writer that wakes for every free byte makes no progress.
        let wanted = ring.len() / 3;
        match producer.room(lane, ring, wanted) {
            Ok(room) => Some(room >= wanted),
            Err(_) => None,
        }
    }

    /// Sends the bytes that do not fit into the ring to its spill. Returns `false` if there is no
    /// spill, or if the direction is not on the lane.
    pub fn spill(&mut self, lane: &LaneHeader, ring: &impl Ring) -> bool {
        let State::Lane(producer) = &mut self.state else { return false };
        producer.spill(lane, ring)
    }

    /// Adds nothing to the spill until the lane is empty, or it is [spilled](Self::spill) again.
    pub fn hold_spill(&mut self) {
        if let State::Lane(producer) = &mut self.state {
            producer.hold_spill();
        }
    }

    /// Returns the state of the spill of a full lane.
    pub fn spill_of(&self, lane: &LaneHeader, ring: &impl Ring) -> Spill {
        match &self.state {
            State::Lane(producer) => producer.spill_of(lane, ring),
            _ => Spill::None,
        }
    }

    /// Returns the number of bytes in the lane that the receiver has not read and will read, even
    /// after this side has left the lane.
    pub fn unread(&mut self, lane: &LaneHeader) -> u64 {
        let producer = match &mut self.state {
            State::Lane(producer) => Some(producer),
            State::Tcp => self.left.as_mut(),
            _ => None,
        };
        let unread = producer.map_or(0, |producer| producer.unread(lane).unwrap_or(0));
        if unread == 0 {
            self.left = None;
        }
        unread
    }

    /// Returns whether the direction is on its lane.
    #[inline]
    pub fn on_lane(&self) -> bool {
        matches!(self.state, State::Lane(_) | State::Returning(..))
    }

    /// Returns whether TCP must take bytes that the receiver has returned before anything else.
    #[inline]
    pub fn is_returning(&self) -> bool {
        matches!(self.state, State::Returning(..))
    }

    /// Returns whether the direction has a lane that it may still move to.
    #[inline]
    pub fn is_adopted(&self) -> bool {
        matches!(self.state, State::Adopted(_))
    }

    /// Returns the reason why the direction is on TCP.
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// Changes the reason of a direction that is on TCP.
    pub fn set_reason(&mut self, reason: Reason) {
        if !self.on_lane() {
            self.reason = reason;
        }
    }

    /// Returns the total number of bytes sent through lanes.
    pub fn lane_total(&self) -> u64 {
        self.done + self.lane_bytes()
    }

    fn lane_bytes(&self) -> u64 {
        match &self.state {
            State::Lane(producer) => producer.published(),
            _ => 0,
        }
    }
}
