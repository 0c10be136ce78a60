//! The one place that chooses between the processor's atomics and the model checker's.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// A sequentially consistent fence, for use directly after a read-modify-write on shared memory.
///
/// On x86-64 a read-modify-write is already a full barrier, so only the compiler needs a fence.
#[inline(always)]
pub(crate) fn full_fence_after_rmw() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
    #[cfg(all(not(loom), target_arch = "x86_64"))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(all(not(loom), not(target_arch = "x86_64")))]
    std::sync::atomic::fence(Ordering::SeqCst);
}
