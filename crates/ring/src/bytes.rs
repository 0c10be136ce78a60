//! The bytes of a ring, behind a trait so that the model checker can watch them too.

use std::hint::cold_path;
use std::ptr;

use shunt_abi::reason::Reason;

use crate::user::{Fault, Sink, Source};

/// Positions from here on are in the spill of a ring.
pub const SPILL: u64 = 1 << 62;

/// A power-of-two ring of bytes that a peer may be writing at the same time: never a slice.
pub trait Ring {
    /// Number of bytes, a power of two.
    fn len(&self) -> usize;

    /// One less.
    #[inline]
    fn mask(&self) -> usize {
        self.len() - 1
    }

    /// Number of bytes of the spill, which has the positions from [`SPILL`] on; a power of two, or 0
    /// if there is none.
    #[inline]
    fn spill_len(&self) -> usize {
        0
    }

    /// Makes sure that there is memory behind `count` bytes from position `at` onwards, which are about to be written.
    /// In a file in memory a page is made when it is first touched, and if it cannot be, that is a signal.
    ///
    /// # Errors
    /// Returns why there is none.
    #[inline]
    fn back(&self, at: u64, count: usize) -> Result<(), Reason> {
        let _ = (at, count);
        Ok(())
    }

    /// Copies the next `count` bytes of `source` to ring position `at` onwards, and advances `source`. After a fault
    /// some may have been copied, and where `source` stands is open.
    fn fill(&self, at: u64, count: usize, source: &mut Source<'_>) -> Result<(), Fault>;

    /// Copies `count` bytes from ring position `at` onwards into `sink`, and advances it. A fault is as in `fill`.
    fn drain(&self, at: u64, count: usize, sink: &mut Sink<'_>) -> Result<(), Fault>;

    /// Whether the ring has no bytes at all: never.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Copies so many bytes if they are few, for which a call would take as long as they do. `false`: there are more than 256, or none.
///
/// # Safety
/// As for `copy_nonoverlapping`.
#[inline(always)]
pub unsafe fn copy_few(from: *const u8, to: *mut u8, len: usize) -> bool {
    // SAFETY: each part lies within what the caller has promised. Some overlap.
    unsafe {
        if len > 64 {
            match len {
                257.. => return false,
                129.. => copy_ends::<128>(from, to, len),
                _ => copy_ends::<64>(from, to, len),
            }
        } else {
            match len {
                33.. => copy_ends::<32>(from, to, len),
                16.. => copy_ends::<16>(from, to, len),
                8.. => copy_ends::<8>(from, to, len),
                4.. => copy_ends::<4>(from, to, len),
                2.. => copy_ends::<2>(from, to, len),
                1 => copy_ends::<1>(from, to, len),
                0 => return false,
            }
        }
    }
    true
}

/// Copies the first `N` bytes of `len`, and the last.
///
/// # Safety
/// As for `copy_nonoverlapping`; `len` is `N` at least.
#[inline(always)]
unsafe fn copy_ends<const N: usize>(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        copy_part::<N>(from, to, 0);
        copy_part::<N>(from, to, len - N);
    }
}

/// # Safety
/// As for `copy_nonoverlapping` of `N` bytes from `at` on.
#[inline(always)]
unsafe fn copy_part<const N: usize>(from: *const u8, to: *mut u8, at: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from.add(at), to.add(at), N) };
}

/// A ring in mapped memory.
#[derive(Clone, Copy, Debug)]
pub struct MappedRing {
    base: *mut u8,
    mask: usize,
    spill: *mut u8,
    spill_len: usize,
}

// SAFETY: the memory is shared between processes anyway; all access is by raw copies that assume nothing
// about who else writes it.
unsafe impl Send for MappedRing {}
// SAFETY: as above.
unsafe impl Sync for MappedRing {}

impl MappedRing {
    /// A ring over `len` bytes at `base`.
    ///
    /// # Safety
    /// The bytes must stay mapped for reads and writes as long as the ring or a copy of it is used, and
    /// `len` must be a power of two.
    pub unsafe fn new(base: *mut u8, len: usize) -> MappedRing {
        debug_assert!(len.is_power_of_two());
        MappedRing { base, mask: len - 1, spill: ptr::null_mut(), spill_len: 0 }
    }

    /// Gives the ring a spill of `len` bytes.
    ///
    /// # Safety
    /// As of [`new`](Self::new).
    pub unsafe fn with_spill(self, spill: *mut u8, len: usize) -> MappedRing {
        debug_assert!(len.is_power_of_two());
        MappedRing { spill, spill_len: len, ..self }
    }

    /// The contiguous run at position `at`, at most `limit` bytes, for whoever copies by other means.
    #[inline]
    pub fn run(&self, at: u64, limit: usize) -> (*mut u8, usize) {
        if at >= SPILL && self.spill_len > 0 {
            cold_path();
            let offset = at as usize & (self.spill_len - 1);
            return (self.spill.wrapping_add(offset), limit.min(self.spill_len - offset));
        }
        let offset = at as usize & self.mask;
        (self.base.wrapping_add(offset), limit.min(self.len() - offset))
    }

    /// Where position `at` of the ring itself is.
    #[inline(always)]
    pub fn in_ring(&self, at: u64) -> *mut u8 {
        self.base.wrapping_add(at as usize & self.mask)
    }

    /// Where `len` bytes at position `at` of the ring itself are, at least one, if they are one run.
    #[inline(always)]
    pub fn whole_run(&self, at: u64, len: usize) -> Option<*mut u8> {
        let offset = at as usize & self.mask;
        (offset + len - 1 <= self.mask).then(|| self.base.wrapping_add(offset))
    }
}

impl Ring for MappedRing {
    #[inline]
    fn len(&self) -> usize {
        self.mask + 1
    }

    #[inline]
    fn mask(&self) -> usize {
        self.mask
    }

    #[inline]
    fn spill_len(&self) -> usize {
        self.spill_len
    }

    #[inline]
    fn fill(&self, mut at: u64, mut count: usize, source: &mut Source<'_>) -> Result<(), Fault> {
        debug_assert!(count <= self.len().max(self.spill_len) && count <= source.remaining());
        while count > 0 {
            let (to, room) = self.run(at, count);
            let (from, run) = source.run(room)?;
            // SAFETY: `to` is a run of at most `room` bytes inside the mapping (see `new`); `from` is a run
            // of the program's buffer that can be read (`Source::new`, `checked`). They cannot overlap:
            // the program does not know where the mapping is.
            unsafe { std::ptr::copy_nonoverlapping(from, to, run) };
            source.advance(run);
            at += run as u64;
            count -= run;
        }
        Ok(())
    }

    #[inline]
    fn drain(&self, mut at: u64, mut count: usize, sink: &mut Sink<'_>) -> Result<(), Fault> {
        debug_assert!(count <= self.len().max(self.spill_len) && count <= sink.remaining());
        while count > 0 {
            let (from, room) = self.run(at, count);
            let (to, run) = sink.run(room)?;
            // SAFETY: as in `fill`, the other way round.
            unsafe { std::ptr::copy_nonoverlapping(from, to, run) };
            sink.advance(run);
            at += run as u64;
            count -= run;
        }
        Ok(())
    }
}
