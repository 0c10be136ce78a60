//! Doorbells: eventfds that a process shares with its peers to be woken by them. No peer can
//! disable a doorbell for the other peers.
//!
//! Every holder of an eventfd shares its file flags and its counter, and a hostile peer may change
//! both. So a doorbell does not depend on them:
//!
//! - The counter starts at 2^63, and each read decrements it by one (EFD_SEMAPHORE).
//! - A notification ([`ring`]) is a read. RWF_NOWAIT makes that one read non-blocking, whatever the
//!   file flags are.
//! - The listener waits for *edges* of EPOLLIN or EPOLLOUT. Every read wakes with EPOLLOUT and
//!   every write with EPOLLIN.
//!
//! So no peer can empty the counter in practice, and a full counter changes nothing. Example: peer
//! A writes the counter full, then peer B notifies the listener. B's read decrements the counter,
//! which is an edge, and the listener wakes. See ADR 7.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::event::{EventfdFlags, Timespec, epoll};
use rustix::fs::{CWD, readlinkat_raw};
use rustix::io::{ReadWriteFlags, preadv2, retry_on_intr, write};

use crate::{Errno, Result};

/// The events that a listener registers. At any counter value at least one of IN and OUT is ready,
/// so epoll never drops an edge.
pub const EDGES: epoll::EventFlags =
    epoll::EventFlags::IN.union(epoll::EventFlags::OUT).union(epoll::EventFlags::ET);
/// The initial counter: more notifications than can happen in the life of a machine.
const RINGS: u64 = 1 << 63;
/// The offset for preadv2 on a file without a position.
const NO_OFFSET: u64 = u64::MAX;

/// Makes a close-on-exec doorbell.
pub fn create() -> Result<OwnedFd> {
    let doorbell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?;
    write(&doorbell, &RINGS.to_ne_bytes())?;
    Ok(doorbell)
}

/// Wakes the listeners of a doorbell. Never blocks, whatever `fd` is and whichever process shares
/// it. Fails if `fd` is not a doorbell, or if the kernel or a seccomp filter refuses the read.
pub fn ring(fd: impl AsFd) -> Result<()> {
    let mut count = [0; 8];
    let read = || preadv2(&fd, &mut [IoSliceMut::new(&mut count)], NO_OFFSET, ReadWriteFlags::NOWAIT);
    match retry_on_intr(read)? {
        8 => Ok(()),
        _ => Err(Errno::INVAL),
    }
}

/// Returns a descriptor that polls readable from the next notification until [`heard`]. No other
/// process may share it.
pub fn listen(doorbell: impl AsFd) -> Result<OwnedFd> {
    let listener = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&listener, doorbell, epoll::EventData::new_u64(0), EDGES)?;
    heard(&listener)?;
    Ok(listener)
}

/// Returns `true` if there was a notification since the last call.
pub fn heard(listener: impl AsFd) -> Result<bool> {
    let mut event = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(epoll::wait(listener, &mut event, Some(&now))? > 0)
}

/// Returns `true` if `fd` is an eventfd. Reads the link in /proc, because no system call reports
/// it.
pub fn is_doorbell(fd: impl AsFd) -> bool {
    let mut path = [0; 32];
    let path = proc_path(fd.as_fd().as_raw_fd(), &mut path);
    let mut target = [0; 64];
    readlinkat_raw(CWD, path, &mut target).is_ok_and(|len| &target[..len] == b"anon_inode:[eventfd]")
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
    use rustix::fs::{OFlags, fcntl_setfl};

    #[test]
    fn rings_are_kept_until_heard() {
        let bell = create().unwrap();
        let listener = listen(&bell).unwrap();
        assert!(!heard(&listener).unwrap());
        ring(&bell).unwrap();
        ring(&bell).unwrap();
        assert!(heard(&listener).unwrap());
        assert!(!heard(&listener).unwrap());
    }

    /// A process that holds a doorbell may write its counter up to 2^64 - 2, and change its flags.
    #[test]
    fn a_full_doorbell_still_rings_and_blocks_nobody() {
        let bell = create().unwrap();
        let listener = listen(&bell).unwrap();
        write(&bell, &(u64::MAX - 1 - RINGS).to_ne_bytes()).unwrap();
        assert!(heard(&listener).unwrap());
        for flags in [OFlags::empty(), OFlags::NONBLOCK, OFlags::APPEND] {
            fcntl_setfl(&bell, flags).unwrap();
            for _ in 0..3 {
                ring(&bell).unwrap();
                assert!(heard(&listener).unwrap());
            }
        }
    }

    /// Between a notification and the listener's check, another holder may write or read the
    /// doorbell.
    #[test]
    fn nobody_can_silence_a_doorbell() {
        let bell = create().unwrap();
        let listener = listen(&bell).unwrap();
        write(&bell, &(u64::MAX - 1 - RINGS).to_ne_bytes()).unwrap();
        let fill: fn(&OwnedFd) = |bell| write(bell, &1u64.to_ne_bytes()).map(|_| ()).unwrap();
        let empty: fn(&OwnedFd) = |bell| rustix::io::read(bell, &mut [0; 8]).map(|_| ()).unwrap();
        for spoil in [fill, empty] {
            assert!(heard(&listener).unwrap());
            ring(&bell).unwrap();
            spoil(&bell);
            assert!(heard(&listener).unwrap(), "a ring was swallowed");
            ring(&bell).unwrap();
        }
    }

    #[test]
    fn what_is_no_doorbell_is_told_by_ringing() {
        let empty = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert_eq!(ring(&empty), Err(Errno::AGAIN));
        let (reader, writer) = std::io::pipe().unwrap();
        assert_eq!(ring(&reader), Err(Errno::AGAIN));
        assert_eq!(ring(&writer), Err(Errno::BADF));
        assert!(ring(std::fs::File::open("/").unwrap()).is_err());
        assert!(ring(std::fs::File::open("/dev/null").unwrap()).is_err());
        assert!(ring(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).is_err());
    }

    #[test]
    fn eventfds_are_told_by_their_name() {
        assert!(is_doorbell(create().unwrap()));
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
