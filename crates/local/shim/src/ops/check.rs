//! One check for bytes: in the lane, and in TCP where the stream is there. Nothing here waits.
//!
//! ```text
//! the stream:   bytes of TCP | bytes of the lane | bytes of TCP
//!               ^ the lane begins here (start)   ^ and ends here (CLOSED in tail)
//! ```
//!
//! A plain receive is `receive` of `shunt-transport`, which takes the bytes up to the first border
//! and goes on into the lane. MSG_PEEK and MSG_TRUNC cross the borders here, so that they see and
//! discard what a receive would take.

use std::ffi::c_int;
use std::os::fd::RawFd;

use libc::msghdr;
use shunt_abi::reason::Reason;
use shunt_ring::bytes::{MappedRing, Ring};
use shunt_ring::user::Piece;
use shunt_ring::{LaneHeader, Sink};
use shunt_transport::{Kernel, Received, Waiting};

use crate::base::lock::Guard;
use crate::base::rank;
use crate::base::{kernel, process};
use crate::life::{attach, returning, unread_timeout};
use crate::ops::send::{NO_PIECES, empty_message, fill_list};
use crate::socket::endpoint::{Endpoint, RxSide};
use crate::socket::finished;
use crate::socket::tcp::Tcp;

/// Locks the receiving direction, after the work that must come first and cannot be done under the
/// lock. `watching` is set as soon as it may be, and returned bytes are sent.
#[inline]
pub(super) fn ready_side(endpoint: &Endpoint, fd: RawFd) -> Guard<'_, RxSide, { rank::RECEIVING }> {
    let side = endpoint.rx.lock();
    let returned = side.at.is_some_and(|at| at.outgoing().0.is_returned());
    if !returned && !side.rx.is_adopted() {
        return side;
    }
    drop(side);
    attach::try_watch(endpoint);
    returning::send_again_if_returned(endpoint, fd);
    endpoint.rx.lock()
}

/// Checks for bytes in a call that may wait. If the sender is slower than the receiver, the lane is
/// left alone for a moment first: see `crate::base::pace`.
#[inline]
pub(super) fn look_in_time(
    endpoint: &Endpoint,
    fd: RawFd,
    side: &mut RxSide,
    sink: &mut Sink<'_>,
) -> Received {
    let wanted = sink.remaining();
    if side.rx.known().is_none_or(|known| known >= wanted) {
        return look(endpoint, fd, side, sink, 0);
    }
    side.pace.wait();
    let outcome = look(endpoint, fd, side, sink, 0);
    let found = wanted - sink.remaining() + side.rx.known().unwrap_or(0);
    side.pace.learn(found, wanted, &endpoint.requests.unanswered);
    outcome
}

/// Checks the lane, and TCP where the stream is not on it.
#[inline]
pub(super) fn look(
    endpoint: &Endpoint,
    fd: RawFd,
    side: &mut RxSide,
    sink: &mut Sink<'_>,
    flags: c_int,
) -> Received {
    let Some(at) = side.at else { return Received::UseTcp };
    let (lane, ring) = at.incoming();
    let tcp = Tcp { endpoint, fd };
    let on_lane = side.rx.on_lane();
    let outcome = match flags & (libc::MSG_PEEK | libc::MSG_TRUNC) {
        0 => side.rx.receive(lane, &ring, &tcp, sink),
        _ => Look { side, lane, ring: &ring, tcp: &tcp }.take_no_bytes(sink, flags),
    };
    if on_lane || side.rx.on_lane() {
        if on_lane && !side.rx.on_lane() {
            note_end(side, lane);
        }
        endpoint.report_received(side);
        if lane.is_space_wanted() {
            tell_of_space(endpoint, side, fd);
        }
    }
    match outcome {
        Received::Bytes(_) if flags & libc::MSG_PEEK == 0 => outcome,
        outcome => {
            finished::notice(endpoint, side);
            Look { side, lane, ring: &ring, tcp: &tcp }.beyond(sink, flags, outcome)
        }
    }
}

/// Wakes a sender that waits for room, once a third of the ring is free.
#[cold]
pub(super) fn tell_of_space(endpoint: &Endpoint, side: &mut RxSide, fd: RawFd) {
    let Some(at) = side.at else { return };
    let (lane, ring) = at.incoming();
    if side.rx.available(lane, &ring, &Tcp { endpoint, fd }) <= ring.len() / 3 * 2 {
        at.announce_space();
    }
}

/// Counts why the lane has been left.
#[cold]
fn note_end(side: &RxSide, lane: &LaneHeader) {
    if side.rx.reason() == Reason::PeerMisbehaved {
        process::count_bypass(Reason::PeerMisbehaved);
    } else if side.rx.reason() == Reason::PeerWentBack && lane.is_taken() && !lane.has_lasting_rx_waiter() {
        // A lane that this end has ended shows nothing here, and a receiver with a known epoll
        // instance merely had no processor.
        unread_timeout::note_taken_back();
    }
}

/// What one check works on.
struct Look<'a> {
    side: &'a mut RxSide,
    lane: &'a LaneHeader,
    ring: &'a MappedRing,
    tcp: &'a Tcp<'a>,
}

impl Look<'_> {
    /// Checks for MSG_PEEK and MSG_TRUNC.
    #[inline(never)]
    fn take_no_bytes(&mut self, sink: &mut Sink<'_>, flags: c_int) -> Received {
        match flags & (libc::MSG_PEEK | libc::MSG_TRUNC) {
            libc::MSG_PEEK => self.side.rx.peek(self.lane, self.ring, self.tcp, &mut { *sink }),
            libc::MSG_TRUNC => self.discard(sink, flags),
            _ => self.count(sink.remaining()),
        }
    }

    /// Completes an outcome by what TCP has, where the lane is not all there is.
    #[inline(never)]
    fn beyond(&mut self, sink: &mut Sink<'_>, flags: c_int, outcome: Received) -> Received {
        let fd = self.tcp.fd;
        // A peek that the lane cannot answer must not block in the kernel while the lane is
        // watched.
        match outcome {
            // Where it may block, the kernel's own receive also passes over urgent data.
            Received::Empty | Received::EndOfFile if !is_watched(self.side) => Received::UseTcp,
            Received::UseTcp if flags & libc::MSG_PEEK != 0 && is_watched(self.side) => {
                match by_tcp_up_to(fd, sink, self.side.rx.peek_limit(), flags) {
                    Ok(0) => Received::EndOfFile,
                    // A peek that has seen all bytes of TCP goes on in the lane.
                    Ok(count) if count == self.side.rx.peek_limit() => {
                        let mut rest = *sink;
                        rest.advance(count.min(rest.remaining()));
                        let behind = if flags & libc::MSG_TRUNC != 0 {
                            let behind = self.side.rx.unread(self.lane, self.ring).min(rest.remaining());
                            rest.advance(behind);
                            behind
                        } else {
                            self.side.rx.peek_behind(self.lane, self.ring, &mut rest)
                        };
                        // Behind the end of the lane, the stream is on TCP again.
                        let beyond = if rest.remaining() > 0
                            && self.side.rx.ends_behind(self.lane, self.ring, behind)
                        {
                            by_tcp_beyond(fd, sink, count, &rest, flags)
                        } else {
                            0
                        };
                        Received::Bytes(count + behind + beyond)
                    }
                    Ok(count) => Received::Bytes(count),
                    Err(libc::EAGAIN) => Received::Empty,
                    Err(errno) => Received::Error(errno),
                }
            }
            // A peek that has seen all of an ended lane goes on in TCP.
            Received::Bytes(count)
                if flags & libc::MSG_PEEK != 0
                    && count < sink.remaining()
                    && self.side.rx.ends_behind(self.lane, self.ring, count)
                    && matches!(self.tcp.waiting(), Waiting::Bytes(_))
                    && !self.tcp.at_mark() =>
            {
                let mut rest = *sink;
                rest.advance(count);
                Received::Bytes(count + by_tcp_now(fd, &rest, flags).unwrap_or(0))
            }
            // No bytes are found before urgent data, but a receive passes over it.
            Received::Empty
                if self.side.rx.is_attached()
                    && !self.side.rx.on_lane()
                    && flags & libc::MSG_PEEK == 0
                    && self.tcp.at_mark() =>
            {
                match self.tcp.receive(sink) {
                    Ok(count @ 1..) => {
                        self.side.rx.note_taken(self.lane, count);
                        Received::Bytes(count)
                    }
                    Ok(0) | Err(libc::EAGAIN) => Received::Empty,
                    Err(errno) => Received::Error(errno),
                }
            }
            outcome => outcome,
        }
    }

    /// Counts the bytes for MSG_TRUNC with MSG_PEEK. The program's buffer is not touched, and may
    /// be null.
    fn count(&mut self, count: usize) -> Received {
        loop {
            let count = self.side.rx.available(self.lane, self.ring, self.tcp).min(count);
            if count > 0 {
                return Received::Bytes(count);
            }
            match self.probe() {
                Received::Bytes(_) => {}
                outcome => return outcome,
            }
        }
    }

    /// Discards bytes for MSG_TRUNC, across every border of the stream, as a receive takes them.
    /// The program's buffer is not touched, and may be null.
    fn discard(&mut self, sink: &mut Sink<'_>, flags: c_int) -> Received {
        let mut total = 0;
        let outcome = loop {
            let count = self.side.rx.discard(self.lane, self.ring, self.tcp, sink.remaining());
            total += count;
            sink.advance(count);
            if sink.remaining() == 0 {
                return Received::Bytes(total);
            }
            // As much of TCP may be discarded as a peek would show.
            let limit = match self.probe() {
                Received::Bytes(_) => continue,
                Received::UseTcp if is_watched(self.side) => self.side.rx.peek_limit(),
                Received::UseTcp if total == 0 => return Received::UseTcp,
                Received::UseTcp if matches!(self.tcp.waiting(), Waiting::Bytes(_)) => sink.remaining(),
                outcome => break outcome,
            };
            if total > 0 && self.tcp.at_mark() {
                break Received::Empty;
            }
            match by_tcp_up_to(self.tcp.fd, sink, limit, flags) {
                Ok(0) => break Received::EndOfFile,
                Ok(count) => {
                    self.side.rx.note_taken(self.lane, count);
                    total += count;
                    sink.advance(count);
                }
                Err(libc::EAGAIN) => break Received::Empty,
                Err(errno) => break Received::Error(errno),
            }
        };
        if total > 0 { Received::Bytes(total) } else { outcome }
    }

    /// Peeks at one byte.
    fn probe(&mut self) -> Received {
        let mut probe = [0u8];
        let pieces = [Piece { base: probe.as_mut_ptr(), len: 1 }];
        // SAFETY: one byte of our own.
        self.side.rx.peek(self.lane, self.ring, self.tcp, &mut unsafe { Sink::new(&pieces) })
    }
}

/// Returns whether no receive may block in the kernel.
pub(super) fn is_watched(side: &RxSide) -> bool {
    side.rx.is_attached() && !side.rx.is_adopted()
}

/// Calls the real recvmsg without waiting, for the rest of `sink`, which it does not advance. It
/// can be called under a lock.
pub(super) fn by_tcp_now(fd: RawFd, sink: &Sink<'_>, flags: c_int) -> Result<usize, i32> {
    // SAFETY: the message describes the program's own buffer.
    in_lists(sink, flags, |message| unsafe { kernel::recvmsg_now(fd, message, flags | libc::MSG_DONTWAIT) })
}

/// Receives at most `limit` bytes without waiting, by a single call.
fn by_tcp_up_to(fd: RawFd, sink: &Sink<'_>, limit: usize, flags: c_int) -> Result<usize, i32> {
    let mut list = NO_PIECES;
    let count = fill_list(&mut list, sink.list());
    let mut left = limit;
    for piece in &mut list[..count] {
        piece.iov_len = piece.iov_len.min(left);
        left -= piece.iov_len;
    }
    // SAFETY: the message describes the program's own buffer.
    unsafe { kernel::recvmsg_now(fd, &mut empty_message(&mut list[..count]), flags | libc::MSG_DONTWAIT) }
}

/// Peeks into `rest` at the bytes of TCP beyond the first `before`, which are written again to the
/// beginning of `sink`.
fn by_tcp_beyond(fd: RawFd, sink: &Sink<'_>, before: usize, rest: &Sink<'_>, flags: c_int) -> usize {
    let mut list = NO_PIECES;
    let filled = fill_list(&mut list, sink.list());
    let (mut left, mut used) = (before, 0);
    while left > 0 && used < filled {
        list[used].iov_len = list[used].iov_len.min(left);
        left -= list[used].iov_len;
        used += 1;
    }
    used += fill_list(&mut list[used..], rest.list());
    // SAFETY: the message describes the program's own buffer.
    let seen =
        unsafe { kernel::recvmsg_now(fd, &mut empty_message(&mut list[..used]), flags | libc::MSG_DONTWAIT) };
    seen.map_or(0, |seen| seen.saturating_sub(before))
}

/// Has `receive` fill one list of pieces after another, as long as it fills them.
fn in_lists(
    sink: &Sink<'_>,
    flags: c_int,
    receive: impl Fn(*mut msghdr) -> Result<usize, i32>,
) -> Result<usize, i32> {
    let mut sink = *sink;
    let mut done = 0;
    loop {
        let mut list = NO_PIECES;
        let count = fill_list(&mut list, sink.list());
        let listed: usize = list[..count].iter().map(|piece| piece.iov_len).sum();
        let received = match receive(&mut empty_message(&mut list[..count])) {
            Ok(received) => received,
            Err(_) if done > 0 => return Ok(done),
            Err(errno) => return Err(errno),
        };
        done += received;
        sink.advance(received.min(sink.remaining()));
        // A second peek would see these bytes again.
        if received < listed || sink.remaining() == 0 || flags & libc::MSG_PEEK != 0 {
            return Ok(done);
        }
    }
}
