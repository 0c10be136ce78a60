//! A shared mapping of a sealed memfd. The other processes that map it are untrusted. So it is
//! never exposed as a slice, only as a raw pointer, as atomics, or through the bounds-checked
//! helpers here.

use std::ffi::c_void;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use rustix::mm::{
    Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags, madvise, mmap, mprotect, mremap, mremap_fixed,
    munlock, munmap,
};
use shunt_abi::page::{BOARD_BYTES, Board, PAGE_BYTES, Page};

use crate::{Errno, Result};

/// The unit of lengths on every machine. No kernel page is smaller, and each is a multiple of it.
const PAGE_SIZE: usize = 4096;

/// Returns the size of this kernel's pages.
#[cfg(target_arch = "x86_64")]
pub(crate) fn page_bytes() -> usize {
    PAGE_SIZE
}

/// Returns the size of this kernel's pages, which is chosen when the kernel is built.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn page_bytes() -> usize {
    // SAFETY: reads the auxiliary vector, which the kernel passed at process start.
    unsafe { libc::getauxval(libc::AT_PAGESZ) as usize }
}

/// An owned, shared, readable and writable mapping; unmapped at drop.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// See [`set_stays`](Mapping::set_stays).
    stays: AtomicBool,
}

// SAFETY: the mapping belongs to the address space and not to a thread; what it holds is reached
// only through raw pointers and atomics.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `fd`. It must be sealed against shrinking, or belong to this
    /// process (see [`crate::memfd`]): otherwise an access could raise SIGBUS.
    pub fn map(fd: impl AsFd, len: usize) -> Result<Mapping> {
        Mapping::map_for(ProtFlags::READ | ProtFlags::WRITE, fd, len)
    }

    /// Maps the first `len` bytes of `fd`, which is memory of the kernel, such as a BPF map. The
    /// kernel cannot grow such a mapping, as [`Mapping::map`] would.
    pub fn map_of_kernel(fd: impl AsFd, len: usize) -> Result<Mapping> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let start = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, fd, 0)? };
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Mapping { start, len, stays: AtomicBool::new(false) })
    }

    fn map_for(access: ProtFlags, fd: impl AsFd, len: usize) -> Result<Mapping> {
        let start = map_unlocked(fd, len, access)?;
        let start = NonNull::new(start).ok_or(Errno::NOMEM)?;
        Ok(Mapping { start, len, stays: AtomicBool::new(false) })
    }

    /// Moves the mapping to `place`, replacing the mapping there in one atomic step. Code that
    /// holds addresses there sees the new memory behind them. The mapping is never unmapped.
    ///
    /// # Safety
    /// At `place` there must be a mapping of the same length that no code will unmap.
    pub unsafe fn move_over(self, place: *mut u8) -> Result<()> {
        // SAFETY: `self` is ours since `map`; the caller guarantees the rest.
        unsafe {
            mremap_fixed(self.as_ptr().cast(), self.len, self.len, MremapFlags::MAYMOVE, place.cast())?;
        }
        std::mem::forget(self);
        Ok(())
    }

    /// Returns the start of the mapping: page aligned, valid for `len()` bytes while `self` lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Sets whether the mapping stays at drop. To unmap a file into which other processes can punch
    /// holes waits for a punch.
    pub fn set_stays(&self, stays: bool) {
        self.stays.store(stays, Relaxed);
    }

    /// Returns whether it stays mapped at drop.
    pub fn stays(&self) -> bool {
        self.stays.load(Relaxed)
    }

    /// Keeps the mapping from children of this process. To copy a mapping of a file into which
    /// other processes can punch holes waits for a punch.
    pub fn keep_from_children(&self) -> Result<()> {
        self.advise(Advice::LinuxDontFork)
    }

    /// Ends [`keep_from_children`](Mapping::keep_from_children).
    pub fn leave_to_children(&self) -> Result<()> {
        self.advise(Advice::LinuxDoFork)
    }

    fn advise(&self, advice: Advice) -> Result<()> {
        // SAFETY: ours since `map`; neither advice changes what this process sees.
        unsafe { madvise(self.as_ptr().cast(), self.len, advice) }
    }

    /// Returns the length of the mapping in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `false`: the kernel refuses empty mappings.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the 64-bit word at `offset`, if it lies inside and is aligned.
    pub fn word(&self, offset: usize) -> Option<&AtomicU64> {
        let inside = offset.checked_add(8).is_some_and(|end| end <= self.len);
        if !inside || !offset.is_multiple_of(8) {
            return None;
        }
        // SAFETY: inside the mapping and aligned (the start is page aligned); lives as long as
        // `self`. Every honest process that shares it uses atomics. A hostile one only corrupts
        // data (L5).
        Some(unsafe { AtomicU64::from_ptr(self.as_ptr().add(offset).cast()) })
    }

    /// Returns the 32-bit word at `offset`, if it lies inside and is aligned.
    pub fn half_word(&self, offset: usize) -> Option<&AtomicU32> {
        let inside = offset.checked_add(4).is_some_and(|end| end <= self.len);
        if !inside || !offset.is_multiple_of(4) {
            return None;
        }
        // SAFETY: as in `word`.
        Some(unsafe { AtomicU32::from_ptr(self.as_ptr().add(offset).cast()) })
    }

    /// Copies `bytes` to `offset`. Returns `false` and does nothing if they do not fit.
    #[must_use]
    pub fn put(&self, offset: usize, bytes: &[u8]) -> bool {
        let inside = offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len);
        if inside {
            // SAFETY: inside the mapping. `bytes` is memory of this process only, so they do not
            // overlap.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_ptr().add(offset), bytes.len()) };
        }
        inside
    }

    /// Copies `bytes.len()` bytes from `offset`, once. Returns `false` and does nothing if the
    /// mapping ends before.
    #[must_use]
    pub fn take(&self, offset: usize, bytes: &mut [u8]) -> bool {
        let inside = offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len);
        if inside {
            // SAFETY: as in `put`; a peer that writes meanwhile can only change which bytes are
            // copied (L5).
            unsafe { ptr::copy_nonoverlapping(self.as_ptr().add(offset), bytes.as_mut_ptr(), bytes.len()) };
        }
        inside
    }

    /// Zeros `len` bytes at `offset`, word by word. Returns `false` and does nothing if the range
    /// is not inside or not aligned.
    #[must_use]
    pub fn zero(&self, offset: usize, len: usize) -> bool {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside || !offset.is_multiple_of(8) || !len.is_multiple_of(8) {
            return false;
        }
        (offset..offset + len)
            .step_by(8)
            .filter_map(|at| self.word(at))
            .for_each(|word| word.store(0, Relaxed));
        true
    }

    /// Frees the memory of the pages of `len` bytes at `offset` (MADV_REMOVE). They read as zero
    /// from then on, in every process that has them mapped.
    ///
    /// Returns `false` and does nothing if the range is not inside, is not a multiple of 4 KiB, or
    /// if the kernel refuses. Where kernel pages are larger, a page that lies in the range only in
    /// part stays as it is.
    ///
    /// Blocks while other processes change the same file by system calls, for as long as they like.
    pub fn give_back(&self, offset: usize, len: usize) -> bool {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside || !offset.is_multiple_of(PAGE_SIZE) || !len.is_multiple_of(PAGE_SIZE) {
            return false;
        }
        let (first, end) =
            (offset.next_multiple_of(page_bytes()), (offset + len) / page_bytes() * page_bytes());
        let Some(len) = end.checked_sub(first).filter(|len| *len > 0) else { return false };
        // SAFETY: inside the mapping, whose bytes may change at any time anyway.
        unsafe { madvise(self.as_ptr().add(first).cast(), len, Advice::LinuxRemove).is_ok() }
    }

    /// Returns the mapping as a process's page, if it is large enough.
    pub fn page(&self) -> Option<&Page> {
        if self.len < PAGE_BYTES {
            return None;
        }
        // SAFETY: large enough and page aligned; every field of `Page` that is ever read is an
        // atomic.
        Some(unsafe { self.start.cast::<Page>().as_ref() })
    }

    /// Returns the mapping as the broker's board for a process, if it is large enough.
    pub fn board(&self) -> Option<&Board> {
        if self.len < BOARD_BYTES {
            return None;
        }
        // SAFETY: as in `page`.
        Some(unsafe { self.start.cast::<Board>().as_ref() })
    }
}

/// A read-only mapping of memory that another process writes. A write to it would raise SIGSEGV.
#[derive(Debug)]
pub struct Shown(Mapping);

impl Shown {
    /// Maps the first `len` bytes of `fd`, which must be sealed (see [`crate::memfd`]). Otherwise
    /// its writer could make a reader block, or make an access raise SIGBUS.
    pub fn map(fd: impl AsFd, len: usize) -> Result<Shown> {
        Mapping::map_for(ProtFlags::READ, fd, len).map(Shown)
    }

    /// Makes the kernel allocate the first `len` bytes, so that reading them cannot raise SIGBUS.
    pub fn back(&self, len: usize) -> Result<()> {
        populate(self.0.as_ptr(), len.min(self.0.len), Advice::LinuxPopulateRead)
    }

    /// Moves the mapping as [`Mapping::move_over`] does.
    ///
    /// # Safety
    /// As [`Mapping::move_over`].
    pub unsafe fn move_over(self, place: *const u8) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.0.move_over(place.cast_mut()) }
    }

    /// Returns the start of the mapping, which is page aligned.
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }

    /// Returns the number of mapped bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns false, as [`Mapping::is_empty`] does.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the word as [`Mapping::word`] does. Only loads are allowed.
    pub fn word(&self, offset: usize) -> Option<&AtomicU64> {
        self.0.word(offset)
    }

    /// Returns the page as [`Mapping::page`] does. Only loads are allowed.
    pub fn page(&self) -> Option<&Page> {
        self.0.page()
    }

    /// Returns the board as [`Mapping::board`] does. Only loads are allowed.
    pub fn board(&self) -> Option<&Board> {
        self.0.board()
    }
}

/// Maps the first `len` bytes of `fd`, shared. The mapping takes memory only for pages that are
/// touched, even in a program that has called mlockall(MCL_FUTURE). It is not part of core dumps.
///
/// With MCL_FUTURE the kernel locks a new mapping, allocates all its pages, and counts them against
/// RLIMIT_MEMLOCK. Two exceptions avoid that: the kernel allocates nothing for an inaccessible
/// mapping, and a mapping that grows keeps its flags. So one page is mapped without access and
/// unlocked. Then the mapping grows, and access is granted last.
pub(crate) fn map_unlocked(fd: impl AsFd, len: usize, access: ProtFlags) -> Result<*mut u8> {
    let first = len.min(page_bytes());
    // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
    let start = unsafe { mmap(ptr::null_mut(), first, ProtFlags::empty(), MapFlags::SHARED, fd, 0)? };
    let mut mapped = Unfinished { start, len: first };
    // SAFETY: ours, and no reference into it exists. That is true of the calls below too.
    unsafe {
        munlock(start, first)?;
        if len > first {
            mapped.start = mremap(start, first, len, MremapFlags::MAYMOVE)?;
            mapped.len = len;
        }
        mprotect(mapped.start, len, MprotectFlags::from_bits_retain(access.bits()))?;
        // Lanes may hold secrets that the program has wiped from its own memory.
        madvise(mapped.start, len, Advice::LinuxDontDump)?;
    }
    let start = mapped.start.cast();
    std::mem::forget(mapped);
    Ok(start)
}

/// A mapping that is unmapped at drop unless `map_unlocked` has finished it.
struct Unfinished {
    start: *mut c_void,
    len: usize,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // SAFETY: ours, and no reference into it exists.
        let _ = unsafe { munmap(self.start, self.len) };
    }
}

/// Makes the kernel allocate the pages of `len` bytes at `start` in a shared mapping. Their
/// contents do not change.
///
/// A page of a memfd is allocated when it is first touched. If there is no memory for it, that
/// access raises SIGBUS. This call returns an error instead.
pub fn back(start: *mut u8, len: usize) -> Result<()> {
    populate(start, len, Advice::LinuxPopulateWrite)
}

fn populate(start: *mut u8, len: usize, how: Advice) -> Result<()> {
    let before = start as usize % page_bytes();
    let (first, len) = (start.wrapping_sub(before), len + before);
    // SAFETY: it changes no contents, and fails where nothing is mapped.
    match unsafe { madvise(first.cast(), len, how) } {
        // Linux before 5.14 does not have this advice.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Returns, for each 4 KiB page of `len` bytes at `start`, whether memory is allocated for it.
/// Reading one of the others would allocate it. All are `false` if the kernel does not report it.
pub fn backed_pages(start: *const u8, len: usize) -> Vec<bool> {
    let before = start as usize % page_bytes();
    let first = start.wrapping_sub(before).cast_mut();
    let mut pages = vec![0u8; (before + len).div_ceil(page_bytes())];
    // SAFETY: it writes one byte for each page, and does not access the mapped memory.
    let asked = unsafe { libc::mincore(first.cast(), before + len, pages.as_mut_ptr()) };
    let is_backed = |at: usize| asked == 0 && pages[(before + at) / page_bytes()] & 1 != 0;
    (0..len).step_by(PAGE_SIZE).map(is_backed).collect()
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if *self.stays.get_mut() {
            return;
        }
        // SAFETY: ours since `map`, and no reference outlives `self`. Unmapping a whole mapping
        // cannot fail.
        let _ = unsafe { munmap(self.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd::{create_fixed, create_sealed};

    #[test]
    fn two_mappings_of_one_memfd_see_each_other() {
        let fd = create_fixed("shunt-test", 8192).unwrap();
        let (one, two) = (Mapping::map(&fd, 8192).unwrap(), Mapping::map(&fd, 4096).unwrap());
        one.word(8).unwrap().store(7, Relaxed);
        assert_eq!(two.word(8).unwrap().load(Relaxed), 7);
        assert!(two.zero(0, 64));
        assert_eq!(one.word(8).unwrap().load(Relaxed), 0);
    }

    #[test]
    fn a_mapping_that_moves_over_another_is_found_in_its_place() {
        let old = Mapping::map(create_fixed("shunt-test", 4096).unwrap(), 4096).unwrap();
        let fd = create_fixed("shunt-test", 4096).unwrap();
        let (fresh, other) = (Mapping::map(&fd, 4096).unwrap(), Mapping::map(&fd, 4096).unwrap());
        let place = old.as_ptr();
        old.word(8).unwrap().store(1, Relaxed);
        // SAFETY: `old` is forgotten below.
        unsafe { fresh.move_over(place) }.unwrap();
        other.word(8).unwrap().store(7, Relaxed);
        assert_eq!(old.word(8).unwrap().load(Relaxed), 7);
        std::mem::forget(old);
    }

    #[test]
    fn memory_is_put_behind_the_pages_that_are_named_and_no_others() {
        let fd = create_fixed("shunt-test", 4 * 4096).unwrap();
        let mapping = Mapping::map(&fd, 4 * 4096).unwrap();
        mapping.word(4096).unwrap().store(7, Relaxed);
        back(mapping.as_ptr().wrapping_add(4096 + 100), 4096).unwrap();
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_blocks, 2 * 4096 / 512);
        assert_eq!(mapping.word(4096).unwrap().load(Relaxed), 7);
        assert_eq!(backed_pages(mapping.as_ptr(), 4 * 4096), [false, true, true, false]);
        let nowhere = mapping.as_ptr();
        drop(mapping);
        assert!(back(nowhere, 4096).is_err());
    }

    #[test]
    fn memory_is_given_back_for_everybody_who_has_it_mapped() {
        let fd = create_fixed("shunt-test", 4 * 4096).unwrap();
        let (one, two) = (Mapping::map(&fd, 4 * 4096).unwrap(), Mapping::map(&fd, 4 * 4096).unwrap());
        for page in 0..4 {
            one.word(page * 4096).unwrap().store(7, Relaxed);
        }
        assert!(two.give_back(4096, 2 * 4096));
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_blocks, 2 * 4096 / 512);
        let words = [0, 4096, 8192, 12288].map(|at| one.word(at).unwrap().load(Relaxed));
        assert_eq!(words, [7, 0, 0, 7]);
        assert!(
            !two.give_back(4096, 4 * 4096) && !two.give_back(100, 4096) && !two.give_back(usize::MAX, 4096)
        );
    }

    /// Callers count in units of 4 KiB, so a range may begin in the middle of a larger page.
    #[test]
    fn of_larger_pages_those_are_given_back_that_are_named_whole() {
        let (page, unit) = (page_bytes(), PAGE_SIZE);
        let len = 4 * page;
        let mapping = Mapping::map(create_fixed("shunt-test", len).unwrap(), len).unwrap();
        back(mapping.as_ptr().wrapping_add(unit), unit).unwrap();
        let is_backed = |at: usize| at / page == unit / page;
        assert_eq!(
            backed_pages(mapping.as_ptr(), len),
            (0..len).step_by(unit).map(is_backed).collect::<Vec<_>>()
        );
        assert!(backed_pages(mapping.as_ptr().wrapping_add(unit), unit)[0]);
        (0..len).step_by(unit).for_each(|at| mapping.word(at).unwrap().store(7, Relaxed));
        let named = unit..unit + 2 * page;
        assert!(mapping.give_back(named.start, named.len()));
        for at in (0..len).step_by(unit) {
            let first = at / page * page;
            let is_whole = named.start <= first && first + page <= named.end;
            assert_eq!(mapping.word(at).unwrap().load(Relaxed), if is_whole { 0 } else { 7 }, "{at}");
        }
    }

    #[test]
    fn what_lies_outside_is_refused() {
        let fd = create_fixed("shunt-test", 4096).unwrap();
        let mapping = Mapping::map(&fd, 4096).unwrap();
        assert!(mapping.word(4088).is_some());
        for offset in [4, 4089, 4096, usize::MAX, usize::MAX - 7] {
            assert!(mapping.word(offset).is_none(), "{offset}");
        }
        assert!(!mapping.zero(4096, 8));
        assert!(!mapping.zero(8, usize::MAX - 7));
        assert!(!mapping.zero(4, 8));
        assert!(mapping.half_word(4092).is_some());
        for offset in [2, 4093, 4096, usize::MAX - 3] {
            assert!(mapping.half_word(offset).is_none(), "{offset}");
        }
        assert!(
            mapping.put(4090, b"in here") == mapping.take(4090, &mut [0; 7])
                && !mapping.put(4090, b"in here")
        );
        let mut back = [0; 6];
        assert!(mapping.put(4090, b"inside") && mapping.take(4090, &mut back) && &back == b"inside");
        assert!(!mapping.put(usize::MAX, b"x") && !mapping.take(usize::MAX, &mut back));
        assert!(mapping.page().is_none());
        assert!(Mapping::map(&fd, 0).is_err());
    }

    #[test]
    fn a_page_and_a_board_are_written_by_one_side_and_read_by_the_other() {
        let (fd, page) = create_sealed("shunt-test", PAGE_BYTES).unwrap();
        let shown = Shown::map(&fd, PAGE_BYTES).unwrap();
        shown.back(8192).unwrap();
        page.page().unwrap().rows.store(3, Relaxed);
        assert_eq!(shown.page().unwrap().rows.load(Relaxed), 3);
        let (fd, board) = create_sealed("shunt-test", BOARD_BYTES).unwrap();
        let shown = Shown::map(&fd, BOARD_BYTES).unwrap();
        board.board().unwrap().inbox.store(5, Relaxed);
        assert_eq!(shown.board().unwrap().inbox.load(Relaxed), 5);
        assert!(board.page().is_none());
    }
}
