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
        let mut total = 0;
        while sink.remaining() > 0 {
            let (pieces, offset) = sink.pieces();
            let Some(piece) = pieces.first() else { break };
            let run = piece.len - offset;
            // SAFETY: the program promised this run of its buffer to be writable (`Sink::new`).
            let buffer = unsafe {
                std::slice::from_raw_parts_mut(piece.base.wrapping_add(offset).cast::<MaybeUninit<u8>>(), run)
            };
            match rustix::net::recv(borrow(self.fd), buffer, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => break,
                Ok((_, count)) => {
                    self.endpoint.count_received(count);
                    sink.advance(count);
                    total += count;
                    if count < run {
                        break;
                    }
                }
                Err(errno) if total == 0 => return Err(errno.raw_os_error()),
                Err(_) => break,
            }
        }
        Ok(total)
    }
}
