//! Doorbells: eventfds that a process shares with its peers.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::fs::{CWD, OFlags, fcntl_getfl, readlinkat_raw};
use rustix::io::{read, retry_on_intr, write};

use crate::{Errno, Result};

/// Makes a non-blocking, close-on-exec eventfd.
pub fn create() -> Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// Rings: wakes whoever waits for the eventfd. One that is full has been rung already.
pub fn ring(fd: impl AsFd) -> Result<()> {
    match retry_on_intr(|| write(&fd, &1u64.to_ne_bytes())) {
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Takes back all rings so far; says whether there were any.
pub fn drain(fd: impl AsFd) -> Result<bool> {
    let mut count = [0; 8];
    match retry_on_intr(|| read(&fd, &mut count)) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether `fd` is an eventfd on which a write does not block now. Asks /proc, as nothing else tells.
pub fn is_doorbell(fd: impl AsFd) -> bool {
    let nonblocking = fcntl_getfl(&fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK));
    let mut path = [0; 32];
    let path = proc_path(fd.as_fd().as_raw_fd(), &mut path);
    let mut target = [0; 64];
    let Ok(len) = readlinkat_raw(CWD, path, &mut target) else { return false };
    nonblocking && &target[..len] == b"anon_inode:[eventfd]"
}

/// Writes "/proc/self/fd/N" without allocating.
fn proc_path(fd: i32, buffer: &mut [u8; 32]) -> &[u8] {
    const PREFIX: &[u8] = b"/proc/self/fd/";
    buffer[..PREFIX.len()].copy_from_slice(PREFIX);
    let (mut rest, mut at) = (fd.unsigned_abs(), buffer.len());
    loop {
        at -= 1;
        buffer[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    let digits = buffer.len() - at;
    buffer.copy_within(at.., PREFIX.len());
    &buffer[..PREFIX.len() + digits]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_kept_until_drained() {
        let bell = create().unwrap();
        assert!(!drain(&bell).unwrap());
        ring(&bell).unwrap();
        ring(&bell).unwrap();
        assert!(drain(&bell).unwrap());
        assert!(!drain(&bell).unwrap());
    }

    #[test]
    fn a_full_eventfd_counts_as_rung() {
        let bell = create().unwrap();
        rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        ring(&bell).unwrap();
    }

    #[test]
    fn only_non_blocking_eventfds_are_doorbells() {
        assert!(is_doorbell(create().unwrap()));
        assert!(!is_doorbell(rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
        assert!(!is_doorbell(std::io::pipe().unwrap().0));
        assert!(!is_doorbell(std::fs::File::open("/dev/null").unwrap()));
    }

    #[test]
    fn paths_are_spelled_right() {
        let mut buffer = [0; 32];
        assert_eq!(proc_path(0, &mut buffer), b"/proc/self/fd/0");
        assert_eq!(proc_path(1234, &mut buffer), b"/proc/self/fd/1234");
        assert_eq!(proc_path(i32::MAX, &mut buffer), b"/proc/self/fd/2147483647");
    }
}
