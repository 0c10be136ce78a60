//! Checks that the program's memory can be accessed. The shim must answer a bad pointer with
//! EFAULT, as the kernel does, and must not crash.
//!
//! Asking the kernel about a page takes a system call. So its answer is cached in a table with one
//! slot for each recently used page. The fast path is a load and a few comparisons. When the
//! program calls munmap and similar functions, the shim removes the pages from the table
//! ([`forget`]). It does not see memory that glibc unmaps internally. See docs/adr/0012.

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use crate::mapping::page_bytes;
use crate::{Errno, raw};

const PAGE: usize = 4096;
/// Covers 16 MiB of buffers: more than a program has in use between two system calls.
const SLOTS: usize = 4096;

/// The pages that are known to be readable and writable, by their end addresses; 0 if none.
struct Slot {
    readable: AtomicUsize,
    writable: AtomicUsize,
}

static PAGES: [Slot; SLOTS] =
    [const { Slot { readable: AtomicUsize::new(0), writable: AtomicUsize::new(0) } }; SLOTS];

/// The kind of access that a page is checked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// For reading.
    Read,
    /// For writing, which implies reading.
    Write,
}

/// Returns `true` if `len` bytes at `address` can be read.
#[inline]
pub fn is_readable(address: *const u8, len: usize) -> bool {
    is_accessible(address as usize, len, Access::Read)
}

/// Returns `true` if `len` bytes at `address` can be written. Does not change them.
#[inline]
pub fn is_writable(address: *mut u8, len: usize) -> bool {
    is_accessible(address as usize, len, Access::Write)
}

/// Returns `true` if `len` bytes at `address` lie in the address range of user space, mapped or
/// not. The kernel refuses other addresses before it checks anything else.
#[inline]
pub fn is_of_user(address: usize, len: usize) -> bool {
    address.checked_add(len).is_some_and(|end| end <= limit() || may_end_at(end))
}

/// Returns `true` if `len` bytes, of which the first is a user address, are known to end in user
/// space.
#[inline(always)]
pub fn ends_as_of_user(address: usize, len: usize) -> bool {
    let room = limit().wrapping_sub(address);
    // On other processors `limit` grows as addresses become known, and may still be below
    // `address`.
    (cfg!(target_arch = "x86_64") || address <= limit()) && len <= room
}

/// Returns how many bytes the kernel moves at the most in one read, write, send or receive: its
/// MAX_RW_COUNT. It cuts a longer buffer, and the sum of a longer list of buffers.
#[inline]
pub fn most_at_once() -> usize {
    most_with_pages_of(page_bytes())
}

/// Returns MAX_RW_COUNT of a kernel with pages of `page` bytes, a power of two.
const fn most_with_pages_of(page: usize) -> usize {
    i32::MAX as usize & !(page - 1)
}

/// Returns a limit: all addresses up to it are user addresses.
#[cfg(target_arch = "x86_64")]
#[inline]
fn limit() -> usize {
    (1 << 47) - PAGE
}

/// Returns the highest user address known so far: kernels are built for addresses of 36 to 52 bits.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn limit() -> usize {
    KNOWN_LIMIT.load(Relaxed)
}

#[cfg(not(target_arch = "x86_64"))]
static KNOWN_LIMIT: AtomicUsize = AtomicUsize::new(0);

/// Asks the kernel about an address above `limit`, because kernels and processors differ there. A
/// receive checks its buffer before its fd.
#[cold]
fn may_end_at(end: usize) -> bool {
    const NO_DESCRIPTOR: usize = -1isize as usize;
    // SAFETY: nothing is received from no descriptor.
    let asked = unsafe { raw::call(libc::SYS_recvfrom, [NO_DESCRIPTOR, end - 1, 1, 0, 0, 0]) };
    let may = asked != Err(Errno::FAULT);
    // Addresses above that carry tags, which the kernel ignores if the program has enabled it.
    #[cfg(not(target_arch = "x86_64"))]
    if may && end <= 1 << 52 {
        KNOWN_LIMIT.fetch_max(end, Relaxed);
    }
    may
}

/// Returns a copy of the value at `address`, aligned or not. Returns `None` if it cannot be read.
///
/// # Safety
/// Every pattern of bits must be a valid `T`.
#[inline]
pub unsafe fn read<T: Copy>(address: *const T) -> Option<T> {
    // SAFETY: it can be read, and the caller's promise.
    is_readable(address.cast(), size_of::<T>()).then(|| unsafe { address.read_unaligned() })
}

/// Copies the bytes at `address`, which another thread may unmap at any time. Returns `false` if
/// not all of them can be read.
pub fn copy(address: usize, into: &mut [u8]) -> bool {
    let local = [into.as_mut_ptr() as usize, into.len()];
    let remote = [address, into.len()];
    let process = rustix::process::getpid().as_raw_nonzero().get() as usize;
    let arguments = [process, local.as_ptr() as usize, 1, remote.as_ptr() as usize, 1, 0];
    // SAFETY: the kernel reads the two lists, and writes into the slice alone.
    match unsafe { raw::call(libc::SYS_process_vm_readv, arguments) } {
        Ok(count) => count == into.len(),
        Err(Errno::FAULT) => false,
        // Some sandboxes refuse the call.
        Err(_) => {
            let is_readable = is_readable(address as *const u8, into.len());
            if is_readable {
                // SAFETY: it was readable just now, and the slice has the same length.
                unsafe { std::ptr::copy_nonoverlapping(address as *const u8, into.as_mut_ptr(), into.len()) };
            }
            is_readable
        }
    }
}

/// Writes `bytes` to `address` through the kernel, which respects the program's page protection.
/// Returns `false` if the kernel has refused.
///
/// # Safety
/// The caller must be allowed to change the bytes there.
pub unsafe fn put(address: usize, bytes: &[u8]) -> bool {
    let local = [bytes.as_ptr() as usize, bytes.len()];
    let remote = [address, bytes.len()];
    let process = rustix::process::getpid().as_raw_nonzero().get() as usize;
    let arguments = [process, local.as_ptr() as usize, 1, remote.as_ptr() as usize, 1, 0];
    // SAFETY: the kernel reads the two lists, and the caller's promise.
    unsafe { raw::call(libc::SYS_process_vm_writev, arguments) == Ok(bytes.len()) }
}

/// Writes `value` to `address`, aligned or not. Returns `false` if it cannot be written.
///
/// # Safety
/// The program must have passed `address` as a place to write to.
#[inline]
pub unsafe fn write<T: Copy>(address: *mut T, value: T) -> bool {
    let good = is_writable(address.cast(), size_of::<T>());
    if good {
        // SAFETY: it can be written, and the caller's promise.
        unsafe { address.write_unaligned(value) };
    }
    good
}

/// Returns the program's C string at `address`. Returns `None` if it does not end within `most`
/// bytes, or before unreadable memory.
///
/// # Safety
/// The program must not change the string during 'a.
pub unsafe fn string<'a>(address: *const c_char, most: usize) -> Option<&'a CStr> {
    let mut len = 0;
    while len < most {
        let here = address.wrapping_add(len);
        // One check covers the rest of this page.
        let run = (PAGE - here as usize % PAGE).min(most - len);
        if !is_readable(here.cast(), run) {
            return None;
        }
        // SAFETY: it can be read.
        let bytes = unsafe { std::slice::from_raw_parts(here.cast::<u8>(), run) };
        if bytes.contains(&0) {
            // SAFETY: all of it can be read up to the zero, and the caller's promise.
            return Some(unsafe { CStr::from_ptr(address) });
        }
        len += run;
    }
    None
}

#[inline(always)]
fn is_accessible(address: usize, len: usize, access: Access) -> bool {
    is_known(address, len, access) || are_accessible(address, len, access)
}

#[inline(never)]
fn are_accessible(address: usize, len: usize, access: Access) -> bool {
    let Some(last) = len.checked_sub(1) else { return true };
    let Some(last) = address.checked_add(last) else { return false };
    let mut page = page_of(address);
    while is_known(page, PAGE, access) || ask(page, access) {
        if page == page_of(last) {
            return true;
        }
        page += PAGE;
    }
    false
}

fn page_of(address: usize) -> usize {
    address & !(PAGE - 1)
}

#[inline]
fn slot(address: usize) -> &'static Slot {
    &PAGES[address / PAGE % SLOTS]
}

/// Returns `true` if `len` bytes, at least one, lie on one page that the table lists as accessible.
#[inline(always)]
pub fn is_known(address: usize, len: usize, access: Access) -> bool {
    let end = match access {
        Access::Read => slot(address).readable.load(Relaxed),
        Access::Write => slot(address).writable.load(Relaxed),
    };
    // The slot may hold another page, or none.
    end.checked_sub(address).is_some_and(|room| room <= PAGE && len <= room)
}

/// Removes a range from the table, because the program has changed or unmapped it.
pub fn forget(address: usize, len: usize) {
    // The kernel unmaps whole pages of its own size.
    let range = page_of(address)
        ..address.saturating_add(len).checked_next_multiple_of(page_bytes()).unwrap_or(usize::MAX);
    let forget_in = |slot: &Slot| {
        for end in [&slot.readable, &slot.writable] {
            if range.contains(&end.load(Relaxed).wrapping_sub(PAGE)) {
                end.store(0, Relaxed);
            }
        }
    };
    if len / PAGE < SLOTS {
        range.clone().step_by(PAGE).for_each(|page| forget_in(slot(page)));
    } else {
        PAGES.iter().for_each(forget_in);
    }
}

/// Asks the kernel about a page, by a futex operation whose only effect is to access a word of the
/// page.
///
/// Only EFAULT means "not accessible". A sandbox that refuses the call must not turn good buffers
/// into bad ones.
#[cold]
fn ask(page: usize, access: Access) -> bool {
    static NOBODY_WAITS_HERE: AtomicU32 = AtomicU32::new(0);
    // "Add 0, and wake no thread": an atomic write of the value that is there.
    const ADD_NOTHING: usize = (libc::FUTEX_OP_ADD as usize) << 28 | 0x5a5;
    let word = NOBODY_WAITS_HERE.as_ptr() as usize;
    let (first, operation, second, value) = match access {
        Access::Write => (word, libc::FUTEX_WAKE_OP, page, ADD_NOTHING),
        // "If the value is this, requeue no thread": a read.
        Access::Read => (page, libc::FUTEX_CMP_REQUEUE, word, 0),
    };
    let operation = (operation | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: the kernel checks both addresses itself, changes no value, and wakes no thread.
    if unsafe { raw::call(libc::SYS_futex, [first, operation, 0, 0, second, value]) } == Err(Errno::FAULT) {
        return false;
    }
    slot(page).readable.store(page + PAGE, Relaxed);
    if access == Access::Write {
        slot(page).writable.store(page + PAGE, Relaxed);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
    use std::ptr::null_mut;

    fn map(pages: usize, access: ProtFlags) -> *mut u8 {
        // SAFETY: a new mapping.
        unsafe { mmap_anonymous(null_mut(), pages * page_bytes(), access, MapFlags::PRIVATE) }.unwrap().cast()
    }

    #[test]
    fn one_call_moves_whole_pages_and_less_than_2_gib() {
        for (page, most) in [(4096, 0x7fff_f000), (16_384, 0x7fff_c000), (65_536, 0x7fff_0000)] {
            assert_eq!(most_with_pages_of(page), most);
        }
        assert_eq!(most_at_once() % page_bytes(), 0);
    }

    #[test]
    fn what_the_kernel_would_refuse_is_refused() {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let (plain, none, fixed) = (map(2, both), map(1, ProtFlags::empty()), map(1, ProtFlags::READ));
        assert!(is_readable(plain, 2 * page_bytes()) && is_writable(plain, 2 * page_bytes()));
        assert!(!is_readable(none, 1) && !is_writable(none, 1));
        assert!(is_readable(fixed, page_bytes()) && !is_writable(fixed, 1));
        assert!(is_readable(fixed, page_bytes()), "a refused write has not spoilt what is known of reading");
        for address in [null_mut(), 8 as *mut u8, usize::MAX as *mut u8, (1usize << 63) as *mut u8] {
            assert!(!is_readable(address, 1) && !is_writable(address, 1), "{address:?}");
            assert!(is_readable(address, 0) && is_writable(address, 0));
        }
        assert!(!is_readable(plain, usize::MAX));
    }

    #[test]
    fn a_page_that_was_good_for_reading_is_asked_about_before_it_is_written() {
        let fixed = map(1, ProtFlags::READ);
        assert!(is_readable(fixed, 1) && !is_writable(fixed, 1));
        let plain = map(1, ProtFlags::READ | ProtFlags::WRITE);
        assert!(is_readable(plain, 1) && is_writable(plain, 1) && is_readable(plain, 1));
    }

    #[test]
    fn what_no_program_can_have_is_refused_unseen() {
        let plain = map(1, ProtFlags::READ) as usize;
        assert!(is_of_user(plain, page_bytes()) && is_of_user(0, 0) && is_of_user(8, 1));
        for (address, len) in
            [(plain, usize::MAX), (plain, isize::MAX as usize), (usize::MAX, 1), (1 << 63, 1)]
        {
            assert!(!is_of_user(address, len), "{address:x} {len:x}");
        }
    }

    #[test]
    fn a_copy_is_made_of_what_is_there_and_of_nothing_else() {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let (plain, none) = (map(1, both), map(1, ProtFlags::empty()));
        let odd = plain.wrapping_add(3).cast::<u64>();
        // SAFETY: a mapping of our own, and one that cannot be touched.
        unsafe {
            assert!(write(odd, 0x0102_0304_0506_0708));
            assert_eq!((read(odd), read(none.cast::<u64>())), (Some(0x0102_0304_0506_0708), None));
            assert!(!write(none.cast::<u64>(), 1) && !write(null_mut::<u64>(), 1));
        }
    }

    #[test]
    fn a_string_ends_before_what_cannot_be_read() {
        let two = map(2, ProtFlags::READ | ProtFlags::WRITE);
        let end = two.wrapping_add(page_bytes());
        // SAFETY: a mapping of our own, here and below.
        unsafe {
            mprotect(end.cast(), page_bytes(), MprotectFlags::empty()).unwrap();
            let text = end.wrapping_sub(4);
            text.copy_from_nonoverlapping(b"abcd".as_ptr(), 4);
            assert_eq!(string(text.cast(), 100), None);
            assert_eq!(string(end.cast(), 100), None);
            text.add(3).write(0);
            assert_eq!(string(text.cast(), 100), Some(c"abc"));
            assert_eq!(string(text.cast(), 3), None, "it does not end within so many bytes");
        }
    }

    #[test]
    fn asking_changes_nothing() {
        let plain = map(1, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a mapping of our own.
        unsafe { plain.cast::<u32>().write(0x1234_5678) };
        assert!(is_writable(plain, 4) && is_readable(plain, 4));
        // SAFETY: as above.
        assert_eq!(unsafe { plain.cast::<u32>().read() }, 0x1234_5678);
    }

    #[test]
    fn what_is_taken_away_must_be_forgotten() {
        let plain = map(3, ProtFlags::READ | ProtFlags::WRITE);
        assert!(is_writable(plain, 3 * page_bytes()));
        // SAFETY: a mapping of our own, here and below.
        unsafe { mprotect(plain.wrapping_add(page_bytes()).cast(), 1, MprotectFlags::empty()) }.unwrap();
        // The kernel has changed a whole page.
        forget(plain as usize + page_bytes(), 1);
        assert!(is_writable(plain, page_bytes()) && !is_readable(plain.wrapping_add(page_bytes()), 1));
        assert!(!is_readable(plain.wrapping_add(2 * page_bytes() - 1), 1));
        assert!(
            !is_readable(plain, 3 * page_bytes())
                && is_readable(plain.wrapping_add(2 * page_bytes()), page_bytes())
        );
        // SAFETY: see above.
        unsafe { munmap(plain.cast(), 3 * page_bytes()) }.unwrap();
        forget(0, usize::MAX);
        assert!(!is_readable(plain, 1));
    }
}
