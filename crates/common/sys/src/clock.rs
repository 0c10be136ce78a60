//! Reads the monotonic clock. This takes no system call where the kernel has mapped the vDSO.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::raw;

/// Returns monotonic time in nanoseconds.
#[inline]
pub fn now() -> u64 {
    let time = if has_vdso() { clock_gettime(ClockId::Monotonic) } else { asked() };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns `true` if the process has a vDSO.
///
/// Valgrind hides the vDSO: it removes it from the auxiliary vector that libc reads, but not from
/// the one that the kernel returns. rustix uses the kernel's, so it would call a vDSO that is not
/// there.
#[inline]
fn has_vdso() -> bool {
    const YES: u32 = 1;
    const NO: u32 = 2;
    static KNOWN: AtomicU32 = AtomicU32::new(0);
    match KNOWN.load(Relaxed) {
        0 => {
            // SAFETY: a plain look-up.
            let has = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) } != 0;
            KNOWN.store(if has { YES } else { NO }, Relaxed);
            has
        }
        known => known == YES,
    }
}

#[cold]
fn asked() -> Timespec {
    let mut time = Timespec { tv_sec: 0, tv_nsec: 0 };
    let arguments = [libc::CLOCK_MONOTONIC as usize, std::ptr::from_mut(&mut time) as usize, 0, 0, 0, 0];
    // SAFETY: the kernel writes a timespec, whose layout rustix's has.
    let _ = unsafe { raw::call(libc::SYS_clock_gettime, arguments) };
    time
}
