//! The TCP socket beneath an endpoint, as the state machines need it.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::Relaxed;

use std::ffi::{c_int, c_long};

use libc::{epoll_event, msghdr, pollfd};
use shunt_abi::page;
use shunt_abi::reason::Reason;
use shunt_ring::Sink;
use shunt_transport::{Kernel, Waiting};

use crate::endpoint::Endpoint;
use crate::private::borrow;
use crate::{errno, family, real};

/// One socket, for the length of one call.
pub(crate) struct Tcp<'a> {
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) fd: RawFd,
}

impl Tcp<'_> {
    /// Whether bytes have gone past TCP's counts, as those do that a sockmap takes from one socket's queue to another's: the kernel
    /// counts nothing of a connection that has been used, or less sent than the program has sent. Nobody knows where in the stream
    /// such bytes stand.
    pub(crate) fn is_bypassed(&self) -> bool {
        // In this order: what is sent meanwhile is counted by the kernel first.
        let count = |entry: &page::Entry| (entry.tcp_sent.load(Relaxed), entry.tcp_received.load(Relaxed));
        let (sent_here, received_here) = self.endpoint.entry().map_or((0, 0), count);
        let unused = || self.endpoint.is_listed_from_the_first() && (sent_here, received_here) == (0, 0);
        match (self.sent(), self.read()) {
            (Some(0), Some(0)) => !unused(),
            (Some(sent), _) => sent < sent_here,
            (None, _) => false,
        }
    }
}

impl Kernel for Tcp<'_> {
    fn sent(&self) -> Option<u64> {
        shunt_sys::tcp::sent(borrow(self.fd), self.endpoint.opener()).ok().flatten()
    }

    fn read(&self) -> Option<u64> {
        // Over: how it ended cannot be told once the error has been.
        if shunt_sys::tcp::state(borrow(self.fd)) == Ok(shunt_sys::tcp::CLOSE) {
            return None;
        }
        let read = shunt_sys::tcp::read(borrow(self.fd)).ok();
        // Asked second, since urgent data may come in between. Another process may have taken it already.
        let is_taken = || family::changes(self.endpoint).is_some_and(|count| count > 0);
        if has_urgent(self.fd) || self.endpoint.barred() == Some(Reason::OutOfBand) || is_taken() {
            return shunt_sys::tcp::read_beside_urgent(borrow(self.fd)).ok();
        }
        read
    }

    fn received(&self) -> u64 {
        shunt_sys::tcp::received(borrow(self.fd)).unwrap_or(0)
    }

    fn waiting(&self) -> Waiting {
        let mut polled = [pollfd { fd: self.fd, events: libc::POLLIN, revents: 0 }];
        // To poll there is nothing below SO_RCVLOWAT, but it is what comes before the lane.
        let hides = || self.endpoint.low_water.of(self.fd) > 0 && shunt_sys::tcp::has_unread(borrow(self.fd));
        if poll_now(&mut polled) == 0 && !hides() {
            return Waiting::Nothing;
        }
        // Even a peek would take the error, if nothing lies before it.
        if polled[0].revents & libc::POLLERR != 0 && !shunt_sys::tcp::has_unread(borrow(self.fd)) {
            return Waiting::Error;
        }
        let flags = libc::MSG_PEEK | libc::MSG_TRUNC | libc::MSG_DONTWAIT;
        // SAFETY: with MSG_TRUNC nothing is copied, so the null buffer is never written.
        match unsafe { call(libc::SYS_recvfrom, [self.fd.into(), 0, i32::MAX.into(), flags.into(), 0, 0]) } {
            Ok(0) => Waiting::EndOfFile,
            Ok(count) => Waiting::Bytes(count),
            Err(libc::EAGAIN) => Waiting::Nothing,
            Err(_) => Waiting::Error,
        }
    }

    fn at_mark(&self) -> bool {
        const SIOCATMARK: c_long = 0x8905;
        let mut at_mark: c_int = 0;
        let answer = std::ptr::from_mut(&mut at_mark) as c_long;
        // SAFETY: SIOCATMARK writes one int.
        unsafe { call(libc::SYS_ioctl, [self.fd.into(), SIOCATMARK, answer, 0, 0, 0]) }.is_ok()
            && at_mark != 0
    }

    fn receive(&self, sink: &mut Sink<'_>) -> Result<usize, i32> {
        // One run of the buffer at a time: an error that came after bytes would be told by nobody.
        let (pieces, offset) = sink.pieces();
        let Some(piece) = pieces.first() else { return Ok(0) };
        let (base, len) = (piece.base.wrapping_add(offset), piece.len - offset);
        // SAFETY: the kernel checks the program's buffer itself.
        let count = unsafe { receive_now(self.fd, base, len)? };
        self.endpoint.count_received(count);
        sink.advance(count);
        Ok(count)
    }
}

/// A system call that does not wait, made under a lock: libc's own function could be a cancellation point, and a thread
/// that ended there would keep the lock.
///
/// # Safety
/// As the system call.
unsafe fn call(number: c_long, arguments: [c_long; 6]) -> Result<usize, i32> {
    let before = errno::get();
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the caller's promise.
    let result = unsafe { real::syscall(number, a, b, c, d, e, f) };
    usize::try_from(result).map_err(|_| {
        let failed = errno::get();
        errno::set(before);
        failed
    })
}

/// recv that does not wait.
///
/// # Safety
/// As recv.
unsafe fn receive_now(fd: RawFd, base: *mut u8, len: usize) -> Result<usize, i32> {
    let flags = libc::MSG_DONTWAIT;
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_recvfrom, [fd.into(), base as _, len as _, flags.into(), 0, 0]) }
}

/// recvmsg that does not wait.
///
/// # Safety
/// As recvmsg; the flags contain MSG_DONTWAIT.
pub(crate) unsafe fn recvmsg_now(fd: RawFd, message: *mut msghdr, flags: c_int) -> Result<usize, i32> {
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_recvmsg, [fd.into(), message as _, flags.into(), 0, 0, 0]) }
}

/// send that neither waits nor raises SIGPIPE.
///
/// # Safety
/// As send.
pub(crate) unsafe fn send_now(fd: RawFd, base: *const u8, len: usize) -> Result<usize, i32> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_sendto, [fd.into(), base as _, len as _, flags.into(), 0, 0]) }
}

/// Sends a byte of urgent data, which lies beside the stream.
pub(crate) fn send_urgent_now(fd: RawFd) -> bool {
    let byte = [0u8];
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_OOB;
    // SAFETY: a byte of ours.
    unsafe { call(libc::SYS_sendto, [fd.into(), byte.as_ptr() as _, 1, flags.into(), 0, 0]) }.is_ok()
}

/// pread, of a regular file.
///
/// # Safety
/// As pread.
pub(crate) unsafe fn read_at(file: RawFd, base: *mut u8, len: usize, offset: i64) -> Result<usize, i32> {
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_pread64, [file.into(), base as _, len as _, offset, 0, 0]) }
}

/// Dissolves the socket's association, which leaves ECONNRESET as its error.
pub(crate) fn dissolve(fd: RawFd) {
    let nowhere = libc::sockaddr { sa_family: libc::AF_UNSPEC as u16, sa_data: [0; 14] };
    let (address, len) = (std::ptr::from_ref(&nowhere) as c_long, size_of_val(&nowhere) as c_long);
    // SAFETY: an address of ours.
    let _ = unsafe { call(libc::SYS_connect, [fd.into(), address, len, 0, 0, 0]) };
}

/// Whether a number is the same open file in two processes, one of them this. `None`: the kernel does not say.
pub(crate) fn is_same_file(own: u32, other: u32, fd: RawFd) -> Option<bool> {
    const KCMP_FILE: c_long = 0;
    // SAFETY: a plain call, which writes nothing.
    match unsafe { call(libc::SYS_kcmp, [own.into(), other.into(), KCMP_FILE, fd.into(), fd.into(), 0]) } {
        Ok(order) => Some(order == 0),
        // The other has no such number, or has ended.
        Err(libc::EBADF | libc::ESRCH) => Some(false),
        Err(_) => None,
    }
}

/// Has TCP send what it holds back only because little of it has come together (TCP_NODELAY does, and is taken back).
#[cold]
pub(crate) fn push(fd: RawFd) {
    let mut on: c_int = 0;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    let (level, name) = (c_long::from(libc::IPPROTO_TCP), c_long::from(libc::TCP_NODELAY));
    let (value, room) = (std::ptr::from_mut(&mut on) as c_long, std::ptr::from_mut(&mut len) as c_long);
    // SAFETY: a number of ours, and its length, here and below.
    let asked = unsafe { call(libc::SYS_getsockopt, [fd.into(), level, name, value, room, 0]) };
    if asked.is_err() || on != 0 {
        return;
    }
    for nodelay in [1, 0] {
        on = nodelay;
        let value = std::ptr::from_ref(&on) as c_long;
        // SAFETY: see above.
        let _ = unsafe { call(libc::SYS_setsockopt, [fd.into(), level, name, value, len.into(), 0]) };
    }
}

/// Whether the socket has an error to tell, which is told once.
pub(crate) fn has_error(fd: RawFd) -> bool {
    let mut polled = [pollfd { fd, events: 0, revents: 0 }];
    poll_now(&mut polled) > 0 && polled[0].revents & libc::POLLERR != 0
}

/// Whether urgent data waits.
pub(crate) fn has_urgent(fd: RawFd) -> bool {
    let mut polled = [pollfd { fd, events: libc::POLLPRI, revents: 0 }];
    poll_now(&mut polled);
    polled[0].revents & libc::POLLPRI != 0
}

/// poll that does not wait. An interrupted one has found nothing.
pub(crate) fn poll_now(fds: &mut [pollfd]) -> usize {
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let time = std::ptr::from_ref(&at_once) as c_long;
    // SAFETY: the array is as long as it says.
    unsafe { call(libc::SYS_ppoll, [fds.as_mut_ptr() as _, fds.len() as _, time, 0, 0, 0]) }.unwrap_or(0)
}

/// epoll_wait that does not wait.
pub(crate) fn epoll_now(epoll: RawFd, events: &mut [epoll_event]) -> usize {
    let (base, len) = (events.as_mut_ptr() as c_long, events.len() as c_long);
    // SAFETY: the array is as long as it says.
    unsafe { call(libc::SYS_epoll_pwait, [epoll.into(), base, len, 0, 0, 0]) }.unwrap_or(0)
}
