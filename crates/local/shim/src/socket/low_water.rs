//! SO_RCVLOWAT, as a receive of bytes in a lane must respect it. No endpoint is offered with a
//! value above 1, so the shim keeps the value only if it was set later.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::base::kernel;

/// The value if it is more than 1 and was set while the endpoint was attached, or 0. [`ASK_KERNEL`]
/// means that the kernel has to be queried.
#[derive(Debug, Default)]
pub(crate) struct LowWater(AtomicU32);

/// Another process may have set the value.
const ASK_KERNEL: u32 = u32::MAX;

impl LowWater {
    /// Returns the value for the socket behind `fd`, or 0 if it is not above 1.
    #[inline]
    pub(crate) fn of(&self, fd: RawFd) -> usize {
        match self.0.load(Relaxed) {
            ASK_KERNEL => kernel::low_water(fd),
            noted => noted as usize,
        }
    }

    /// Returns whether receives can ignore the value: it is 1, or only the kernel has to respect
    /// it.
    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.0.load(Relaxed) == 0
    }

    /// Records a value that the program has set.
    pub(crate) fn note(&self, bytes: usize) {
        let noted = bytes.try_into().unwrap_or(0);
        let _ = self.0.fetch_update(Relaxed, Relaxed, |old| (old != ASK_KERNEL).then_some(noted));
    }

    /// Records that from now on other processes may set the value too.
    pub(crate) fn share(&self) {
        self.0.store(ASK_KERNEL, Relaxed);
    }

    /// Records that no other process holds the socket, and that the value is 1: see
    /// [`crate::socket::settings::learn`].
    pub(crate) fn reclaim(&self) {
        let _ = self.0.compare_exchange(ASK_KERNEL, 0, Relaxed, Relaxed);
    }

    /// Resets the value for another socket.
    pub(crate) fn clear(&self) {
        self.0.store(0, Relaxed);
    }
}
