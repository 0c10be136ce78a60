//! A process that is stopped at its exec. Its memory can be written, and it can be made to make
//! system calls.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nix::errno::Errno;
use nix::libc::user_regs_struct;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use shunt_abi::intercept::SYSCALL;

use crate::Closed;

/// A traced process. Dropping it restores the code at `calls_at` and lets the process run.
pub(crate) struct Tracee {
    process: Pid,
    memory: File,
    /// Signals that arrived while it was stopped, to be sent again.
    signals: Vec<Signal>,
    /// The address of the `syscall` instruction that it uses for calls, and the bytes that it
    /// replaces.
    calls_at: u64,
    before: [u8; 2],
}

/// Makes a thread stop at its next exec, or, if it `is_parent`, its next child at the child's.
pub(crate) fn seize(thread: Pid, is_parent: bool) -> Result<(), Closed> {
    // /proc/PID/mem must be that of the traced process, so /proc must show our own PID namespace.
    let own = std::fs::read_link("/proc/self").map_err(Closed::Unreadable)?;
    if own != Path::new(&std::process::id().to_string()) {
        return Err(Closed::OtherProc);
    }
    let children = Options::PTRACE_O_TRACEFORK | Options::PTRACE_O_TRACEVFORK | Options::PTRACE_O_TRACECLONE;
    let also = if is_parent { children } else { Options::empty() };
    ptrace::seize(thread, Options::PTRACE_O_TRACEEXEC | also).map_err(|errno| Closed::Kernel("ptrace", errno))
}

/// Converts the error of a ptrace request on a thread that has been stopped.
fn refused(errno: Errno) -> Closed {
    if errno == Errno::ESRCH { Closed::Gone } else { Closed::Kernel("ptrace", errno) }
}

impl Tracee {
    /// Waits until the traced process has executed the program, before its first instruction.
    pub(crate) fn at_exec() -> Result<Tracee, Closed> {
        use nix::libc::{
            PTRACE_EVENT_CLONE, PTRACE_EVENT_EXEC, PTRACE_EVENT_FORK, PTRACE_EVENT_STOP, PTRACE_EVENT_VFORK,
        };
        let any = Pid::from_raw(-1);
        let process = loop {
            let status = waitpid(any, Some(WaitPidFlag::__WALL));
            let gone = match status.map_err(|errno| Closed::Kernel("waitpid", errno))? {
                // At exec a thread that is not the main thread takes over the id of the main
                // thread.
                WaitStatus::PtraceEvent(process, _, PTRACE_EVENT_EXEC) => break process,
                WaitStatus::PtraceEvent(
                    parent,
                    _,
                    PTRACE_EVENT_FORK | PTRACE_EVENT_VFORK | PTRACE_EVENT_CLONE,
                ) => ptrace::detach(parent, None),
                // A group stop. The thread stays stopped when it is detached.
                WaitStatus::PtraceEvent(thread, signal, PTRACE_EVENT_STOP) if signal != Signal::SIGTRAP => {
                    let _ = ptrace::detach(thread, None);
                    return Err(Closed::Gone);
                }
                WaitStatus::PtraceEvent(thread, ..) => ptrace::cont(thread, None),
                WaitStatus::Stopped(thread, signal) => ptrace::cont(thread, signal),
                _ => return Err(Closed::Gone),
            };
            gone.map_err(|_| Closed::Gone)?;
        };
        let path = format!("/proc/{process}/mem");
        let memory = File::options().read(true).write(true).open(path).map_err(Closed::Unreadable)?;
        let mut tracee = Tracee { process, memory, signals: Vec::new(), calls_at: 0, before: [0; 2] };
        tracee.calls_at = tracee.registers()?.rip;
        tracee.memory.read_exact_at(&mut tracee.before, tracee.calls_at).map_err(Closed::Unreadable)?;
        tracee.write(tracee.calls_at, &SYSCALL)?;
        Ok(tracee)
    }

    /// Returns the address at which the program starts, after its dynamic linker.
    pub(crate) fn entry(&self) -> Result<u64, Closed> {
        const AT_ENTRY: u64 = 9;
        let told = std::fs::read(format!("/proc/{}/auxv", self.process)).map_err(Closed::Unreadable)?;
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let mut pairs = told.chunks_exact(16).map(|pair| (word(&pair[..8]), word(&pair[8..])));
        pairs.find(|(kind, _)| *kind == AT_ENTRY).map(|(_, at)| at).ok_or(Closed::Elf)
    }

    pub(crate) fn process(&self) -> Pid {
        self.process
    }

    pub(crate) fn registers(&self) -> Result<user_regs_struct, Closed> {
        ptrace::getregs(self.process).map_err(refused)
    }

    pub(crate) fn set_registers(&self, registers: user_regs_struct) -> Result<(), Closed> {
        ptrace::setregs(self.process, registers).map_err(refused)
    }

    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Closed> {
        self.memory.read_exact_at(into, at).map_err(|error| self.lacks(at, error))
    }

    /// Writes memory, even if it is read-only for the program.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Closed> {
        self.memory.write_all_at(bytes, at).map_err(|error| self.lacks(at, error))
    }

    /// Returns why its memory is inaccessible. A killed process has no memory.
    fn lacks(&self, at: u64, error: std::io::Error) -> Closed {
        match self.registers() {
            Err(Closed::Gone) => Closed::Gone,
            _ => Closed::Memory(at, error),
        }
    }

    /// Makes the process make a system call, and returns the result.
    pub(crate) fn call(
        &mut self,
        name: &'static str,
        number: i64,
        arguments: [u64; 6],
    ) -> Result<u64, Closed> {
        let before = self.registers()?;
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        // -1 means that no system call is in progress, so the kernel restarts none.
        let orig_rax = u64::MAX;
        let call = user_regs_struct {
            rax: number as u64,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            orig_rax,
            rip: self.calls_at,
            ..before
        };
        let result = loop {
            self.set_registers(call)?;
            self.step()?;
            let after = self.registers()?;
            // The first step only completes the exec, which changes rax.
            if after.rip != call.rip {
                break after.rax;
            }
        };
        self.set_registers(user_regs_struct { orig_rax, ..before })?;
        if result > (-4096_i64) as u64 {
            return Err(Closed::Kernel(name, Errno::from_raw(-(result as i64) as i32)));
        }
        Ok(result)
    }

    /// Executes one instruction.
    fn step(&mut self) -> Result<(), Closed> {
        loop {
            ptrace::step(self.process, None).map_err(|_| Closed::Gone)?;
            match waitpid(self.process, None).map_err(|_| Closed::Gone)? {
                WaitStatus::Stopped(_, Signal::SIGTRAP) => return Ok(()),
                WaitStatus::Stopped(_, signal) => self.signals.push(signal),
                WaitStatus::PtraceEvent(..) => {}
                _ => return Err(Closed::Gone),
            }
        }
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        let _ = self.write(self.calls_at, &self.before);
        for signal in self.signals.drain(..) {
            let _ = kill(self.process, signal);
        }
        let _ = ptrace::detach(self.process, None);
    }
}
