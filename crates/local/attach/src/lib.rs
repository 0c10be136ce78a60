//! Enters a program that runs already: loads libshunt.so into it, and redirects its calls of libc's
//! functions to the hooks. See `docs/adr/0040-a-running-program-is-entered-by-ptrace.md`.
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
//! Modules: `process` reads /proc. `others` finds out what other processes have. `sockets` lists
//! those of the program alone. `image` finds functions in files. `threads` stops threads and
//! executes functions on them. `waits` finds epoll instances and the threads that wait in them.
//! `sweep` searches the memory for addresses.

#![forbid(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod image;
#[cfg(target_arch = "x86_64")]
mod others;
#[cfg(target_arch = "x86_64")]
mod process;
#[cfg(target_arch = "x86_64")]
mod session;
#[cfg(target_arch = "x86_64")]
mod sockets;
#[cfg(target_arch = "x86_64")]
mod sweep;
#[cfg(target_arch = "x86_64")]
mod threads;
#[cfg(target_arch = "x86_64")]
mod waits;

use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

/// The outcome of an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attached {
    /// How long all threads of the program were stopped.
    pub stopped: Duration,
    /// The number of addresses that were redirected.
    pub redirected: usize,
    /// The number of epoll instances that the program has.
    pub instances: usize,
    /// The number of connections that were taken over.
    pub connections: usize,
}

/// The state of the library in a program under shunt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Whether the program was entered while it ran, rather than started with the library.
    pub is_entered: bool,
    /// The paths at which the library looks for its broker, best first, in the program's root
    /// directory.
    pub brokers: Vec<PathBuf>,
    /// Why the last attempt to reach a broker has failed, if it has.
    pub unreached: Option<shunt_sys::Errno>,
    /// Why the library is off, if it is.
    pub off: Option<shunt_abi::reason::Reason>,
    /// The address of code that may make system calls past the library, if it has found some.
    pub bypasses: Option<u64>,
    /// Whether a broker has accepted the program, or the one that forked it. `None` if the library
    /// is of another version.
    pub has_registered: Option<bool>,
}

/// The outcome of a detachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detached {
    /// All connections are on TCP.
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
    /// It is in another PID namespace. Thread ids mean other threads there.
    #[error(
        "it is in another PID namespace, as in a container: start it there with `shunt run`, or by shunt's runtime"
    )]
    OtherNamespace,
    /// All its threads are stopped.
    #[error("it is stopped, as by SIGSTOP: let it go on first")]
    Stopped,
    /// A thread sleeps without interruption.
    #[error("its thread {0} cannot be stopped now, as in vfork or while it waits for a disk: try again")]
    Asleep(i32),
    /// Another process shares its memory, and would get its calls redirected too.
    #[error("process {0} shares its memory, as after vfork: try again, or start it with `shunt run`")]
    SharesMemory(i32),
    /// Other processes may call through an address in shared memory.
    #[error("it has addresses of libc's functions in shared memory: start it with `shunt run`")]
    SharesCalls,
    /// A file that it has loaded is not there any more, and this process may not read it.
    #[error("its {0} has been replaced since it started: try as root, or restart it with `shunt run`")]
    Replaced(String),
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
    /// Its root directory does not have this file.
    #[error(
        "it cannot see {0}, as in a container or with PrivateTmp: start it there with `shunt run`, or by shunt's runtime"
    )]
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

/// Enters a program. `settings` are environment variables of the library, and the program must see
/// `broker`, a socket that one of them names.
pub fn attach(
    pid: u32,
    library: &Path,
    broker: &Path,
    settings: &[(&str, &[u8])],
) -> Result<Attached, Refusal> {
    #[cfg(target_arch = "x86_64")]
    return session::attach(pid, library, broker, settings);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (pid, library, broker, settings);
        Err(Refusal::Processor)
    }
}

/// Returns the state of the library in a program, as the library shows it. `None` if the program has
/// no such library, or its memory may not be read.
pub fn view(pid: u32) -> Option<View> {
    #[cfg(target_arch = "x86_64")]
    return session::view(pid).ok().flatten();
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = pid;
        None
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
