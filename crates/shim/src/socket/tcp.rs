//! The TCP socket beneath an endpoint, as the state machines need it.

use std::ffi::{c_int, c_long};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::Relaxed;

use libc::pollfd;
use shunt_abi::reason::Reason;
use shunt_ring::Sink;
use shunt_ring::user::Piece;
use shunt_transport::{Kernel, Waiting};

use crate::base::kernel::{call, has_urgent, poll_now};
use crate::base::private::borrow;
use crate::socket::endpoint::Endpoint;
use crate::socket::family;

/// One socket, for the length of one call.
pub(crate) struct Tcp<'a> {
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) fd: RawFd,
}

impl Tcp<'_> {
    /// Whether bytes have gone past TCP's counts, as those do that a sockmap takes from one socket's queue to another's: the kernel
    /// counts nothing of a connection that has moved some, or less sent than the program has sent. Nobody knows where in the stream
    /// such bytes stand.
    pub(crate) fn is_bypassed(&self) -> bool {
        // In this order: what is sent meanwhile is counted by the kernel first.
        let sent_here = self.endpoint.entry().map_or(0, |entry| entry.tcp_sent.load(Relaxed));
        match (self.sent(), self.read()) {
            (Some(0), Some(0)) => self.endpoint.has_moved(),
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
        let Some(Piece { base, len }) = sink.list().next() else { return Ok(0) };
        // SAFETY: the kernel checks the program's buffer itself.
        let count = unsafe { receive_now(self.fd, base, len)? };
        self.endpoint.count_received(count);
        sink.advance(count);
        Ok(count)
    }
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
