//! Stopped threads, and functions that they execute for this process.
//!
//! A thread that is interrupted in a system call has not ended it. Most calls are restarted by the
//! kernel. Some, such as epoll_wait, return EINTR although no signal has come. [`Thread::stop`]
//! makes these calls restart too, unless a handler runs.
//!
//! A thread that executes a function is at the instruction of its system call, so that it makes
//! that call (again) afterwards. Its stack has, from the top:
//!
//! ```text
//!   the program's frames      the red zone      the data      floats      signal frame, whose first
//!                                                                         word is the return address
//! ```
//!
//! The return address is that of the code by which signal handlers return. So the kernel restores
//! all registers and the signal mask, whether this process still exists or not.

use std::ops::Range;
use std::time::{Duration, Instant};

use shunt_sys::trace::{self, Registers, Stop};
use shunt_sys::xstate::Extended;
use shunt_sys::{Errno, Result as Made};

use crate::Refusal;
use crate::process::{Mapping, Process};

/// How long a thread may take to stop. One in an uninterruptible sleep does not.
const STOPS: Duration = Duration::from_secs(2);
/// How long a function may take.
const RETURNS: Duration = Duration::from_secs(30);
/// How long a thread may run until it makes a system call in which it can be borrowed.
const CALLS: Duration = Duration::from_millis(100);

const EINTR: i64 = 4;
/// The kernel's own results of calls that it restarts: from ERESTARTSYS on.
const RESTARTS: Range<i64> = 512..517;
/// The kernel restarts the call unless a handler runs; then the call returns EINTR.
const ERESTARTNOHAND: i64 = 514;

/// System calls that a thread makes without a lock of libc or of the dynamic linker.
const WITHOUT_LOCKS: [i64; 18] = [
    7,   // poll
    23,  // select
    34,  // pause
    35,  // nanosleep
    43,  // accept
    44,  // sendto
    45,  // recvfrom
    46,  // sendmsg
    47,  // recvmsg
    61,  // wait4
    130, // rt_sigsuspend
    230, // clock_nanosleep
    232, // epoll_wait
    270, // pselect6
    271, // ppoll
    281, // epoll_pwait
    288, // accept4
    441, // epoll_pwait2
];
const FUTEX: i64 = 202;
const SIGRETURN: i64 = 15;

/// A traced thread that stands still. Dropping it lets it go on.
#[derive(Debug)]
pub(crate) struct Thread {
    pub(crate) id: i32,
}

impl Drop for Thread {
    fn drop(&mut self) {
        let _ = trace::detach(self.id);
    }
}

pub(crate) fn refused(name: &'static str, errno: Errno) -> Refusal {
    match errno {
        Errno::SRCH => Refusal::Gone,
        errno => Refusal::Kernel(name, errno),
    }
}

/// A thread's place at a stop.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// In this system call, which is not over.
    Call(i64),
    /// At the end of a system call.
    EndOfCall,
    /// In code of the program or of a library.
    Code,
}

impl Thread {
    /// Stops a thread. Returns `None` if it has ended.
    pub(crate) fn stop(id: i32) -> Result<Option<Thread>, Refusal> {
        match trace::seize(id) {
            Ok(()) => {}
            Err(Errno::SRCH) => return Ok(None),
            Err(errno @ (Errno::PERM | Errno::ACCESS)) => return Err(Refusal::MayNotTrace(errno)),
            Err(errno) => return Err(Refusal::Kernel("ptrace", errno)),
        }
        let thread = Thread { id };
        trace::interrupt(id).map_err(|errno| refused("ptrace", errno))?;
        match thread.wait(Instant::now() + STOPS, trace::go_on) {
            Ok(Stop::Interrupted) => {
                thread.make_restart()?;
                Ok(Some(thread))
            }
            Ok(Stop::Ended) => Ok(None),
            Ok(Stop::Group) => Err(Refusal::Stopped),
            Ok(_) => Err(Refusal::Unsafe),
            // The tracing ends with this process.
            Err(Refusal::Unsafe) => Err(Refusal::Asleep(id)),
            Err(refusal) => Err(refusal),
        }
    }

    /// Waits until the thread is interrupted, begins or ends a call, or has ended. It gets its
    /// signals meanwhile.
    fn wait(&self, until: Instant, go_on: impl Fn(i32, i32) -> Made<()>) -> Result<Stop, Refusal> {
        loop {
            let stop = trace::poll(self.id).map_err(|errno| refused("waitpid", errno))?;
            let made = match stop {
                Some(Stop::Signal(signal)) => go_on(self.id, signal),
                Some(Stop::Other) => go_on(self.id, 0),
                Some(stop) => return Ok(stop),
                None if Instant::now() > until => return Err(Refusal::Unsafe),
                None => {
                    std::thread::sleep(Duration::from_micros(20));
                    Ok(())
                }
            };
            made.map_err(|errno| refused("ptrace", errno))?;
        }
    }

    pub(crate) fn registers(&self) -> Result<Registers, Refusal> {
        trace::registers(self.id).map_err(|errno| refused("ptrace", errno))
    }

    pub(crate) fn set_registers(&self, registers: &Registers) -> Result<(), Refusal> {
        trace::set_registers(self.id, registers).map_err(|errno| refused("ptrace", errno))
    }

    /// Makes a call that the stop has interrupted restart.
    fn make_restart(&self) -> Result<(), Refusal> {
        let registers = self.registers()?;
        if is_call(&registers) && -(registers.rax as i64) == EINTR {
            self.set_registers(&Registers { rax: -ERESTARTNOHAND as u64, ..registers })?;
        }
        Ok(())
    }

    /// Returns where an interrupted thread stands.
    pub(crate) fn place(&self) -> Result<Place, Refusal> {
        let registers = self.registers()?;
        let is_under_way = is_call(&registers) && RESTARTS.contains(&-(registers.rax as i64));
        Ok(match is_call(&registers) {
            true if is_under_way => Place::Call(registers.orig_rax as i64),
            true => Place::EndOfCall,
            false => Place::Code,
        })
    }
}

fn is_call(registers: &Registers) -> bool {
    (registers.orig_rax as i64) >= 0
}

/// The parts of libc that matter for borrowed threads.
#[derive(Clone, Debug)]
pub(crate) struct Libc {
    /// Its code.
    pub(crate) code: Vec<Range<u64>>,
    /// The code by which signal handlers return.
    pub(crate) restorer: u64,
    /// The functions that wait for a condition. A thread in them holds no lock of libc.
    pub(crate) conditions: Vec<Range<u64>>,
}

/// A stopped thread that executes functions for this process. Dropping it lets it make its own
/// system call.
#[derive(Debug)]
pub(crate) struct Caller<'a> {
    process: &'a Process,
    thread: Thread,
    libc: &'a Libc,
    /// Its registers at the instruction of its system call.
    own: Registers,
    /// Its other registers, as a signal frame has them.
    floats: Vec<u8>,
    blocked: u64,
}

impl<'a> Caller<'a> {
    /// Stops the thread `id` if a function can be executed on it, which needs this much `stack`.
    pub(crate) fn borrow(
        process: &'a Process,
        libc: &'a Libc,
        id: i32,
        stack: u64,
    ) -> Result<Option<Caller<'a>>, Refusal> {
        let kernel = |errno| refused("ptrace", errno);
        let Some(thread) = Thread::stop(id)? else { return Ok(None) };
        let registers = thread.registers()?;
        let own = match thread.place()? {
            Place::Call(number) if is_free(process, libc, number, &registers) => at_call(registers),
            _ => match next_call(&thread, process, libc)? {
                Some(own) => own,
                None => return Ok(None),
            },
        };
        let Some(frames) = frames(&process.mappings()?, &own, stack) else { return Ok(None) };
        let extended = Extended::of(id).map_err(kernel)?;
        if is_in_handler(process, libc, frames)? || extended.has_keys() {
            return Ok(None);
        }
        let Some(floats) = extended.in_frame() else { return Ok(None) };
        let blocked = trace::blocked(id).map_err(kernel)?;
        thread.set_registers(&own)?;
        Ok(Some(Caller { process, thread, libc, own, floats, blocked }))
    }

    pub(crate) fn id(&self) -> i32 {
        self.thread.id
    }

    /// Returns the system call that it makes afterwards, with its arguments.
    pub(crate) fn own_call(&self) -> (i64, [u64; 6]) {
        let own = &self.own;
        (own.rax as i64, [own.rdi, own.rsi, own.rdx, own.r10, own.r8, own.r9])
    }

    /// Changes the registers that it will have afterwards.
    pub(crate) fn change_own(&mut self, change: impl Fn(u64) -> u64) -> Result<(), Refusal> {
        each_register(&mut self.own, change);
        self.thread.set_registers(&self.own)
    }

    /// Executes a function with the address of `data` and the `others` as its arguments. Returns
    /// the last system call that failed meanwhile.
    pub(crate) fn call(
        &self,
        function: u64,
        data: &[u8],
        others: impl Fn(u64) -> [u64; 4],
    ) -> Result<Option<(i64, Errno)>, Refusal> {
        const RED_ZONE: u64 = 128;
        let own = &self.own;
        let at = (own.rsp - RED_ZONE - data.len() as u64) & !15;
        let floats_at = (at - self.floats.len() as u64) & !63;
        let frame_at = ((floats_at - FRAME as u64) & !15) - 8;
        self.process.write(at, data)?;
        self.process.write(floats_at, &self.floats)?;
        self.process.write(frame_at, &frame(self.libc.restorer, own, self.blocked, floats_at))?;
        let [rdi, rsi, rdx, rcx] = others(at);
        const TRAP_AND_DIRECTION: u64 = 1 << 8 | 1 << 10;
        let called = Registers {
            rip: function,
            rsp: frame_at,
            rdi,
            rsi,
            rdx,
            rcx,
            rax: 0,
            rbp: 0,
            orig_rax: u64::MAX,
            eflags: own.eflags & !TRAP_AND_DIRECTION,
            ..*own
        };
        self.thread.set_registers(&called)?;
        // From here on, the frame restores the mask.
        let kernel = |errno| refused("ptrace", errno);
        trace::set_blocked(self.thread.id, u64::MAX).map_err(kernel)?;
        let until = Instant::now() + RETURNS;
        let mut failed = None;
        let mut begins = true;
        let mut returns = false;
        loop {
            trace::go_on_to_call(self.thread.id, 0).map_err(kernel)?;
            match self.thread.wait(until, trace::go_on_to_call)? {
                Stop::Call => {}
                Stop::Interrupted | Stop::Group => continue,
                _ => return Err(Refusal::Gone),
            }
            let now = self.thread.registers()?;
            if begins {
                returns = now.orig_rax as i64 == SIGRETURN && now.rsp == frame_at + 8;
            } else if returns {
                return Ok(failed);
            } else if let error @ 1..4096 = -(now.rax as i64) {
                failed = Some((now.orig_rax as i64, Errno::from_raw_os_error(error as i32)));
            }
            begins = !begins;
        }
    }
}

impl Drop for Caller<'_> {
    /// Makes the thread's own call one that the kernel has interrupted, so that a signal that has
    /// come meanwhile ends it as it should.
    fn drop(&mut self) {
        const SYSCALL: u64 = 2;
        let id = self.thread.id;
        let is_stopped = trace::interrupt(id).is_ok()
            && trace::go_on(id, 0).is_ok()
            && self
                .thread
                .wait(Instant::now() + STOPS, trace::go_on)
                .is_ok_and(|stop| stop == Stop::Interrupted);
        if is_stopped && self.thread.registers().is_ok_and(|now| now.rip == self.own.rip) {
            let interrupted = Registers {
                rip: self.own.rip + SYSCALL,
                rax: -ERESTARTNOHAND as u64,
                orig_rax: self.own.rax,
                ..self.own
            };
            let _ = self.thread.set_registers(&interrupted);
        }
    }
}

/// Returns where a thread's frames are. Returns `None` if its stack may have less room than `stack`.
/// The thread may have switched to a stack of the program's own, such as a coroutine's, whose end is
/// not known. So only the stacks are used that the kernel and libc have made.
fn frames(mappings: &[Mapping], own: &Registers, stack: u64) -> Option<Range<u64>> {
    let one = mappings.iter().find(|one| one.range.contains(&own.rsp))?;
    let Range { start, end } = one.range;
    if one.path.as_os_str() == "[stack]" {
        return Some(own.rsp..end);
    }
    // libc has the data of a thread at the top of its stack, and a guard below.
    let is_guarded = mappings.iter().any(|guard| guard.range.end == start && !guard.is_readable);
    let is_threads = (own.rsp..end).contains(&own.fs_base) && own.rsp - start >= stack;
    (is_guarded && is_threads).then_some(own.rsp..own.fs_base)
}

/// Returns whether a handler of a signal runs, which may have interrupted a function that holds a
/// lock. The handler's return address is among the frames.
fn is_in_handler(process: &Process, libc: &Libc, frames: Range<u64>) -> Result<bool, Refusal> {
    const MOST: u64 = 16 << 20;
    let mut bytes = vec![0; (frames.end - frames.start).min(MOST) as usize & !7];
    process.read(frames.start, &mut bytes)?;
    Ok(bytes.chunks_exact(8).any(|word| word == libc.restorer.to_ne_bytes()))
}

/// Returns the registers of a thread in a call as of the call's instruction.
fn at_call(registers: Registers) -> Registers {
    Registers { rip: registers.rip - 2, rax: registers.orig_rax, orig_rax: u64::MAX, ..registers }
}

/// Returns whether a thread in this call holds no lock of libc or of the dynamic linker.
fn is_free(process: &Process, libc: &Libc, number: i64, registers: &Registers) -> bool {
    let is_in = |ranges: &[Range<u64>], at| ranges.iter().any(|range: &Range<u64>| range.contains(&at));
    if !is_in(&libc.code, registers.rip) {
        return false;
    }
    if number != FUTEX {
        return WITHOUT_LOCKS.contains(&number);
    }
    // The function that waits for a condition calls the one that sleeps.
    process
        .words::<32>(registers.rsp)
        .is_ok_and(|words| words.iter().any(|word| is_in(&libc.conditions, *word)))
}

/// Lets a thread run until it begins a call in which a function can be executed. Returns its
/// registers at the instruction of that call, which it has not made.
fn next_call(thread: &Thread, process: &Process, libc: &Libc) -> Result<Option<Registers>, Refusal> {
    let kernel = |errno| refused("ptrace", errno);
    let until = Instant::now() + CALLS;
    let mut begins = true;
    let mut is_interrupted = false;
    loop {
        trace::go_on_to_call(thread.id, 0).map_err(kernel)?;
        let stop = match thread.wait(until, trace::go_on_to_call) {
            Err(Refusal::Unsafe) => {
                trace::interrupt(thread.id).map_err(kernel)?;
                is_interrupted = true;
                thread.wait(Instant::now() + STOPS, trace::go_on_to_call)?
            }
            stop => stop?,
        };
        match stop {
            Stop::Call => {}
            Stop::Interrupted => {
                thread.make_restart()?;
                return Ok(None);
            }
            _ => return Err(Refusal::Gone),
        }
        let registers = thread.registers()?;
        let number = registers.orig_rax as i64;
        if begins && number != FUTEX && is_free(process, libc, number, &registers) {
            let own = at_call(registers);
            // The call is skipped, and made again from its instruction.
            thread.set_registers(&own)?;
            trace::go_on_to_call(thread.id, 0).map_err(kernel)?;
            return match thread.wait(Instant::now() + STOPS, trace::go_on_to_call)? {
                Stop::Call => Ok(Some(own)),
                _ => Err(Refusal::Gone),
            };
        }
        begins = !begins;
        // After an interruption, the result of a call may be one that only the kernel understands.
        if Instant::now() > until && begins && !is_interrupted {
            return Ok(None);
        }
    }
}

/// The length of a signal frame: the return address, `ucontext` and no more.
const FRAME: usize = 8 + 40 + 256 + 8;

/// Returns a signal frame (`struct rt_sigframe`) that restores these registers.
fn frame(restorer: u64, own: &Registers, blocked: u64, floats: u64) -> Vec<u8> {
    // UC_FP_XSTATE, UC_SIGCONTEXT_SS and UC_STRICT_RESTORE_SS.
    const FLAGS: u64 = 7;
    // The kernel ignores an alternate stack with unknown flags, and keeps the thread's own.
    const NO_STACK: u64 = 0x1234;
    let segments = own.cs & 0xffff | (own.ss & 0xffff) << 48;
    let words = [
        restorer, FLAGS, 0, 0, NO_STACK, 0, //
        own.r8, own.r9, own.r10, own.r11, own.r12, own.r13, own.r14, own.r15, own.rdi, own.rsi, own.rbp,
        own.rbx, own.rdx, own.rax, own.rcx, own.rsp, own.rip, own.eflags, segments, //
        0, 0, blocked, 0, floats, 0, 0, 0, 0, 0, 0, 0, 0, blocked,
    ];
    let bytes = words.map(u64::to_ne_bytes).concat();
    debug_assert_eq!(bytes.len(), FRAME);
    bytes
}

/// Applies `change` to each register that may hold the address of a function. Returns whether one
/// has changed.
pub(crate) fn each_register(registers: &mut Registers, change: impl Fn(u64) -> u64) -> bool {
    let Registers { rax, rbx, rcx, rdx, rsi, rdi, rbp, r8, r9, r10, r11, r12, r13, r14, r15, .. } = registers;
    let mut has_changed = false;
    for one in [rax, rbx, rcx, rdx, rsi, rdi, rbp, r8, r9, r10, r11, r12, r13, r14, r15] {
        let before = std::mem::replace(one, change(*one));
        has_changed |= before != *one;
    }
    has_changed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_run_on_stacks_of_the_kernel_and_of_libc_alone() {
        let mapping = |range: Range<u64>, is_readable, path: &str| Mapping {
            range,
            is_readable,
            is_writable: is_readable,
            is_executable: false,
            is_private: true,
            offset: 0,
            inode: 0,
            path: path.into(),
            is_removed: false,
        };
        let mappings = [
            mapping(0x1_0000..0x90_0000, true, "[heap]"),
            mapping(0xa0_0000..0xa0_1000, false, ""),
            mapping(0xa0_1000..0xb0_0000, true, ""),
            mapping(0xf0_0000..0xf1_0000, true, "[stack]"),
        ];
        let at = |rsp, fs_base| Registers { rsp, fs_base, ..trace::no_registers() };
        let frames = |rsp, fs_base| super::frames(&mappings, &at(rsp, fs_base), 0x1_0000);
        assert_eq!(frames(0xf0_8000, 0), Some(0xf0_8000..0xf1_0000), "that of the kernel grows");
        assert_eq!(frames(0xaf_0000, 0xaf_f000), Some(0xaf_0000..0xaf_f000));
        assert_eq!(frames(0xa0_8000, 0xaf_f000), None, "too little is left");
        assert_eq!(frames(0x80_0000, 0xaf_f000), None, "a coroutine's");
        assert_eq!(frames(0x80_0000, 0x80_f000), None, "without a guard");
    }

    #[test]
    fn signal_frame_is_as_long_as_the_kernels() {
        let none = trace::registers(std::process::id() as i32);
        assert_eq!(none.err(), Some(Errno::SRCH), "this process does not trace itself");
        assert_eq!(FRAME, 312);
    }
}
