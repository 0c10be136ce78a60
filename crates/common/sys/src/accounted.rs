//! Creates TCP sockets that are accounted to another control group.
//!
//! The kernel counts and limits a socket by the control group of the process that created it. The
//! group never changes, even when another process holds the socket. So [`sockets`] clones a
//! short-lived process into the group, which creates the sockets and exits.

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

/// Creates `count` sockets in the control group whose directory is `group`. The sockets are
/// non-blocking and close-on-exec. Needs Linux 5.7.
///
/// Fails with EAGAIN if the group may have no more processes. The call waits for a process in the
/// group, and therefore blocks for as long as the group is frozen.
pub fn sockets(group: BorrowedFd<'_>, family: AddressFamily, count: usize) -> Result<Vec<OwnedFd>> {
    // The clone shares the fd table of this process. It replaces these placeholders by sockets.
    let places = (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC)).collect::<Result<Vec<_>>>()?;
    let arguments = Arguments {
        // The clone shares no memory. It also resets signal handlers, because a signal that is sent
        // to the whole group must not run a handler of this process.
        flags: libc::CLONE_FILES as u64 | libc::CLONE_VFORK as u64 | CLONE_CLEAR_SIGHAND | CLONE_INTO_CGROUP,
        cgroup: group.as_raw_fd() as u64,
        ..Arguments::default()
    };
    let clone = [&raw const arguments as usize, size_of::<Arguments>(), 0, 0, 0, 0];
    // SAFETY: the kernel reads the arguments, which outlive the call. The copy of this process has
    // this thread only: it makes system calls, which need no other thread, and exits.
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

/// Creates one socket and puts it in the place of `place`. Runs in the cloned process.
fn make(family: AddressFamily, place: BorrowedFd<'_>) -> Result<()> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let arguments = [family.as_raw() as usize, kind as usize, libc::IPPROTO_TCP as usize, 0, 0, 0];
    // SAFETY: the arguments are values.
    let made = unsafe { raw::call(libc::SYS_socket, arguments)? };
    let arguments = [made, place.as_raw_fd() as usize, libc::O_CLOEXEC as usize, 0, 0, 0];
    // SAFETY: the arguments are values; `place` is a placeholder that is meant to be replaced.
    let placed = unsafe { raw::call(libc::SYS_dup3, arguments) };
    // SAFETY: no other code knows the fd.
    unsafe { raw::call(libc::SYS_close, [made, 0, 0, 0, 0, 0])? };
    placed.map(drop)
}

/// Waits for a process that has ended or is about to, and returns its exit status. Returns EINTR if
/// a signal killed it.
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
