//! The bytes of a ring, behind a trait, so that the model checker can check each access too.

use std::hint::cold_path;
use std::ptr;

use shunt_abi::reason::Reason;

use crate::copy::{self, Method};
use crate::user::{Fault, Sink, Source};

/// Positions from this one on are in the spill of a ring.
pub const SPILL: u64 = 1 << 62;

/// A power-of-two ring of bytes. A peer may write it at any time, so it is never a slice.
pub trait Ring {
    /// Number of bytes, a power of two.
    fn len(&self) -> usize;

    /// Returns [`len`](Self::len) - 1.
    #[inline]
    fn mask(&self) -> usize {
        self.len() - 1
    }

    /// Returns the number of bytes of the spill: a power of two, or 0 if there is none. The spill
    /// has the positions from [`SPILL`] on.
    #[inline]
    fn spill_len(&self) -> usize {
        0
    }

    /// Makes sure that memory backs the `count` bytes from position `at` on, which the caller is
    /// about to write.
    ///
    /// A page of a memfd is allocated at its first touch. If that fails, the kernel sends SIGBUS.
    ///
    /// # Errors Returns the reason if there is no memory.
    #[inline]
    fn back(&self, at: u64, count: usize) -> Result<(), Reason> {
        let _ = (at, count);
        Ok(())
    }

    /// Copies the next `count` bytes of `source` to the positions from `at` on by `method`, and
    /// advances `source`.
    ///
    /// After a fault, some bytes may have been copied, and the position of `source` is unspecified.
    fn fill(&self, at: u64, count: usize, source: &mut Source<'_>, method: Method) -> Result<(), Fault>;

    /// Copies `count` bytes from the positions from `at` on into `sink`, and advances `sink`. A
    /// fault has the effects that it has in [`fill`](Self::fill).
    fn drain(&self, at: u64, count: usize, sink: &mut Sink<'_>) -> Result<(), Fault>;

    /// Returns whether the ring has no bytes at all, which is never so.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Copies `len` bytes if they are 1 to 256, for which a call of `memcpy` would take as long as the
/// copy. Returns `false`, and copies nothing, for any other length.
///
/// # Safety
/// As for `copy_nonoverlapping`.
#[inline(always)]
pub unsafe fn copy_few(from: *const u8, to: *mut u8, len: usize) -> bool {
    // SAFETY: each part lies within the range that the caller has promised. Some parts overlap.
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

/// Copies the first `N` bytes of `len`, and the last `N`.
///
/// # Safety
/// As for `copy_nonoverlapping`; `len` is at least `N`.
#[inline(always)]
unsafe fn copy_ends<const N: usize>(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise covers both parts.
    unsafe {
        copy_part::<N>(from, to, 0);
        copy_part::<N>(from, to, len - N);
    }
}

/// # Safety
/// As for `copy_nonoverlapping` of `N` bytes from `at` on.
#[inline(always)]
unsafe fn copy_part<const N: usize>(from: *const u8, to: *mut u8, at: usize) {
    // SAFETY: the caller's promise covers these bytes.
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

// SAFETY: other processes write the memory anyway; all access is by raw copies, which assume
// nothing about other writers.
unsafe impl Send for MappedRing {}
// SAFETY: as above.
unsafe impl Sync for MappedRing {}

impl MappedRing {
    /// Returns a ring over `len` bytes at `base`.
    ///
    /// # Safety
    /// The bytes must stay mapped for reads and writes as long as the ring or a copy of it is used,
    /// and `len` must be a power of two.
    pub unsafe fn new(base: *mut u8, len: usize) -> MappedRing {
        debug_assert!(len.is_power_of_two());
        MappedRing { base, mask: len - 1, spill: ptr::null_mut(), spill_len: 0 }
    }

    /// Gives the ring a spill of `len` bytes.
    ///
    /// # Safety
    /// As for [`new`](Self::new).
    pub unsafe fn with_spill(self, spill: *mut u8, len: usize) -> MappedRing {
        debug_assert!(len.is_power_of_two());
        MappedRing { spill, spill_len: len, ..self }
    }

    /// Returns the contiguous run at position `at`, at most `limit` bytes, for a caller that copies
    /// by other means.
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

    /// Returns the address of position `at` of the ring itself.
    #[inline(always)]
    pub fn in_ring(&self, at: u64) -> *mut u8 {
        self.base.wrapping_add(at as usize & self.mask)
    }

    /// Returns the address of `len` bytes (at least one) at position `at` of the ring itself, if
    /// they are one run.
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
    fn fill(
        &self,
        mut at: u64,
        mut count: usize,
        source: &mut Source<'_>,
        method: Method,
    ) -> Result<(), Fault> {
        debug_assert!(count <= self.len().max(self.spill_len) && count <= source.remaining());
        while count > 0 {
            let (to, room) = self.run(at, count);
            let (from, run) = source.run(room)?;
            // SAFETY: `to` is a run of at most `room` bytes inside the mapping (see `new`); `from`
            // is a run of the program's buffer that can be read (`Source::new`, `checked`). They
            // cannot overlap: the program does not know the address of the mapping.
            unsafe { copy::copy(method.for_run(run), from, to, run) };
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
            // SAFETY: as in `fill`, with the roles of the two swapped.
            unsafe { std::ptr::copy_nonoverlapping(from, to, run) };
            sink.advance(run);
            at += run as u64;
            count -= run;
        }
        Ok(())
    }
}
