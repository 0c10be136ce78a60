//! Calls on a connection whose peer has died with bytes of this end unread: see
//! [`crate::socket::lost`].

use shunt_abi::reason::Reason;

use crate::base::private::borrow;
use crate::epoll;
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::lost;

/// Resets the connection if it is lost, for a call that reports its state without moving bytes: see
/// [`reset_if_lost`].
pub(crate) fn notice_reset(endpoint: &Endpoint, fd: i32) -> bool {
    lost::may_be_lost(endpoint, fd) && reset_if_lost(endpoint, fd)
}

/// Resets the connection if TCP has ended by the death of the peer's process, with bytes of this
/// end unread. Returns whether that was the case.
pub(crate) fn reset_if_lost(endpoint: &Endpoint, fd: i32) -> bool {
    let is_lost = lost::reset_in_a_set(endpoint, fd).is_some();
    if is_lost {
        // TCP determines again whether there is room.
        epoll::refresh(endpoint);
    }
    is_lost
}

/// Records that the program has got the error of a reset. Bytes that the peer has not read will
/// cause no other.
pub(crate) fn reset_is_told(endpoint: &Endpoint) {
    {
        let mut side = endpoint.tx.lock();
        let Some(at) = side.at else { return };
        at.outgoing().0.note_reset_told();
        side.tx.abandon(at.outgoing().0, Reason::PeerDied);
        endpoint.report_tx(&side);
    }
    // TCP determines again whether there is room.
    epoll::refresh(endpoint);
}

/// Has the kernel report every reset that only the shim knows of, before code can run whose calls
/// no hook sees (L11). A reset that comes behind unread bytes of TCP stays with the shim, because
/// the kernel could report it only in their place.
pub(crate) fn leave_to_kernel() {
    for endpoint in endpoint::all() {
        let fd = endpoint.fd();
        lost::notice_reset_for_another(endpoint, fd);
        if endpoint.owes()
            && !shunt_sys::tcp::has_unread(borrow(fd))
            && endpoint.take_owed(fd) == Some(libc::ECONNRESET)
        {
            lost::dissolve(endpoint, fd);
        }
    }
}
