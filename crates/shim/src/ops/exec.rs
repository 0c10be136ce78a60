//! What another program is handed: what it inherits at an exec, and what a child takes along that becomes one.
//!
//! The other program reads and writes by TCP, so what has not been read is given back to the sender first (L2). Nobody can
//! say how long it, or what it starts in turn, holds the socket: who shares one with it stays on TCP.

use std::os::fd::RawFd;

use rustix::io::FdFlags;
use shunt_abi::reason::Reason;

use crate::endpoint::Endpoint;
use crate::signal::Shield;
use crate::table::{self, Entry};
use crate::{attach, errno, family, process, sandbox};

/// exec, in the process itself or in a child of vfork, which runs in our memory with descriptors of its own.
pub(crate) fn before_exec() {
    if process::is_off() {
        return sandbox::pass_beyond();
    }
    if !process::is_home() {
        return before_child();
    }
    keeping_errno(|| {
        for endpoint in inheritable() {
            family::pass_beyond(endpoint);
            attach::give_back(endpoint, Reason::Exec);
        }
    });
}

/// A child is started that becomes another program, where no hook is met: it inherits what has no close-on-exec flag.
pub(crate) fn before_child() {
    keeping_errno(|| inheritable().for_each(|endpoint| attach::bar_reading(endpoint, Reason::Exec)));
}

/// Such a child is given `fd` by name.
pub(crate) fn hand_out(fd: RawFd) {
    if let Some(endpoint) = table::endpoint(fd) {
        keeping_errno(|| attach::bar_reading(endpoint, Reason::Exec));
    }
}

fn inheritable() -> impl Iterator<Item = &'static Endpoint> {
    table::known(0, u32::MAX).filter_map(|(fd, entry)| {
        let Entry::Endpoint(name) = entry else { return None };
        let stays = rustix::io::fcntl_getfd(crate::private::borrow(fd))
            .is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC));
        name.resolve().filter(|_| stays)
    })
}

fn keeping_errno(act: impl FnOnce()) {
    let before = errno::get();
    let _shield = Shield::raise();
    act();
    errno::set(before);
}
