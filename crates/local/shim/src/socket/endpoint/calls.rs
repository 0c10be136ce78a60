//! The calls in progress on a socket, counted.
//!
//! Two rules use the counts. A direction moves to its lane only while no thread is inside a kernel
//! call of that direction (L4). And a call that waits holds the socket, even if another thread
//! closes its last descriptor.
//!
//! ```text
//! thread A: a kernel receive             thread B: attaches the endpoint
//! raises `receiving`                     sets the phase to `Shared`
//! loads the phase                        loads `receiving`
//! ```
//!
//! Each thread writes before it reads, so at least one of them sees the other. Either A uses the
//! lane, or B finds that the direction is not quiet and lets it switch later.

use std::sync::atomic::{AtomicU32, Ordering::*};

use super::Endpoint;
use crate::base::clib::is_single_threaded;

/// The numbers of calls in progress. A handler may close the socket in the middle of a call. That
/// call lowers its count when it ends, even if the slot has another connection by then. So the
/// counts are not reset with the slot.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// Threads inside a kernel receive or poll.
    receiving: AtomicU32,
    /// Threads inside a kernel send.
    sending: AtomicU32,
    /// Calls that wait in the shim: see [`crate::ops::socket_reference`].
    waiting: AtomicU32,
}

impl Calls {
    #[inline]
    pub(super) fn enter_receive(&self) {
        raise(&self.receiving);
    }

    #[inline]
    pub(super) fn leave_receive(&self) {
        lower(&self.receiving);
    }

    #[inline]
    pub(super) fn enter_send(&self) {
        raise(&self.sending);
    }

    #[inline]
    pub(super) fn leave_send(&self) {
        lower(&self.sending);
    }

    pub(super) fn begin_wait(&self) {
        self.waiting.fetch_add(1, SeqCst);
    }

    pub(super) fn end_wait(&self) {
        self.waiting.fetch_sub(1, SeqCst);
    }

    /// Returns whether no thread is inside a kernel receive or poll.
    #[inline]
    pub(super) fn is_quiet_for_receive(&self) -> bool {
        self.receiving.load(SeqCst) == 0
    }

    /// Returns whether no thread is inside a kernel send.
    #[inline]
    pub(super) fn is_quiet_for_send(&self) -> bool {
        self.sending.load(SeqCst) == 0
    }

    /// Returns the number of calls in progress, in the shim and in the kernel.
    pub(super) fn in_progress(&self) -> u32 {
        let counts = [&self.waiting, &self.receiving, &self.sending];
        counts.into_iter().fold(0, |sum, count| sum.saturating_add(count.load(SeqCst)))
    }

    /// Forgets the calls of the parent's other threads, in a forked child.
    pub(super) fn reset_in_child(&self) {
        let Calls { receiving, sending, waiting } = self;
        [receiving, sending, waiting].into_iter().for_each(|count| count.store(0, Relaxed));
    }
}

/// Adds one to a count.
#[inline]
fn raise(count: &AtomicU32) {
    change(count, 1);
}

/// Subtracts one from a count.
#[inline]
fn lower(count: &AtomicU32) {
    change(count, -1);
}

/// Changes a count, without an atomic read-modify-write in a process with one thread: see
/// [`crate::base::lock`]. The shield keeps signal handlers out meanwhile.
#[inline(always)]
fn change(count: &AtomicU32, by: i32) {
    if is_single_threaded() {
        count.store(count.load(Relaxed).wrapping_add_signed(by), Relaxed);
    } else {
        count.fetch_add(by.cast_unsigned(), SeqCst);
    }
}

impl Endpoint {
    /// Enters a kernel receive or poll. Returns `false`, without having entered, if calls must take
    /// the lock instead.
    ///
    /// The other half of the handshake is [`is_quiet_for_receive`](Self::is_quiet_for_receive).
    /// There the phase is set before the count is read. Here the count is raised before the phase
    /// is read.
    #[inline]
    pub(crate) fn enter_receive(&self) -> bool {
        self.calls.enter_receive();
        if self.is_attached() {
            self.leave_receive();
            return false;
        }
        true
    }

    /// Enters a kernel receive while the caller holds the receive lock.
    #[inline]
    pub(crate) fn enter_receive_locked(&self) {
        self.calls.enter_receive();
    }

    #[inline]
    pub(crate) fn leave_receive(&self) {
        self.calls.leave_receive();
        self.end_if_held_by_nobody();
    }

    /// Enters a kernel send, as [`enter_receive`](Self::enter_receive) does for receiving.
    #[inline]
    pub(crate) fn enter_send(&self) -> bool {
        self.calls.enter_send();
        if self.is_attached() {
            self.leave_send();
            return false;
        }
        true
    }

    #[inline]
    pub(crate) fn enter_send_locked(&self) {
        self.calls.enter_send();
    }

    #[inline]
    pub(crate) fn leave_send(&self) {
        self.calls.leave_send();
        self.end_if_held_by_nobody();
    }

    /// Begins a call that waits. As in the kernel, the call holds the socket from here on, even if
    /// another thread closes the descriptor.
    #[inline]
    pub(crate) fn begin_call(&self) {
        self.calls.begin_wait();
    }

    /// Ends a call that [`begin_call`](Self::begin_call) began.
    pub(crate) fn end_call(&self) {
        self.calls.end_wait();
        self.end_if_held_by_nobody();
    }

    /// Returns the number of calls that wait, in the shim or in the kernel.
    #[inline]
    pub(crate) fn calls_in_progress(&self) -> u32 {
        self.calls.in_progress()
    }

    /// Returns whether no thread is inside a kernel receive or poll. If the endpoint is attached,
    /// the caller holds the receive lock.
    #[inline]
    pub(crate) fn is_quiet_for_receive(&self) -> bool {
        self.calls.is_quiet_for_receive()
    }

    /// Returns whether no thread is inside a kernel send. If the endpoint is attached, the caller
    /// holds the send lock.
    #[inline]
    pub(crate) fn is_quiet_for_send(&self) -> bool {
        self.calls.is_quiet_for_send()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_direction_is_quiet_without_kernel_calls_of_its_own() {
        let calls = Calls::default();
        calls.enter_receive();
        assert!(!calls.is_quiet_for_receive() && calls.is_quiet_for_send());
        calls.enter_send();
        calls.leave_receive();
        assert!(calls.is_quiet_for_receive() && !calls.is_quiet_for_send());
        calls.leave_send();
        assert!(calls.is_quiet_for_receive() && calls.is_quiet_for_send());
    }

    #[test]
    fn waiting_calls_are_in_progress_and_leave_both_directions_quiet() {
        let calls = Calls::default();
        calls.begin_wait();
        assert!(calls.is_quiet_for_receive() && calls.is_quiet_for_send());
        calls.enter_receive();
        calls.enter_send();
        assert_eq!(calls.in_progress(), 3);
        calls.end_wait();
        assert_eq!(calls.in_progress(), 2);
    }

    #[test]
    fn a_child_has_none_of_the_parents_calls() {
        let calls = Calls::default();
        calls.begin_wait();
        calls.enter_receive();
        calls.enter_send();
        calls.reset_in_child();
        assert_eq!(calls.in_progress(), 0);
    }
}
