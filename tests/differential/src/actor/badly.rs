//! Calls with invalid message pointers. musl's functions read the messages before the kernel does,
//! which ends the program. So programs of musl make these calls as system calls.

#[cfg(not(target_env = "musl"))]
pub(super) use libc::{recvmmsg, recvmsg, sendmmsg, sendmsg};

#[cfg(target_env = "musl")]
pub(super) use by_number::{recvmmsg, recvmsg, sendmmsg, sendmsg};

#[cfg(target_env = "musl")]
mod by_number {
    use libc::{c_int, c_uint, mmsghdr, msghdr, ssize_t, syscall, timespec};

    /// # Safety
    /// As the system call.
    pub(in crate::actor) unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
        // SAFETY: the caller's promise.
        unsafe { syscall(libc::SYS_sendmsg, fd, message, flags) as ssize_t }
    }

    /// # Safety
    /// As the system call.
    pub(in crate::actor) unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
        // SAFETY: the caller's promise.
        unsafe { syscall(libc::SYS_recvmsg, fd, message, flags) as ssize_t }
    }

    /// # Safety
    /// As the system call.
    pub(in crate::actor) unsafe fn sendmmsg(
        fd: c_int,
        messages: *mut mmsghdr,
        count: c_uint,
        flags: c_uint,
    ) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { syscall(libc::SYS_sendmmsg, fd, messages, count, flags) as c_int }
    }

    /// # Safety
    /// As the system call.
    pub(in crate::actor) unsafe fn recvmmsg(
        fd: c_int,
        messages: *mut mmsghdr,
        count: c_uint,
        flags: c_uint,
        limit: *mut timespec,
    ) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { syscall(libc::SYS_recvmmsg, fd, messages, count, flags, limit) as c_int }
    }
}
