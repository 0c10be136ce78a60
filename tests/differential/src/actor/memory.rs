//! Memory that calls must not be able to use, and memory that ends where such memory begins.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::OnceLock;

const PAGE: usize = 4096;
/// Bytes of usable pages, before one that is not usable.
const USABLE: usize = 16 * PAGE;

/// An area laid out as: usable, without access, read only.
struct Area(usize);

fn area() -> usize {
    static AREA: OnceLock<Area> = OnceLock::new();
    AREA.get_or_init(|| {
        // SAFETY: a new mapping, which is never unmapped.
        unsafe {
            let base = map(USABLE + 3 * PAGE);
            libc::mprotect(base.wrapping_byte_add(USABLE), PAGE, libc::PROT_NONE);
            libc::mprotect(base.wrapping_byte_add(USABLE + PAGE), PAGE, libc::PROT_READ);
            Area(base as usize)
        }
    })
    .0
}

unsafe fn map(len: usize) -> *mut c_void {
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping.
    unsafe { libc::mmap(null_mut(), len, access, kind, -1, 0) }
}

/// Returns a page without access.
pub(super) fn forbidden() -> *mut c_void {
    (area() + USABLE) as *mut c_void
}

/// Returns a page that can only be read.
pub(super) fn read_only() -> *mut c_void {
    (area() + USABLE + PAGE) as *mut c_void
}

/// Returns an address of the kernel.
pub(super) fn of_kernel() -> *mut c_void {
    0xffff_8000_0000_0000_usize as *mut c_void
}

/// Returns `len` bytes right before a page without access.
pub(super) fn before_forbidden(len: usize) -> *mut u8 {
    (area() + USABLE - len.min(USABLE)) as *mut u8
}

/// Passes a page to `first`, and to `then` after it has lost all access.
pub(super) fn taken_away<T>(first: impl FnOnce(*mut u8), then: impl FnOnce(*mut u8) -> T) -> T {
    // SAFETY: a new page, which no other code uses.
    unsafe {
        let page = map(PAGE);
        first(page.cast());
        libc::mprotect(page, PAGE, libc::PROT_NONE);
        let result = then(page.cast());
        libc::munmap(page, PAGE);
        result
    }
}

/// Returns the header of a message that contains only bytes. Programs of musl leave arbitrary
/// values next to its narrower length fields.
pub(super) fn message(list: &mut [libc::iovec]) -> libc::msghdr {
    let rubbish = if cfg!(target_env = "musl") { 0xa5 } else { 0 };
    // SAFETY: plain numbers and pointers; all fields that the kernel reads are set.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (&raw mut message.msg_iovlen).cast::<u64>().write(rubbish << 40);
        (&raw mut message.msg_controllen).cast::<u64>().write(rubbish << 40);
        message.msg_iov = list.as_mut_ptr();
        message.msg_iovlen = list.len() as _;
        message.msg_controllen = 0;
        message
    }
}
