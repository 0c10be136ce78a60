//! A process of its own beside this one: no child that this one could wait for. It goes through libc's fork, so it is not for the shim.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::{Errno, Result, raw};

/// Makes one, which has nothing of this process but `kept`: not its other descriptors, nor its standard ones. It lives as long as `life`
/// does, and `life` must not lean on a descriptor that it has from here. EDEADLK: there are other threads, and so locks that nobody would
/// ever release in the copy.
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
                // A panic ends this process as well, and never comes back to the caller's code.
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

/// The number that the one descriptor gets.
const KEPT: i32 = 3;

fn keep_only(kept: &OwnedFd) -> Result<OwnedFd> {
    let null = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())?;
    for standard in 0..KEPT {
        // SAFETY: the arguments are values, and the three numbers belong to nobody.
        unsafe { raw::call(libc::SYS_dup3, [null.as_raw_fd() as usize, standard as usize, 0, 0, 0, 0]) }?;
    }
    // While the number is its own.
    drop(null);
    if kept.as_raw_fd() != KEPT {
        let arguments = [kept.as_raw_fd() as usize, KEPT as usize, libc::O_CLOEXEC as usize, 0, 0, 0];
        // SAFETY: the arguments are values. Whatever had the number belongs to code that this process never comes back to, as does
        // everything that is closed below.
        unsafe { raw::call(libc::SYS_dup3, arguments)? };
    }
    // SAFETY: as above.
    unsafe { raw::call(libc::SYS_close_range, [KEPT as usize + 1, u32::MAX as usize, 0, 0, 0, 0])? };
    // SAFETY: it is there, and whoever owned the number before is of that code too.
    Ok(unsafe { OwnedFd::from_raw_fd(KEPT) })
}

/// Has this process live on when it is asked to end: it ends with those that it serves.
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
