//! The TCP socket beneath an endpoint, as the state machines need it.

use std::mem::MaybeUninit;
use std::os::fd::RawFd;

use rustix::net::RecvFlags;
use shunt_ring::Sink;
use shunt_transport::Kernel;

use crate::endpoint::Endpoint;
use crate::private::borrow;
use crate::{errno, real};

/// One socket, for the length of one call.
pub(crate) struct Tcp<'a> {
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) fd: RawFd,
}

impl Kernel for Tcp<'_> {
    fn sent(&self) -> Option<u64> {
        shunt_sys::tcp::sent(borrow(self.fd)).ok().flatten()
    }

    fn read(&self) -> Option<u64> {
        shunt_sys::tcp::read(borrow(self.fd)).ok()
    }

    fn waiting(&self) -> Result<usize, i32> {
        let flags = libc::MSG_PEEK | libc::MSG_TRUNC | libc::MSG_DONTWAIT;
        let before = errno::get();
        // SAFETY: with MSG_TRUNC nothing is copied, so the null buffer is never written.
        let result = unsafe { real::recv(self.fd, std::ptr::null_mut(), i32::MAX as usize, flags) };
        usize::try_from(result).map_err(|_| {
            let failed = errno::get();
            errno::set(before);
            failed
        })
    }

    fn receive(&self, sink: &mut Sink<'_>) -> Result<usize, i32> {
        // One run of the buffer at a time: an error that came after bytes would be told by nobody.
        let (pieces, offset) = sink.pieces();
        let Some(piece) = pieces.first() else { return Ok(0) };
        // SAFETY: the program promised this run of its buffer to be writable (`Sink::new`).
        let buffer = unsafe {
            let base = piece.base.wrapping_add(offset).cast::<MaybeUninit<u8>>();
            std::slice::from_raw_parts_mut(base, piece.len - offset)
        };
        match rustix::net::recv(borrow(self.fd), buffer, RecvFlags::DONTWAIT) {
            Ok((_, count)) => {
                self.endpoint.count_received(count);
                sink.advance(count);
                Ok(count)
            }
            Err(errno) => Err(errno.raw_os_error()),
        }
    }
}
