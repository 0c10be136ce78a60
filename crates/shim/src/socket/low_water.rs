//! SO_RCVLOWAT, where a receive of bytes in a lane must know it: it is asked for only while the kernel may not be.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::base::kernel;

/// The value where it is more than 1, and lanes hold bytes from before it was set; else 0. Or [`ASK_KERNEL`].
#[derive(Default)]
pub(crate) struct LowWater(AtomicU32);

/// Other processes may have set it.
const ASK_KERNEL: u32 = u32::MAX;

impl LowWater {
    /// Of the socket that `fd` names.
    #[inline]
    pub(crate) fn of(&self, fd: RawFd) -> usize {
        match self.0.load(Relaxed) {
            ASK_KERNEL => kernel::low_water(fd),
            noted => noted as usize,
        }
    }

    /// Whether it is surely 1, or the kernel's alone.
    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.0.load(Relaxed) == 0
    }

    /// The program has set it.
    pub(crate) fn note(&self, bytes: usize) {
        let noted = bytes.try_into().unwrap_or(0);
        let _ = self.0.fetch_update(Relaxed, Relaxed, |old| (old != ASK_KERNEL).then_some(noted));
    }

    /// From now on other processes may set it too.
    pub(crate) fn share(&self) {
        self.0.store(ASK_KERNEL, Relaxed);
    }

    /// No other process holds the socket, and it is not set: see [`crate::socket::settings::learn`].
    pub(crate) fn reclaim(&self) {
        let _ = self.0.compare_exchange(ASK_KERNEL, 0, Relaxed, Relaxed);
    }

    /// It belongs to another socket from now on.
    pub(crate) fn clear(&self) {
        self.0.store(0, Relaxed);
    }
}
