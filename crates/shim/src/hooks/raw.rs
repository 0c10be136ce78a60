//! syscall(2), through which some programs make the calls we hook: libuv closes descriptors this way.
//!
//! Calls with a hook of the same shape are given to it; everything else goes to the kernel unseen.

use std::ffi::{c_int, c_long, c_ulong, c_void};

use super::{descriptor, epoll, io, message, readiness, socket};
use crate::real;

/// See syscall(2). C passes the arguments, as many as there are, where named ones would be.
///
/// # Safety
/// As in C; so for every hook.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    let fd = a as c_int;
    let (pb, pc, pd) = (b as *mut c_void, c as *mut c_void, d as *mut c_void);
    let (ib, ic) = (b as c_int, c as c_int);
    // SAFETY: the program's own call, with its own arguments.
    unsafe {
        match number {
            libc::SYS_read => io::read(fd, pb, c as usize) as c_long,
            libc::SYS_write => io::write(fd, pb, c as usize) as c_long,
            libc::SYS_readv => io::readv(fd, pb.cast(), ic) as c_long,
            libc::SYS_writev => io::writev(fd, pb.cast(), ic) as c_long,
            libc::SYS_recvfrom => {
                io::recvfrom(fd, pb, c as usize, d as c_int, e as *mut _, f as *mut _) as c_long
            }
            libc::SYS_sendto => io::sendto(fd, pb, c as usize, d as c_int, e as *const _, f as u32) as c_long,
            libc::SYS_recvmsg => message::recvmsg(fd, pb.cast(), ic) as c_long,
            libc::SYS_sendmsg => message::sendmsg(fd, pb.cast(), ic) as c_long,
            libc::SYS_sendfile => io::sendfile64(fd, ib, pc.cast(), d as usize) as c_long,
            libc::SYS_socket => socket::socket(fd, ib, ic) as c_long,
            libc::SYS_connect => socket::connect(fd, pb.cast(), c as u32) as c_long,
            libc::SYS_accept => socket::accept(fd, pb.cast(), pc.cast()) as c_long,
            libc::SYS_accept4 => socket::accept4(fd, pb.cast(), pc.cast(), d as c_int) as c_long,
            libc::SYS_shutdown => socket::shutdown(fd, ib) as c_long,
            libc::SYS_setsockopt => socket::setsockopt(fd, ib, ic, pd, e as u32) as c_long,
            libc::SYS_close => descriptor::close(fd) as c_long,
            libc::SYS_close_range => descriptor::close_range(a as u32, b as u32, ic) as c_long,
            libc::SYS_dup => descriptor::dup(fd) as c_long,
            libc::SYS_dup2 => descriptor::dup2(fd, ib) as c_long,
            libc::SYS_dup3 => descriptor::dup3(fd, ib, ic) as c_long,
            libc::SYS_fcntl => descriptor::fcntl(fd, ib, c as c_ulong) as c_long,
            libc::SYS_ioctl => descriptor::ioctl(fd, b as c_ulong, pc) as c_long,
            libc::SYS_poll => readiness::poll(a as *mut _, b as c_ulong, ic) as c_long,
            libc::SYS_epoll_create1 => epoll::epoll_create1(fd) as c_long,
            libc::SYS_epoll_ctl => epoll::epoll_ctl(fd, ib, ic, pd.cast()) as c_long,
            libc::SYS_epoll_wait => epoll::epoll_wait(fd, pb.cast(), ic, d as c_int) as c_long,
            _ => real::syscall(number, a, b, c, d, e, f),
        }
    }
}
