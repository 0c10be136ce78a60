//! ptrace and kcmp. nix cannot name real-time signals, so a traced thread would lose them.

use rustix::process::{Pid, WaitOptions, waitpid};

use crate::{Errno, Result, raw};

const PTRACE_CONT: usize = 7;
const PTRACE_SINGLESTEP: usize = 9;
const PTRACE_DETACH: usize = 17;
const PTRACE_SYSCALL: usize = 24;
const PTRACE_SEIZE: usize = 0x4206;
const PTRACE_INTERRUPT: usize = 0x4207;
const PTRACE_GETSIGMASK: usize = 0x420a;
const PTRACE_SETSIGMASK: usize = 0x420b;
const PTRACE_O_TRACESYSGOOD: usize = 1;
const PTRACE_EVENT_STOP: i32 = 128;
const KCMP_FILE: usize = 0;
const KCMP_VM: usize = 1;

/// Why a traced thread stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It has been interrupted.
    Interrupted,
    /// All threads of its process are stopped by a signal.
    Group,
    /// It begins or ends a system call.
    Call,
    /// A signal is about to be delivered to it.
    Signal(i32),
    /// It has another event.
    Other,
    /// It has ended.
    Ended,
}

pub(crate) fn request(request: usize, thread: i32, address: usize, data: usize) -> Result<()> {
    // SAFETY: requests that use no memory of this process, or the caller's own.
    unsafe { raw::call(libc::SYS_ptrace, [request, thread as usize, address, data, 0, 0]) }.map(drop)
}

/// Begins to trace a thread, which goes on.
pub fn seize(thread: i32) -> Result<()> {
    request(PTRACE_SEIZE, thread, 0, PTRACE_O_TRACESYSGOOD)
}

/// Makes a traced thread stop.
pub fn interrupt(thread: i32) -> Result<()> {
    request(PTRACE_INTERRUPT, thread, 0, 0)
}

/// Lets a stopped thread go on, with a signal or 0.
pub fn go_on(thread: i32, signal: i32) -> Result<()> {
    request(PTRACE_CONT, thread, 0, signal as usize)
}

/// Lets a stopped thread execute one instruction, without the signal that it has stopped for.
pub fn step(thread: i32) -> Result<()> {
    request(PTRACE_SINGLESTEP, thread, 0, 0)
}

/// Lets a stopped thread go on to the begin or the end of its next system call.
pub fn go_on_to_call(thread: i32, signal: i32) -> Result<()> {
    request(PTRACE_SYSCALL, thread, 0, signal as usize)
}

/// Ends the tracing of a stopped thread, which goes on.
pub fn detach(thread: i32) -> Result<()> {
    request(PTRACE_DETACH, thread, 0, 0)
}

/// Returns why a traced thread stands still, or `None` if it does not.
pub fn poll(thread: i32) -> Result<Option<Stop>> {
    const WALL: u32 = 0x4000_0000;
    let options = WaitOptions::NOHANG | WaitOptions::from_bits_retain(WALL);
    let status = match waitpid(Pid::from_raw(thread), options) {
        Ok(None) => return Ok(None),
        Ok(Some((_, status))) => status.as_raw(),
        Err(Errno::CHILD) => return Ok(Some(Stop::Ended)),
        Err(errno) => return Err(errno),
    };
    if status & 0xff != 0x7f {
        return Ok(Some(Stop::Ended));
    }
    let signal = status >> 8 & 0xff;
    Ok(Some(match (status >> 16, signal) {
        (PTRACE_EVENT_STOP, libc::SIGTRAP) => Stop::Interrupted,
        (PTRACE_EVENT_STOP, _) => Stop::Group,
        (0, signal) if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        (0, signal) => Stop::Signal(signal),
        _ => Stop::Other,
    }))
}

/// Returns the signals that a stopped traced thread blocks. If a system call has replaced them for
/// its duration, returns those that the thread has afterwards.
pub fn blocked(thread: i32) -> Result<u64> {
    let mut mask = 0_u64;
    request(PTRACE_GETSIGMASK, thread, size_of::<u64>(), std::ptr::from_mut(&mut mask) as usize)?;
    Ok(mask)
}

/// Sets the signals that a stopped traced thread blocks.
pub fn set_blocked(thread: i32, mask: u64) -> Result<()> {
    request(PTRACE_SETSIGMASK, thread, size_of::<u64>(), std::ptr::from_ref(&mask) as usize)
}

/// The registers of a thread.
#[cfg(target_arch = "x86_64")]
pub use libc::user_regs_struct as Registers;

/// Returns registers that are all zero.
#[cfg(target_arch = "x86_64")]
pub fn no_registers() -> Registers {
    // SAFETY: zeroes are valid integers.
    unsafe { std::mem::zeroed() }
}

/// Returns the registers of a stopped thread.
#[cfg(target_arch = "x86_64")]
pub fn registers(thread: i32) -> Result<Registers> {
    const PTRACE_GETREGS: usize = 12;
    let mut registers = no_registers();
    request(PTRACE_GETREGS, thread, 0, std::ptr::from_mut(&mut registers) as usize)?;
    Ok(registers)
}

/// Sets the registers of a stopped thread.
#[cfg(target_arch = "x86_64")]
pub fn set_registers(thread: i32, registers: &Registers) -> Result<()> {
    const PTRACE_SETREGS: usize = 13;
    request(PTRACE_SETREGS, thread, 0, std::ptr::from_ref(registers) as usize)
}

/// Returns whether descriptors of two processes are of the same open file. They are not if one of
/// the processes has ended, or does not have the descriptor. `None`: the kernel does not answer.
pub fn is_same_file((process, fd): (i32, i32), (other, others): (i32, i32)) -> Option<bool> {
    let arguments = [process as usize, other as usize, KCMP_FILE, fd as usize, others as usize, 0];
    // SAFETY: the call writes nothing.
    match unsafe { raw::call(libc::SYS_kcmp, arguments) } {
        Ok(order) => Some(order == 0),
        Err(Errno::BADF | Errno::SRCH) => Some(false),
        Err(_) => None,
    }
}

/// Returns whether two processes have the same memory.
pub fn is_same_memory(process: i32, other: i32) -> Result<bool> {
    let arguments = [process as usize, other as usize, KCMP_VM, 0, 0, 0];
    // SAFETY: the call writes nothing.
    unsafe { raw::call(libc::SYS_kcmp, arguments) }.map(|order| order == 0)
}
