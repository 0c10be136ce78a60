//! Starts an independent process that is not a child of this one, so that this one has nothing to
//! wait for. It uses libc's `fork`, so the shim must not use it.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::{Errno, Result, raw};

/// Forks a process that runs `life` and keeps no descriptor but `kept`. Its standard descriptors
/// are /dev/null. The process ends when `life` returns. `life` must not use a descriptor that it
/// has captured from this process.
///
/// Fails with EDEADLK if this process has other threads: a lock that one of them holds would never
/// be released in the copy.
pub fn beside(kept: OwnedFd, life: impl FnOnce(OwnedFd)) -> Result<()> {
    if std::fs::read_dir("/proc/self/task").map_or(true, |tasks| tasks.count() != 1) {
        return Err(Errno::DEADLK);
    }
    // SAFETY: the only thread of the process, so the copy is whole.
    match unsafe { libc::fork() } {
        -1 => Err(last_error()),
        0 => {
            // SAFETY: as above.
            let beside = unsafe { libc::fork() };
            if beside == 0 {
                // A panic ends this process too. It never unwinds into the caller's code.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    if let Ok(kept) = keep_only(&kept) {
                        life(kept);
                    }
                }));
            }
            // SAFETY: ends this process without touching what it shares with its copies.
            unsafe { libc::_exit(i32::from(beside == -1)) }
        }
        between => {
            let mut status = 0;
            // SAFETY: waits for our own child, and writes one integer.
            while unsafe { libc::waitpid(between, &raw mut status, 0) } == -1 && last_error() == Errno::INTR {
            }
            if status == 0 { Ok(()) } else { Err(Errno::AGAIN) }
        }
    }
}

/// The fd that `kept` gets in the new process.
const KEPT: i32 = 3;

fn keep_only(kept: &OwnedFd) -> Result<OwnedFd> {
    // Both move above the fds that they are copied to, so that no copy replaces the other.
    let kept = rustix::io::fcntl_dupfd_cloexec(kept, KEPT + 1)?;
    let null = {
        let opened = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())?;
        rustix::io::fcntl_dupfd_cloexec(&opened, KEPT + 1)?
    };
    for standard in 0..KEPT {
        // SAFETY: the arguments are values, and no code in this process uses the three standard
        // fds.
        unsafe { raw::call(libc::SYS_dup3, [null.as_raw_fd() as usize, standard as usize, 0, 0, 0, 0]) }?;
    }
    // Close it before another descriptor takes its fd.
    drop(null);
    let arguments = [kept.as_raw_fd() as usize, KEPT as usize, libc::O_CLOEXEC as usize, 0, 0, 0];
    // SAFETY: the arguments are values. Code that owned this fd never runs again in this process.
    // That is also true of every fd that is closed below.
    unsafe { raw::call(libc::SYS_dup3, arguments)? };
    drop(kept);
    // SAFETY: as above.
    unsafe { raw::call(libc::SYS_close_range, [KEPT as usize + 1, u32::MAX as usize, 0, 0, 0, 0])? };
    // SAFETY: the fd is open, and the code that owned its number before never runs again.
    Ok(unsafe { OwnedFd::from_raw_fd(KEPT) })
}

/// Ignores SIGHUP, SIGINT, SIGQUIT and SIGTERM: this process ends with the processes that it
/// serves.
pub fn ignore_endings() {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
        // SAFETY: to ignore a signal runs no code.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_threads_is_not_copied() {
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || receiver.recv());
        let (_reader, writer) = std::io::pipe().unwrap();
        assert_eq!(beside(writer.into(), |_| unreachable!()), Err(Errno::DEADLK));
        drop(sender);
        assert!(other.join().unwrap().is_err());
    }
}
