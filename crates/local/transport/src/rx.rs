//! The receiving direction of an endpoint.

use shunt_abi::reason::Reason;
use shunt_ring::bytes::Ring;
use shunt_ring::lane::End;
use shunt_ring::{Consumer, LaneHeader, Misbehaved, ReadError, Sink};

use crate::{EAGAIN, ECONNRESET, EFAULT, Kernel, Waiting};

/// After this number of empty receives in a row, a receive asks TCP anyway. A program that only
/// ever calls a non-blocking receive so still learns of the end of file.
const ASK_TCP_EVERY: u32 = 8;

/// The distance before the lane from which on a receiver asks the kernel for its position before
/// each receive. Farther away it asks once for every `FAR` bytes. If code that the shim cannot see
/// has read from the socket, the receiver notices that long before the border.
const FAR: u64 = 64 * 1024;

#[derive(Debug, Default)]
enum State {
    #[default]
    Tcp,
    /// The direction has a lane, but a thread of this process is still inside a kernel receive.
    Adopted(Consumer),
    /// L4: the receiver checks the lane before it sleeps, but the sender has not begun.
    Watching(Consumer),
    /// The sender has begun at this offset, and the receiver has not read TCP up to it.
    CatchingUp(Consumer, u64),
    Lane(Consumer),
}

/// The outcome of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// This number of bytes, at least one unless the sink has no room.
    Bytes(usize),
    /// Nothing is there now.
    Empty,
    /// TCP has ended, and the lane is drained.
    EndOfFile,
    /// TCP has an error, and the lane is drained. The kernel reports the error once. If the caller
    /// has nothing else to return, it takes the error by a receive on TCP.
    Failed,
    /// The call fails with this errno.
    Error(i32),
    /// The direction is entirely on TCP.
    UseTcp,
}

/// The receiving direction of one endpoint.
#[derive(Debug, Default)]
pub struct Rx {
    state: State,
    reason: Reason,
    done: u64,
    empty_in_a_row: u32,
    tcp_has_news: bool,
    peek_limit: usize,
    /// Number of bytes ever read from TCP. The kernel loses that count at a reset, so it is kept
    /// here once all receives go through this type.
    read: Option<u64>,
    /// Number of bytes that may be taken from TCP before the kernel must be asked for the position
    /// again, as long as the lane has not ended.
    unasked: u64,
}

/// The part of the stream that TCP may supply next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Share {
    Tcp(Waiting),
    /// Unknown: the count has been lost, and the bytes in TCP may lie on both sides of the lane.
    Unclear,
    /// The stream continues elsewhere.
    None,
}

/// Bytes of the lane that can be received on the fast path.
#[derive(Debug)]
pub struct AtOnce<'a> {
    /// The number of bytes: at least one, unless none were wanted.
    pub count: usize,
    consumer: &'a mut Consumer,
    done: &'a u64,
    empty_in_a_row: &'a mut u32,
}

impl AtOnce<'_> {
    /// Returns whether [`Rx::receive`] should copy the bytes: in pieces, or because the copy is to
    /// be timed.
    #[inline(always)]
    pub fn is_for_receive(&self) -> bool {
        self.consumer.is_for_read(self.count)
    }

    /// Returns their position in the ring.
    #[inline(always)]
    pub fn place(&self, lane: &LaneHeader) -> u64 {
        self.consumer.place(lane)
    }

    /// Consumes the bytes, which the caller has copied, and returns [`Rx::lane_total`]. If it
    /// returns `None`, nothing has happened, and [`Rx::receive`] finds the cause.
    #[inline(always)]
    pub fn take(self, lane: &LaneHeader) -> Option<u64> {
        self.consumer.take(lane, self.count).ok()?;
        *self.empty_in_a_row = 0;
        Some(self.done + self.consumer.cursor())
    }
}

impl Rx {
    /// Gives the direction a lane.
    pub fn adopt(&mut self) {
        self.state = State::Adopted(Consumer::new());
        self.empty_in_a_row = 0;
        self.reason = Reason::Idle;
    }

    /// L4: announces "watching", if `quiet`: no thread of this process is inside a kernel receive
    /// or poll on the socket. From then on no thread blocks in one.
    pub fn try_watch(&mut self, lane: &LaneHeader, kernel: &impl Kernel, quiet: bool) -> bool {
        if !quiet || !matches!(self.state, State::Adopted(_)) {
            return false;
        }
        self.read = kernel.read();
        if let State::Adopted(consumer) = std::mem::take(&mut self.state) {
            self.state = State::Watching(consumer);
        }
        self.say_reached(lane);
        lane.watch();
        true
    }

    /// Publishes how far TCP has been read. The sender then does not mistake a receiver with much
    /// left to read before the lane for one that never receives.
    fn say_reached(&self, lane: &LaneHeader) {
        if let Some(read) = self.read {
            lane.note_reached(read);
        }
    }

    /// Receives the available bytes, first TCP's part and then the lane's, without blocking.
    ///
    /// A count shorter than the sink means that it took everything that had arrived.
    #[inline]
    pub fn receive(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        kernel: &impl Kernel,
        sink: &mut Sink<'_>,
    ) -> Received {
        let mut total = 0;
        while sink.remaining() > 0 {
            // An error would be lost if bytes came before it, so only the first bytes are taken
            // without asking.
            if self.unasked > 0 && total == 0 {
                match self.catch_up_unasked(lane, kernel, sink) {
                    Ok(count) => total = count,
                    Err(errno) => return Received::Error(errno),
                }
                continue;
            }
            if let State::Lane(consumer) = &mut self.state {
                match consumer.read(lane, ring, sink) {
                    Ok(count) => total += count,
                    Err(ReadError::Fault) if total > 0 => break,
                    Err(ReadError::Fault) => return Received::Error(EFAULT),
                    Err(ReadError::Misbehaved) => self.misbehaved(lane),
                }
                if sink.remaining() == 0 {
                    break;
                }
            }
            // Fill the rest of the sink from the next part of the stream: a short count must mean
            // that the connection is drained.
            if self.step(lane, kernel) {
                continue;
            }
            match self.state {
                State::Tcp | State::Adopted(_) if total == 0 => return Received::UseTcp,
                State::Lane(_) if total > 0 => break,
                _ => {}
            }
            if self.on_lane() && !self.must_ask_tcp(lane) {
                return Received::Empty;
            }
            match self.tcp_share(lane, ring, kernel) {
                Share::None => {}
                Share::Tcp(Waiting::Bytes(_)) if total > 0 && kernel.at_mark() => break,
                Share::Tcp(Waiting::Bytes(share)) => {
                    match sink.within(share, |part| kernel.receive(part)) {
                        Ok(count) if count > 0 => {
                            self.note_taken(lane, count);
                            total += count;
                        }
                        _ if total > 0 => break,
                        // A reader that the shim cannot see was faster.
                        Ok(_) => return self.judge(Share::Tcp(Waiting::EndOfFile)),
                        Err(EAGAIN) => return self.judge(Share::Tcp(Waiting::Nothing)),
                        Err(errno) => return Received::Error(errno),
                    }
                }
                _ if total > 0 => break,
                verdict => return self.judge(verdict),
            }
        }
        self.empty_in_a_row = 0;
        Received::Bytes(total)
    }

    /// Returns up to `wanted` bytes, if receiving them takes only a copy from the ring and a
    /// [take](AtOnce::take), as most receives do. Returns `None` if [`receive`](Self::receive) must
    /// handle the case.
    #[inline(always)]
    pub fn look_at_once(&mut self, lane: &LaneHeader, ring: &impl Ring, wanted: usize) -> Option<AtOnce<'_>> {
        let State::Lane(consumer) = &mut self.state else { return None };
        let count = consumer.look_at_once(lane, ring, wanted)?;
        Some(AtOnce { count, consumer, done: &self.done, empty_in_a_row: &mut self.empty_in_a_row })
    }

    /// Takes bytes from TCP that cannot lie behind the lane. If there are none, the kernel must be
    /// asked for the position.
    #[cold]
    fn catch_up_unasked(
        &mut self,
        lane: &LaneHeader,
        kernel: &impl Kernel,
        sink: &mut Sink<'_>,
    ) -> Result<usize, i32> {
        let limit = self.unasked as usize;
        let outcome = match lane.is_closed() {
            true => Ok(0),
            false => sink.within(limit, |part| kernel.receive(part)),
        };
        match outcome {
            Ok(count @ 1..) => {
                self.note_taken(lane, count);
                Ok(count)
            }
            Ok(0) | Err(EAGAIN) => {
                self.unasked = 0;
                Ok(0)
            }
            Err(errno) => Err(errno),
        }
    }

    /// Returns whether a receive that found the lane empty must ask TCP whether the connection has
    /// ended.
    fn must_ask_tcp(&mut self, lane: &LaneHeader) -> bool {
        self.empty_in_a_row = self.empty_in_a_row.wrapping_add(1);
        self.tcp_has_news || lane.end() != End::Open || self.empty_in_a_row.is_multiple_of(ASK_TCP_EVERY)
    }

    /// Returns the part that may be taken from TCP before the lane must be checked again.
    ///
    /// Between any two instructions here, the sender may begin, publish, fall back and write to
    /// TCP. So the receiver first asks TCP what it holds, then checks the lane, and takes no more
    /// than TCP held before. Those bytes (or that end of file) cannot lie behind bytes in the lane
    /// that this check missed.
    fn tcp_share(&mut self, lane: &LaneHeader, ring: &impl Ring, kernel: &impl Kernel) -> Share {
        let waiting = kernel.waiting();
        let elsewhere = match &mut self.state {
            State::Tcp | State::Adopted(_) => false,
            State::Watching(_) => {
                // Loaded once: a peer may change it later.
                let beginning = lane.beginning();
                beginning.into_iter().for_each(|offset| self.catch_up(offset));
                beginning.is_some()
            }
            State::CatchingUp(_, offset) => {
                let offset = *offset;
                match (self.read(lane, kernel), waiting) {
                    (Some(read), Waiting::Bytes(count)) if read < offset => {
                        return Share::Tcp(Waiting::Bytes(count.min((offset - read) as usize)));
                    }
                    (Some(read), _) => read >= offset,
                    // Only an ended lane can have bytes of TCP behind it. To continue there would
                    // leave a hole in the stream.
                    (None, Waiting::Bytes(_)) if lane.is_closed() && kernel.received() > offset => {
                        return Share::Unclear;
                    }
                    (None, _) => false,
                }
            }
            State::Lane(consumer) => match consumer.available(lane, ring) {
                Ok(count) => count > 0 || consumer.is_finished(),
                Err(Misbehaved) => {
                    self.misbehaved(lane);
                    true
                }
            },
        };
        if elsewhere {
            self.tcp_has_news |= matches!(waiting, Waiting::Error | Waiting::EndOfFile);
            return Share::None;
        }
        Share::Tcp(waiting)
    }

    fn read(&mut self, lane: &LaneHeader, kernel: &impl Kernel) -> Option<u64> {
        let known = kernel.read();
        if known.is_some() {
            self.read = known;
        }
        // After a reset, only the readers have the count; after a fork there are several readers.
        known.or_else(|| lane.shared_read()).or(self.read)
    }

    /// Records that `count` bytes have been taken from TCP.
    pub fn note_taken(&mut self, lane: &LaneHeader, count: usize) {
        self.unasked = self.unasked.saturating_sub(count as u64);
        self.read = self.read.map(|read| read + count as u64);
        lane.note_read(count);
        self.say_reached(lane);
    }

    fn judge(&mut self, share: Share) -> Received {
        // The end stays, so every later receive asks TCP for it.
        self.tcp_has_news = share != Share::Tcp(Waiting::Nothing);
        match share {
            Share::Tcp(Waiting::EndOfFile) => Received::EndOfFile,
            Share::Tcp(Waiting::Error) => Received::Failed,
            Share::Unclear => {
                self.empty_in_a_row = self.empty_in_a_row.saturating_add(1);
                let lost = self.empty_in_a_row >= ASK_TCP_EVERY;
                if lost { Received::Error(ECONNRESET) } else { Received::Empty }
            }
            Share::Tcp(Waiting::Nothing | Waiting::Bytes(_)) | Share::None => Received::Empty,
        }
    }

    /// Moves along the stream if possible: begins to catch up, reaches the lane, or leaves an ended
    /// lane that is drained. Returns whether the next receive may find more.
    fn step(&mut self, lane: &LaneHeader, kernel: &impl Kernel) -> bool {
        match &mut self.state {
            State::Watching(_) => {
                // The order matters: a lane that ended without a beginning will never contain a
                // byte.
                let ended = lane.is_closed();
                let Some(offset) = lane.beginning() else {
                    if ended {
                        self.leave(Reason::PeerWentBack);
                    }
                    return false;
                };
                self.catch_up(offset);
                self.step(lane, kernel)
            }
            State::CatchingUp(_, offset) => {
                let offset = *offset;
                match self.read(lane, kernel) {
                    Some(read) if read == offset => {
                        self.reach_lane(lane);
                        true
                    }
                    // A beginning before the current position is a lie, or the sender wrote bytes
                    // past its own shim.
                    Some(read) if read > offset => {
                        self.misbehaved(lane);
                        false
                    }
                    Some(read) => {
                        self.unasked = (offset - read).saturating_sub(FAR).min(FAR);
                        false
                    }
                    // The connection was reset before the count was known. No more bytes arrive. A
                    // FIN makes the received count one too high, but it comes after all written
                    // bytes, which are at least `offset`.
                    None if kernel.received() >= offset && !matches!(kernel.waiting(), Waiting::Bytes(_)) => {
                        self.reach_lane(lane);
                        true
                    }
                    None => false,
                }
            }
            State::Lane(consumer) if consumer.is_finished() => {
                self.leave(Reason::PeerWentBack);
                true
            }
            _ => false,
        }
    }

    fn catch_up(&mut self, offset: u64) {
        if let State::Watching(consumer) = std::mem::take(&mut self.state) {
            self.state = State::CatchingUp(consumer, offset);
        }
    }

    fn reach_lane(&mut self, lane: &LaneHeader) {
        self.unasked = 0;
        if let State::CatchingUp(consumer, _) = std::mem::take(&mut self.state) {
            self.state = State::Lane(consumer);
            // If the lane has ended, it is only drained here, and the reason for its end is already
            // recorded.
            if !lane.is_closed() {
                self.reason = Reason::None;
            }
        }
    }

    /// Copies bytes without reading them. Covers only the next part of the stream.
    ///
    /// [`Received::UseTcp`] means that this part is TCP's: the caller peeks there, without
    /// blocking, at no more than [`peek_limit`](Self::peek_limit) bytes.
    pub fn peek(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        kernel: &impl Kernel,
        sink: &mut Sink<'_>,
    ) -> Received {
        loop {
            while self.step(lane, kernel) {}
            if let State::Lane(consumer) = &mut self.state {
                match consumer.peek(lane, ring, sink) {
                    Ok(0) if consumer.is_finished() => continue,
                    Ok(0) => {}
                    Ok(count) => return Received::Bytes(count),
                    Err(ReadError::Fault) => return Received::Error(EFAULT),
                    Err(ReadError::Misbehaved) => self.misbehaved(lane),
                }
            }
            match self.tcp_share(lane, ring, kernel) {
                Share::None => {}
                Share::Tcp(Waiting::Bytes(share)) => {
                    self.peek_limit = share;
                    return Received::UseTcp;
                }
                verdict => return self.judge(verdict),
            }
        }
    }

    /// Returns whether the lane ended `count` bytes behind the cursor. A peek that has copied so
    /// many bytes then continues on TCP.
    pub fn ends_behind(&mut self, lane: &LaneHeader, ring: &impl Ring, count: usize) -> bool {
        match &mut self.state {
            State::CatchingUp(consumer, _) | State::Lane(consumer) => {
                lane.is_closed() && consumer.available(lane, ring) == Ok(count)
            }
            _ => false,
        }
    }

    /// Copies, without reading, the bytes of the lane behind TCP's part of the stream. The caller
    /// has copied all of that part.
    pub fn peek_behind(&mut self, lane: &LaneHeader, ring: &impl Ring, sink: &mut Sink<'_>) -> usize {
        match &mut self.state {
            State::CatchingUp(consumer, _) => match consumer.peek(lane, ring, sink) {
                Ok(count) => count,
                Err(ReadError::Fault) => 0,
                Err(ReadError::Misbehaved) => {
                    self.misbehaved(lane);
                    0
                }
            },
            _ => 0,
        }
    }

    /// Returns how many bytes of TCP the last [`peek`](Self::peek) left to its caller. TCP's bytes
    /// behind them come after the lane.
    pub fn peek_limit(&self) -> usize {
        self.peek_limit
    }

    /// Discards up to `count` bytes of the lane, as MSG_TRUNC does. Returns how many it discarded;
    /// 0 if there are none.
    pub fn discard(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        kernel: &impl Kernel,
        count: usize,
    ) -> usize {
        while self.step(lane, kernel) {}
        match &mut self.state {
            State::Lane(consumer) => match consumer.discard(lane, ring, count) {
                Ok(count) => count,
                Err(Misbehaved) => {
                    self.misbehaved(lane);
                    0
                }
            },
            _ => 0,
        }
    }

    /// Returns the number of bytes of the lane that can be read now.
    #[inline]
    pub fn available(&mut self, lane: &LaneHeader, ring: &impl Ring, kernel: &impl Kernel) -> usize {
        loop {
            while self.step(lane, kernel) {}
            let State::Lane(consumer) = &mut self.state else { return 0 };
            let Ok(count) = consumer.available(lane, ring) else {
                self.misbehaved(lane);
                return 0;
            };
            // Only now is it known whether the lane ends here.
            if count > 0 || !consumer.is_finished() {
                return count;
            }
        }
    }

    /// Returns [`available`](Self::available) and [`arrived_total`](Self::arrived_total) on the
    /// fast path: if the stream continues in a lane that has not ended. Returns `None` if
    /// `available` must handle the case.
    #[inline]
    pub fn available_at_once(&mut self, lane: &LaneHeader, ring: &impl Ring) -> Option<(usize, u64)> {
        let State::Lane(consumer) = &mut self.state else { return None };
        let unread = consumer.available_at_once(lane, ring)?;
        Some((unread, self.done + consumer.consumed() + unread as u64))
    }

    /// Returns the number of bytes to read that are known without a load of the sender's cursor.
    /// Returns `None` if the direction is not on the lane.
    #[inline]
    pub fn known(&self) -> Option<usize> {
        match &self.state {
            State::Lane(consumer) => Some(consumer.known()),
            _ => None,
        }
    }

    /// Returns whether bytes have arrived in the lane behind bytes of TCP that have not been read.
    /// Called after [`available`](Self::available).
    #[inline]
    pub fn has_arrived_behind(&self, lane: &LaneHeader) -> bool {
        matches!(self.state, State::CatchingUp(..)) && !lane.looks_empty()
    }

    /// Records that the kernel has reported TCP as readable: the next receive that finds the lane
    /// empty asks TCP.
    #[inline]
    pub fn note_tcp_news(&mut self) {
        self.tcp_has_news = true;
    }

    /// Returns whether TCP may have an event of this direction to report, without asking it.
    #[inline]
    pub fn has_tcp_news(&self, lane: &LaneHeader) -> bool {
        self.tcp_has_news || !self.on_lane() || lane.end() != End::Open
    }

    /// L2: ends the lane. Its bytes are still read first.
    pub fn close(&mut self, lane: &LaneHeader, kernel: &impl Kernel, reason: Reason) {
        match self.state {
            State::Tcp => return,
            State::Adopted(_) => {
                lane.close();
                self.leave(reason);
            }
            // The sender may have begun just before. Only `step` can find that out, and it drains
            // the lane.
            _ => lane.close(),
        }
        // From now on another process reads too.
        if reason == Reason::Fork
            && let Some(read) = self.read(lane, kernel)
        {
            lane.share_read(read);
        }
        self.reason = reason;
    }

    /// L2, for a reader that will be out of reach: returns the unread bytes to the sender, so that
    /// they come by TCP. Returns `false` if the sender has left the lane before; then this side
    /// must still read its bytes.
    pub fn give_back(&mut self, lane: &LaneHeader, reason: Reason) -> bool {
        if matches!(self.state, State::Tcp) {
            return true;
        }
        if !lane.give_back() {
            return false;
        }
        self.leave(reason);
        true
    }

    /// L5: leaves the lane of a sender whose cursors are impossible. TCP says from now on whether
    /// there is something to read.
    fn misbehaved(&mut self, lane: &LaneHeader) {
        lane.close();
        self.leave(Reason::PeerMisbehaved);
    }

    fn leave(&mut self, reason: Reason) {
        self.unasked = 0;
        self.done += self.lane_bytes();
        self.state = State::Tcp;
        // The reason why this side closed the lane is more useful than "the lane had an end".
        if matches!(self.reason, Reason::None | Reason::Idle) || reason != Reason::PeerWentBack {
            self.reason = reason;
        }
    }

    /// Returns whether receives must go through here. It is `false` while the direction is entirely
    /// on TCP.
    #[inline]
    pub fn is_attached(&self) -> bool {
        !matches!(self.state, State::Tcp)
    }

    /// Returns whether the direction has a lane but has not announced "watching".
    #[inline]
    pub fn is_adopted(&self) -> bool {
        matches!(self.state, State::Adopted(_))
    }

    /// Returns whether the direction is on its lane.
    #[inline]
    pub fn on_lane(&self) -> bool {
        matches!(self.state, State::Lane(_))
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

    /// Returns the total number of bytes received through lanes.
    pub fn lane_total(&self) -> u64 {
        self.done + self.lane_bytes()
    }

    /// Returns the number of unread bytes in the lane, even while TCP's bytes before them are
    /// unread too.
    pub fn unread(&mut self, lane: &LaneHeader, ring: &impl Ring) -> usize {
        match &mut self.state {
            State::Tcp => 0,
            State::Adopted(consumer)
            | State::Watching(consumer)
            | State::CatchingUp(consumer, _)
            | State::Lane(consumer) => match consumer.available(lane, ring) {
                Ok(count) => count,
                Err(Misbehaved) => {
                    self.misbehaved(lane);
                    0
                }
            },
        }
    }

    /// Returns the total number of bytes that have arrived through lanes, read or not.
    pub fn arrived_total(&mut self, lane: &LaneHeader, ring: &impl Ring) -> u64 {
        let unread = self.unread(lane, ring);
        self.lane_total() + unread as u64
    }

    fn lane_bytes(&self) -> u64 {
        match &self.state {
            State::Tcp => 0,
            State::Adopted(consumer) | State::Watching(consumer) | State::Lane(consumer) => {
                consumer.consumed()
            }
            State::CatchingUp(consumer, _) => consumer.consumed(),
        }
    }
}
