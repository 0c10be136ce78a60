//! A process that stands at its exec: its memory is written, and it is made to call the kernel.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nix::errno::Errno;
use nix::libc::user_regs_struct;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use shunt_abi::door::SYSCALL;

use crate::Closed;

/// Held still by this process, which the kernel has let go on when it is dropped.
pub(crate) struct Tracee {
    process: Pid,
    memory: File,
    /// Signals that have come meanwhile.
    signals: Vec<Signal>,
    /// Where it makes calls, and what else stands there.
    calls_at: u64,
    before: [u8; 2],
}

/// From now on the thread stops when it becomes another program, or its next child does.
pub(crate) fn seize(thread: Pid, is_parent: bool) -> Result<(), Closed> {
    // Its memory is found by its number, and must be no other's.
    let own = std::fs::read_link("/proc/self").map_err(Closed::Unreadable)?;
    if own != Path::new(&std::process::id().to_string()) {
        return Err(Closed::OtherProc);
    }
    let children = Options::PTRACE_O_TRACEFORK | Options::PTRACE_O_TRACEVFORK | Options::PTRACE_O_TRACECLONE;
    let also = if is_parent { children } else { Options::empty() };
    ptrace::seize(thread, Options::PTRACE_O_TRACEEXEC | also).map_err(|errno| Closed::Kernel("ptrace", errno))
}

/// What a refusal of ptrace's says of a thread that has stopped for it.
fn refused(errno: Errno) -> Closed {
    if errno == Errno::ESRCH { Closed::Gone } else { Closed::Kernel("ptrace", errno) }
}

impl Tracee {
    /// The process when it has become the program, before the program's first instruction.
    pub(crate) fn at_exec() -> Result<Tracee, Closed> {
        use nix::libc::{
            PTRACE_EVENT_CLONE, PTRACE_EVENT_EXEC, PTRACE_EVENT_FORK, PTRACE_EVENT_STOP, PTRACE_EVENT_VFORK,
        };
        let any = Pid::from_raw(-1);
        let process = loop {
            let status = waitpid(any, Some(WaitPidFlag::__WALL));
            let gone = match status.map_err(|errno| Closed::Kernel("waitpid", errno))? {
                // A thread that is not the first of its process has the number of that one from here on.
                WaitStatus::PtraceEvent(process, _, PTRACE_EVENT_EXEC) => break process,
                WaitStatus::PtraceEvent(
                    parent,
                    _,
                    PTRACE_EVENT_FORK | PTRACE_EVENT_VFORK | PTRACE_EVENT_CLONE,
                ) => ptrace::detach(parent, None),
                // It has been told to stop, and stays so without being traced.
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

    /// Where the program begins, whatever there is before it.
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

    /// Also where the program may only read.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Closed> {
        self.memory.write_all_at(bytes, at).map_err(|error| self.lacks(at, error))
    }

    /// Why its memory cannot be touched: somebody who is killed has none.
    fn lacks(&self, at: u64, error: std::io::Error) -> Closed {
        match self.registers() {
            Err(Closed::Gone) => Closed::Gone,
            _ => Closed::Memory(at, error),
        }
    }

    /// Has it make a system call.
    pub(crate) fn call(
        &mut self,
        name: &'static str,
        number: i64,
        arguments: [u64; 6],
    ) -> Result<u64, Closed> {
        let before = self.registers()?;
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        // No call is under way that the kernel would begin again.
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
            // The first step is the end of the exec itself, and changes rax.
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

    /// One instruction.
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
