//! The connection to the broker across a fork: the child makes its own.

use super::session::Session;
use super::{CONTROL, Control};
use crate::base::lock::AcrossFork;
use crate::broker::presence;
use crate::socket::links::Peer;

/// Returns the control lock: no thread talks to the broker during a fork.
pub(crate) fn across_fork() -> &'static impl AcrossFork {
    &CONTROL
}

/// Discards the parent's connection to the broker in a forked child, which makes its own.
pub(crate) fn after_fork_in_child() {
    let mut control = CONTROL.lock();
    // Bytes that were in the lanes at the fork may still be read, or returned to the sender. So
    // those links stay mapped, and the doorbells of their peers stay open.
    let draining = |peer: &Peer| crate::socket::endpoint::all().any(|endpoint| endpoint.is_linked_with(peer));
    control.peers.values().filter(|peer| !draining(peer)).for_each(|peer| peer.forget_doorbells());
    presence::end();
    let mut session = std::mem::replace(&mut control.session, Session::new());
    session.begin_child();
    *control = Control { session, ..Control::new() };
}

/// Drops the connection to the broker in a child of a fork that the shim did not see. The parent
/// goes on with it.
///
/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn disown() {
    // SAFETY: the caller's promise.
    unsafe { CONTROL.reset() };
    let mut control = CONTROL.lock();
    presence::end();
    control.session.begin_child();
    control.forget_peers();
}
