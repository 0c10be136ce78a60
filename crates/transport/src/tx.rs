//! The sending direction.

use std::ops::Range;

use shunt_abi::reason::{Reason, Road};
use shunt_ring::bytes::Ring;
use shunt_ring::{LaneHeader, Producer, Published, Source, Spill};

use crate::Kernel;

#[derive(Debug, Default)]
enum State {
    #[default]
    Tcp,
    /// Paired, but the receiver is not watching yet, or a thread is inside a kernel send.
    Adopted(Producer),
    Lane(Producer),
    /// The receiver gave back what it had not read: these positions, of the ring and of its spill,
    /// must go to TCP before anything else.
    Returning([Range<u64>; 2]),
}

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// So many bytes are in the lane; the receiver must be told.
    Bytes(usize),
    /// The lane is full.
    Full,
    /// The receiver has ended the lane, of which it may have read not all: this is to be [taken back](Tx::take_back), or, where TCP
    /// could not bring it, the lane to be [closed](Tx::close). Then the rest belongs to TCP.
    Ended,
    /// The rest belongs to TCP.
    UseTcp,
    /// What [`Tx::returning`] names belongs to TCP, and then the rest.
    SendAgain,
    /// Nothing: the program must not touch the memory that it gave. EFAULT.
    Fault,
}

/// Where in the ring bytes can be sent at once.
#[derive(Debug)]
pub struct AtOnce<'a> {
    /// The position.
    pub place: u64,
    count: usize,
    producer: &'a mut Producer,
    done: &'a u64,
}

impl AtOnce<'_> {
    /// Sends them, which have been copied there. Returns [`Tx::lane_total`]. `None`: nothing has happened, and [`Tx::write`] finds out why.
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
    /// The end of a lane that this side has left: the receiver may not have read all of it yet.
    left: Option<Producer>,
}

impl Tx {
    /// The direction has a lane now; nothing changes until [`road`](Self::road) finds the receiver watching.
    pub fn adopt(&mut self) {
        self.left = None;
        self.state = State::Adopted(Producer::new());
        self.reason = Reason::Idle;
    }

    /// The road to take now. Moves onto the lane if the receiver watches and `quiet` says that no thread of this
    /// process is inside a kernel send on the socket.
    #[inline]
    pub fn road(&mut self, lane: &LaneHeader, kernel: &impl Kernel, quiet: bool) -> Road {
        match self.state {
            State::Lane(_) | State::Returning(..) => Road::Shm,
            State::Tcp => Road::Tcp,
            State::Adopted(_) => self.try_begin(lane, kernel, quiet),
        }
    }

    fn try_begin(&mut self, lane: &LaneHeader, kernel: &impl Kernel, quiet: bool) -> Road {
        if lane.is_closed() {
            self.leave(Reason::PeerWentBack);
            return Road::Tcp;
        }
        if !quiet || !lane.is_watched() {
            return Road::Tcp;
        }
        let Some(offset) = kernel.sent() else {
            self.close(lane, Reason::OffsetUnclear);
            return Road::Tcp;
        };
        // L4: everything after `offset` goes to the lane. The lock around this call keeps every other sender of
        // this process out, and `quiet` says that none is still inside the kernel.
        lane.begin(offset);
        if let State::Adopted(producer) = std::mem::take(&mut self.state) {
            self.state = State::Lane(producer);
            self.reason = Reason::None;
        }
        Road::Shm
    }

    /// Writes to the lane, if that is the road.
    #[inline]
    pub fn write(&mut self, lane: &LaneHeader, ring: &impl Ring, source: &mut Source<'_>) -> Sent {
        let producer = match &mut self.state {
            State::Lane(producer) => producer,
            State::Returning(..) => return Sent::SendAgain,
            _ => return Sent::UseTcp,
        };
        let outcome = match producer.write(lane, ring, source) {
            // Behind its end it is TCP that answers, which may have an error to tell first.
            Ok(Published::Fault) if lane.is_closed() => producer.commit(lane, 0),
            outcome => outcome,
        };
        self.judge(lane, outcome)
    }

    /// Room for `count` bytes, all on one page, which has memory, if sending them takes no more than to copy them there and to
    /// [publish](AtOnce::publish) them: what most sends are. `None`: [`write`](Self::write) finds out why.
    #[inline(always)]
    pub fn place_at_once(&mut self, lane: &LaneHeader, ring: &impl Ring, count: usize) -> Option<AtOnce<'_>> {
        let State::Lane(producer) = &mut self.state else { return None };
        let place = producer.place_at_once(lane, ring, count)?;
        Some(AtOnce { place, count, producer, done: &self.done })
    }

    /// The same if that is the page which is being written to.
    #[inline(always)]
    pub fn place_on_page(&mut self, count: usize) -> Option<AtOnce<'_>> {
        let State::Lane(producer) = &mut self.state else { return None };
        let place = producer.place_on_page(count)?;
        Some(AtOnce { place, count, producer, done: &self.done })
    }

    /// Has `fill` put bytes straight into the ring, for a source that only the kernel can read: it gets the position
    /// and the room, and returns how many it put there.
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
                // Not by `close`, which asks the lane once more and would be judged again.
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
        // The rest has not gone through the lane after all.
        self.done += producer.published() - unread;
        self.state = State::Returning(ranges);
        Sent::SendAgain
    }

    /// Finds out whether the receiver has given back what it had not read, for a sender that has nothing to send.
    pub fn notice_return(&mut self, lane: &LaneHeader) {
        if let State::Lane(producer) = &mut self.state
            && lane.is_returned()
        {
            let outcome = producer.commit(lane, 0);
            self.judge(lane, outcome);
        }
    }

    /// L9: leaves the lane, and takes back what the receiver has not read, which is [`returning`](Self::returning) then. `false`: it is
    /// not on a lane.
    pub fn take_back(&mut self, lane: &LaneHeader, reason: Reason) -> bool {
        let State::Lane(producer) = &mut self.state else { return false };
        lane.take_back();
        match producer.commit(lane, 0) {
            Ok(Published::Returned) => self.begin_returning(reason),
            outcome => self.judge(lane, outcome),
        };
        true
    }

    /// The positions whose bytes must go to TCP next.
    pub fn returning(&self) -> Option<Range<u64>> {
        match &self.state {
            State::Returning(ranges) => ranges.iter().find(|range| !range.is_empty()).cloned(),
            _ => None,
        }
    }

    /// So many of them have gone.
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

    /// L2: ends the lane at what has been published; everything else goes to TCP. What the receiver has given back stays
    /// to be sent first.
    pub fn close(&mut self, lane: &LaneHeader, reason: Reason) {
        if matches!(self.state, State::Tcp | State::Returning(..)) {
            return;
        }
        lane.leave();
        // Only now is it certain whether the receiver was first, with a return.
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

    /// Ends the lane together with the stream. Returns whether all of the stream since the lane began is in it, as long as no
    /// byte follows: the receiver has given none back.
    pub fn finish(&mut self, lane: &LaneHeader, reason: Reason) -> bool {
        let was_on_lane = matches!(self.state, State::Lane(_));
        self.close(lane, reason);
        was_on_lane && matches!(self.state, State::Tcp)
    }

    /// Ends the lane, which nobody will read any more.
    pub fn abandon(&mut self, lane: &LaneHeader, reason: Reason) {
        self.close(lane, reason);
        self.left = None;
    }

    /// Whether a write could make progress now. `None`: ask TCP.
    pub fn is_writable(&mut self, lane: &LaneHeader, ring: &impl Ring) -> Option<bool> {
        let State::Lane(producer) = &mut self.state else { return None };
        if lane.is_closed() {
            return None;
        }
        // A third, as TCP does it: a writer that is told of every byte gets nothing done.
        let wanted = ring.len() / 3;
        match producer.room(lane, ring, wanted) {
            Ok(room) => Some(room >= wanted),
            Err(_) => None,
        }
    }

    /// Has what does not fit into the ring go to its spill. `false`: it has none, or this side is not on the lane.
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

    /// What the lane's spill is good for, if the lane is full.
    pub fn spill_of(&self, lane: &LaneHeader, ring: &impl Ring) -> Spill {
        match &self.state {
            State::Lane(producer) => producer.spill_of(lane, ring),
            _ => Spill::None,
        }
    }

    /// Bytes in the lane that the receiver has not read, and will, also after this side has left it.
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

    /// Whether the direction is on its lane.
    #[inline]
    pub fn on_lane(&self) -> bool {
        matches!(self.state, State::Lane(_) | State::Returning(..))
    }

    /// Whether the direction has a lane that it may still move to.
    #[inline]
    pub fn is_adopted(&self) -> bool {
        matches!(self.state, State::Adopted(_))
    }

    /// Why the direction is on TCP.
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// Changes the reason of a direction that is on TCP.
    pub fn set_reason(&mut self, reason: Reason) {
        if !self.on_lane() {
            self.reason = reason;
        }
    }

    /// Bytes that went through lanes in all.
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
