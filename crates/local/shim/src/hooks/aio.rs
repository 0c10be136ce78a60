//! POSIX AIO, whose reads and writes no hook sees.

use std::ffi::c_int;

use libc::{aiocb, sigevent};
use shunt_abi::reason::Reason;
use shunt_sys::memory;

use crate::base::signal::Shield;
use crate::base::{errno, real};
use crate::life::attach;
use crate::socket::endpoint;

/// Keeps a connection on TCP, because threads of libc or the kernel will read and write the socket.
pub(super) fn going_async(fd: c_int) {
    if let Some(endpoint) = endpoint::behind(fd) {
        let _shield = Shield::raise();
        let before = errno::get();
        attach::bar_reading(endpoint, Reason::AsyncIo);
        errno::set(before);
    }
}

/// Keeps the connection of an AIO request on TCP. libc checks the request.
///
/// # Safety
/// `request` is the program's argument.
unsafe fn request_going_async(request: *const aiocb) {
    let fd: *const c_int = request.wrapping_byte_add(std::mem::offset_of!(aiocb, aio_fildes)).cast();
    // SAFETY: the caller's promise. The value is an integer.
    if let Some(fd) = unsafe { memory::read(fd) } {
        going_async(fd);
    }
}

macro_rules! aio {
    ($($name:ident, $real:ident;)*) => { $(
        /// See aio_read(3) and aio_write(3).
        ///
        /// # Safety
        /// As in C.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(request: *mut aiocb) -> c_int {
            // SAFETY: the program's own call.
            unsafe {
                request_going_async(request);
                real::$real(request)
            }
        }
    )* };
}

// off_t has 64 bits here, so each pair is one function.
aio! {
    aio_read, aio_read;
    aio_read64, aio_read;
    aio_write, aio_write;
    aio_write64, aio_write;
}

macro_rules! listio {
    ($($name:ident;)*) => { $(
        /// See lio_listio(3).
        ///
        /// # Safety
        /// As in C.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            mode: c_int,
            list: *const *mut aiocb,
            count: c_int,
            event: *mut sigevent,
        ) -> c_int {
            for index in 0..count.max(0) as usize {
                // SAFETY: the program's list, each entry of which is null or a request.
                let Some(request) = (unsafe { memory::read(list.wrapping_add(index)) }) else { break };
                // SAFETY: as above.
                unsafe { request_going_async(request) };
            }
            // SAFETY: the program's own call.
            unsafe { real::lio_listio(mode, list, count, event) }
        }
    )* };
}

listio! {
    lio_listio;
    lio_listio64;
}
