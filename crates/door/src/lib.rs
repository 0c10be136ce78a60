//! The door for programs that make system calls by themselves: at its exec, the `syscall` instructions of such a program are led to
//! libshunt.so, which is put into it if it has no dynamic linker that would load it. See `docs/adr/0028`.
//!
//! [`wait`] is for a process beside the one that becomes the program. It is gone before the program's first instruction.
//!
//! `text` finds the instructions and says how each is led away, `own` which of them are calls in a program that has a libc; `library` is
//! libshunt.so as it lies in the program; `tracee` is the process.
//! Whatever is not as expected closes the door, and the program runs as it is.

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
pub use open::{Door, wait};
#[cfg(not(target_arch = "x86_64"))]
pub use without::{Door, wait};

use thiserror::Error;

/// Whether there are doors on this processor.
pub const IS_HERE: bool = cfg!(target_arch = "x86_64");

/// Who becomes the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// A thread, whose process that is then.
    Thread(i32),
    /// The next child that a thread makes.
    Child(i32),
}

/// Why a program's system calls cannot be led to shunt.
#[derive(Debug, Error)]
pub enum Closed {
    /// It is no ELF file, or a damaged one.
    #[error("its file cannot be understood")]
    Elf,
    /// The file cannot be read.
    #[error("its file cannot be read: {0}")]
    Unreadable(std::io::Error),
    /// Its memory cannot be read or written.
    #[error("its memory at {0:#x} cannot be touched: {1}")]
    Memory(u64, std::io::Error),
    /// A system call's instruction stands where nothing can be put in its place.
    #[error("the system call at {0:#x} cannot be led elsewhere")]
    Call(u64),
    /// Its libc cancels threads, and looks where a thread stands for that.
    #[error("its libc cancels threads by where they stand (at {0:#x})")]
    Cancels(u64),
    /// It asks whether a thread stands in this call: the address behind it is taken.
    #[error("it looks whether threads stand in a system call (at {0:#x})")]
    Watched(u64),
    /// It uses the register that shunt finds its own data by.
    #[error("it uses GS (at {0:#x})")]
    UsesGs(u64),
    /// It makes no system calls that matter, or makes them elsewhere.
    #[error("it has no system calls of its own")]
    NoCalls,
    /// It has a libc, and more code than is looked through for calls of its own.
    #[error("it has more code than is looked through")]
    TooMuch,
    /// The processor or the kernel do not let programs write GS.
    #[error("this kernel lets no program set GS")]
    NoGs,
    /// Which instructions there are, and how they are led elsewhere, is known of another processor only.
    #[error("such programs are entered on x86-64 alone")]
    Processor,
    /// The processor cannot keep all vector registers at once.
    #[error("this processor has no XSAVE")]
    NoXsave,
    /// The dynamic linker writes where calls would be led from.
    #[error("its dynamic linker changes its code")]
    ChangesCode,
    /// It has a dynamic linker, but makes threads without libc.
    #[error("its threads are not libc's")]
    OwnThreads,
    /// libshunt.so is not as expected.
    #[error("libshunt.so is not of this build")]
    Library,
    /// /proc is of other processes than those that this one can name.
    #[error("/proc is of another namespace of processes")]
    OtherProc,
    /// The kernel refuses.
    #[error("{0}: {1}")]
    Kernel(&'static str, nix::errno::Errno),
    /// There is no room near the program's code.
    #[error("there is no room near its code")]
    NoRoom,
    /// The process has become another program, or the file has changed.
    #[error("it is not the file that was looked at")]
    Other,
    /// The process has ended.
    #[error("it has not been started")]
    Gone,
}
