//! A connection whose peer has died with bytes of ours unread, as calls meet it: see [`crate::socket::lost`].

use shunt_abi::reason::Reason;

use crate::epoll;
use crate::socket::endpoint::Endpoint;
use crate::socket::lost;

/// For a call that shows what has become of the connection, though it moves no bytes: see [`reset_if_lost`].
pub(crate) fn notice_reset(endpoint: &Endpoint, fd: i32) -> bool {
    lost::may_be_lost(endpoint, fd) && reset_if_lost(endpoint, fd)
}

/// TCP has ended: resets the connection if that was the death of the peer's process with bytes of ours unread. `true` if it was.
pub(crate) fn reset_if_lost(endpoint: &Endpoint, fd: i32) -> bool {
    let is_lost = lost::reset_in_a_set(endpoint, fd).is_some();
    if is_lost {
        // Whether there is room is TCP's to say again.
        epoll::refresh(endpoint);
    }
    is_lost
}

/// The program has been told of a reset, so what the peer has not read will cause no other.
pub(crate) fn reset_is_told(endpoint: &Endpoint) {
    {
        let mut side = endpoint.tx.lock();
        let Some(at) = side.at else { return };
        at.outgoing().0.note_reset_told();
        side.tx.abandon(at.outgoing().0, Reason::PeerDied);
        endpoint.report_tx(&side);
    }
    // Whether there is room is TCP's to say again.
    epoll::refresh(endpoint);
}
