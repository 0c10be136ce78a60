//! The receiving direction.

use shunt_abi::reason::Reason;
use shunt_ring::bytes::Ring;
use shunt_ring::lane::End;
use shunt_ring::{Consumer, LaneHeader, Misbehaved, ReadError, Sink};

use crate::{EAGAIN, ECONNRESET, EFAULT, Kernel, Waiting};

/// Empty receives in a row after which TCP is asked anyway, so that a program that only ever calls a
/// non-blocking receive still learns of end of file.
const ASK_TCP_EVERY: u32 = 8;

/// A receiver that has much to catch up with asks the kernel where it is every so many bytes, and for each of the last so many
/// before the lane. Should somebody have read whom nobody sees, it is told so long before the border.
const FAR: u64 = 64 * 1024;

#[derive(Debug, Default)]
enum State {
    #[default]
    Tcp,
    /// Paired, but a thread of this process is still inside a kernel receive.
    Adopted(Consumer),
    /// L4: we look at the lane before we sleep, but the sender has not begun.
    Watching(Consumer),
    /// The sender has begun at this offset; TCP has not been read up to it.
    CatchingUp(Consumer, u64),
    Lane(Consumer),
}

/// What a receive found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// So many bytes, at least one unless the sink has no room.
    Bytes(usize),
    /// Nothing now.
    Empty,
    /// TCP has ended, and the lane is drained.
    EndOfFile,
    /// TCP has an error, and the lane is drained. It is told once, to whoever asks next: the caller, if it has nothing
    /// else to say, by a receive on TCP.
    Failed,
    /// This errno.
    Error(i32),
    /// The direction is TCP's alone.
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
    /// Bytes ever read from TCP. The kernel loses that count at a reset, so it is kept here from the moment on when all
    /// receives come by here.
    read: Option<u64>,
    /// Bytes that may be taken from TCP, as long as the lane has not ended, before the kernel is asked again where that is.
    unasked: u64,
}

/// What of TCP is next in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Share {
    Tcp(Waiting),
    /// Nobody knows: the count has been lost, and what TCP holds may lie on both sides of the lane.
    Unclear,
    /// The stream goes on elsewhere.
    None,
}

/// Bytes of the lane that can be received at once.
#[derive(Debug)]
pub struct AtOnce<'a> {
    /// How many: at least one, unless none were wanted.
    pub count: usize,
    consumer: &'a mut Consumer,
    done: &'a u64,
    empty_in_a_row: &'a mut u32,
}

impl AtOnce<'_> {
    /// Where in the ring they are.
    #[inline(always)]
    pub fn place(&self, lane: &LaneHeader) -> u64 {
        self.consumer.place(lane)
    }

    /// Takes them, which have been copied. Returns [`Rx::lane_total`]. `None`: nothing has happened, and [`Rx::receive`] finds out why.
    #[inline(always)]
    pub fn take(self, lane: &LaneHeader) -> Option<u64> {
        self.consumer.take(lane, self.count).ok()?;
        *self.empty_in_a_row = 0;
        Some(self.done + self.consumer.cursor())
    }
}

impl Rx {
    /// The direction has a lane now.
    pub fn adopt(&mut self) {
        self.state = State::Adopted(Consumer::new());
        self.empty_in_a_row = 0;
        self.reason = Reason::Idle;
    }

    /// L4: says "watching" once `quiet` says that no thread of this process is inside a kernel receive or poll
    /// on the socket. From then on nobody blocks in one.
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

    /// Tells the sender how far TCP has been read, so that it does not take who has much of that before the lane for one who never
    /// comes by.
    fn say_reached(&self, lane: &LaneHeader) {
        if let Some(read) = self.read {
            lane.note_reached(read);
        }
    }

    /// Receives what is there, first TCP's share and then the lane's, without blocking.
    ///
    /// A count shorter than the sink means that everything that had arrived was taken.
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
            // An error would be told to nobody if bytes came before it, so only the first are taken unasked.
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
            // Whatever is left of the sink may be filled from the next stretch of the stream: a short count must
            // mean that the connection is drained.
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
                        // Somebody else, whom nobody sees, was faster.
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

    /// Up to `wanted` bytes, if receiving them takes no more than to copy them from the ring and to [take](AtOnce::take) them: what most receives
    /// are. `None`: [`receive`](Self::receive) finds out why.
    #[inline(always)]
    pub fn look_at_once(&mut self, lane: &LaneHeader, ring: &impl Ring, wanted: usize) -> Option<AtOnce<'_>> {
        let State::Lane(consumer) = &mut self.state else { return None };
        let count = consumer.look_at_once(lane, ring, wanted)?;
        Some(AtOnce { count, consumer, done: &self.done, empty_in_a_row: &mut self.empty_in_a_row })
    }

    /// Takes from TCP what cannot lie behind the lane. Nothing: the kernel must be asked.
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

    /// An empty lane: is it time to ask TCP whether the connection has ended?
    fn must_ask_tcp(&mut self, lane: &LaneHeader) -> bool {
        self.empty_in_a_row = self.empty_in_a_row.wrapping_add(1);
        self.tcp_has_news || lane.end() != End::Open || self.empty_in_a_row.is_multiple_of(ASK_TCP_EVERY)
    }

    /// What may be taken from TCP before the lane must be looked at again.
    ///
    /// The sender may begin, publish, go back and write to TCP, all between two instructions of ours. So TCP is
    /// first asked what it holds, then the lane is looked at, and no more is taken than TCP held before: those bytes
    /// (or that end of file) cannot lie behind something in the lane that this look did not see.
    fn tcp_share(&mut self, lane: &LaneHeader, ring: &impl Ring, kernel: &impl Kernel) -> Share {
        let waiting = kernel.waiting();
        let elsewhere = match &mut self.state {
            State::Tcp | State::Adopted(_) => false,
            State::Watching(_) => {
                // Asked once: whatever a peer makes of it later.
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
                    // Only an ended lane can have bytes of TCP behind it; to go on there would leave a hole in the
                    // stream.
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
        // After a reset only those who have read know; since a fork those are several.
        known.or_else(|| lane.shared_read()).or(self.read)
    }

    /// So many bytes have been taken from TCP.
    pub fn note_taken(&mut self, lane: &LaneHeader, count: usize) {
        self.unasked = self.unasked.saturating_sub(count as u64);
        self.read = self.read.map(|read| read + count as u64);
        lane.note_read(count);
        self.say_reached(lane);
    }

    fn judge(&mut self, share: Share) -> Received {
        // The end stays: from now on every receive asks for it.
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

    /// Moves on along the stream if it can: begins to catch up, has caught up, or has drained an ended lane.
    fn step(&mut self, lane: &LaneHeader, kernel: &impl Kernel) -> bool {
        match &mut self.state {
            State::Watching(_) => {
                // In this order: a lane that has ended without a beginning has nothing in it, now and for ever.
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
                    // A beginning that lies behind us is a lie, or bytes that the sender wrote past its own shim.
                    Some(read) if read > offset => {
                        self.misbehaved(lane);
                        false
                    }
                    Some(read) => {
                        self.unasked = (offset - read).saturating_sub(FAR).min(FAR);
                        false
                    }
                    // Reset before it was known how far it had been read. Nothing more comes, and if a FIN is in the
                    // count it is one too high; but a FIN comes after all that was written, which is at least `offset`.
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
            // Otherwise it is only drained, and why it ended is known already.
            if !lane.is_closed() {
                self.reason = Reason::None;
            }
        }
    }

    /// Copies without reading. Only the nearest stretch of the stream is looked at.
    ///
    /// [`Received::UseTcp`] means that it is TCP's: the caller peeks there, without blocking and at no more than
    /// [`peek_limit`](Self::peek_limit) bytes.
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

    /// Whether the lane has ended `count` bytes behind the cursor, so that a peek that has come so far goes on in TCP there.
    pub fn ends_behind(&mut self, lane: &LaneHeader, ring: &impl Ring, count: usize) -> bool {
        match &mut self.state {
            State::CatchingUp(consumer, _) | State::Lane(consumer) => {
                lane.is_closed() && consumer.available(lane, ring) == Ok(count)
            }
            _ => false,
        }
    }

    /// Copies without reading what the lane holds behind TCP's share of the stream, all of which has been seen.
    pub fn peek_behind(&mut self, lane: &LaneHeader, ring: &impl Ring, sink: &mut Sink<'_>) -> usize {
        match &mut self.state {
            State::CatchingUp(consumer, _) => consumer.peek(lane, ring, sink).unwrap_or(0),
            _ => 0,
        }
    }

    /// How many bytes of TCP the last [`peek`](Self::peek) left to its caller: what is behind them comes after the
    /// lane.
    pub fn peek_limit(&self) -> usize {
        self.peek_limit
    }

    /// Throws away up to `count` bytes of the lane, as MSG_TRUNC does; 0 if there are none.
    pub fn discard(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        kernel: &impl Kernel,
        count: usize,
    ) -> usize {
        while self.step(lane, kernel) {}
        match &mut self.state {
            State::Lane(consumer) => consumer.discard(lane, ring, count).unwrap_or(0),
            _ => 0,
        }
    }

    /// Bytes of the lane that can be read now.
    #[inline]
    pub fn available(&mut self, lane: &LaneHeader, ring: &impl Ring, kernel: &impl Kernel) -> usize {
        loop {
            while self.step(lane, kernel) {}
            let State::Lane(consumer) = &mut self.state else { return 0 };
            let count = consumer.available(lane, ring).unwrap_or(0);
            // Only now is it known whether the lane ends here.
            if count > 0 || !consumer.is_finished() {
                return count;
            }
        }
    }

    /// The same and [`arrived_total`](Self::arrived_total), where all that is next in the stream is in a lane that has not ended, as it
    /// mostly is. `None`: [`available`](Self::available) has to see to it.
    #[inline]
    pub fn available_at_once(&mut self, lane: &LaneHeader, ring: &impl Ring) -> Option<(usize, u64)> {
        let State::Lane(consumer) = &mut self.state else { return None };
        let unread = consumer.available_at_once(lane, ring)?;
        Some((unread, self.done + consumer.consumed() + unread as u64))
    }

    /// The same, as far as is known without a look at what the sender says. `None`: not on the lane.
    #[inline]
    pub fn known(&self) -> Option<usize> {
        match &self.state {
            State::Lane(consumer) => Some(consumer.known()),
            _ => None,
        }
    }

    /// Whether bytes of the lane have arrived that stand behind some of TCP's which have not been read. Asked after
    /// [`available`](Self::available).
    #[inline]
    pub fn has_arrived_behind(&self, lane: &LaneHeader) -> bool {
        matches!(self.state, State::CatchingUp(..)) && !lane.looks_empty()
    }

    /// The kernel has said that TCP is readable: the next receive that finds the lane empty asks it.
    #[inline]
    pub fn note_tcp_news(&mut self) {
        self.tcp_has_news = true;
    }

    /// Whether TCP has something to say about this direction, as far as is known without asking.
    #[inline]
    pub fn has_tcp_news(&self, lane: &LaneHeader) -> bool {
        self.tcp_has_news || !self.on_lane() || lane.end() != End::Open
    }

    /// L2: ends the lane. What is in it is still read first.
    pub fn close(&mut self, lane: &LaneHeader, kernel: &impl Kernel, reason: Reason) {
        match self.state {
            State::Tcp => return,
            State::Adopted(_) => {
                lane.close();
                self.leave(reason);
            }
            // The sender may have begun just before: only `step` can tell, and it drains what there is.
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

    /// L2, for a reader that will be out of reach: gives back what has not been read, so that it comes by TCP. `false` if
    /// the sender has left the lane before; then what is in it is still to be read here.
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

    fn misbehaved(&mut self, lane: &LaneHeader) {
        lane.close();
        self.leave(Reason::PeerMisbehaved);
    }

    fn leave(&mut self, reason: Reason) {
        self.unasked = 0;
        self.done += self.lane_bytes();
        self.state = State::Tcp;
        // The reason why this side closed is better than "the lane had an end".
        if matches!(self.reason, Reason::None | Reason::Idle) || reason != Reason::PeerWentBack {
            self.reason = reason;
        }
    }

    /// Whether receives must go through here: false once, or as long as, the direction is TCP's alone.
    #[inline]
    pub fn is_attached(&self) -> bool {
        !matches!(self.state, State::Tcp)
    }

    /// Whether the direction has a lane but has not said "watching".
    #[inline]
    pub fn is_adopted(&self) -> bool {
        matches!(self.state, State::Adopted(_))
    }

    /// Whether the direction is on its lane.
    #[inline]
    pub fn on_lane(&self) -> bool {
        matches!(self.state, State::Lane(_))
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

    /// Bytes that came through lanes in all.
    pub fn lane_total(&self) -> u64 {
        self.done + self.lane_bytes()
    }

    /// Bytes of the lane that have not been read, also while TCP's before them have not been either.
    pub fn unread(&mut self, lane: &LaneHeader, ring: &impl Ring) -> usize {
        match &mut self.state {
            State::Tcp => 0,
            State::Adopted(consumer)
            | State::Watching(consumer)
            | State::CatchingUp(consumer, _)
            | State::Lane(consumer) => consumer.available(lane, ring).unwrap_or(0),
        }
    }

    /// Bytes that have arrived through lanes in all, read or not.
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
