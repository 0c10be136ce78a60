//! Receiving: read, readv, recv, recvfrom, recvmsg.
//!
//! A receive takes the first of these paths that suffices:
//!
//! ```text
//! receive_few     fast path of a hook: one buffer, and nothing to do but to copy from the lane
//! at_once         fast path of the other calls (both in receive_fast.rs)
//! receive_from    a loop of checks (ops/check.rs) and sleeps, which goes on by TCP if it must
//! ```
//!
//! An example: a blocking recv of 100 bytes finds the lane empty. The call takes a reference to its
//! socket (`SocketReference`), spins, makes its thread the waiter of the lane, checks once more,
//! and sleeps on the TCP socket and its doorbell. The peer publishes 10 bytes, and rings. The next
//! check takes them. That is enough without MSG_WAITALL, so the call returns 10.

use std::ffi::{c_int, c_short};
use std::os::fd::RawFd;

use libc::ssize_t;
use shunt_abi::reason::Reason;
use shunt_ring::Sink;
use shunt_ring::user::Piece;
use shunt_sys::memory;
use shunt_transport::{Kernel, Received, Waiting};

use super::receive_fast::{at_once, waits};
use crate::base::lock::Guard;
use crate::base::private::borrow;
use crate::base::undo_log::Held;
use crate::base::{errno, kernel, rank, signal, spin, waiter};
use crate::broker::control;
use crate::epoll;
use crate::life::{attach, resets};
use crate::ops::check::{by_tcp_now, is_watched, look, look_in_time, ready_side};
use crate::ops::receive_step::{Facts, Progress, Step};
use crate::ops::sleep::{Deadline, Woken};
use crate::ops::socket_reference::{BEGIN_ANEW, SocketReference};
use crate::ops::{options, receive_step, sleep, undo};
use crate::socket::endpoint::{Endpoint, RxSide};
use crate::socket::incoming::{available, is_readable};
use crate::socket::tcp::Tcp;
use crate::socket::{endpoint, incoming, lost, outgoing, settings};

/// Flags that are handled here, and flags that mean nothing to a receive of TCP.
pub(super) const UNDERSTOOD: c_int = MEANINGFUL
    | libc::MSG_NOSIGNAL
    | libc::MSG_CMSG_CLOEXEC
    | libc::MSG_MORE
    | libc::MSG_EOR
    | libc::MSG_CONFIRM
    | libc::MSG_DONTROUTE
    | libc::MSG_CTRUNC
    | libc::MSG_WAITFORONE;
const MEANINGFUL: c_int = libc::MSG_PEEK | libc::MSG_WAITALL | libc::MSG_DONTWAIT | libc::MSG_TRUNC;

/// The result of a receive.
pub(crate) struct Taken {
    pub(crate) count: usize,
    /// By the program's own call, so the kernel has written everything that goes with the bytes.
    pub(crate) by_kernel: bool,
    /// How many bytes wait behind them, if the program asked for that (TCP_INQ) and the kernel
    /// cannot have written it.
    pub(crate) waiting: Option<c_int>,
}

impl Taken {
    fn here(count: usize) -> Taken {
        Taken { count, by_kernel: false, waiting: None }
    }

    pub(crate) fn count(self) -> usize {
        self.count
    }

    /// Fills in `waiting`. `wanted`: the program asked for that when the call began.
    fn say_what_waits(&mut self, endpoint: &Endpoint, fd: RawFd, wanted: bool) {
        if !wanted {
            // If the program has asked for it during a sleep, the kernel has written it, and the
            // hook must replace that.
            self.by_kernel &= !options::tells_waiting(endpoint, fd);
        } else if !self.by_kernel || incoming::unread(endpoint) > 0 || endpoint.is_fin_discounted() {
            self.waiting = Some(options::waiting(endpoint, fd));
        }
    }
}

/// Receives into `pieces`. If the call restarts and `fd` names another connection by then, it
/// receives from that one. Where only TCP is concerned, `kernel` makes the program's own call, with
/// the fd that it is passed. `Err` is an errno.
#[inline(always)]
pub(crate) fn receive(
    endpoint: &'static Endpoint,
    fd: RawFd,
    pieces: &[Piece],
    flags: c_int,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<usize, i32> {
    match only(pieces).and_then(|piece| at_once(endpoint, piece, flags)) {
        Some(count) => Ok(count),
        None => receive_all(endpoint, fd, pieces, flags, kernel),
    }
}

/// Receives where that was not possible [`at_once`].
pub(crate) fn receive_all(
    endpoint: &'static Endpoint,
    fd: RawFd,
    pieces: &[Piece],
    flags: c_int,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<usize, i32> {
    receive_as(Form::Bytes, endpoint, fd, pieces, flags, kernel).map(Taken::count)
}

/// Receives where it matters whether the kernel has written the sender's address.
pub(crate) fn receive_named(
    endpoint: &'static Endpoint,
    fd: RawFd,
    pieces: &[Piece],
    flags: c_int,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<Taken, i32> {
    match only(pieces).and_then(|piece| at_once(endpoint, piece, flags)) {
        Some(count) => Ok(Taken::here(count)),
        None => receive_as(Form::Bytes, endpoint, fd, pieces, flags, kernel),
    }
}

/// Receives a message: bytes and the control data that goes with them.
pub(crate) fn receive_message(
    endpoint: &'static Endpoint,
    fd: RawFd,
    pieces: &[Piece],
    flags: c_int,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<Taken, i32> {
    let piece = only(pieces).filter(|_| !options::tells_waiting(endpoint, fd));
    match piece.and_then(|piece| at_once(endpoint, piece, flags)) {
        Some(count) => Ok(Taken::here(count)),
        None => receive_as(Form::Message, endpoint, fd, pieces, flags, kernel),
    }
}

#[inline]
fn only(pieces: &[Piece]) -> Option<Piece> {
    match pieces {
        [piece] => Some(*piece),
        _ => None,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Bytes,
    Message,
}

#[inline(never)]
fn receive_as(
    form: Form,
    mut endpoint: &'static Endpoint,
    fd: RawFd,
    pieces: &[Piece],
    flags: c_int,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<Taken, i32> {
    // SAFETY: only memory is written that may be written by what the kernel says.
    let mut sink = unsafe { Sink::checked(pieces, memory::is_writable) };
    loop {
        match receive_from(form, endpoint, fd, &mut sink, flags, kernel) {
            Err(BEGIN_ANEW) => match endpoint::behind(fd) {
                Some(now) => endpoint = now,
                None => return by_kernel(Held::NOTHING, fd, kernel),
            },
            outcome => return outcome,
        }
    }
}

/// Receives from the connection that `fd` named when the call began. Returns `BEGIN_ANEW` if the
/// call restarts.
#[inline]
fn receive_from(
    form: Form,
    endpoint: &'static Endpoint,
    fd: RawFd,
    sink: &mut Sink<'_>,
    flags: c_int,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<Taken, i32> {
    if flags & !UNDERSTOOD != 0 {
        // Urgent data and the error queue are not part of the stream.
        if flags & (libc::MSG_ERRQUEUE | libc::MSG_OOB) != 0 {
            resets::notice_reset(endpoint, fd);
            // The kernel has seen a FIN before the reset, and would return the end.
            if flags & libc::MSG_OOB != 0 && endpoint.owes() && kernel::has_urgent(fd) {
                return Err(libc::ENOTCONN);
            }
            let outcome = by_kernel(Held::NOTHING, fd, kernel);
            if flags & (libc::MSG_OOB | libc::MSG_PEEK) == libc::MSG_OOB && outcome.is_ok() {
                epoll::note_urgent_read(endpoint);
            }
            return outcome;
        }
        // The bytes that are still in the lane come as without the flag.
        attach::bar(endpoint, Reason::UnsupportedFlag);
    }
    let flags = flags & MEANINGFUL;
    // The setting counts when the call begins, even if it sleeps after that, as in the kernel.
    let tells_waiting = form == Form::Message && options::tells_waiting(endpoint, fd);
    let wanted = sink.remaining();
    let mut call = Call {
        endpoint,
        fd,
        flags,
        wanted,
        least: least(endpoint, fd, wanted, flags),
        waits: waits(endpoint, flags),
        deadline: sleep::deadline(endpoint.options.receive_timeout()),
        slept: false,
        tcp_has_some: false,
        hold: SocketReference::new(endpoint, fd),
    };
    let mut answer = if call.wanted == 0 {
        drop(ready_side(endpoint, fd));
        receive_nothing(&call.hold, endpoint, sink, flags, call.waits.then_some(call.deadline), kernel)
    } else {
        call.run(sink, kernel)
    };
    // While the call holds the socket, since its fd may have been closed.
    if form == Form::Message
        && let Ok(taken) = &mut answer
    {
        taken.say_what_waits(endpoint, call.hold.fd(), tells_waiting);
    }
    call.hold.release();
    answer
}

/// A receive on the slow path.
struct Call {
    endpoint: &'static Endpoint,
    fd: RawFd,
    flags: c_int,
    wanted: usize,
    /// With fewer bytes, a call that waits goes on waiting.
    least: usize,
    waits: bool,
    deadline: Deadline,
    slept: bool,
    tcp_has_some: bool,
    hold: SocketReference,
}

impl Call {
    #[inline]
    fn run(&mut self, sink: &mut Sink<'_>, kernel: &dyn Fn(RawFd) -> ssize_t) -> Result<Taken, i32> {
        let Call { endpoint, flags, waits, least, wanted, .. } = *self;
        loop {
            let fd = self.fd;
            let mut side = ready_side(endpoint, fd);
            let done = wanted - sink.remaining();
            let outcome = if waits && flags & (libc::MSG_PEEK | libc::MSG_TRUNC) == 0 {
                look_in_time(endpoint, fd, &mut side, sink)
            } else {
                look(endpoint, fd, &mut side, sink, flags)
            };
            // The outcome of most receives.
            if let Received::Bytes(count) = outcome
                && flags & libc::MSG_PEEK == 0
                && done + count >= least
            {
                return Ok(Taken::here(done + count));
            }
            // As in the kernel, a call that goes on keeps the socket even if the fd is closed.
            if waits && !self.hold.take() {
                drop(side);
                return if done > 0 { Ok(Taken::here(done)) } else { Err(BEGIN_ANEW) };
            }
            if let Some(answer) = self.go_on(outcome, done, side, sink, kernel) {
                return answer;
            }
            // After a handler, the call has nothing but the fd.
            let begins_anew = !self.slept && sink.remaining() == wanted && self.hold.is_closed();
            if begins_anew || self.hold.is_void() {
                return Err(BEGIN_ANEW);
            }
            self.fd = self.hold.fd();
        }
    }

    /// Goes on after a check of the lane, before which the call had `done` bytes. Returns `None` if
    /// it must check again.
    #[inline(never)]
    fn go_on(
        &mut self,
        found: Received,
        done: usize,
        side: Guard<'_, RxSide, { rank::RECEIVING }>,
        sink: &mut Sink<'_>,
        kernel: &dyn Fn(RawFd) -> ssize_t,
    ) -> Option<Result<Taken, i32>> {
        let Call { endpoint, fd, flags, least, waits, deadline, slept, tcp_has_some, .. } = *self;
        let peeks = flags & libc::MSG_PEEK != 0;
        let progress = Progress { waits, peeks, done, least, slept, tcp_has_some };
        let mut situation = Situation { call: self, side: Some(side) };
        let step = receive_step::next(found, progress, &mut situation);
        let side = situation.side;
        if step == Step::ByTcp {
            endpoint.enter_receive_locked();
        }
        drop(side);
        match step {
            Step::Return(count) => Some(Ok(Taken::here(count))),
            Step::Fail(errno) => Some(Err(errno)),
            Step::CheckAgain => None,
            Step::TryTcp => {
                self.tcp_has_some = true;
                None
            }
            Step::SleepForBytes { urgent } => {
                let events = if urgent { libc::POLLPRI } else { 0 };
                let woken = wait_for_bytes(&self.hold, endpoint, deadline, events);
                self.after_sleep(woken, done, sink)
            }
            Step::SleepOnTcp => {
                let events = libc::POLLIN | libc::POLLPRI | libc::POLLRDHUP;
                let woken = sleep::sleep(&self.hold, events, None, deadline, None, Held::NOTHING);
                self.after_sleep(woken, done, sink)
            }
            Step::Interrupted => self.after_sleep(sleep::interrupted(deadline), done, sink),
            Step::ByTcp => self.by_tcp(done, sink, kernel),
            Step::WaitToPeek { seen } => match wait_for_more(&self.hold, deadline) {
                Woken::LookAgain { tcp: false } => {
                    self.slept = true;
                    None
                }
                _ => Some(Ok(Taken::here(self.peek_again(seen, sink)))),
            },
            Step::PeekAgain { seen } => Some(Ok(Taken::here(self.peek_again(seen, sink)))),
            Step::End => {
                if waits {
                    lost::await_news(endpoint, fd, control::has_broker);
                }
                if resets::reset_if_lost(endpoint, fd) {
                    return None;
                }
                Some(endpoint.take_owed(fd).map_or(Ok(Taken::here(0)), Err))
            }
            Step::TakeError => {
                let pending = endpoint.take_owed(fd);
                Some(pending.map_or_else(|| by_tcp_now(fd, sink, flags), Err).map(Taken::here))
            }
            Step::Linger => {
                let what = std::ptr::from_ref(endpoint).addr();
                match spin::linger(what, || is_readable(endpoint, fd)) {
                    true => None,
                    false => Some(Err(libc::EAGAIN)),
                }
            }
        }
    }

    /// Peeks once more, after `seen` bytes, and returns how many bytes are there.
    fn peek_again(&self, seen: usize, sink: &mut Sink<'_>) -> usize {
        let Call { endpoint, flags, .. } = *self;
        let fd = self.hold.fd();
        let found = look(endpoint, fd, &mut ready_side(endpoint, fd), sink, flags);
        match found {
            Received::Bytes(all) => all,
            Received::UseTcp => by_tcp_now(fd, sink, flags).unwrap_or(seen),
            _ => seen,
        }
    }

    /// Receives by TCP, or only the rest if the call has `done` bytes from the lane. The receive
    /// has been entered (`Endpoint::enter_receive_locked`).
    fn by_tcp(
        &mut self,
        done: usize,
        sink: &mut Sink<'_>,
        kernel: &dyn Fn(RawFd) -> ssize_t,
    ) -> Option<Result<Taken, i32>> {
        let Call { endpoint, fd, flags, least, waits, deadline, .. } = *self;
        resets::notice_reset(endpoint, fd);
        attach::let_go_if_done(endpoint);
        if done == 0
            && let Some(outcome) = pending_first(endpoint, fd, sink, flags)
        {
            endpoint.leave_receive();
            return Some(outcome);
        }
        // Bytes that were taken count, and an error is kept for the next call.
        let outcome = if done > 0 {
            let goes_on = done < least && waits && (self.slept || settings::really_blocks(endpoint, fd));
            let missing = least.saturating_sub(done);
            let waits = goes_on.then_some((missing, deadline));
            let rest = rest_by_tcp(&self.hold, endpoint, sink, flags, waits);
            Ok(Taken::here(done + rest))
        } else {
            by_kernel(undo::receive(endpoint), fd, kernel)
        };
        endpoint.leave_receive();
        self.after_tcp(outcome, done, sink)
    }

    /// Returns the result of the call after a receive by TCP, or `None` if the call goes on.
    fn after_tcp(
        &mut self,
        outcome: Result<Taken, i32>,
        done: usize,
        sink: &mut Sink<'_>,
    ) -> Option<Result<Taken, i32>> {
        let Call { endpoint, flags, least, waits, deadline, .. } = *self;
        let fd = self.hold.fd();
        // The end of the stream, where bytes of this process may lie unread in a lane.
        if matches!(outcome, Ok(Taken { count: 0, .. })) && endpoint.is_attached() {
            if waits {
                lost::await_news(endpoint, fd, control::has_broker);
            }
            if resets::reset_if_lost(endpoint, fd) {
                return None;
            }
            if let Some(errno) = endpoint.take_owed(fd) {
                return Some(Err(errno));
            }
        }
        // The socket has become non-blocking since the call began to sleep, which goes on.
        if self.slept && waits && matches!(outcome, Err(libc::EAGAIN)) {
            let events = libc::POLLIN | libc::POLLRDHUP;
            let woken = sleep::sleep(&self.hold, events, None, deadline, None, Held::NOTHING);
            if let Some(outcome) = woken.ends(done) {
                return Some(outcome.map(Taken::here));
            }
            // A call that restarts checks the mode again.
            self.slept = matches!(woken, Woken::LookAgain { .. });
            return None;
        }
        let Ok(taken) = &outcome else { return Some(outcome) };
        let peeks = flags & libc::MSG_PEEK != 0;
        let count = taken.count - done;
        if !peeks {
            endpoint.count_received(count);
        }
        let is_short = done == 0 && count > 0 && count < least;
        let goes_on = self.slept && waits && is_short && !settings::really_blocks(endpoint, fd);
        if !peeks && goes_on {
            sink.advance(count);
            return None;
        }
        // The bytes of a peek end at urgent data.
        if goes_on && before_mark(fd) != Some(count) {
            if wait_for_more(&self.hold, deadline) == (Woken::LookAgain { tcp: false }) {
                return None;
            }
            let fd = self.hold.fd();
            return Some(Ok(Taken::here(by_tcp_now(fd, sink, flags).unwrap_or(count))));
        }
        Some(outcome)
    }

    /// Returns the result of the call if a sleep has ended it. Otherwise the call goes on, by what
    /// the sleep has shown.
    fn after_sleep(&mut self, woken: Woken, done: usize, sink: &mut Sink<'_>) -> Option<Result<Taken, i32>> {
        let over = self.over(woken, done, sink);
        self.tcp_has_some = woken == (Woken::LookAgain { tcp: true });
        // A call that restarts checks the mode again.
        self.slept = matches!(woken, Woken::LookAgain { .. });
        over.map(|outcome| outcome.map(Taken::here))
    }

    /// Returns the result of the call if the sleep has ended it. Bytes that are there count more
    /// than the deadline or a handler, as in the kernel, even if the call would restart. Urgent
    /// data is passed over.
    fn over(&self, woken: Woken, done: usize, sink: &mut Sink<'_>) -> Option<Result<usize, i32>> {
        let Call { endpoint, flags, .. } = *self;
        let fd = self.hold.fd();
        if matches!(woken, Woken::LookAgain { .. } | Woken::Refused) {
            return None;
        }
        let tcp = Tcp { endpoint, fd };
        match look(endpoint, fd, &mut ready_side(endpoint, fd), sink, flags) {
            Received::Bytes(count) => return Some(Ok(done + count)),
            Received::UseTcp if done > 0 => {}
            Received::UseTcp if tcp.at_mark() => {
                if let Ok(count @ 1..) = by_tcp_now(fd, sink, flags) {
                    return Some(Ok(count));
                }
            }
            Received::UseTcp if tcp.waiting() != Waiting::Nothing => return None,
            _ => {}
        }
        woken.ends(done)
    }
}

/// What a decision about the next step may look up, of a call that holds the receiving side.
struct Situation<'call, 'side> {
    call: &'call Call,
    /// `None` after a lookup that asks the kernel.
    side: Option<Guard<'side, RxSide, { rank::RECEIVING }>>,
}

impl Facts for Situation<'_, '_> {
    fn awaits_return(&mut self) -> bool {
        self.side.as_deref().is_some_and(|side| awaits_return(self.call.endpoint, side))
    }

    fn is_handler_due(&mut self) -> bool {
        signal::is_due()
    }

    fn must_sleep_outside_receive(&mut self) -> bool {
        self.call.hold.is_closed() || self.call.endpoint.awaits_end()
    }

    fn really_blocks(&mut self) -> bool {
        self.side = None;
        settings::really_blocks(self.call.endpoint, self.call.fd)
    }

    fn is_watched(&mut self) -> bool {
        self.side.as_deref().is_some_and(is_watched)
    }

    fn ends_at_mark(&mut self, seen: usize) -> bool {
        let Call { endpoint, fd, .. } = *self.call;
        self.side.as_deref_mut().is_some_and(|side| ends_at_mark(endpoint, fd, side, seen))
    }
}

/// Returns what a receive by TCP returns before the kernel is asked for bytes, if anything: bytes
/// that end at urgent data, or the pending error.
fn pending_first(
    endpoint: &Endpoint,
    fd: RawFd,
    sink: &mut Sink<'_>,
    flags: c_int,
) -> Option<Result<Taken, i32>> {
    // Urgent data is passed over before an error is met. The receive takes that error then, and
    // bytes may follow.
    if endpoint.owes() && (Tcp { endpoint, fd }).at_mark() {
        match by_tcp_now(fd, sink, flags) {
            Ok(count @ 1..) => return Some(Ok(Taken::here(count))),
            Ok(0) | Err(libc::EAGAIN | libc::EFAULT) => {}
            Err(errno) => return Some(Err(endpoint.tell_owed(|| true).unwrap_or(errno))),
        }
    }
    take_owed(endpoint, fd).map(Err)
}

/// Returns whether urgent data follows the `count` bytes that a peek has seen, in the lane and in
/// TCP on both sides of it. No receive goes on behind that.
fn ends_at_mark(endpoint: &Endpoint, fd: RawFd, side: &mut RxSide, count: usize) -> bool {
    side.at.is_some_and(|at| {
        let (lane, ring) = at.incoming();
        if side.rx.ends_behind(lane, &ring, count) && (Tcp { endpoint, fd }).at_mark() {
            return true;
        }
        let unread = side.rx.unread(lane, &ring);
        lane.is_closed() && before_mark(fd).is_some_and(|on_tcp| on_tcp + unread == count)
    })
}

/// Returns how many bytes TCP has before urgent data, if it has urgent data.
fn before_mark(fd: RawFd) -> Option<usize> {
    // FIONREAD counts up to the urgent mark only.
    kernel::has_urgent(fd).then(|| rustix::io::ioctl_fionread(borrow(fd)).unwrap_or(0) as usize)
}

/// Takes the pending error of the endpoint, if no bytes come before it.
pub(crate) fn take_owed(endpoint: &Endpoint, fd: RawFd) -> Option<i32> {
    (endpoint.owes() && !shunt_sys::tcp::has_unread(borrow(fd))).then(|| endpoint.take_owed(fd)).flatten()
}

/// Returns whether the peer may still return bytes of this end. A thread that waits for an answer
/// to them must notice that, which it would not inside the kernel, and this direction may fall back
/// before the other does. If the lock is taken, another thread sends just now, so the answer is
/// yes.
fn awaits_return(endpoint: &Endpoint, side: &RxSide) -> bool {
    side.at.is_some() && endpoint.tx.try_lock().is_none_or(|side| side.tx.on_lane())
}

fn by_kernel(held: Held, fd: RawFd, kernel: &dyn Fn(RawFd) -> ssize_t) -> Result<Taken, i32> {
    let count = usize::try_from(signal::open(held, || kernel(fd))).map_err(|_| errno::get())?;
    Ok(Taken { count, by_kernel: true, waiting: None })
}

/// Returns with how many of the `wanted` bytes a receive is content: one, unless MSG_WAITALL or
/// SO_RCVLOWAT says otherwise.
#[inline]
fn least(endpoint: &Endpoint, fd: RawFd, wanted: usize, flags: c_int) -> usize {
    if flags & libc::MSG_WAITALL != 0 {
        return wanted;
    }
    wanted.min(endpoint.options.low_water.of(fd).max(1))
}

/// Receives by TCP what follows bytes that were taken already, and returns how much. A call that
/// may wait does so until so many bytes have come, or the deadline has passed. It does not wait in
/// the kernel's receive, which would take an error that belongs to the next call. Nor does a
/// receive that has bytes go on behind urgent data.
fn rest_by_tcp(
    hold: &SocketReference,
    endpoint: &'static Endpoint,
    sink: &mut Sink<'_>,
    flags: c_int,
    waits: Option<(usize, Deadline)>,
) -> usize {
    let mut taken = 0;
    loop {
        let tcp = Tcp { endpoint, fd: hold.fd() };
        let waiting = tcp.waiting();
        // In this order: without bytes before it, a receive would pass over urgent data that has
        // just come.
        if tcp.at_mark() {
            break;
        }
        match (waiting, waits) {
            (Waiting::Bytes(_), _) => match by_tcp_now(tcp.fd, sink, flags) {
                Ok(count) => {
                    taken += count;
                    sink.advance(count.min(sink.remaining()));
                    if count == 0 || waits.is_none_or(|(missing, _)| taken >= missing) {
                        break;
                    }
                }
                // Another thread was faster.
                Err(libc::EAGAIN) if waits.is_some() => {}
                Err(_) => break,
            },
            (Waiting::Nothing, Some((_, deadline))) => {
                let events = libc::POLLIN | libc::POLLPRI | libc::POLLRDHUP;
                let held = undo::receive(endpoint);
                if !matches!(sleep::sleep(hold, events, None, deadline, None, held), Woken::LookAgain { .. })
                {
                    break;
                }
            }
            _ => break,
        }
    }
    taken
}

/// Receives into a buffer without room. In the kernel, such a call waits until anything happens to
/// the socket, be it a signal, a shutdown of this end or an error, which stays. Then it returns 0.
/// So it waits in the kernel here, and the direction falls back for that. `deadline` is that of a
/// call that waits.
#[inline(never)]
fn receive_nothing(
    hold: &SocketReference,
    endpoint: &'static Endpoint,
    sink: &Sink<'_>,
    flags: c_int,
    deadline: Option<Deadline>,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<Taken, i32> {
    resets::notice_reset(endpoint, hold.fd());
    loop {
        let fd = hold.fd();
        if deadline.is_some() && !hold.take() || hold.is_void() {
            return Err(BEGIN_ANEW);
        }
        if available(endpoint, fd) > 0 {
            return Ok(Taken::here(0));
        }
        // If urgent data comes first, no receive without room gets beyond it.
        if !(Tcp { endpoint, fd }).at_mark()
            && let Some(errno) = take_owed(endpoint, fd)
        {
            return Err(errno);
        }
        let mut side = endpoint.rx.lock();
        if !is_watched(&side) {
            endpoint.enter_receive_locked();
            drop(side);
            attach::let_go_if_done(endpoint);
            let outcome = by_kernel(undo::receive(endpoint), fd, kernel);
            endpoint.leave_receive();
            return outcome;
        }
        match (by_tcp_now(fd, sink, flags), deadline) {
            (Err(libc::EAGAIN), Some(deadline)) if settings::really_blocks(endpoint, fd) => {
                let by_tcp = attach::stop_receiving(endpoint, &mut side, Reason::UnsupportedFlag);
                drop(side);
                epoll::refresh(endpoint);
                // Otherwise bytes of TCP have yet to come that the sender wrote before its lane.
                if !by_tcp && wait_for_bytes(hold, endpoint, deadline, 0).ends(0).is_some() {
                    return Ok(Taken::here(0));
                }
            }
            (outcome, _) => return outcome.map(Taken::here),
        }
    }
}

/// Sleeps in a peek that wants more bytes than there are. The bytes that it has seen keep the
/// doorbell silent, so it checks again soon.
fn wait_for_more(hold: &SocketReference, deadline: Deadline) -> Woken {
    sleep::sleep(hold, libc::POLLRDHUP, None, deadline, Some(crate::epoll::DEGRADED_NANOS), Held::NOTHING)
}

/// Sleeps in a call that has found nothing and may wait. `more`: further events of TCP that wake
/// it.
fn wait_for_bytes(
    hold: &SocketReference,
    endpoint: &'static Endpoint,
    deadline: Deadline,
    more: c_short,
) -> Woken {
    waiter::waiting(|| sleep_for_bytes(hold, endpoint, deadline, more))
}

fn sleep_for_bytes(
    hold: &SocketReference,
    endpoint: &'static Endpoint,
    deadline: Deadline,
    more: c_short,
) -> Woken {
    let fd = hold.fd();
    if sleep::spin_for_lanes(|| is_readable(endpoint, fd)) {
        return Woken::LookAgain { tcp: false };
    }
    let slot = sleep::thread_slot();
    if !incoming::can_be_rung(endpoint, slot) && sleep::leave_to_tcp(endpoint) {
        return Woken::LookAgain { tcp: false };
    }
    epoll::make_way(endpoint, slot);
    let (at, owns) = {
        let side = endpoint.rx.lock();
        let Some(at) = side.at else { return Woken::LookAgain { tcp: false } };
        (at.pin().by_hand(), slot.is_some_and(|slot| endpoint.wait_on(&side, slot)))
    };
    let step = sleep::step_for(&at, slot, owns);
    if let (true, Some(slot)) = (owns, slot) {
        at.link.view().waiter(at.link.side, slot.0).announce_sleep();
    }
    // If the lane has ended just now, TCP may have urgent data, which the caller has not waited for
    // on the lane.
    let has_ended = || more == 0 && !endpoint.rx.lock().rx.is_attached();
    let woken = if is_readable(endpoint, fd) || outgoing::has_unseen_return(endpoint) || has_ended() {
        Woken::LookAgain { tcp: false }
    } else {
        let held = undo::sleep(endpoint, at, slot.filter(|_| owns));
        sleep::sleep(hold, libc::POLLIN | libc::POLLRDHUP | more, slot, deadline, step, held)
    };
    if let (true, Some(slot)) = (owns, slot) {
        at.link.view().waiter(at.link.side, slot.0).awake();
        endpoint.unclaim(slot);
    }
    at.unpin();
    sleep::leave_if_refused(endpoint, woken);
    if woken == (Woken::LookAgain { tcp: true }) {
        endpoint.rx.lock().rx.note_tcp_news();
    }
    woken
}
