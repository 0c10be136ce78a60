//! The bytes of a ring, behind a trait so that the model checker can watch them too.

use crate::user::{Fault, Sink, Source};

/// A power-of-two ring of bytes that a peer may be writing at the same time: never a slice.
pub trait Ring {
    /// Number of bytes, a power of two.
    fn len(&self) -> usize;

    /// Makes sure that there is memory behind `count` bytes from position `at` onwards, which are about to be written.
    /// `false`: there is none. In a file in memory a page is made when it is first touched, and if it cannot be, that is a
    /// signal.
    #[inline]
    fn back(&self, at: u64, count: usize) -> bool {
        let _ = (at, count);
        true
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

/// A ring in mapped memory.
#[derive(Clone, Copy, Debug)]
pub struct MappedRing {
    base: *mut u8,
    len: usize,
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
        MappedRing { base, len }
    }

    /// The contiguous run at position `at`, at most `limit` bytes, for a system call that reads or writes it.
    pub fn run(&self, at: u64, limit: usize) -> (*mut u8, usize) {
        let offset = at as usize & (self.len - 1);
        (self.base.wrapping_add(offset), limit.min(self.len - offset))
    }
}

impl Ring for MappedRing {
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn fill(&self, mut at: u64, mut count: usize, source: &mut Source<'_>) -> Result<(), Fault> {
        debug_assert!(count <= self.len && count <= source.remaining());
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
        debug_assert!(count <= self.len && count <= sink.remaining());
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
