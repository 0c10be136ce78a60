//! A keeper: a second process that shares all descriptors of this one (CLONE_FILES), so that they
//! stay open when this process is killed. The keeper then executes a successor of it, which finds
//! them by their fds.
//!
//! ```text
//!              ends normally
//! Watching ──────────────────► Ended
//!    │  ended otherwise; or no beat for [`BEATS`] seconds: kills it
//!    ▼
//! Succeeding ── exec ────────► Replaced: the successor starts a keeper
//!    │  exec fails: tries again each [`PAUSE_MS`], and meanwhile lets calls continue
//!    └──────┘
//! ```
//!
//! The process may have threads. Another one may hold a lock, such as that of the allocator, when
//! the keeper is made as a copy. So until it executes the successor, the keeper only makes
//! system calls, whose arguments exist before the copy.

use std::ffi::{CStr, CString, c_char};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open, waitpid};

use crate::seccomp::Listener;
use crate::{Errno, Result, raw};

/// The number of seconds without a beat after which the process counts as stopped.
const BEATS: u32 = 3;
/// The time between attempts to execute the successor, in milliseconds.
const PAUSE_MS: i64 = 10;
/// The number of unused fds in succession after which no further one is looked for.
const GAP: i32 = 4096;

/// The program that succeeds this process.
#[derive(Debug)]
pub struct Successor {
    /// The path of this process's program, where an update puts another version.
    path: CString,
    /// This process's program. It is executed if nothing can be executed at the path.
    own: OwnedFd,
    arguments: Vec<CString>,
}

/// Words in memory that the process shares with its keeper.
#[derive(Clone, Copy, Debug)]
pub struct Signs<'s> {
    /// Not 0 once the process ends normally.
    pub is_over: &'s AtomicU32,
    /// Changes at least once a second while the process runs.
    pub beat: &'s AtomicU32,
}

impl Successor {
    /// Prepares the execution of this process's own program, with these arguments.
    pub fn of_this_program(arguments: impl IntoIterator<Item = CString>) -> Result<Successor> {
        const LINK: &CStr = c"/proc/self/exe";
        let own = rustix::fs::open(LINK, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let path = rustix::fs::readlink(LINK, Vec::new())?;
        // The kernel appends this after the file at the path has been replaced.
        let path = match path.as_bytes().strip_suffix(b" (deleted)") {
            Some(path) => CString::new(path).map_err(|_| Errno::INVAL)?,
            None => path,
        };
        Ok(Successor { path, own, arguments: arguments.into_iter().collect() })
    }

    /// Prepares the execution of another process's program.
    pub fn with_program(own: OwnedFd, arguments: impl IntoIterator<Item = CString>) -> Successor {
        Successor { path: CString::default(), own, arguments: arguments.into_iter().collect() }
    }

    /// Returns the descriptor of the program.
    pub fn own(&self) -> BorrowedFd<'_> {
        self.own.as_fd()
    }

    /// Returns `true` if another file is at the path of this process's program.
    pub fn is_another(&self) -> bool {
        let (Ok(own), Ok(there)) = (rustix::fs::fstat(&self.own), rustix::fs::stat(&self.path)) else {
            return false;
        };
        (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino)
    }

    /// Starts a keeper of this process. `listener` answers the calls of programs which may continue
    /// if no successor can be executed.
    pub fn start_keeper(&self, signs: Signs<'_>, listener: Option<&Listener>) -> Result<Pid> {
        let watched = pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
        let mut arguments: Vec<*const c_char> = self.arguments.iter().map(|it| it.as_ptr()).collect();
        arguments.push(ptr::null());
        let flags = libc::CLONE_FILES as usize | libc::SIGCHLD as usize;
        // SAFETY: the copy runs only `keep`, which makes nothing but system calls, uses only what
        // exists by now, and never returns.
        match unsafe { raw::call(libc::SYS_clone, [flags, 0, 0, 0, 0, 0])? } {
            0 => self.keep(watched.as_raw_fd(), &arguments, signs, listener),
            keeper => {
                // The keeper uses this descriptor, which is also its own: it stays open.
                std::mem::forget(watched);
                Pid::from_raw(keeper as i32).ok_or(Errno::SRCH)
            }
        }
    }

    /// Runs the keeper.
    fn keep(
        &self,
        watched: i32,
        arguments: &[*const c_char],
        signs: Signs<'_>,
        listener: Option<&Listener>,
    ) -> ! {
        let (mut last, mut missed) = (signs.beat.load(Relaxed), 0);
        while !is_readable(watched, 1000) {
            let beat = signs.beat.load(Relaxed);
            missed = if beat == last { missed + 1 } else { 0 };
            last = beat;
            if missed >= BEATS {
                let arguments = [watched as usize, libc::SIGKILL as usize, 0, 0, 0, 0];
                // SAFETY: the arguments are values.
                let _ = unsafe { raw::call(libc::SYS_pidfd_send_signal, arguments) };
            }
        }
        if signs.is_over.load(Relaxed) != 0 {
            exit();
        }
        pass_on_descriptors();
        loop {
            self.execute(arguments);
            match listener {
                Some(listener) if is_readable(listener.number(), PAUSE_MS) => {
                    if let Ok(call) = listener.next() {
                        let _ = listener.proceed(call.id);
                    }
                }
                // No process is left under the filter, or there is none to wait for.
                _ => pause(),
            }
        }
    }

    /// Executes the successor. Returns if that fails.
    fn execute(&self, arguments: &[*const c_char]) {
        let environment = [ptr::null::<c_char>()];
        let (arguments, environment) = (arguments.as_ptr() as usize, environment.as_ptr() as usize);
        let call = [self.path.as_ptr() as usize, arguments, environment, 0, 0, 0];
        // SAFETY: strings and lists end with a null, and outlive the call.
        let _ = unsafe { raw::call(libc::SYS_execve, call) };
        self.execute_own_with(arguments, environment);
    }

    /// Executes this process's own program again, whatever is at its path. Returns if that fails.
    pub fn execute_own(&self) {
        pass_on_descriptors();
        let mut arguments: Vec<*const c_char> = self.arguments.iter().map(|it| it.as_ptr()).collect();
        arguments.push(ptr::null());
        let environment = [ptr::null::<c_char>()];
        self.execute_own_with(arguments.as_ptr() as usize, environment.as_ptr() as usize);
    }

    fn execute_own_with(&self, arguments: usize, environment: usize) {
        let own = self.own.as_raw_fd() as usize;
        let call = [own, c"".as_ptr() as usize, arguments, environment, libc::AT_EMPTY_PATH as usize, 0];
        // SAFETY: as in `execute`; both callers pass lists that end with a null.
        let _ = unsafe { raw::call(libc::SYS_execveat, call) };
    }
}

/// Returns `true` if the keeper, a child of this process, has ended.
pub fn has_ended(keeper: Pid) -> bool {
    !matches!(waitpid(Some(keeper), WaitOptions::NOHANG), Ok(None))
}

/// Waits until the descriptor is readable, for at most `limit` milliseconds.
fn is_readable(fd: i32, limit: i64) -> bool {
    let mut polled = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let limit = libc::timespec { tv_sec: limit / 1000, tv_nsec: limit % 1000 * 1_000_000 };
    let arguments = [&raw mut polled as usize, 1, &raw const limit as usize, 0, 0, 0];
    // SAFETY: both structures outlive the call, which writes only to the first.
    let ready = unsafe { raw::call(libc::SYS_ppoll, arguments) };
    matches!(ready, Ok(1)) && polled.revents & libc::POLLIN != 0
}

fn pause() {
    let pause = libc::timespec { tv_sec: 0, tv_nsec: PAUSE_MS * 1_000_000 };
    // SAFETY: the structure outlives the call.
    let _ = unsafe { raw::call(libc::SYS_nanosleep, [&raw const pause as usize, 0, 0, 0, 0, 0]) };
}

/// Lets the next program have all descriptors.
fn pass_on_descriptors() {
    let (mut fd, mut unused) = (3, 0);
    while unused < GAP {
        // SAFETY: the arguments are values. An fd that is not open is no error here.
        let result = unsafe { raw::call(libc::SYS_fcntl, [fd as usize, libc::F_SETFD as usize, 0, 0, 0, 0]) };
        unused = if result.is_ok() { 0 } else { unused + 1 };
        fd += 1;
    }
}

fn exit() -> ! {
    loop {
        // SAFETY: ends this process without touching what it shares with its copies.
        let _ = unsafe { raw::call(libc::SYS_exit_group, [0; 6]) };
    }
}
