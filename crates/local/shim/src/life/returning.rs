//! Sending by TCP the bytes that a receiver has returned, or that the sender has reclaimed.
//!
//! ```text
//!  send_again    offers TCP the bytes, at each call that waits; the broker gets a copy of the rest
//!      |
//!  has_rest      a close, a shutdown or an exec, after which this process may make no other call
//!      |
//!  leave_rest    the broker sends the rest, or the call waits for TCP
//! ```
//!
//! [`crate::socket::custody`] has the states, and an example.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::base::names::EndpointRef;
use crate::base::private::borrow;
use crate::base::process;
use crate::base::upcall::Upcall;
use crate::epoll;
use crate::life::attach::let_go_if_done;
use crate::life::unread_timeout;
use crate::socket::endpoint::Endpoint;
use crate::socket::outgoing;

/// Informs the broker about bytes that TCP has yet to take, for a socket whose descriptor is open.
pub(crate) static PASS_ON: Upcall<(EndpointRef, i32, PassOn)> = Upcall::new();

/// The longest wait for TCP to take returned bytes before a non-blocking socket is closed or shut
/// down.
const NON_BLOCKING_WAIT_NANOS: u64 = 1_000_000_000;
/// The longest such wait if the socket is a blocking one.
const BLOCKING_WAIT_NANOS: u64 = 10_000_000_000;

/// A message to the broker about bytes that TCP has yet to take.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PassOn {
    /// It gets a copy, unless it has one.
    Copy,
    /// It sends them now.
    Send { then_shut: bool },
    /// TCP has them.
    Drop,
}

/// The state of bytes that TCP had yet to take, after a call that is the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// TCP has them.
    Sent,
    /// The broker sends them.
    Handed,
    /// They are lost.
    Lost,
}

/// Sends again by TCP the bytes that the receiver has returned, if there are any. The caller holds
/// no lock.
#[inline]
pub(crate) fn send_again_if_returned(endpoint: &Endpoint, fd: i32) {
    if outgoing::is_returned(endpoint) {
        send_again(endpoint, fd);
    }
}

/// Sends by TCP the bytes that the receiver has returned. Returns `false` if TCP cannot take all of
/// them now. The broker gets a copy then. The caller holds no lock.
pub(crate) fn send_again(endpoint: &Endpoint, fd: i32) -> bool {
    let mut side = endpoint.tx.lock();
    let Some(at) = side.at else { return true };
    side.tx.notice_return(at.outgoing().0);
    if !outgoing::offer_returned(endpoint, &mut side, &at, fd) {
        // Threads that sleep meanwhile send the rest.
        unread_timeout::note_sent(endpoint, &side.seen);
        drop(side);
        PASS_ON.call((endpoint.reference(), fd, PassOn::Copy));
        return false;
    }
    let has_copy = side.custody.end();
    endpoint.report_tx(&side);
    drop(side);
    if has_copy {
        PASS_ON.call((endpoint.reference(), fd, PassOn::Drop));
    }
    epoll::refresh(endpoint);
    let_go_if_done(endpoint);
    true
}

/// Has the broker send the bytes that TCP has yet to take. Returns whether it does.
fn hand_over(endpoint: &Endpoint, fd: i32, then_shut: bool) -> bool {
    PASS_ON.call((endpoint.reference(), fd, PassOn::Send { then_shut }));
    endpoint.tx.lock().custody.is_handed()
}

/// Has the broker send the bytes that TCP has yet to take, so that parent and child need not.
pub(crate) fn hand_over_before_fork(endpoint: &Endpoint) {
    if endpoint.tx.lock().tx.is_returning() {
        hand_over(endpoint, endpoint.fd(), false);
    }
}

/// Waits until TCP has taken the bytes that were in the lane. On TCP, the send of these bytes would
/// have waited. Returns `false` if TCP has not taken all of them after [`NON_BLOCKING_WAIT_NANOS`]
/// or [`BLOCKING_WAIT_NANOS`], depending on the socket's mode.
fn wait_for_tcp(endpoint: &Endpoint, fd: i32) -> bool {
    let longest =
        if endpoint.options.is_nonblocking() { NON_BLOCKING_WAIT_NANOS } else { BLOCKING_WAIT_NANOS };
    let end = process::now() + longest;
    loop {
        let left = end.saturating_sub(process::now());
        let mut polled = [PollFd::from_borrowed_fd(borrow(fd), PollFlags::OUT)];
        let timeout = Timespec::try_from(Duration::from_nanos(left)).unwrap_or_default();
        let _ = poll(&mut polled, Some(&timeout));
        if send_again(endpoint, fd) {
            return true;
        }
        if left == 0 {
            return false;
        }
    }
}

/// Offers TCP the bytes that the receiver has returned, for a call after which this process makes no
/// other. Returns whether some remain.
pub(crate) fn has_rest(endpoint: &Endpoint, fd: i32) -> bool {
    outgoing::is_returned(endpoint) && !send_again(endpoint, fd)
}

/// Leaves the rest to the broker, or else waits until TCP has taken it.
pub(crate) fn leave_rest(endpoint: &Endpoint, fd: i32, then_shut: bool) -> Rest {
    if hand_over(endpoint, fd, then_shut) {
        Rest::Handed
    } else if wait_for_tcp(endpoint, fd) {
        Rest::Sent
    } else {
        Rest::Lost
    }
}

/// Gives up the bytes that TCP has yet to take, because the connection is reset.
pub(crate) fn abandon_rest(endpoint: &Endpoint, fd: i32) {
    let mut side = endpoint.tx.lock();
    side.tx.forget_returning();
    if side.custody.end() {
        drop(side);
        PASS_ON.call((endpoint.reference(), fd, PassOn::Drop));
    }
}

/// Finishes the sending of bytes that were in the lane before an exec. The next program may send
/// more, which must follow them.
pub(crate) fn finish_before_exec(endpoint: &Endpoint) {
    let fd = endpoint.fd();
    if has_rest(endpoint, fd) && !wait_for_tcp(endpoint, fd) {
        hand_over(endpoint, fd, false);
    }
}

/// Forgets the bytes that TCP has yet to take, in a forked child, unless the broker sends them. The
/// parent sends them.
pub(crate) fn forget_returning(endpoint: &Endpoint) {
    let mut side = endpoint.tx.lock();
    if !side.custody.is_handed() {
        side.tx.forget_returning();
        side.custody.end();
    }
}

/// Leaves a lane that the receiver has ended, for a call that waits for room.
pub(crate) fn leave_ended(endpoint: &Endpoint, fd: i32) {
    if outgoing::leave_ended(endpoint, fd) {
        send_again(endpoint, fd);
    }
}
