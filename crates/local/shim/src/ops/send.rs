//! Sending: write, writev, send, sendto, sendmsg, sendfile.
//!
//! A send takes the first of these paths that suffices:
//!
//! ```text
//! send_few    fast path of a hook: one small buffer, and nothing to do but to copy it
//! at_once     fast path of the other calls
//! send_to     a loop of `onto_lane` and sleeps, which goes on by TCP if it must
//! ```
//!
//! An example: a blocking send of 1 MiB finds room for 200 KiB. `onto_lane` copies these and
//! returns `Full`. The call takes a reference to its socket (`SocketReference`), notes in the lane
//! that it wants room, and sleeps. The receiver reads, sees the note, and rings. That goes on until
//! the lane has everything (`Done`) or TCP must take the rest (`Left`). If the receiver does not
//! read, the rest goes into the spill (`socket/stall.rs`). `ops/send_step.rs` decides what follows
//! each attempt, and [`Call`] does it.

use std::ffi::{c_int, c_void};
use std::hint::cold_path;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use libc::{iovec, msghdr, ssize_t};
use shunt_abi::reason::{Reason, Transport};
use shunt_ring::bytes::{MappedRing, Ring};
use shunt_ring::copy::Method;
use shunt_ring::user::Piece;
use shunt_ring::{LaneHeader, Source, WaiterLine};
use shunt_sys::memory::{self, Access};
use shunt_transport::Sent;

use crate::base::lock::Guard;
use crate::base::rank;
use crate::base::signal;
use crate::base::undo_log::Held;
use crate::base::{errno, kernel, process, real, waiter};
use crate::epoll;
use crate::life::{attach, resets, returning, unread_timeout};
use crate::ops::send_step::{self, Found, Lane, Progress, Step};
use crate::ops::sleep::{Deadline, Woken};
use crate::ops::socket_reference::{BEGIN_ANEW, SocketReference};
use crate::ops::{self, Slowly, sleep, undo};
use crate::socket::endpoint::{self, Endpoint, Seen, TxSide};
use crate::socket::links::{Attachment, Backed};
use crate::socket::stall::Verdict;
use crate::socket::{outgoing, settings};

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

/// How many bytes can be sent [`at_once`] at most.
const SHORT: usize = 4096;

/// Handles the call of a hook that has found its endpoint on the [fast path](endpoint::at_once):
/// puts a few bytes into the lane if nothing else is to be done, as in most calls. Everything else
/// is left to functions that return in its place, so that this one needs no stack frame.
#[inline(always)]
pub(crate) fn send_few(
    endpoint: &'static Endpoint,
    shield: signal::Brief,
    fd: RawFd,
    Piece { base, len }: Piece,
    flags: c_int,
    slowly: Slowly<*const c_void>,
) -> ssize_t {
    if !endpoint.tx.try_hold_briefly() {
        cold_path();
        return ops::begin_slowly(fd, base.cast_const().cast(), len, flags, slowly);
    }
    // SAFETY: held now.
    let mut side = unsafe { endpoint.tx.take_over() };
    match put::<true>(endpoint, side.value(), Piece { base, len }) {
        Some(None) if side.value().seen.is_listed.get() => {}
        Some(sleeper) => return end_put(endpoint, sleeper, len),
        None => return send_many(fd, base.cast(), len, flags, endpoint, slowly),
    }
    ops::end_at_once(side, shield, len as ssize_t)
}

/// Goes on where the bytes are many, or memory must be checked, or the fast path lacks something
/// else.
#[inline(never)]
fn send_many(
    fd: RawFd,
    base: *const c_void,
    len: usize,
    flags: c_int,
    endpoint: &'static Endpoint,
    slowly: Slowly<*const c_void>,
) -> ssize_t {
    // SAFETY: `send_few` has left both to this function.
    let (mut side, shield) = (unsafe { endpoint.tx.take_over() }, signal::Brief::take_over());
    let sent = put_all(endpoint, side.value(), Piece { base: base.cast_mut().cast(), len });
    side.end();
    let answer = shield.lower(if sent { len as ssize_t } else { -1 });
    if answer < 0 { slowly(fd, base, len, flags) } else { answer }
}

/// Ends a send whose bytes are in the lane, but that has more to do.
#[inline(never)]
fn end_put(endpoint: &'static Endpoint, sleeper: Option<&'static WaiterLine>, len: usize) -> ssize_t {
    // SAFETY: as in `send_many`.
    let (mut side, shield) = (unsafe { endpoint.tx.take_over() }, signal::Brief::take_over());
    complete(endpoint, side.value(), sleeper);
    side.end();
    shield.lower(len as ssize_t)
}

/// Sends these bytes if nothing is to be done but to put them into the lane. The endpoint must have
/// no pending error. Returns `false`, having done nothing, if [`send`] must find out more.
#[inline(always)]
pub(crate) fn at_once(endpoint: &Endpoint, piece: Piece, flags: c_int) -> bool {
    if flags & !UNDERSTOOD != 0 {
        return false;
    }
    let mut side = endpoint.tx.briefly();
    let sent = put_all(endpoint, side.value(), piece);
    side.end();
    sent
}

/// Puts the bytes into the lane, under the lock.
#[inline(always)]
fn put_all(endpoint: &Endpoint, side: &mut TxSide, piece: Piece) -> bool {
    // From 1 byte on.
    let is_short = piece.len.wrapping_sub(1) < SHORT;
    let sleeper = if is_short { put::<false>(endpoint, side, piece) } else { None };
    if let Some(sleeper) = sleeper {
        complete(endpoint, side, sleeper);
    }
    sleeper.is_some()
}

/// Puts the bytes into the lane, and returns which waiter of the peer must be rung for them, if
/// any. Returns `None`, having done nothing, if there is more to do. `FEW`: only if they are few,
/// on memory that is known to be good.
#[inline(always)]
fn put<const FEW: bool>(
    endpoint: &Endpoint,
    side: &mut TxSide,
    Piece { base, len }: Piece,
) -> Option<Option<&'static WaiterLine>> {
    let is_good = ops::is_good::<FEW>(base, len, Access::Read);
    let TxSide { tx, at: Some(at), seen, .. } = side else { return None };
    if !is_good || outgoing::peer_has_left(at) {
        return None;
    }
    let (lane, ring) = at.outgoing();
    let found = if FEW { tx.place_on_page(len) } else { tx.place_at_once(lane, &ring, len) }?;
    // A page of the ring is one run.
    let to = ring.in_ring(found.place);
    let method = if FEW { Method::Plain } else { found.method()? };
    // SAFETY: so many bytes can be read there, and written here.
    if !unsafe { ops::copy::<FEW>(base, to, len, method) } {
        return None;
    }
    let total = found.publish(lane)?;
    endpoint.unanswered.answer();
    note_progress(endpoint, total, seen);
    Some(at.mark_bytes())
}

/// Does the rest of the work: rings the waiter, and notes that the bytes must be checked again
/// (L9).
#[inline(always)]
fn complete(endpoint: &Endpoint, side: &TxSide, sleeper: Option<&'static WaiterLine>) {
    if let (Some(sleeper), Some(at)) = (sleeper, &side.at) {
        at.ring(sleeper);
    }
    unread_timeout::note_sent(endpoint, &side.seen);
}

/// Notes that bytes have come into the lane. `total`: how many lanes have carried, with these.
#[inline(always)]
fn note_progress(endpoint: &Endpoint, total: u64, seen: &mut Seen) {
    seen.backlog.forget_wait();
    seen.sends = seen.sends.wrapping_add(1);
    if let Some(entry) = endpoint.entry() {
        entry.shm_sent.store(total, Relaxed);
    }
}

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
    endpoint.unanswered.answer();
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
struct Call<'a> {
    endpoint: &'static Endpoint,
    fd: RawFd,
    wanted: usize,
    waits: bool,
    deadline: Deadline,
    /// It is a sendfile, which goes on with its socket after a handler.
    of_file: bool,
    /// A handler has run during the last wait, and the call restarts.
    restarts: bool,
    hold: &'a SocketReference,
}

impl Call<'_> {
    #[inline]
    fn run(
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
    fn go_on(&mut self, mut step: Step, progress: Progress) -> Option<Result<usize, i32>> {
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
fn announce(endpoint: &Endpoint, at: &Attachment, seen: &Seen) {
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

fn by_kernel(held: Held, fd: RawFd, kernel: &dyn Fn(RawFd) -> ssize_t) -> Result<usize, i32> {
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
fn is_of_connection(errno: i32) -> bool {
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

/// The outcome of a step of sendfile.
pub(crate) enum FileStep {
    /// So many bytes of the file are in the lane; 0 at its end.
    Moved(usize),
    /// So many bytes are in the lane, and the rest belongs to TCP: the kernel's own sendfile sends
    /// it. It also does if the transport is TCP, or the file cannot be read into a lane.
    UseTcp(usize),
}

/// Sends a file onto a lane: the kernel reads it straight into the ring. `read_file` is passed the
/// destination, the most bytes to read, and how far behind the beginning.
#[inline(never)]
pub(crate) fn send_file(
    hold: &SocketReference,
    endpoint: &'static Endpoint,
    wanted: usize,
    mut read_file: impl FnMut(*mut u8, usize, usize) -> Result<usize, i32>,
) -> Result<FileStep, i32> {
    let mut call = Call {
        endpoint,
        fd: hold.fd(),
        wanted,
        waits: !endpoint.options.is_nonblocking(),
        deadline: sleep::deadline(endpoint.options.send_timeout()),
        of_file: true,
        restarts: false,
        hold,
    };
    let mut moved = 0;
    while moved < wanted {
        call.fd = hold.fd();
        if hold.is_void() {
            return if moved > 0 { Ok(FileStep::Moved(moved)) } else { Ok(FileStep::UseTcp(0)) };
        }
        let mut side = endpoint.tx.lock();
        let Some(at) = side.at.filter(|_| side.tx.on_lane()) else {
            drop(side);
            let has_none = moved == 0;
            let pending =
                if has_none { pending_before_file(endpoint, call.fd, &mut read_file) } else { None };
            return pending.map_or(Ok(FileStep::UseTcp(moved)), Err);
        };
        let lane = match file_onto_lane(endpoint, &mut side, &at, wanted - moved, |to, room| {
            read_file(to, room, moved)
        }) {
            Ok(Moved::Bytes(0)) => return Ok(FileStep::Moved(moved)),
            Ok(Moved::Bytes(count)) => {
                moved += count;
                continue;
            }
            Ok(Moved::Again) => continue,
            Ok(Moved::Ended) => {
                drop(side);
                epoll::refresh(endpoint);
                continue;
            }
            Ok(Moved::Not(lane)) => lane,
            Err(_) if moved > 0 => return Ok(FileStep::Moved(moved)),
            Err(errno) => return Err(errno),
        };
        drop(side);
        let progress = Progress { waits: call.waits, done: moved };
        let step = send_step::next(Found::Attempted { lane, has_socket: true }, progress);
        match call.go_on(step, progress) {
            None => {}
            Some(Err(BEGIN_ANEW)) => return Ok(FileStep::UseTcp(0)),
            Some(outcome) => return outcome.map(FileStep::Moved),
        }
    }
    Ok(FileStep::Moved(moved))
}

/// The outcome of an attempt to move a part of a file onto a lane.
enum Moved {
    Bytes(usize),
    /// The lane has ended, and the next attempt finds that out.
    Ended,
    /// None, but the lane has a spill now.
    Again,
    /// None, because of the state of the lane.
    Not(Lane),
}

/// Puts a part of a file onto the lane. `Err` is the errno of the file, or of bad memory.
fn file_onto_lane(
    endpoint: &Endpoint,
    side: &mut TxSide,
    at: &Attachment,
    wanted: usize,
    read_file: impl FnOnce(*mut u8, usize) -> Result<usize, i32>,
) -> Result<Moved, i32> {
    let (lane, ring) = at.outgoing();
    if outgoing::peer_has_left(at) && !lane.is_returned() {
        return Ok(Moved::Not(Lane::Deserted));
    }
    Ok(match fill_from_file(side, lane, &ring, wanted, read_file)? {
        Sent::Bytes(0) => Moved::Bytes(0),
        Sent::Bytes(count) => {
            announce(endpoint, at, &side.seen);
            let total = side.tx.lane_total();
            outgoing::end_wait(&mut side.seen);
            note_progress(endpoint, total, &mut side.seen);
            Moved::Bytes(count)
        }
        Sent::Ended => {
            outgoing::leave_ended_lane(endpoint, side, at);
            Moved::Ended
        }
        Sent::UseTcp => Moved::Ended,
        Sent::SendAgain => Moved::Not(Lane::Returned),
        Sent::Full => match outgoing::look(side, at) {
            Verdict::Spill => Moved::Again,
            Verdict::FallBack => Moved::Not(Lane::Stalled),
            Verdict::HoldSpill(_) | Verdict::Wait(_) => Moved::Not(Lane::Full),
        },
        Sent::Fault => return Err(libc::EFAULT),
    })
}

/// Returns the pending error, which a sendfile on TCP meets. Only bytes meet it: a file that has
/// none is for the kernel to refuse.
fn pending_before_file(
    endpoint: &Endpoint,
    fd: RawFd,
    read_file: &mut impl FnMut(*mut u8, usize, usize) -> Result<usize, i32>,
) -> Option<i32> {
    resets::notice_reset(endpoint, fd);
    let mut byte = [0u8];
    let has_bytes = endpoint.owes() && read_file(byte.as_mut_ptr(), 1, 0) == Ok(1);
    if has_bytes { endpoint.take_owed(fd) } else { None }
}

/// Calls the kernel's own sendfile, which `kernel` makes with the fd that it is passed.
#[inline(never)]
pub(crate) fn file_by_tcp(
    hold: &SocketReference,
    endpoint: &'static Endpoint,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<usize, i32> {
    // It writes to TCP, so no other thread may begin the lane meanwhile.
    endpoint.enter_send_locked();
    let outcome = by_kernel(undo::send(endpoint), hold.fd(), kernel);
    let outcome = outcome.inspect(|count| endpoint.count_sent(*count));
    endpoint.leave_send();
    outcome
}

/// Sends the rest of a file by the kernel's own sendfile, which `kernel` calls with an fd. Returns
/// how many bytes that were.
#[inline(never)]
pub(crate) fn rest_of_file_by_tcp(
    hold: &SocketReference,
    endpoint: &'static Endpoint,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> usize {
    // A call that has sent bytes returns their count, and leaves the error to the next.
    if endpoint.owes() || kernel::has_error(hold.fd()) {
        return 0;
    }
    let outcome = file_by_tcp(hold, endpoint, kernel);
    if let Err(errno) = outcome
        && is_of_connection(errno)
    {
        endpoint.owe(hold.fd(), errno);
    }
    outcome.unwrap_or(0)
}

fn fill_from_file(
    side: &mut TxSide,
    lane: &LaneHeader,
    ring: &MappedRing,
    wanted: usize,
    read_file: impl FnOnce(*mut u8, usize) -> Result<usize, i32>,
) -> Result<Sent, i32> {
    // A quarter of the ring at a time, so that the reader can begin.
    let backed = Backed::new(*ring, &side.seen);
    side.tx.write_with(lane, &backed, wanted.min(ring.len() / 4), |at, room| {
        if room == 0 {
            return Ok(0);
        }
        let (to, run) = ring.run(at, room);
        read_file(to, run)
    })
}
