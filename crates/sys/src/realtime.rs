//! The real-time class of the scheduler, for threads whose work is to be on time.

use crate::{Result, raw};

/// Puts the calling thread before every thread of the ordinary classes. What it starts does not inherit that. Needs
/// CAP_SYS_NICE, and a control group that allows it.
pub fn enter() -> Result<()> {
    // SAFETY: plain numbers, of which musl has more.
    let mut parameter: libc::sched_param = unsafe { std::mem::zeroed() };
    parameter.sched_priority = 1;
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    let arguments = [0, policy as usize, &raw const parameter as usize, 0, 0, 0];
    // SAFETY: the kernel reads one `sched_param`, which outlives the call.
    unsafe { raw::call(libc::SYS_sched_setscheduler, arguments)? };
    Ok(())
}
