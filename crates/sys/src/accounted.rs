//! TCP sockets of another control group: what the kernel counts and limits by the group of a socket is that group's for the life of the
//! socket, whoever has it. The group is that of the process which makes the socket, so one is made there, and ends at once.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::AddressFamily;

use crate::{Errno, Result, raw};

const CLONE_CLEAR_SIGHAND: u64 = 1 << 32;
const CLONE_INTO_CGROUP: u64 = 1 << 33;

/// `struct clone_args`.
#[repr(C)]
#[derive(Default)]
struct Arguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Makes so many in the group whose directory is `group`, which do not block and are closed on exec. Linux 5.7. EAGAIN: the group may
/// have no more processes.
///
/// Waits for a process in the group, and so for as long as the group is frozen.
pub fn sockets(group: BorrowedFd<'_>, family: AddressFamily, count: usize) -> Result<Vec<OwnedFd>> {
    // The process shares the table of descriptors: it puts sockets in the places of these.
    let places = (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC)).collect::<Result<Vec<_>>>()?;
    let arguments = Arguments {
        // It shares no memory, and no handler of a signal that is sent to everybody in the group.
        flags: libc::CLONE_FILES as u64 | libc::CLONE_VFORK as u64 | CLONE_CLEAR_SIGHAND | CLONE_INTO_CGROUP,
        cgroup: group.as_raw_fd() as u64,
        ..Arguments::default()
    };
    let clone = [&raw const arguments as usize, size_of::<Arguments>(), 0, 0, 0, 0];
    // SAFETY: the kernel reads the arguments, which outlive the call. The copy of this process has this thread only: it makes system
    // calls, which need nothing of the others, and ends.
    let process = unsafe { raw::call(libc::SYS_clone3, clone) }?;
    if process == 0 {
        let made = places.iter().try_for_each(|place| make(family, place.as_fd()));
        let status = made.map_or_else(|error| error.raw_os_error() as usize, |()| 0);
        loop {
            // SAFETY: ends this process, and nothing that it shares.
            let _ = unsafe { raw::call(libc::SYS_exit_group, [status, 0, 0, 0, 0, 0]) };
        }
    }
    match exit_status(process)? {
        0 => Ok(places),
        status => Err(Errno::from_raw_os_error(status)),
    }
}

/// The life of the process in the group.
fn make(family: AddressFamily, place: BorrowedFd<'_>) -> Result<()> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let arguments = [family.as_raw() as usize, kind as usize, libc::IPPROTO_TCP as usize, 0, 0, 0];
    // SAFETY: the arguments are values.
    let made = unsafe { raw::call(libc::SYS_socket, arguments)? };
    let arguments = [made, place.as_raw_fd() as usize, libc::O_CLOEXEC as usize, 0, 0, 0];
    // SAFETY: the arguments are values; `place` waits to be replaced.
    let placed = unsafe { raw::call(libc::SYS_dup3, arguments) };
    // SAFETY: the number is known here only.
    unsafe { raw::call(libc::SYS_close, [made, 0, 0, 0, 0, 0])? };
    placed.map(drop)
}

/// Of a process that has ended, or is just about to. EINTR: it was killed.
fn exit_status(process: usize) -> Result<i32> {
    let mut status = 0;
    let arguments = [process, &raw mut status as usize, libc::__WALL as usize, 0, 0, 0];
    // SAFETY: waits for our own child, and writes one integer.
    while let Err(error) = unsafe { raw::call(libc::SYS_wait4, arguments) } {
        if error != Errno::INTR {
            return Err(error);
        }
    }
    if libc::WIFEXITED(status) { Ok(libc::WEXITSTATUS(status)) } else { Err(Errno::INTR) }
}
