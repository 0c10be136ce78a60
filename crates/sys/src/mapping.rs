//! A shared mapping of a sealed memfd. Its other mappers are untrusted, so it is never seen as a slice: only
//! as a raw pointer, as atomics, or through the bounds-checked helpers here.

use std::ffi::c_void;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use rustix::mm::{
    Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags, madvise, mmap, mprotect, mremap, mremap_fixed,
    munlock, munmap,
};
use shunt_abi::page::{BOARD_BYTES, Board, PAGE_BYTES, Page};

use crate::{Errno, Result};

/// What lengths are counted in, on every machine: no page is smaller, and each is a multiple of it.
const PAGE_SIZE: usize = 4096;

/// Bytes of a page of this kernel's.
#[cfg(target_arch = "x86_64")]
pub(crate) fn page_bytes() -> usize {
    PAGE_SIZE
}

/// The same: it was built for one of several sizes.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn page_bytes() -> usize {
    // SAFETY: it reads what the kernel has told the process at its start.
    unsafe { libc::getauxval(libc::AT_PAGESZ) as usize }
}

/// An owned, shared, readable and writable mapping; unmapped at drop.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the address space and not to a thread; what it holds is reached only
// through raw pointers and atomics.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `fd`, which must be sealed against shrinking or be our own
    /// (see [`crate::memfd`]): otherwise an access could end in SIGBUS.
    pub fn map(fd: impl AsFd, len: usize) -> Result<Mapping> {
        Mapping::map_for(ProtFlags::READ | ProtFlags::WRITE, fd, len)
    }

    /// Maps the first `len` bytes of `fd`, which is memory of the kernel's own, such as a BPF map's: a mapping
    /// of that cannot grow, as one of [`Mapping::map`] does.
    pub fn map_of_kernel(fd: impl AsFd, len: usize) -> Result<Mapping> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let start = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, fd, 0)? };
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Mapping { start, len })
    }

    fn map_for(access: ProtFlags, fd: impl AsFd, len: usize) -> Result<Mapping> {
        let start = map_unlocked(fd, len, access)?;
        Ok(Mapping { start: NonNull::new(start).ok_or(Errno::NOMEM)?, len })
    }

    /// Moves the mapping to `place`, over what is mapped there now, in one step: who holds an address there finds the new
    /// memory behind it. It stays for ever.
    ///
    /// # Safety
    /// At `place` there must be a mapping of the same length that nobody will unmap.
    pub unsafe fn move_over(self, place: *mut u8) -> Result<()> {
        // SAFETY: ours since `map`; and the caller's promise.
        unsafe {
            mremap_fixed(self.as_ptr().cast(), self.len, self.len, MremapFlags::MAYMOVE, place.cast())?;
        }
        std::mem::forget(self);
        Ok(())
    }

    /// Where the mapping begins: page aligned, valid for `len()` bytes while `self` lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: the kernel refuses empty mappings.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The 64-bit word at `offset`, if it lies inside and is aligned.
    pub fn word(&self, offset: usize) -> Option<&AtomicU64> {
        let inside = offset.checked_add(8).is_some_and(|end| end <= self.len);
        if !inside || !offset.is_multiple_of(8) {
            return None;
        }
        // SAFETY: inside the mapping and aligned (the start is page aligned); lives as long as `self`;
        // everyone who shares it uses atomics (L5: a peer that does not harms only what it reads itself).
        Some(unsafe { AtomicU64::from_ptr(self.as_ptr().add(offset).cast()) })
    }

    /// The 32-bit word at `offset`, if it lies inside and is aligned.
    pub fn half_word(&self, offset: usize) -> Option<&AtomicU32> {
        let inside = offset.checked_add(4).is_some_and(|end| end <= self.len);
        if !inside || !offset.is_multiple_of(4) {
            return None;
        }
        // SAFETY: as in `word`.
        Some(unsafe { AtomicU32::from_ptr(self.as_ptr().add(offset).cast()) })
    }

    /// Copies `bytes` to `offset`. `false`, and nothing done, if there is no room.
    #[must_use]
    pub fn put(&self, offset: usize, bytes: &[u8]) -> bool {
        let inside = offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len);
        if inside {
            // SAFETY: inside the mapping. `bytes` is memory of this process only, so they do not overlap.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_ptr().add(offset), bytes.len()) };
        }
        inside
    }

    /// Copies what is at `offset` to `bytes`, once. `false`, and nothing done, if there is not so much.
    #[must_use]
    pub fn take(&self, offset: usize, bytes: &mut [u8]) -> bool {
        let inside = offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len);
        if inside {
            // SAFETY: as in `put`; what a peer writes meanwhile can only change which bytes are copied (L5).
            unsafe { ptr::copy_nonoverlapping(self.as_ptr().add(offset), bytes.as_mut_ptr(), bytes.len()) };
        }
        inside
    }

    /// Zeros `len` bytes at `offset`, word by word. `false`, and nothing done, if that is not inside and aligned.
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

    /// Gives the memory behind the pages of `len` bytes at `offset` back to the kernel: they are zero from then on, for everybody
    /// who has them mapped. `false`, and nothing done, if that is not inside, not whole pages, or refused. Where pages are larger, those
    /// that lie beyond it in part stay as they are.
    ///
    /// It waits for others who change the same file by system calls, as long as they like.
    pub fn give_back(&self, offset: usize, len: usize) -> bool {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside || !offset.is_multiple_of(PAGE_SIZE) || !len.is_multiple_of(PAGE_SIZE) {
            return false;
        }
        let (first, end) =
            (offset.next_multiple_of(page_bytes()), (offset + len) / page_bytes() * page_bytes());
        let Some(len) = end.checked_sub(first).filter(|len| *len > 0) else { return false };
        // SAFETY: inside the mapping, which nobody sees as more than bytes that change.
        unsafe { madvise(self.as_ptr().add(first).cast(), len, Advice::LinuxRemove).is_ok() }
    }

    /// The mapping as a process's page, if it is large enough.
    pub fn page(&self) -> Option<&Page> {
        if self.len < PAGE_BYTES {
            return None;
        }
        // SAFETY: large enough and page aligned; every field of `Page` that is ever read is an atomic.
        Some(unsafe { self.start.cast::<Page>().as_ref() })
    }

    /// The mapping as the broker's board for a process, if it is large enough.
    pub fn board(&self) -> Option<&Board> {
        if self.len < BOARD_BYTES {
            return None;
        }
        // SAFETY: as in `page`.
        Some(unsafe { self.start.cast::<Board>().as_ref() })
    }
}

/// Memory that another process writes and this one only reads. To write to it would end this process.
#[derive(Debug)]
pub struct Shown(Mapping);

impl Shown {
    /// Maps the first `len` bytes of `fd`, which must be sealed (see [`crate::memfd`]): otherwise its writer could keep
    /// whoever reads it waiting, or end in SIGBUS.
    pub fn map(fd: impl AsFd, len: usize) -> Result<Shown> {
        Mapping::map_for(ProtFlags::READ, fd, len).map(Shown)
    }

    /// Has the kernel put memory behind the first `len` bytes, so that to read them cannot be a signal.
    pub fn back(&self, len: usize) -> Result<()> {
        populate(self.0.as_ptr(), len.min(self.0.len), Advice::LinuxPopulateRead)
    }

    /// See [`Mapping::move_over`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn move_over(self, place: *const u8) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.0.move_over(place.cast_mut()) }
    }

    /// Where the mapping begins: page aligned.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }

    /// See [`Mapping::word`]. Only loads are allowed.
    pub fn word(&self, offset: usize) -> Option<&AtomicU64> {
        self.0.word(offset)
    }

    /// See [`Mapping::page`]. Only loads are allowed.
    pub fn page(&self) -> Option<&Page> {
        self.0.page()
    }

    /// See [`Mapping::board`]. Only loads are allowed.
    pub fn board(&self) -> Option<&Board> {
        self.0.board()
    }
}

/// Maps the first `len` bytes of `fd`, shared. The mapping takes memory only for the pages that are
/// touched, also in a program that has called mlockall(MCL_FUTURE), and is in no core dump.
///
/// With MCL_FUTURE the kernel locks a new mapping, fills it with pages, and counts all of it against
/// RLIMIT_MEMLOCK. It fills nothing that cannot be accessed, and a mapping that grows keeps its own
/// flags. So one page is mapped without access and unlocked; then it grows, and access follows.
pub(crate) fn map_unlocked(fd: impl AsFd, len: usize, access: ProtFlags) -> Result<*mut u8> {
    let first = len.min(page_bytes());
    // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
    let start = unsafe { mmap(ptr::null_mut(), first, ProtFlags::empty(), MapFlags::SHARED, fd, 0)? };
    let mut mapped = Unfinished { start, len: first };
    // SAFETY: ours, and no reference into it exists. So it is for the calls below.
    unsafe {
        munlock(start, first)?;
        if len > first {
            mapped.start = mremap(start, first, len, MremapFlags::MAYMOVE)?;
            mapped.len = len;
        }
        mprotect(mapped.start, len, MprotectFlags::from_bits_retain(access.bits()))?;
        // Rings may hold what the program has wiped. A dump without them serves as well.
        madvise(mapped.start, len, Advice::LinuxDontDump)?;
    }
    let start = mapped.start.cast();
    std::mem::forget(mapped);
    Ok(start)
}

/// A mapping that is taken back unless it is finished.
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

/// Has the kernel put memory behind the pages of `len` bytes at `start`, in a shared mapping. A page of a memfd is made when it
/// is first touched, and where there is no memory for it that is SIGBUS: so it is asked for first. What the pages hold
/// stays as it is.
pub fn back(start: *mut u8, len: usize) -> Result<()> {
    populate(start, len, Advice::LinuxPopulateWrite)
}

fn populate(start: *mut u8, len: usize, how: Advice) -> Result<()> {
    let before = start as usize % page_bytes();
    let (first, len) = (start.wrapping_sub(before), len + before);
    // SAFETY: it changes nothing that can be seen, and where nothing is mapped it fails.
    match unsafe { madvise(first.cast(), len, how) } {
        // Linux before 5.14 cannot be asked.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Which of the pages of `len` bytes at `start`, of 4 KiB each, have memory behind them, by their order; none, if the kernel does not
/// say. To read any of the others would make it.
pub fn backed_pages(start: *const u8, len: usize) -> Vec<bool> {
    let before = start as usize % page_bytes();
    let first = start.wrapping_sub(before).cast_mut();
    let mut pages = vec![0u8; (before + len).div_ceil(page_bytes())];
    // SAFETY: it writes a byte for each page, and looks at nothing that is mapped.
    let asked = unsafe { libc::mincore(first.cast(), before + len, pages.as_mut_ptr()) };
    let is_backed = |at: usize| asked == 0 && pages[(before + at) / page_bytes()] & 1 != 0;
    (0..len).step_by(PAGE_SIZE).map(is_backed).collect()
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: ours since `map`, and no reference outlives `self`. It cannot fail for a whole mapping.
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

    /// Callers count in 4 KiB, and what they name may begin in the middle of a larger page.
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
