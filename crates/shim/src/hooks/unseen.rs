//! Asynchronous I/O, which reads and writes sockets where no hook sees it: io_uring by liburing, and POSIX AIO.

use std::ffi::{CStr, c_int, c_void};

use libc::{aiocb, sigevent};
use shunt_abi::reason::Reason;
use shunt_sys::memory;

use super::trampoline::{Call, trampolines};
use crate::base::signal::Shield;
use crate::base::{errno, real};
use crate::life::{attach, unseen};
use crate::socket::endpoint;

trampolines! {
    /// See io_uring_setup(2).
    io_uring_setup: before_setup;
    /// See io_uring_queue_init(3).
    io_uring_queue_init: before_queue_init;
    /// See io_uring_queue_init_params(3).
    io_uring_queue_init_params: before_queue_init_params;
    /// See io_uring_queue_init_mem(3).
    io_uring_queue_init_mem: before_queue_init_mem;
    /// As io_uring_queue_init.
    io_uring_queue_init_try_nosqarr: before_queue_init_try_nosqarr;
    /// Maps a ring that somebody else made.
    io_uring_queue_mmap: before_queue_mmap;
}

macro_rules! makes_ring {
    ($($before:ident = $name:literal;)*) => { $(
        extern "C" fn $before(call: &Call) -> *mut c_void {
            unseen::leave(Reason::IoUring);
            in_liburing($name, call.caller)
        }
    )* };
}

makes_ring! {
    before_setup = c"io_uring_setup";
    before_queue_init = c"io_uring_queue_init";
    before_queue_init_params = c"io_uring_queue_init_params";
    before_queue_init_mem = c"io_uring_queue_init_mem";
    before_queue_init_try_nosqarr = c"io_uring_queue_init_try_nosqarr";
    before_queue_mmap = c"io_uring_queue_mmap";
}

/// The function of this name that `caller` would have met without us.
fn in_liburing(name: &CStr, caller: *const c_void) -> *mut c_void {
    // SAFETY: look-ups of a constant name; the loader writes the structure before it is read, and the file that it
    // names stays loaded because it is about to be returned to.
    unsafe {
        let found = libc::dlsym(libc::RTLD_NEXT, name.as_ptr());
        if !found.is_null() {
            return found;
        }
        // A plugin brings a liburing of its own, which only the plugin can see.
        let mut info = std::mem::zeroed::<libc::Dl_info>();
        if libc::dladdr(caller, &mut info) != 0 {
            let plugin = libc::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            if !plugin.is_null() {
                let found = libc::dlsym(plugin, name.as_ptr());
                libc::dlclose(plugin);
                if !found.is_null() {
                    return found;
                }
            }
        }
    }
    no_rings as *mut c_void
}

/// What liburing's functions answer on a kernel without io_uring.
extern "C" fn no_rings() -> c_int {
    -libc::ENOSYS
}

/// glibc's threads read and write the socket behind our back.
pub(super) fn going_async(fd: c_int) {
    if let Some(endpoint) = endpoint::behind(fd) {
        let _shield = Shield::raise();
        let before = errno::get();
        attach::bar_reading(endpoint, Reason::AsyncIo);
        errno::set(before);
    }
}

/// The same for the socket that a request names. What is bad about it, libc sees.
///
/// # Safety
/// `request` is the program's argument.
unsafe fn request_going_async(request: *const aiocb) {
    let fd: *const c_int = request.wrapping_byte_add(std::mem::offset_of!(aiocb, aio_fildes)).cast();
    // SAFETY: the caller's promise; it is a plain number.
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
                // SAFETY: the same.
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
