//! Endpoints around a fork: see `crate::fork`.

use std::sync::atomic::{AtomicBool, Ordering::*};

use shunt_abi::reason::Reason;

use super::Endpoint;
use super::slab::{FREE, all, at};
use crate::socket::sharing::{self, Holders};

/// The processes that have the socket of one endpoint.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    pub(crate) holders: Holders,
    /// Set when the current fork has been prepared for the endpoint.
    is_prepared: AtomicBool,
}

impl Sharing {
    fn set_prepared(&self) {
        self.is_prepared.store(true, Relaxed);
    }

    fn is_prepared(&self) -> bool {
        self.is_prepared.load(Relaxed)
    }

    /// Notes that the fork is over.
    fn end_fork(&self) {
        if self.is_prepared() {
            self.is_prepared.store(false, Relaxed);
        }
    }

    /// Resets the fields for another socket. A fork that another thread is making may have prepared
    /// this socket, but not the next one.
    pub(super) fn reset(&self) {
        let Sharing { holders, is_prepared } = self;
        holders.begin(0);
        is_prepared.store(false, Relaxed);
    }

    /// Sets each field to a value that no new endpoint has.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        self.holders.use_up();
        self.set_prepared();
    }
}

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
            endpoint.corrections.counts.hold();
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
            endpoint.corrections.counts.release();
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
            endpoint.corrections.counts.reset();
        }
    }
}

/// Records the child as a holder of the sockets that were made since the fork was prepared. The
/// caller holds the locks.
pub(crate) fn expect_child_of_new() {
    // SAFETY: the caller holds this lock.
    let made = unsafe { FREE.value().made };
    let new = |endpoint: &&Endpoint| endpoint.is_in_use() && !endpoint.sharing.is_prepared();
    (0..made).filter_map(at).filter(new).for_each(Endpoint::expect_child);
}

/// Resets the counts of threads in calls, because the child has none of the parent's other threads.
pub(crate) fn after_fork_in_child() {
    for endpoint in all() {
        endpoint.calls.reset_in_child();
        endpoint.notified.reset_in_child();
        endpoint.offer.forget_message();
    }
}

impl Endpoint {
    /// Records a child that is about to be made as a holder of the socket.
    pub(crate) fn expect_child(&self) {
        self.sharing.set_prepared();
        if !sharing::expect_child(self) {
            self.bar(Reason::Shared);
        }
    }

    /// Notes that the fork which [`expect_child`](Self::expect_child) prepared is over.
    pub(crate) fn end_fork(&self) {
        self.sharing.end_fork();
    }
}
