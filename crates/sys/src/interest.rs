//! What an epoll set waits for, taken over to another file under the same descriptor number. The set knows a file by its number in the
//! table of whoever registered it, so this is done in a table of its own, where the number is free.

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

/// What a program has registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// The number under which it did.
    pub number: i32,
    /// For which events, with their flags.
    pub events: u32,
    /// What it wants to be told with them.
    pub data: u64,
}

/// In the set `epoll`, `new` takes the place of `old`. ENOENT: `old` is not registered there under that number.
pub fn take_over(
    epoll: BorrowedFd<'_>,
    old: BorrowedFd<'_>,
    new: BorrowedFd<'_>,
    interest: Interest,
) -> Result<()> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("shunt-epoll".into()).spawn_scoped(scope, || {
            // SAFETY: only this thread's table becomes its own; what it has of the others' is closed when it ends.
            unsafe { unshare_unsafe(UnshareFlags::FILES) }?;
            inside(epoll, old, new, interest)
        });
        let thread = thread.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
        thread.join().unwrap_or(Err(Errno::CANCELED))
    })
}

/// In a table that nobody else uses.
fn inside(epoll: BorrowedFd<'_>, old: BorrowedFd<'_>, new: BorrowedFd<'_>, interest: Interest) -> Result<()> {
    let Interest { number, events, data } = interest;
    // Above the number, which may be that of one of them.
    let above = |fd: BorrowedFd<'_>| fcntl_dupfd_cloexec(fd, number.checked_add(1).ok_or(Errno::INVAL)?);
    let (epoll, old, new) = (above(epoll)?, above(old)?, above(new)?);
    put(old.as_fd(), number)?;
    control(epoll.as_fd(), libc::EPOLL_CTL_DEL, number, 0, 0)?;
    put(new.as_fd(), number)?;
    control(epoll.as_fd(), libc::EPOLL_CTL_ADD, number, events, data)
}

fn put(fd: BorrowedFd<'_>, number: i32) -> Result<()> {
    // SAFETY: never dropped, so nothing is closed that somebody else owns: the table goes with the thread.
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
