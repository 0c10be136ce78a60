//! The receiving direction.

use shunt_abi::reason::Reason;
use shunt_ring::bytes::Ring;
use shunt_ring::{Consumer, LaneHeader, Misbehaved, Sink};

use crate::{EAGAIN, Kernel};

/// Empty receives in a row after which TCP is asked anyway, so that a program that only ever calls a
/// non-blocking receive still learns of end of file.
const ASK_TCP_EVERY: u32 = 8;

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
    /// So many bytes, at least one.
    Bytes(usize),
    /// Nothing now.
    Empty,
    /// TCP has ended, and the lane is drained.
    EndOfFile,
    /// TCP reports this errno, and the lane is drained.
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
}

impl Rx {
    /// The direction has a lane now.
    pub fn adopt(&mut self) {
        self.state = State::Adopted(Consumer::new());
        self.reason = Reason::PeerNotOffered;
    }

    /// L4: says "watching" once `quiet` says that no thread of this process is inside a kernel receive or poll
    /// on the socket. From then on nobody blocks in one.
    pub fn try_watch(&mut self, lane: &LaneHeader, quiet: bool) -> bool {
        if !quiet || !matches!(self.state, State::Adopted(_)) {
            return false;
        }
        if let State::Adopted(consumer) = std::mem::take(&mut self.state) {
            self.state = State::Watching(consumer);
        }
        lane.watch();
        true
    }

    /// Receives what is there, first TCP's share and then the lane's, without blocking.
    #[inline]
    pub fn receive(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        kernel: &impl Kernel,
        sink: &mut Sink<'_>,
    ) -> Received {
        let mut total = 0;
        loop {
            if let State::Lane(consumer) = &mut self.state {
                match consumer.read(lane, ring, sink) {
                    Ok(count) => total += count,
                    Err(Misbehaved) => self.misbehaved(lane),
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
            if matches!(self.state, State::Lane(_)) {
                return self.empty_lane(lane, ring, kernel, sink, total);
            }
            if matches!(self.state, State::Tcp | State::Adopted(_)) && total == 0 {
                return Received::UseTcp;
            }
            match kernel.receive(sink) {
                Ok(0) => return if total > 0 { Received::Bytes(total) } else { Received::EndOfFile },
                Ok(count) => total += count,
                Err(_) if total > 0 => return Received::Bytes(total),
                Err(EAGAIN) if self.step(lane, kernel) => continue,
                Err(EAGAIN) => return Received::Empty,
                Err(errno) => return Received::Error(errno),
            }
            if sink.remaining() == 0 {
                break;
            }
        }
        self.empty_in_a_row = 0;
        Received::Bytes(total)
    }

    /// Moves on along the stream if it can: begins to catch up, has caught up, or has drained an ended lane.
    fn step(&mut self, lane: &LaneHeader, kernel: &impl Kernel) -> bool {
        match &mut self.state {
            State::Watching(_) => {
                let Some(offset) = lane.beginning() else {
                    if lane.is_closed() && lane.beginning().is_none() {
                        self.leave(Reason::PeerWentBack);
                    }
                    return false;
                };
                if let State::Watching(consumer) = std::mem::take(&mut self.state) {
                    self.state = State::CatchingUp(consumer, offset);
                }
                self.step(lane, kernel)
            }
            State::CatchingUp(_, offset) => {
                let offset = *offset;
                match kernel.read() {
                    Some(read) if read == offset => {
                        if let State::CatchingUp(consumer, _) = std::mem::take(&mut self.state) {
                            self.state = State::Lane(consumer);
                            self.reason = Reason::None;
                        }
                        true
                    }
                    // A beginning that lies behind us is a lie, or bytes that the sender wrote past its own shim.
                    Some(read) if read > offset => {
                        self.misbehaved(lane);
                        false
                    }
                    _ => false,
                }
            }
            State::Lane(consumer) if consumer.is_finished() => {
                self.leave(Reason::PeerWentBack);
                true
            }
            _ => false,
        }
    }

    /// The lane is empty and has not ended: say so, or ask TCP whether the connection has.
    fn empty_lane(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        kernel: &impl Kernel,
        sink: &mut Sink<'_>,
        total: usize,
    ) -> Received {
        if total > 0 {
            self.empty_in_a_row = 0;
            return Received::Bytes(total);
        }
        self.empty_in_a_row += 1;
        if !self.tcp_has_news && !lane.has_fin() && !self.empty_in_a_row.is_multiple_of(ASK_TCP_EVERY) {
            return Received::Empty;
        }
        let before = *sink;
        let verdict = match kernel.receive(sink) {
            Err(EAGAIN) => {
                self.tcp_has_news = false;
                return Received::Empty;
            }
            // Bytes that the sender wrote past its shim: there is no better place for them than here.
            Ok(count) if count > 0 => return Received::Bytes(count),
            Ok(_) => Received::EndOfFile,
            Err(errno) => Received::Error(errno),
        };
        // The sender publishes before it shuts down, so what it published is visible now.
        *sink = before;
        let State::Lane(consumer) = &mut self.state else { return verdict };
        match consumer.read(lane, ring, sink) {
            Ok(count) if count > 0 => Received::Bytes(count),
            _ => verdict,
        }
    }

    /// Copies without reading. Only the nearest stretch of the stream is looked at.
    pub fn peek(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        kernel: &impl Kernel,
        sink: &mut Sink<'_>,
    ) -> Received {
        while self.step(lane, kernel) {}
        let State::Lane(consumer) = &mut self.state else { return Received::UseTcp };
        match consumer.peek(lane, ring, sink) {
            Ok(0) if consumer.is_finished() => {
                self.leave(Reason::PeerWentBack);
                Received::UseTcp
            }
            // An empty lane: TCP knows about end of file, and its answer to a peek changes nothing.
            Ok(0) => Received::UseTcp,
            Ok(count) => Received::Bytes(count),
            Err(Misbehaved) => {
                self.misbehaved(lane);
                Received::UseTcp
            }
        }
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
        while self.step(lane, kernel) {}
        match &mut self.state {
            State::Lane(consumer) => consumer.available(lane, ring).unwrap_or(0),
            _ => 0,
        }
    }

    /// The kernel has said that TCP is readable: the next receive that finds the lane empty asks it.
    #[inline]
    pub fn note_tcp_news(&mut self) {
        self.tcp_has_news = true;
    }

    /// L2: ends the lane. What is in it is still read first.
    pub fn close(&mut self, lane: &LaneHeader, reason: Reason) {
        match self.state {
            State::Tcp => return,
            State::Adopted(_) => {
                lane.close();
                self.leave(reason);
            }
            // The sender may have begun just before: only `step` can tell, and it drains what there is.
            _ => lane.close(),
        }
        self.reason = reason;
    }

    fn misbehaved(&mut self, lane: &LaneHeader) {
        lane.close();
        self.leave(Reason::PeerMisbehaved);
    }

    fn leave(&mut self, reason: Reason) {
        self.done += self.lane_bytes();
        self.state = State::Tcp;
        // The reason why this side closed is better than "the lane had an end".
        if matches!(self.reason, Reason::None | Reason::PeerNotOffered) || reason != Reason::PeerWentBack {
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

    fn lane_bytes(&self) -> u64 {
        match &self.state {
            State::Tcp => 0,
            State::Adopted(consumer) | State::Watching(consumer) | State::Lane(consumer) => consumer.consumed(),
            State::CatchingUp(consumer, _) => consumer.consumed(),
        }
    }
}
