//! System call interception for programs that make system calls with their own instructions. When
//! such a program is executed, its `syscall` instructions are redirected to libshunt.so. If the
//! program has no dynamic linker, libshunt.so is also loaded into it. See `docs/adr/0028`.
//!
//! A helper process does this with ptrace, before the first instruction of the program runs:
//!
//! ```text
//!   helper:   wait(By::Thread) ── Interception::plan ── Interception::open ──────────────── exit
//!                    │ PTRACE_SEIZE                │ stubs and jumps are written
//!   program:  ───────┴────── execve ── stopped ────┴── first instruction ── ...
//! ```
//!
//! Each `syscall` of two bytes, together with neighbouring instructions, becomes a jump to a stub.
//! The stub jumps to libshunt.so, which answers the call itself, or jumps back to a `syscall` in
//! the stub.
//!
//! Modules: `text` finds the instructions and decides how each is redirected. `own` finds the
//! system calls in programs that have a libc. `library` prepares the memory image of libshunt.so.
//! `tracee` controls the stopped process. `elf` and `frames` read files. `open` contains the steps
//! in their order.
//!
//! If anything is not as expected, the result is [`Closed`], and the program runs unmodified.

#![forbid(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod elf;
#[cfg(target_arch = "x86_64")]
mod frames;
#[cfg(target_arch = "x86_64")]
mod library;
#[cfg(target_arch = "x86_64")]
mod open;
#[cfg(target_arch = "x86_64")]
mod own;
#[cfg(target_arch = "x86_64")]
mod text;
#[cfg(target_arch = "x86_64")]
mod tracee;
#[cfg(not(target_arch = "x86_64"))]
mod without;

#[cfg(target_arch = "x86_64")]
pub use open::{Interception, wait};
#[cfg(not(target_arch = "x86_64"))]
pub use without::{Interception, wait};

use thiserror::Error;

/// `true` if this processor is supported.
pub const IS_HERE: bool = cfg!(target_arch = "x86_64");

/// The thread that will execute the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// This thread. Its whole process becomes the program.
    Thread(i32),
    /// The next child that this thread creates.
    Child(i32),
}

/// Why a program's system calls cannot be redirected to shunt.
#[derive(Debug, Error)]
pub enum Closed {
    /// The file is not ELF, or is damaged.
    #[error("its file cannot be understood")]
    Elf,
    /// The file cannot be read.
    #[error("its file cannot be read: {0}")]
    Unreadable(std::io::Error),
    /// Its memory cannot be read or written.
    #[error("its memory at {0:#x} cannot be touched: {1}")]
    Memory(u64, std::io::Error),
    /// A jump does not fit in the place of a system call instruction.
    #[error("the system call at {0:#x} cannot be led elsewhere")]
    Call(u64),
    /// The program's libc cancels threads, and decides from a thread's program counter whether it
    /// may.
    #[error("its libc cancels threads by where they stand (at {0:#x})")]
    Cancels(u64),
    /// The program takes the address behind the system call, presumably to check whether threads
    /// are in the call.
    #[error("it looks whether threads stand in a system call (at {0:#x})")]
    Watched(u64),
    /// The program uses the GS register, in which shunt keeps the pointer to its own data.
    #[error("it uses GS (at {0:#x})")]
    UsesGs(u64),
    /// The program makes no system calls that matter, or makes them in other files.
    #[error("it has no system calls of its own")]
    NoCalls,
    /// The program has a libc, and more code than shunt searches for direct system calls.
    #[error("it has more code than is looked through")]
    TooMuch,
    /// The processor or the kernel does not let programs write GS.
    #[error("this kernel lets no program set GS")]
    NoGs,
    /// The processor is not x86-64, the only one whose instructions this crate can redirect.
    #[error("such programs are entered on x86-64 alone")]
    Processor,
    /// The processor has no instruction that saves all vector registers.
    #[error("this processor has no XSAVE")]
    NoXsave,
    /// The dynamic linker modifies the code in which calls would be redirected.
    #[error("its dynamic linker changes its code")]
    ChangesCode,
    /// The program has a dynamic linker, but creates threads without libc.
    #[error("its threads are not libc's")]
    OwnThreads,
    /// libshunt.so has an unexpected layout.
    #[error("libshunt.so is not of this build")]
    Library,
    /// /proc shows another PID namespace than that of this process.
    #[error("/proc is of another namespace of processes")]
    OtherProc,
    /// The kernel refuses an operation.
    #[error("{0}: {1}")]
    Kernel(&'static str, nix::errno::Errno),
    /// There is no free memory near the program's code.
    #[error("there is no room near its code")]
    NoRoom,
    /// The process has become another program, or the file has changed.
    #[error("it is not the file that was looked at")]
    Other,
    /// The process has ended.
    #[error("it has not been started")]
    Gone,
}
