//! Sending: write, writev, send, sendto, sendmsg. `send_file.rs` has sendfile.
//!
//! A send takes the first of these paths that suffices:
//!
//! ```text
//! send_few    fast path of a hook: one small buffer, and nothing to do but to copy it
//! at_once     fast path of the other calls (both in send_fast.rs)
//! send_to     a loop of `onto_lane` and sleeps, which goes on by TCP if it must
//! ```
//!
//! An example: a blocking send of 1 MiB finds room for 200 KiB. `onto_lane` copies these and
//! returns `Full`. The call takes a reference to its socket (`SocketReference`), notes in the lane
//! that it wants room, and sleeps. The receiver reads, sees the note, and rings. That goes on until
//! the lane has everything (`Done`) or TCP must take the rest (`Left`). If the receiver does not
//! read, the rest goes into the spill (`socket/stall.rs`). `ops/send_step.rs` decides what follows
//! each attempt, and [`Call`] does it.

use std::ffi::c_int;
use std::os::fd::RawFd;

use libc::{iovec, msghdr, ssize_t};
use shunt_abi::reason::{Reason, Transport};
use shunt_ring::Source;
use shunt_ring::user::Piece;
use shunt_sys::memory;
use shunt_transport::Sent;

use super::send_fast::{at_once, note_progress};
use crate::base::lock::Guard;
use crate::base::undo_log::Held;
use crate::base::{errno, kernel, process, rank, real, signal, waiter};
use crate::epoll;
use crate::life::{attach, resets, returning, unread_timeout};
use crate::ops::send_step::{Found, Lane, Progress, Step};
use crate::ops::sleep::{Deadline, Woken};
use crate::ops::socket_reference::{BEGIN_ANEW, SocketReference};
use crate::ops::{send_step, sleep, undo};
use crate::socket::endpoint::{Endpoint, Seen, TxSide};
use crate::socket::links::{Attachment, Backed};
use crate::socket::stall::Verdict;
use crate::socket::{endpoint, outgoing, settings};

/// Flags that mean the same on a lane as for TCP, or that mean nothing to a send of TCP.
pub(crate) const UNDERSTOOD: c_int = libc::MSG_NOSIGNAL
    | libc::MSG_DONTWAIT
    | libc::MSG_MORE
    | libc::MSG_EOR
    | libc::MSG_CONFIRM
    | libc::MSG_DONTROUTE
    | libc::MSG_WAITALL;
/// The pieces of one system call, for [`fill_list`] to fill in.
pub(super) const NO_PIECES: [iovec; 64] = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 64];

/// Sends the bytes in `pieces`. If the call restarts and `fd` names another connection by then, it
/// sends to that one. Where only TCP is concerned, `kernel` makes the program's own call, with the
/// fd that it is passed. `Err` is an errno.
#[inline(always)]
pub(crate) fn send(
    endpoint: &'static Endpoint,
    fd: RawFd,
    pieces: &[Piece],
    flags: c_int,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<usize, i32> {
    match pieces {
        [piece] if !endpoint.owes() && at_once(endpoint, *piece, flags) => Ok(piece.len),
        _ => send_all(endpoint, fd, pieces, flags, kernel),
    }
}

/// The check of a source's pieces, a function because tests/stack knows it by its name.
fn is_source_readable(base: *mut u8, len: usize) -> bool {
    memory::is_readable(base, len)
}

/// Sends where that was not possible [`at_once`].
#[inline(never)]
pub(crate) fn send_all(
    mut endpoint: &'static Endpoint,
    fd: RawFd,
    pieces: &[Piece],
    flags: c_int,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<usize, i32> {
    // SAFETY: only memory is read that may be read by what the kernel says.
    let mut source = unsafe { Source::checked(pieces, is_source_readable) };
    loop {
        match send_to(endpoint, fd, &mut source, flags, kernel) {
            Err(BEGIN_ANEW) => match endpoint::behind(fd) {
                Some(now) => endpoint = now,
                None => return by_kernel(Held::NOTHING, fd, kernel),
            },
            outcome => return outcome,
        }
    }
}

/// Sends to the connection that `fd` named when the call began. Returns `BEGIN_ANEW` if the call
/// restarts.
#[inline]
fn send_to(
    endpoint: &'static Endpoint,
    fd: RawFd,
    source: &mut Source<'_>,
    flags: c_int,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<usize, i32> {
    if source.remaining() == 0 {
        resets::notice_reset(endpoint, fd);
        return endpoint.take_owed(fd).map_or_else(|| by_kernel(Held::NOTHING, fd, kernel), Err);
    }
    if flags & !UNDERSTOOD != 0 {
        refuse_flags(endpoint, flags);
    }
    if endpoint.owes()
        && let Some(errno) = endpoint.take_owed(fd)
    {
        return Err(errno);
    }
    endpoint.requests.unanswered.answer();
    let hold = SocketReference::new(endpoint, fd);
    let mut call = Call {
        endpoint,
        fd,
        wanted: source.remaining(),
        waits: flags & libc::MSG_DONTWAIT == 0 && !endpoint.options.is_nonblocking(),
        deadline: sleep::deadline(endpoint.options.send_timeout()),
        of_file: false,
        restarts: false,
        hold: &hold,
    };
    let answer = call.run(source, flags, kernel);
    hold.release();
    answer
}

/// A send that the lane has not taken on the fast path.
pub(super) struct Call<'a> {
    pub(super) endpoint: &'static Endpoint,
    pub(super) fd: RawFd,
    pub(super) wanted: usize,
    pub(super) waits: bool,
    pub(super) deadline: Deadline,
    /// It is a sendfile, which goes on with its socket after a handler.
    pub(super) of_file: bool,
    /// A handler has run during the last wait, and the call restarts.
    pub(super) restarts: bool,
    pub(super) hold: &'a SocketReference,
}

impl Call<'_> {
    #[inline]
    pub(super) fn run(
        &mut self,
        source: &mut Source<'_>,
        flags: c_int,
        kernel: &dyn Fn(RawFd) -> ssize_t,
    ) -> Result<usize, i32> {
        let Call { endpoint, wanted, waits, .. } = *self;
        loop {
            let mut side = endpoint.tx.lock();
            let (transport, switched) = attach::sending_transport(endpoint, &mut side, self.fd);
            let lane = match transport {
                Transport::Tcp => Lane::OnTcp,
                _ => onto_lane(endpoint, &mut side, source),
            };
            if lane == Lane::Done {
                drop(side);
                if switched {
                    epoll::refresh(endpoint);
                }
                return Ok(wanted);
            }
            let has_socket = !waits || self.hold.take();
            let progress = Progress { waits, done: wanted - source.remaining() };
            let step = send_step::next(Found::Attempted { lane, has_socket }, progress);
            if step == Step::ByTcp {
                return self.by_tcp(side, source, flags, kernel);
            }
            drop(side);
            if has_socket && (switched || lane == Lane::Left) {
                epoll::refresh(endpoint);
            }
            if let Some(answer) = self.go_on(step, progress) {
                return answer;
            }
            self.fd = self.hold.fd();
        }
    }

    /// Sends the rest by TCP.
    #[inline(never)]
    fn by_tcp(
        &self,
        side: Guard<'_, TxSide, { rank::SENDING }>,
        source: &Source<'_>,
        flags: c_int,
        kernel: &dyn Fn(RawFd) -> ssize_t,
    ) -> Result<usize, i32> {
        let Call { endpoint, fd, wanted, .. } = *self;
        endpoint.enter_send_locked();
        let is_attached = side.at.is_some();
        drop(side);
        let done = wanted - source.remaining();
        // Even before another thread has noticed that the peer is gone: TCP knows it sooner.
        if is_attached {
            resets::notice_reset(endpoint, fd);
            if done == 0
                && let Some(errno) = endpoint.take_owed(fd)
            {
                endpoint.leave_send();
                return Err(errno);
            }
        }
        attach::let_go_if_done(endpoint);
        let held = undo::send(endpoint);
        let outcome = match done {
            0 => by_kernel(held, fd, kernel),
            // A call that has sent bytes returns their count, and leaves the error to the next.
            _ if endpoint.owes() || kernel::has_error(fd) => Ok(0),
            _ => Ok(rest_by_tcp(held, endpoint, fd, source, flags)),
        };
        let outcome = outcome.inspect(|count| endpoint.count_sent(*count));
        endpoint.leave_send();
        Ok(done + outcome?)
    }

    /// Runs the steps that follow an attempt. Returns the result of the call, or `None` if it makes
    /// another attempt.
    #[inline(never)]
    pub(super) fn go_on(&mut self, mut step: Step, progress: Progress) -> Option<Result<usize, i32>> {
        let Call { endpoint, fd, deadline, hold, .. } = *self;
        loop {
            let found = match step {
                Step::Return(count) => return Some(Ok(count)),
                Step::Fail(errno) => return Some(Err(errno)),
                Step::BeginAnew => return Some(Err(BEGIN_ANEW)),
                // Only an attempt leads to TCP.
                Step::Attempt | Step::ByTcp => return None,
                Step::LeaveLane => {
                    attach::let_go_if_done(endpoint);
                    Found::Changed
                }
                Step::FallBack => {
                    give_up(endpoint);
                    Found::Changed
                }
                Step::Desert => {
                    desert(endpoint, fd);
                    Found::Changed
                }
                Step::SendAgain => Found::SentAgain { all: returning::send_again(endpoint, fd) },
                Step::AskMode(until) => {
                    Found::Mode { until, blocks: settings::really_blocks(endpoint, fd) && hold.take() }
                }
                Step::Arm => Found::Armed { has_room: arm_for_space(endpoint) },
                Step::SleepForSpace => self.note(wait_for_space(hold, endpoint, deadline)),
                Step::SleepOnTcp => {
                    self.note(sleep::sleep(hold, libc::POLLOUT, None, deadline, None, Held::NOTHING))
                }
                Step::KeepSocket => {
                    // After a handler, the call has nothing but the fd.
                    let is_lost = self.restarts && hold.is_closed() || hold.is_void();
                    Found::Socket { is_kept: !is_lost }
                }
            };
            step = send_step::next(found, progress);
        }
    }

    fn note(&mut self, woken: Woken) -> Found {
        self.restarts = !self.of_file && woken == Woken::Signal { restarts: true };
        Found::Woken(woken)
    }
}

/// Puts as many bytes onto the lane as fit.
#[inline]
fn onto_lane(endpoint: &Endpoint, side: &mut TxSide, source: &mut Source<'_>) -> Lane {
    let Some(at) = side.at else { return Lane::Left };
    let (lane, ring) = at.outgoing();
    if outgoing::peer_has_left(&at) && !lane.is_returned() {
        return Lane::Deserted;
    }
    let before = source.remaining();
    let outcome = loop {
        let ring = Backed::new(ring, &side.seen);
        let left = source.remaining();
        let sent = side.tx.write(lane, &ring, source);
        // The lane may have ended after it took bytes.
        if source.remaining() < left {
            announce(endpoint, &at, &side.seen);
        }
        match sent {
            Sent::Bytes(_) if source.remaining() == 0 => break Lane::Done,
            Sent::Bytes(_) => {}
            Sent::Full => match outgoing::look(side, &at) {
                Verdict::Spill => {}
                Verdict::FallBack => break Lane::Stalled,
                Verdict::HoldSpill(_) | Verdict::Wait(_) => break Lane::Full,
            },
            Sent::Ended => outgoing::leave_ended_lane(endpoint, side, &at),
            Sent::UseTcp => break Lane::Left,
            Sent::SendAgain => break Lane::Returned,
            Sent::Fault => break Lane::Fault,
        }
    };
    if source.remaining() < before {
        if outcome != Lane::Full {
            outgoing::end_wait(&mut side.seen);
        }
        note_progress(endpoint, side.tx.lane_total(), &mut side.seen);
    }
    match outcome {
        Lane::Left => {
            if side.tx.reason() != Reason::PeerWentBack {
                process::count_bypass(side.tx.reason());
            }
            endpoint.report_tx(side);
            Lane::Left
        }
        outcome => outcome,
    }
}

/// Wakes the receiver for bytes in the lane, and notes that they must be checked again (L9). The
/// latter is done even if a waiter is woken: a program that poll notifies of the bytes may then
/// wait in a way that no hook sees.
#[inline(always)]
pub(super) fn announce(endpoint: &Endpoint, at: &Attachment, seen: &Seen) {
    at.announce_bytes();
    unread_timeout::note_sent(endpoint, seen);
}

/// Falls back to TCP, because the peer is gone.
fn desert(endpoint: &Endpoint, fd: RawFd) {
    resets::reset_if_lost(endpoint, fd);
    attach::go_back(endpoint, Reason::PeerDied);
}

/// Has a stalled connection fall back. Both directions leave the link, so that it can be paired
/// again later.
pub(crate) fn give_up(endpoint: &Endpoint) {
    attach::go_back(endpoint, Reason::Stalled);
}

/// Has the socket's waiter woken for room, after a non-blocking send that found none. Returns
/// `true` if there is some by now.
fn arm_for_space(endpoint: &Endpoint) -> bool {
    let is_full = outgoing::is_full(endpoint, endpoint.owner());
    if is_full {
        epoll::watch_for_space(endpoint);
    }
    !is_full
}

/// Sleeps in a call that has found a full lane and may wait.
fn wait_for_space(hold: &SocketReference, endpoint: &'static Endpoint, deadline: Deadline) -> Woken {
    waiter::waiting(|| sleep_for_space(hold, endpoint, deadline))
}

fn sleep_for_space(hold: &SocketReference, endpoint: &'static Endpoint, deadline: Deadline) -> Woken {
    if sleep::spin(|| !outgoing::is_full(endpoint, None)) {
        return Woken::LookAgain { tcp: false };
    }
    let slot = sleep::thread_slot();
    let at = endpoint.tx.lock().at.map(|at| at.pin().by_hand());
    let Some(at) = at else { return Woken::LookAgain { tcp: false } };
    let line = slot.map(|slot| at.link.view().waiter(at.link.side, slot.0));
    if let Some(line) = line {
        line.announce_sleep();
    }
    let woken = if outgoing::is_full(endpoint, slot) {
        let held = undo::sleep(endpoint, at, slot);
        sleep::sleep(hold, 0, slot, deadline, Some(outgoing::longest_sleep(endpoint)), held)
    } else {
        Woken::LookAgain { tcp: false }
    };
    if let Some(line) = line {
        line.awake();
    }
    at.unpin();
    sleep::leave_if_refused(endpoint, woken);
    woken
}

/// Falls back for a flag that lanes do not have. For urgent data the hook has done that.
fn refuse_flags(endpoint: &Endpoint, flags: c_int) {
    if flags & libc::MSG_ZEROCOPY != 0 {
        attach::bar(endpoint, Reason::ZeroCopy);
    } else if flags & libc::MSG_FASTOPEN != 0 {
        attach::bar(endpoint, Reason::FastOpen);
    } else if flags & libc::MSG_OOB == 0 {
        attach::bar(endpoint, Reason::UnsupportedFlag);
    }
}

pub(super) fn by_kernel(held: Held, fd: RawFd, kernel: &dyn Fn(RawFd) -> ssize_t) -> Result<usize, i32> {
    usize::try_from(signal::open(held, || kernel(fd))).map_err(|_| errno::get())
}

/// Sends the rest of `source` by the real sendmsg, without advancing it. Returns how many bytes
/// that were.
fn rest_by_tcp(held: Held, endpoint: &Endpoint, fd: RawFd, source: &Source<'_>, flags: c_int) -> usize {
    let mut source = *source;
    let mut done = 0;
    while source.remaining() > 0 {
        let mut list = NO_PIECES;
        let count = fill_list(&mut list, source.list());
        let listed: usize = list[..count].iter().map(|piece| piece.iov_len).sum();
        let message = empty_message(&mut list[..count]);
        // SAFETY: the list describes the program's own buffer.
        let result =
            signal::open(held, || unsafe { real::sendmsg(fd, &message, flags | libc::MSG_NOSIGNAL) });
        let Ok(sent) = usize::try_from(result) else {
            // TCP would have kept its error for the next call. That of a socket which is shut down
            // is there for every call.
            if is_of_connection(errno::get()) {
                endpoint.owe(fd, errno::get());
            }
            break;
        };
        done += sent;
        if sent < listed {
            break;
        }
        source.advance(sent.min(source.remaining()));
    }
    done
}

/// Returns whether it is an error that a connection reports once.
pub(super) fn is_of_connection(errno: i32) -> bool {
    matches!(
        errno,
        libc::ECONNRESET | libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH | libc::ECONNABORTED
    )
}

/// Puts the first `pieces` into an iovec list, and returns how many.
pub(crate) fn fill_list(list: &mut [iovec], pieces: impl Iterator<Item = Piece>) -> usize {
    let parts = list.iter_mut().zip(pieces);
    parts.map(|(to, Piece { base, len })| *to = iovec { iov_base: base.cast(), iov_len: len }).count()
}

/// Returns a message of bytes only.
pub(crate) fn empty_message(list: &mut [iovec]) -> msghdr {
    // SAFETY: all zeroes is a valid msghdr: no name, no control data.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = list.as_mut_ptr();
    message.msg_iovlen = list.len() as _;
    message
}
