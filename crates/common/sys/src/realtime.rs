//! The scheduler's real-time class, for threads that must run on time.

use crate::{Result, raw};

/// Moves the calling thread to SCHED_FIFO, so that it precedes every thread of the ordinary
/// classes. Threads and processes that it starts do not inherit that. Needs CAP_SYS_NICE, and a
/// control group that allows it.
pub fn enter() -> Result<()> {
    // SAFETY: a structure of integers. musl's has more fields than glibc's.
    let mut parameter: libc::sched_param = unsafe { std::mem::zeroed() };
    parameter.sched_priority = 1;
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    let arguments = [0, policy as usize, &raw const parameter as usize, 0, 0, 0];
    // SAFETY: the kernel reads one `sched_param`, which outlives the call.
    unsafe { raw::call(libc::SYS_sched_setscheduler, arguments)? };
    Ok(())
}
