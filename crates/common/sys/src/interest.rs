//! Moves a registration in an epoll instance to another file under the same fd.
//!
//! epoll identifies a registration by file and fd, where the fd is looked up in the fd table of the
//! thread that makes the call. So a new thread unshares its fd table and makes the calls there,
//! where it may put any file under that fd.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::{FdFlags, dup2, fcntl_dupfd_cloexec};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::{Errno, Result, raw};

/// `struct epoll_event`.
#[repr(C)]
#[cfg_attr(target_arch = "x86_64", repr(packed))]
struct Event {
    events: u32,
    data: u64,
}

/// A registration that a program has made with epoll_ctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// The fd under which the file is registered.
    pub number: i32,
    /// The events, including EPOLLET and the other flags.
    pub events: u32,
    /// The data that epoll_wait returns with the events.
    pub data: u64,
}

/// Replaces `old` by `new` in the instance `epoll`. Fails with ENOENT if `old` is not registered
/// there under `interest.number`.
pub fn take_over(
    epoll: BorrowedFd<'_>,
    old: BorrowedFd<'_>,
    new: BorrowedFd<'_>,
    interest: Interest,
) -> Result<()> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("shunt-epoll".into()).spawn_scoped(scope, || {
            // SAFETY: only this thread gets its own fd table. Its copies of the descriptors are
            // closed when it ends.
            unsafe { unshare_unsafe(UnshareFlags::FILES) }?;
            inside(epoll, old, new, interest)
        });
        let thread = thread.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
        thread.join().unwrap_or(Err(Errno::CANCELED))
    })
}

/// Does the work of [`take_over`] in an fd table that no other thread shares.
fn inside(epoll: BorrowedFd<'_>, old: BorrowedFd<'_>, new: BorrowedFd<'_>, interest: Interest) -> Result<()> {
    let Interest { number, events, data } = interest;
    // Duplicate to fds above `number`, because `number` may be the fd of one of them.
    let above = |fd: BorrowedFd<'_>| fcntl_dupfd_cloexec(fd, number.checked_add(1).ok_or(Errno::INVAL)?);
    let (epoll, old, new) = (above(epoll)?, above(old)?, above(new)?);
    put(old.as_fd(), number)?;
    control(epoll.as_fd(), libc::EPOLL_CTL_DEL, number, 0, 0)?;
    put(new.as_fd(), number)?;
    control(epoll.as_fd(), libc::EPOLL_CTL_ADD, number, events, data)
}

fn put(fd: BorrowedFd<'_>, number: i32) -> Result<()> {
    // SAFETY: `place` is never dropped, so it closes no descriptor of other code. The table is
    // freed with the thread.
    let mut place = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
    dup2(fd, &mut place)?;
    rustix::io::fcntl_setfd(place.as_fd(), FdFlags::CLOEXEC)
}

fn control(epoll: BorrowedFd<'_>, operation: i32, number: i32, events: u32, data: u64) -> Result<()> {
    let event = Event { events, data };
    let arguments =
        [epoll.as_raw_fd() as usize, operation as usize, number as usize, &raw const event as usize, 0, 0];
    // SAFETY: the kernel reads the event, which outlives the call.
    unsafe { raw::call(libc::SYS_epoll_ctl, arguments) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_set_waits_for_the_new_file_and_for_the_old_no_more() {
        let ((old, mut old_peer), (new, mut new_peer)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        epoll::add(&set, &old, epoll::EventData::new_u64(7), epoll::EventFlags::IN).unwrap();
        let interest = Interest { number: old.as_raw_fd(), events: libc::EPOLLIN as u32, data: 9 };
        take_over(set.as_fd(), old.as_fd(), new.as_fd(), interest).unwrap();
        old_peer.write_all(b"x").unwrap();
        let mut events = Vec::with_capacity(2);
        let none = Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 });
        epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), none).unwrap();
        assert!(events.is_empty());
        new_peer.write_all(b"x").unwrap();
        epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), none).unwrap();
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].data.u64(), 9);
        let again = take_over(set.as_fd(), old.as_fd(), new.as_fd(), interest);
        assert_eq!(again, Err(Errno::NOENT));
    }
}
