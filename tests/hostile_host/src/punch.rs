//! Hole punching in shared memory. During a punch, a thread that touches the page sleeps in the
//! kernel, for longer the more mappings the file has. The attacker makes as many mappings as a
//! process may have.

use std::os::fd::BorrowedFd;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::fs::{FallocateFlags, fallocate, ftruncate};
use rustix::mm::{Advice, madvise};
use shunt_sys::mapping::Mapping;

/// Number of mappings of one process; the kernel allows 65,530.
pub(crate) const MAPPINGS: usize = 60_000;

/// Punches holes into `len` bytes of a file at `offset` until the process ends, even if the kernel
/// refuses it.
pub(crate) fn without_end(file: BorrowedFd<'_>, offset: u64, len: usize) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    loop {
        if fallocate(file, flags, offset, len as u64).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// Tries every way to take memory away from a file, until `stop` is set.
pub(crate) fn every_way(file: BorrowedFd<'_>, mapping: &Mapping, stop: &AtomicBool) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let len = mapping.len();
    while !stop.load(Relaxed) {
        let punched = fallocate(file, flags, 0, len as u64).is_ok();
        // SAFETY: a mapping of this process that nothing refers to.
        let removed = unsafe { madvise(mapping.as_ptr().cast(), len, Advice::LinuxRemove).is_ok() };
        if !punched && !removed && ftruncate(file, 0).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
