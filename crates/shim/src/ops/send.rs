//! Sending: write, writev, send, sendto, sendmsg, sendfile.

use std::ffi::{c_int, c_void};
use std::hint::cold_path;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use libc::{iovec, msghdr, ssize_t};
use shunt_abi::reason::{Reason, Road};
use shunt_ring::bytes::{MappedRing, Ring};
use shunt_ring::user::Piece;
use shunt_ring::{LaneHeader, Source, WaiterLine};
use shunt_sys::memory::{self, Access};
use shunt_transport::{Sent, Tx};

use crate::base::journal::Held;
use crate::base::lock::Guard;
use crate::base::signal;
use crate::base::{errno, kernel, process, real, waiter};
use crate::epoll;
use crate::life::{attach, overdue, resets};
use crate::ops::hold::{BEGIN_ANEW, Hold};
use crate::ops::sleep::{Deadline, Woken};
use crate::ops::{self, Slowly, held, sleep};
use crate::socket::endpoint::{self, Endpoint, Seen, TxSide};
use crate::socket::links::{Attachment, Backed};
use crate::socket::stall::Verdict;
use crate::socket::{outgoing, settings};

/// Flags whose meaning on a lane is that of TCP, or that mean nothing to a send of TCP.
pub(crate) const UNDERSTOOD: c_int = libc::MSG_NOSIGNAL
    | libc::MSG_DONTWAIT
    | libc::MSG_MORE
    | libc::MSG_EOR
    | libc::MSG_CONFIRM
    | libc::MSG_DONTROUTE
    | libc::MSG_WAITALL;
/// The pieces of one system call, for [`fill_list`] to fill in.
pub(super) const NO_PIECES: [iovec; 64] = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 64];

/// What can be sent [`at_once`].
const SHORT: usize = 4096;

/// The call of a hook that has found its endpoint [at once](endpoint::at_once): puts a few bytes into the lane if there is nothing else to
/// it, as with most. All that does not belong to that is left to functions that return in its place, so that it needs no frame of its own.
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

/// They are many, or lie elsewhere; or something is to be found out.
#[inline(never)]
fn send_many(
    fd: RawFd,
    base: *const c_void,
    len: usize,
    flags: c_int,
    endpoint: &'static Endpoint,
    slowly: Slowly<*const c_void>,
) -> ssize_t {
    // SAFETY: `send_few` has left both to this.
    let (mut side, shield) = (unsafe { endpoint.tx.take_over() }, signal::Brief::take_over());
    let sent = put_all(endpoint, side.value(), Piece { base: base.cast_mut().cast(), len });
    side.end();
    let answer = shield.lower(if sent { len as ssize_t } else { -1 });
    if answer < 0 { slowly(fd, base, len, flags) } else { answer }
}

/// Bytes are in the lane, and there is more to it.
#[inline(never)]
fn end_put(endpoint: &'static Endpoint, sleeper: Option<&'static WaiterLine>, len: usize) -> ssize_t {
    // SAFETY: as in `send_many`.
    let (mut side, shield) = (unsafe { endpoint.tx.take_over() }, signal::Brief::take_over());
    complete(endpoint, side.value(), sleeper);
    side.end();
    shield.lower(len as ssize_t)
}

/// Sends these bytes if there is nothing to it but to put them into the lane, on an endpoint that owes nothing. `false`: nothing has been
/// done, and [`send`] finds out why.
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

/// Puts them there, under the lock.
#[inline(always)]
fn put_all(endpoint: &Endpoint, side: &mut TxSide, piece: Piece) -> bool {
    // From 1 on.
    let is_short = piece.len.wrapping_sub(1) < SHORT;
    let sleeper = if is_short { put::<false>(endpoint, side, piece) } else { None };
    if let Some(sleeper) = sleeper {
        complete(endpoint, side, sleeper);
    }
    sleeper.is_some()
}

/// Puts them into the lane, and says which waiter of the peer's is to be rung for them. `FEW`: if they are, on memory that is known to be good.
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
    // SAFETY: so much can be read there, and written here.
    if !unsafe { ops::copy::<FEW>(base, to, len) } {
        return None;
    }
    let total = found.publish(lane)?;
    endpoint.unanswered.answer();
    note_progress(endpoint, total, seen);
    Some(at.mark_bytes())
}

/// Does what follows from that.
#[inline(always)]
fn complete(endpoint: &Endpoint, side: &TxSide, sleeper: Option<&'static WaiterLine>) {
    if let (Some(sleeper), Some(at)) = (sleeper, &side.at) {
        at.ring(sleeper);
    }
    overdue::note_sent(endpoint, &side.seen);
}

/// Bytes have come into the lane, with which so many have gone by lanes.
#[inline(always)]
fn note_progress(endpoint: &Endpoint, total: u64, seen: &mut Seen) {
    seen.backlog.forget_wait();
    seen.sends = seen.sends.wrapping_add(1);
    if let Some(entry) = endpoint.entry() {
        entry.shm_sent.store(total, Relaxed);
    }
}

/// Sends what is in `pieces`, to whatever `fd` names if it is another connection's by the time that the call begins anew; where nothing but TCP is concerned, by the program's own call, `kernel`, of the number that it is
/// told. `Err` is an errno.
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

/// The same of what cannot be sent [`at_once`].
#[inline(never)]
pub(crate) fn send_all(
    mut endpoint: &'static Endpoint,
    fd: RawFd,
    pieces: &[Piece],
    flags: c_int,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<usize, i32> {
    // SAFETY: what can be read by what the kernel says may be read.
    let mut source = unsafe { Source::checked(pieces, |base, len| memory::is_readable(base, len)) };
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

/// The same to the connection that `fd` has named. It may begin anew.
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
    let mut call = Call {
        endpoint,
        fd,
        wanted: source.remaining(),
        waits: flags & libc::MSG_DONTWAIT == 0 && endpoint.nonblocking.load(Relaxed) == 0,
        deadline: sleep::deadline(endpoint.send_timeout.load(Relaxed)),
        restarts: false,
        hold: Hold::new(endpoint, fd),
    };
    let answer = call.run(source, flags, kernel);
    call.hold.release();
    answer
}

/// A send that the lane has not taken at once.
struct Call {
    endpoint: &'static Endpoint,
    fd: RawFd,
    wanted: usize,
    waits: bool,
    deadline: Deadline,
    /// A handler has run during the last wait.
    restarts: bool,
    hold: Hold,
}

impl Call {
    #[inline]
    fn run(
        &mut self,
        source: &mut Source<'_>,
        flags: c_int,
        kernel: &dyn Fn(RawFd) -> ssize_t,
    ) -> Result<usize, i32> {
        let Call { endpoint, wanted, waits, .. } = *self;
        loop {
            let fd = self.fd;
            let mut side = endpoint.tx.lock();
            let (road, switched) = attach::sending_road(endpoint, &mut side, fd);
            let outcome = match road {
                Road::Tcp => None,
                _ => Some(onto_lane(endpoint, &mut side, source)),
            };
            if outcome == Some(Lane::Done) {
                drop(side);
                if switched {
                    epoll::refresh(endpoint);
                }
                return Ok(wanted);
            }
            // In the kernel too, a call that goes on has the socket whoever closes the number.
            if waits && !self.hold.take() {
                drop(side);
                let done = wanted - source.remaining();
                return if done > 0 { Ok(done) } else { Err(BEGIN_ANEW) };
            }
            let Some(outcome) = outcome else { return self.by_tcp(side, source, flags, kernel) };
            drop(side);
            if switched || outcome == Lane::Left {
                epoll::refresh(endpoint);
            }
            if let Some(answer) = self.go_on(outcome, source) {
                return answer;
            }
            // After a handler the call has the number alone.
            if self.restarts && self.hold.is_closed() || self.hold.is_void() {
                let done = wanted - source.remaining();
                return if done > 0 { Ok(done) } else { Err(BEGIN_ANEW) };
            }
            self.fd = self.hold.fd();
        }
    }

    /// The rest, where TCP is the road.
    #[inline(never)]
    fn by_tcp(
        &self,
        side: Guard<'_, TxSide>,
        source: &Source<'_>,
        flags: c_int,
        kernel: &dyn Fn(RawFd) -> ssize_t,
    ) -> Result<usize, i32> {
        let Call { endpoint, fd, wanted, .. } = *self;
        endpoint.enter_send_locked();
        let is_attached = side.at.is_some();
        drop(side);
        let done = wanted - source.remaining();
        // Also before anybody has said that the peer is gone: TCP knows it sooner.
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
        let held = held::send(endpoint);
        let outcome = match done {
            0 => by_kernel(held, fd, kernel),
            // A call that has done something says that, and leaves the error to the next.
            _ if endpoint.owes() || kernel::has_error(fd) => Ok(0),
            _ => Ok(rest_by_tcp(held, endpoint, fd, source, flags)),
        };
        let outcome = outcome.inspect(|count| endpoint.count_sent(*count));
        endpoint.leave_send();
        Ok(done + outcome?)
    }

    /// What follows from how far it has come on the lane. `None`: try again.
    #[inline(never)]
    fn go_on(&mut self, outcome: Lane, source: &Source<'_>) -> Option<Result<usize, i32>> {
        let Call { endpoint, fd, wanted, waits, deadline, .. } = *self;
        let done = wanted - source.remaining();
        match outcome {
            Lane::Done => Some(Ok(wanted)),
            Lane::Fault if done > 0 => Some(Ok(done)),
            Lane::Fault => Some(Err(libc::EFAULT)),
            Lane::Left => {
                attach::let_go_if_done(endpoint);
                None
            }
            Lane::Stalled => {
                give_up(endpoint);
                None
            }
            Lane::Returned if attach::send_again(endpoint, fd) => None,
            Lane::Returned if waits && settings::really_blocks(endpoint, fd) => {
                let woken = sleep::sleep(&self.hold, libc::POLLOUT, None, deadline, None, Held::NOTHING);
                self.note(woken).ends(done)
            }
            Lane::Deserted => {
                desert(endpoint, fd);
                None
            }
            Lane::Full if waits && settings::really_blocks(endpoint, fd) => {
                let woken = wait_for_space(&self.hold, endpoint, deadline);
                self.note(woken).ends(done)
            }
            Lane::Full if arm_for_space(endpoint) => None,
            Lane::Returned | Lane::Full if done > 0 => Some(Ok(done)),
            Lane::Returned | Lane::Full => Some(Err(libc::EAGAIN)),
        }
    }
}

impl Call {
    fn note(&mut self, woken: Woken) -> Woken {
        self.restarts = woken == Woken::Signal { restarts: true };
        woken
    }
}

/// How far a send has come on the lane.
#[derive(PartialEq, Eq)]
enum Lane {
    /// Everything is in it.
    Done,
    /// There is no room.
    Full,
    /// There has been no room for so long that TCP is to take the rest.
    Stalled,
    /// The other end has been closed, or its process is gone.
    Deserted,
    /// The receiver has given back what it had not read.
    Returned,
    /// The rest is TCP's.
    Left,
    /// The program must not touch what it wants to send.
    Fault,
}

/// Puts what fits onto the lane.
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
        // The lane may have ended behind bytes that it took.
        if source.remaining() < left {
            announce(endpoint, &at, &side.seen);
        }
        match sent {
            Sent::Bytes(_) if source.remaining() == 0 => break Lane::Done,
            Sent::Bytes(_) => {}
            Sent::Full => match outgoing::look(side, &at) {
                Verdict::Spill => {}
                Verdict::FallBack => break Lane::Stalled,
                Verdict::Hold(_) | Verdict::Wait(_) => break Lane::Full,
            },
            Sent::Ended => leave_ended(endpoint, &mut side.tx, &at),
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

/// The receiver has ended the lane, to go on in TCP. L9: it may wait there in a way that tells it of nothing else, so what it has not
/// read goes there too: the next write says so.
#[cold]
fn leave_ended(endpoint: &Endpoint, tx: &mut Tx, at: &Attachment) {
    let lane = at.outgoing().0;
    if attach::could_take_back(endpoint, at) {
        tx.take_back(lane, Reason::PeerWentBack);
    } else {
        tx.close(lane, Reason::PeerWentBack);
    }
}

/// Bytes are in the lane. They are to be looked at again (L9), also if they wake somebody: who is told of them by poll may then wait in
/// a way that nobody sees.
#[inline(always)]
fn announce(endpoint: &Endpoint, at: &Attachment, seen: &Seen) {
    at.announce_bytes();
    overdue::note_sent(endpoint, seen);
}

/// What is said next is said by TCP.
fn desert(endpoint: &Endpoint, fd: RawFd) {
    resets::reset_if_lost(endpoint, fd);
    attach::go_back(endpoint, Reason::PeerDied);
}

/// Takes a stalled connection off its link. Both directions go, so that it can be paired again later.
pub(crate) fn give_up(endpoint: &Endpoint) {
    attach::go_back(endpoint, Reason::Stalled);
}

/// For a non-blocking send that found no room: has the waiter of the socket told of space. `true`: there is some now.
fn arm_for_space(endpoint: &Endpoint) -> bool {
    let is_full = outgoing::writability(endpoint, endpoint.owner()) == Some(false);
    if is_full {
        epoll::watch_for_space(endpoint);
    }
    !is_full
}

/// A full lane, and a caller that may be made to wait.
fn wait_for_space(hold: &Hold, endpoint: &'static Endpoint, deadline: Deadline) -> Woken {
    waiter::waiting(|| sleep_for_space(hold, endpoint, deadline))
}

fn sleep_for_space(hold: &Hold, endpoint: &'static Endpoint, deadline: Deadline) -> Woken {
    if sleep::spin(|| outgoing::writability(endpoint, None) != Some(false)) {
        return Woken::LookAgain { tcp: false };
    }
    let slot = sleep::thread_slot();
    let at = endpoint.tx.lock().at.map(|at| at.pin().by_hand());
    let Some(at) = at else { return Woken::LookAgain { tcp: false } };
    let line = slot.map(|slot| at.link.view().waiter(at.link.side, slot.0));
    if let Some(line) = line {
        line.announce_sleep();
    }
    let woken = if outgoing::writability(endpoint, slot) == Some(false) {
        let held = held::sleep(endpoint, at, slot);
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

/// A flag that a lane does not have: back to TCP first. For urgent data the hook has seen to that.
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

/// The real sendmsg for what is left of `source`, which it leaves where it is.
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
            // TCP would have kept its error. Of what is shut down it has the same for every call.
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

/// Whether it is an error that a connection has once.
fn is_of_connection(errno: i32) -> bool {
    matches!(
        errno,
        libc::ECONNRESET | libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH | libc::ECONNABORTED
    )
}

/// Puts the first `pieces` into an iovec list; returns how many.
pub(crate) fn fill_list(list: &mut [iovec], pieces: impl Iterator<Item = Piece>) -> usize {
    let parts = list.iter_mut().zip(pieces);
    parts.map(|(to, Piece { base, len })| *to = iovec { iov_base: base.cast(), iov_len: len }).count()
}

/// A message of nothing but bytes.
pub(crate) fn empty_message(list: &mut [iovec]) -> msghdr {
    // SAFETY: all zeroes is a valid msghdr: no name, no control data.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = list.as_mut_ptr();
    message.msg_iovlen = list.len() as _;
    message
}

/// What a step of sendfile did.
pub(crate) enum FileStep {
    /// So many bytes of the file are in the lane; 0 at its end.
    Moved(usize),
    /// So many bytes are in the lane, and the rest belongs to TCP: the kernel's own sendfile sends
    /// it. It also does if the transport is TCP, or the file cannot be read into a lane.
    UseTcp(usize),
}

/// sendfile onto a lane: the kernel reads the file straight into the ring. `read_file` is told where to, how much at
/// most, and how far behind the beginning.
#[inline(never)]
pub(crate) fn send_file(
    hold: &Hold,
    endpoint: &'static Endpoint,
    wanted: usize,
    mut read_file: impl FnMut(*mut u8, usize, usize) -> Result<usize, i32>,
) -> Result<FileStep, i32> {
    let waits = endpoint.nonblocking.load(Relaxed) == 0;
    let deadline = sleep::deadline(endpoint.send_timeout.load(Relaxed));
    let mut moved = 0;
    while moved < wanted {
        let fd = hold.fd();
        if hold.is_void() {
            return if moved > 0 { Ok(FileStep::Moved(moved)) } else { Ok(FileStep::UseTcp(0)) };
        }
        let mut side = endpoint.tx.lock();
        let Some(at) = side.at.filter(|_| side.tx.on_lane()) else {
            drop(side);
            if moved > 0 {
                return Ok(FileStep::UseTcp(moved));
            }
            resets::notice_reset(endpoint, fd);
            // Only bytes meet an error: a file that has none is the kernel's to refuse.
            let mut byte = [0u8];
            let meets_error = endpoint.owes() && read_file(byte.as_mut_ptr(), 1, 0) == Ok(1);
            let owed = if meets_error { endpoint.take_owed(fd) } else { None };
            return owed.map_or(Ok(FileStep::UseTcp(0)), Err);
        };
        let (lane, ring) = at.outgoing();
        if outgoing::peer_has_left(&at) && !lane.is_returned() {
            drop(side);
            desert(endpoint, fd);
            continue;
        }
        match fill_from_file(&mut side, lane, &ring, wanted - moved, |to, room| read_file(to, room, moved)) {
            Ok(Sent::Bytes(0)) => return Ok(FileStep::Moved(moved)),
            Ok(Sent::Bytes(count)) => {
                moved += count;
                announce(endpoint, &at, &side.seen);
                let total = side.tx.lane_total();
                outgoing::end_wait(&mut side.seen);
                note_progress(endpoint, total, &mut side.seen);
            }
            Ok(Sent::Ended) => {
                leave_ended(endpoint, &mut side.tx, &at);
                drop(side);
                epoll::refresh(endpoint);
            }
            Ok(Sent::UseTcp) => {
                drop(side);
                epoll::refresh(endpoint);
            }
            Ok(Sent::SendAgain) => {
                drop(side);
                if attach::send_again(endpoint, fd) {
                    continue;
                }
                if !(waits && settings::really_blocks(endpoint, fd) && hold.take()) {
                    return if moved > 0 { Ok(FileStep::Moved(moved)) } else { Err(libc::EAGAIN) };
                }
                let woken = sleep::sleep(hold, libc::POLLOUT, None, deadline, None, Held::NOTHING);
                if let Some(outcome) = woken.ends(moved) {
                    return outcome.map(FileStep::Moved);
                }
            }
            Ok(Sent::Full) => {
                let verdict = outgoing::look(&mut side, &at);
                drop(side);
                if verdict == Verdict::Spill {
                    continue;
                }
                if verdict == Verdict::FallBack {
                    give_up(endpoint);
                } else if waits && settings::really_blocks(endpoint, fd) && hold.take() {
                    if let Some(outcome) = wait_for_space(hold, endpoint, deadline).ends(moved) {
                        return outcome.map(FileStep::Moved);
                    }
                } else if !arm_for_space(endpoint) {
                    return if moved > 0 { Ok(FileStep::Moved(moved)) } else { Err(libc::EAGAIN) };
                }
            }
            Ok(Sent::Fault) => return Err(libc::EFAULT),
            Err(_) if moved > 0 => return Ok(FileStep::Moved(moved)),
            Err(errno) => return Err(errno),
        }
    }
    Ok(FileStep::Moved(moved))
}

/// The kernel's own sendfile, which `kernel` makes of the number that it is told.
#[inline(never)]
pub(crate) fn file_by_tcp(
    hold: &Hold,
    endpoint: &'static Endpoint,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<usize, i32> {
    // What it writes goes to TCP, so the lane must not be begun behind its back.
    endpoint.enter_send_locked();
    let outcome = by_kernel(held::send(endpoint), hold.fd(), kernel);
    let outcome = outcome.inspect(|count| endpoint.count_sent(*count));
    endpoint.leave_send();
    outcome
}

/// Sends the rest of a file by the kernel's own sendfile, which `kernel` calls with an fd. Returns
/// how many bytes that were.
#[inline(never)]
pub(crate) fn rest_of_file_by_tcp(
    hold: &Hold,
    endpoint: &'static Endpoint,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> usize {
    // A call that has done something says that, and leaves the error to the next.
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
