//! Enters a program that runs already: loads libshunt.so into it, and redirects its calls of libc's
//! functions to the hooks. See `docs/adr/0039-a-running-program-is-entered-by-ptrace.md`.
//!
//! ```text
//! examine      refuse a program that cannot be entered
//! borrow       stop one thread at a system call that holds no lock: the *caller*
//! load         dlopen and shunt_prepare on the caller; all other threads run
//! stop         stop all threads; let them run and try again if one is in the dynamic linker
//! redirect     write the hooks' addresses over those of libc's functions
//! commit       shunt_commit on the caller
//! switch on    one write
//! let go       all threads continue, each with its own registers and its own system call
//! ```
//!
//! Before the switch is on, the hooks pass each call on. A function that the caller executes
//! returns to a signal frame, with which the kernel restores the thread's registers and its signal
//! mask. So the program goes on even if this process is killed at any point.
//!
//! Modules: `process` reads /proc. `image` finds functions in files. `threads` stops threads and
//! executes functions on them. `waits` finds epoll instances and the threads that wait in them.
//! `sweep` searches the memory for addresses.

#![forbid(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod image;
#[cfg(target_arch = "x86_64")]
mod process;
#[cfg(target_arch = "x86_64")]
mod session;
#[cfg(target_arch = "x86_64")]
mod sweep;
#[cfg(target_arch = "x86_64")]
mod threads;
#[cfg(target_arch = "x86_64")]
mod waits;

use std::path::Path;
use std::time::Duration;

use thiserror::Error;

/// What was done to a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attached {
    /// How long all threads of the program were stopped.
    pub stopped: Duration,
    /// The number of addresses that were redirected.
    pub redirected: usize,
    /// The number of epoll instances that the program has.
    pub instances: usize,
}

/// The outcome of a detachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detached {
    /// The library passes every call on.
    Left,
    /// No connection sends on shared memory any more, but the program has not read everything yet.
    Leaving,
}

/// Why a program cannot be entered, or left.
#[derive(Debug, Error)]
pub enum Refusal {
    /// Only x86-64 is supported.
    #[error("running programs are entered on x86-64 alone")]
    Processor,
    /// There is no such process, or it has ended.
    #[error("there is no such process, or it has ended")]
    Gone,
    /// /proc cannot be read.
    #[error("its /proc cannot be read: {0}")]
    Unreadable(std::io::Error),
    /// /proc shows another PID namespace than that of this process.
    #[error("/proc is of another namespace of processes")]
    OtherProc,
    /// The kernel does not let this process trace it.
    #[error("the kernel does not let this process trace it ({0}): run this as root, or as its user")]
    MayNotTrace(shunt_sys::Errno),
    /// Another process traces it.
    #[error("process {0} traces it already, such as a debugger")]
    Traced(u32),
    /// The program has a seccomp filter, which could forbid what shared memory needs.
    #[error(
        "it has a seccomp filter, which could forbid what shared memory needs: start it with `shunt run`"
    )]
    Seccomp,
    /// The processor checks return addresses by a shadow stack.
    #[error("it has a shadow stack, which forbids calls from outside: start it with `shunt run`")]
    ShadowStack,
    /// Its libc has no dlopen, or is none that is known.
    #[error("it has no glibc of 2.34 or later to load a library with: start it with `shunt run`")]
    Libc,
    /// The library is already at work there.
    #[error("it is under shunt already")]
    Already,
    /// The library has worked there, and been ended.
    #[error("shunt has left it before: restart it with `shunt run`")]
    HasLeft,
    /// The library is not there.
    #[error("it is not under shunt")]
    NotUnder,
    /// Its root directory does not have this library.
    #[error("it cannot see {0}: it has another root directory or mount namespace")]
    OutOfReach(std::path::PathBuf),
    /// The dynamic linker did not load the library.
    #[error("its dynamic linker did not load libshunt.so{0}")]
    NotLoaded(String),
    /// The library is of another build.
    #[error("the libshunt.so in it is of another version")]
    Version,
    /// The library gives this reason.
    #[error("{0}")]
    Unfit(String),
    /// No thread waited in a system call in which a function could be called.
    #[error("none of its threads was at a point where a library can be loaded: try again")]
    Busy,
    /// Threads were in the dynamic linker at each attempt, or could not be stopped.
    #[error("its threads could not all be stopped at a safe point: try again")]
    Unsafe,
    /// It generates code that calls libc directly.
    #[error("code that it has generated calls libc directly: start it with `shunt run`")]
    Generated,
    /// It has more memory than is searched while it is stopped.
    #[error("it has {0} GiB of memory, which takes too long to search: start it with `shunt run`")]
    TooLarge(u64),
    /// The kernel refuses an operation.
    #[error("{0}: {1}")]
    Kernel(&'static str, shunt_sys::Errno),
    /// Its memory cannot be read or written.
    #[error("its memory cannot be touched: {0}")]
    Memory(std::io::Error),
    /// A file cannot be understood.
    #[error("{0} cannot be understood")]
    File(String),
}

/// Enters a program. `settings` are environment variables of the library.
pub fn attach(pid: u32, library: &Path, settings: &[(&str, &[u8])]) -> Result<Attached, Refusal> {
    #[cfg(target_arch = "x86_64")]
    return session::attach(pid, library, settings);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (pid, library, settings);
        Err(Refusal::Processor)
    }
}

/// Ends the library's work in a program.
pub fn detach(pid: u32) -> Result<Detached, Refusal> {
    #[cfg(target_arch = "x86_64")]
    return session::detach(pid);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = pid;
        Err(Refusal::Processor)
    }
}
