//! Endpoints around a fork: see `crate::fork`.

use std::sync::atomic::Ordering::*;

use shunt_abi::reason::Reason;

use super::Endpoint;
use super::slab::{FREE, all, at};
use crate::socket::sharing;

/// Takes the locks of every endpoint and of the free list before a fork, so that the child gets no
/// half-done change. Returns whether every attached endpoint has both lanes closed. That fails for
/// an endpoint that was attached or made since the fork was prepared.
pub(crate) fn hold_locks() -> bool {
    let mut ready = true;
    let mut held = 0;
    loop {
        // Another thread may wait for this lock while it holds an endpoint's lock, so this lock is
        // not held while the endpoints' locks are taken.
        FREE.hold();
        // SAFETY: the lock was taken above. Other threads only read the number without it.
        let made = unsafe { FREE.value().made };
        if made == held {
            return ready;
        }
        // SAFETY: the lock was taken above.
        unsafe { FREE.release() };
        for endpoint in (held..made).filter_map(at) {
            let tx = endpoint.tx.lock();
            ready &= tx.at.is_none_or(|at| at.outgoing().0.is_closed() && at.incoming().0.is_closed());
            std::mem::forget(tx);
            endpoint.rx.hold();
            endpoint.epolls.hold();
            endpoint.beside_kernel.hold();
        }
        held = made;
    }
}

/// Releases the locks after a fork, in the parent and in the child.
///
/// # Safety
/// The caller has called [`hold_locks`] on the same thread.
pub(crate) unsafe fn release_locks() {
    // SAFETY: the caller's promise.
    unsafe {
        for endpoint in (0..FREE.value().made).filter_map(at) {
            endpoint.beside_kernel.release();
            endpoint.epolls.release();
            endpoint.rx.release();
            endpoint.tx.release();
        }
        FREE.release();
    }
}

/// Frees the locks of every endpoint in a child of a fork that the shim did not see.
///
/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn reset_locks() {
    // SAFETY: the caller's promise.
    unsafe { FREE.reset() };
    for endpoint in all() {
        // SAFETY: the caller's promise.
        unsafe {
            endpoint.tx.reset();
            endpoint.rx.reset();
            endpoint.epolls.reset();
            endpoint.beside_kernel.reset();
        }
    }
}

/// Records the child as a holder of the sockets that were made since the fork was prepared. The
/// caller holds the locks.
pub(crate) fn expect_child_of_new() {
    // SAFETY: the caller holds this lock.
    let made = unsafe { FREE.value().made };
    let new = |endpoint: &&Endpoint| endpoint.is_in_use() && !endpoint.is_prepared.load(Relaxed);
    (0..made).filter_map(at).filter(new).for_each(Endpoint::expect_child);
}

/// Resets the counts of threads in calls, because the child has none of the parent's other threads.
pub(crate) fn after_fork_in_child() {
    for endpoint in all() {
        endpoint.calls.reset_in_child();
        endpoint.owner.store(0, Relaxed);
        endpoint.offer.forget_message();
    }
}

impl Endpoint {
    /// Records a child that is about to be made as a holder of the socket.
    pub(crate) fn expect_child(&self) {
        self.is_prepared.store(true, Relaxed);
        if !sharing::expect_child(self) {
            self.bar(Reason::Shared);
        }
    }

    /// Notes that the fork which [`expect_child`](Self::expect_child) prepared is over.
    pub(crate) fn end_fork(&self) {
        if self.is_prepared.load(Relaxed) {
            self.is_prepared.store(false, Relaxed);
        }
    }
}
