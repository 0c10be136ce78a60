//! Whether the program's memory can be touched: a bad pointer must be EFAULT, as the kernel has it, and no crash.
//!
//! Asking the kernel about a page is a system call, so what it said is remembered, in a table with a word for each page
//! seen lately. On the fast path that is a load and a comparison for a page. What the program then takes away again by
//! munmap and the like is forgotten ([`forget`]); what glibc unmaps by itself is not seen. See docs/adr/0012.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use crate::{Errno, raw};

const PAGE: usize = 4096;
/// 16 MiB of buffers: more than a program has in use between two system calls.
const SLOTS: usize = 4096;

/// Each holds the address of a page and what the kernel said of it.
static PAGES: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];

/// What a page is wanted for, as the bit that says in its word that it is good for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Access {
    /// To be read.
    Read = 1,
    /// To be written, and so also to be read.
    Write = 3,
}

/// Whether `len` bytes at `address` can be read.
#[inline]
pub fn is_readable(address: *const u8, len: usize) -> bool {
    is_accessible(address as usize, len, Access::Read)
}

/// Whether `len` bytes at `address` can be written. They keep their values.
#[inline]
pub fn is_writable(address: *mut u8, len: usize) -> bool {
    is_accessible(address as usize, len, Access::Write)
}

#[inline]
fn is_accessible(address: usize, len: usize, access: Access) -> bool {
    let Some(last) = len.checked_sub(1) else { return true };
    let Some(last) = address.checked_add(last) else { return false };
    let page = page_of(address);
    page == page_of(last) && is_known(page, access) || are_accessible(page, page_of(last), access)
}

#[inline(never)]
fn are_accessible(first: usize, last: usize, access: Access) -> bool {
    let mut page = first;
    while is_known(page, access) || ask(page, access) {
        if page == last {
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
fn slot(page: usize) -> &'static AtomicUsize {
    &PAGES[page / PAGE % SLOTS]
}

#[inline]
fn is_known(page: usize, access: Access) -> bool {
    let bits = access as usize;
    slot(page).load(Relaxed) & (!(PAGE - 1) | bits) == page | bits
}

/// The program has changed or taken away what is mapped here.
pub fn forget(address: usize, len: usize) {
    let range = page_of(address)..address.saturating_add(len);
    let forget_in = |word: &AtomicUsize| {
        if range.contains(&page_of(word.load(Relaxed))) {
            word.store(0, Relaxed);
        }
    };
    if len / PAGE < SLOTS {
        range.clone().step_by(PAGE).for_each(|page| forget_in(slot(page)));
    } else {
        PAGES.iter().for_each(forget_in);
    }
}

/// Asks the kernel, by a futex operation that has no effect but touches a word of the page as wanted. Only a plain "bad
/// address" is a no: a sandbox that refuses the question must not turn good buffers into bad ones.
#[cold]
fn ask(page: usize, access: Access) -> bool {
    static NOBODY_WAITS_HERE: AtomicU32 = AtomicU32::new(0);
    // "Add 0, and wake nobody": an atomic write of the value that is there.
    const ADD_NOTHING: usize = (libc::FUTEX_OP_ADD as usize) << 28 | 0x5a5;
    let word = NOBODY_WAITS_HERE.as_ptr() as usize;
    let (first, operation, second, value) = match access {
        Access::Write => (word, libc::FUTEX_WAKE_OP, page, ADD_NOTHING),
        // "If the value is this, requeue nobody": a read.
        Access::Read => (page, libc::FUTEX_CMP_REQUEUE, word, 0),
    };
    let operation = (operation | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: the kernel checks both addresses itself, changes no value, and wakes nobody.
    if unsafe { raw::call(libc::SYS_futex, [first, operation, 0, 0, second, value]) } == Err(Errno::FAULT) {
        return false;
    }
    slot(page).store(page | access as usize, Relaxed);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
    use std::ptr::null_mut;

    fn map(pages: usize, access: ProtFlags) -> *mut u8 {
        // SAFETY: a new mapping.
        unsafe { mmap_anonymous(null_mut(), pages * PAGE, access, MapFlags::PRIVATE) }.unwrap().cast()
    }

    #[test]
    fn what_the_kernel_would_refuse_is_refused() {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let (plain, none, fixed) = (map(2, both), map(1, ProtFlags::empty()), map(1, ProtFlags::READ));
        assert!(is_readable(plain, 2 * PAGE) && is_writable(plain, 2 * PAGE));
        assert!(!is_readable(none, 1) && !is_writable(none, 1));
        assert!(is_readable(fixed, PAGE) && !is_writable(fixed, 1));
        assert!(is_readable(fixed, PAGE), "a refused write has not spoilt what is known of reading");
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
        assert!(is_writable(plain, 3 * PAGE));
        // SAFETY: a mapping of our own, here and below.
        unsafe { mprotect(plain.wrapping_add(PAGE).cast(), PAGE, MprotectFlags::empty()) }.unwrap();
        forget(plain as usize + PAGE, PAGE);
        assert!(is_writable(plain, PAGE) && !is_readable(plain.wrapping_add(PAGE), 1));
        assert!(!is_readable(plain, 3 * PAGE) && is_readable(plain.wrapping_add(2 * PAGE), PAGE));
        // SAFETY: see above.
        unsafe { munmap(plain.cast(), 3 * PAGE) }.unwrap();
        forget(0, usize::MAX);
        assert!(!is_readable(plain, 1));
    }
}
