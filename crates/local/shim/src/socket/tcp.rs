//! The kernel's TCP socket of an endpoint, as the state machines of `shunt_transport` use it.

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
use crate::socket::sharing;

/// One socket, for the duration of one call.
pub(crate) struct Tcp<'a> {
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) fd: RawFd,
}

impl Tcp<'_> {
    /// Returns whether bytes have bypassed TCP's counts, as with a sockmap that moves bytes from
    /// one socket's queue to another's. The position of such bytes in the stream is unknown. The
    /// evidence is one of two: the kernel counts no bytes for a connection that has moved some, or
    /// it counts fewer sent bytes than the program has sent.
    pub(crate) fn is_bypassed(&self) -> bool {
        // Loaded in this order, because the kernel counts sent bytes before the shim does.
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
        // The connection is over. The way in which it ended is unknown once its error has been
        // taken.
        if shunt_sys::tcp::state(borrow(self.fd)) == Ok(shunt_sys::tcp::CLOSE) {
            return None;
        }
        let read = shunt_sys::tcp::read(borrow(self.fd)).ok();
        // Checked after the count, since urgent data may arrive in between. Another process may
        // have taken the urgent byte already.
        let is_taken = || sharing::changes(self.endpoint).is_some_and(|count| count > 0);
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
        // A poll reports nothing below SO_RCVLOWAT, but those bytes come before the lane's.
        let hides =
            || self.endpoint.options.low_water.of(self.fd) > 0 && shunt_sys::tcp::has_unread(borrow(self.fd));
        if poll_now(&mut polled) == 0 && !hides() {
            return Waiting::Nothing;
        }
        // If no bytes come first, even a peek would take the error.
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
        // One piece of the buffer at a time, because an error after some bytes would be lost.
        let Some(Piece { base, len }) = sink.list().next() else { return Ok(0) };
        // SAFETY: the kernel checks the program's buffer itself.
        let count = unsafe { receive_now(self.fd, base, len)? };
        self.endpoint.count_received(count);
        sink.advance(count);
        Ok(count)
    }
}

/// Receives without waiting.
///
/// # Safety
/// As for recv.
unsafe fn receive_now(fd: RawFd, base: *mut u8, len: usize) -> Result<usize, i32> {
    let flags = libc::MSG_DONTWAIT;
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_recvfrom, [fd.into(), base as _, len as _, flags.into(), 0, 0]) }
}
