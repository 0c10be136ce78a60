//! A read-only view of a link: nothing here can write to the link's memory.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire};

use rustix::fs::{Mode, OFlags, open};
use rustix::mm::{ProtFlags, munmap};

use crate::mapping::map_unlocked;
use crate::{Errno, Result};

/// Memory that other processes write. Its beginning is mapped, and the rest is read from the file.
/// Reading an unallocated page of a mapping would allocate it; reading it from the file does not.
#[derive(Debug)]
pub struct View {
    file: OwnedFd,
    start: NonNull<u8>,
    mapped: usize,
}

// SAFETY: as for `mapping::Mapping`.
unsafe impl Send for View {}

impl View {
    /// Maps the first `len` bytes of `file`, which must be sealed against shrinking (see
    /// [`crate::memfd`]).
    pub fn map(file: OwnedFd, len: usize) -> Result<View> {
        let start = map_unlocked(&file, len, ProtFlags::READ)?;
        Ok(View { file, start: NonNull::new(start).ok_or(Errno::NOMEM)?, mapped: len })
    }

    /// Loads the 64-bit word at `offset`, if it is mapped and aligned. The load is an acquire:
    /// later reads see the data that was published with the value, or newer data.
    pub fn word(&self, offset: usize) -> Option<u64> {
        let at = self.at(offset, 8)?;
        // SAFETY: inside the mapping and aligned. Every process that shares it uses atomics, and a
        // load of this size writes nothing.
        Some(unsafe { AtomicU64::from_ptr(at.cast()) }.load(Acquire))
    }

    /// Loads the 32-bit word at `offset` as [`View::word`] does.
    pub fn half_word(&self, offset: usize) -> Option<u32> {
        let at = self.at(offset, 4)?;
        // SAFETY: as in `word`.
        Some(unsafe { AtomicU32::from_ptr(at.cast()) }.load(Acquire))
    }

    fn at(&self, offset: usize, size: usize) -> Option<*mut u8> {
        let is_inside = offset.checked_add(size).is_some_and(|end| end <= self.mapped);
        (is_inside && offset.is_multiple_of(size)).then(|| self.start.as_ptr().wrapping_add(offset))
    }

    /// Copies the bytes at `offset` of the file, mapped or not. Returns `false` if the file ends
    /// before.
    #[must_use]
    pub fn read(&self, mut offset: usize, mut bytes: &mut [u8]) -> bool {
        while !bytes.is_empty() {
            match rustix::io::pread(&self.file, &mut *bytes, offset as u64) {
                Ok(0) => return false,
                Ok(count) => {
                    bytes = &mut bytes[count..];
                    offset += count;
                }
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        true
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: ours since `map`, and no reference outlives a call.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.mapped) };
    }
}

/// Opens the file behind `fd` again, for reading only.
pub fn for_reading(fd: impl AsFd) -> Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;
    use crate::memfd::create_fixed;
    use rustix::fs::fstat;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn it_sees_what_others_write_and_makes_no_memory() {
        let fd = create_fixed("shunt-test", 16_384).unwrap();
        let others = Mapping::map(&fd, 16_384).unwrap();
        let view = View::map(for_reading(&fd).unwrap(), 4096).unwrap();
        others.word(8).unwrap().store(7 << 32 | 5, Relaxed);
        assert_eq!((view.word(8), view.half_word(12)), (Some(7 << 32 | 5), Some(7)));
        assert_eq!(
            (view.word(4092), view.word(4096), view.word(4), view.half_word(2)),
            (None, None, None, None)
        );
        let (before, mut bytes) = (fstat(&fd).unwrap().st_blocks, [1; 8192]);
        assert!(view.read(8192, &mut bytes) && bytes == [0; 8192]);
        assert_eq!(fstat(&fd).unwrap().st_blocks, before);
        assert!(others.put(8190, b"abcd"));
        assert!(view.read(8190, &mut bytes[..4]) && &bytes[..4] == b"abcd");
        assert!(!view.read(16_380, &mut bytes[..5]));
    }

    #[test]
    fn what_is_open_for_reading_cannot_be_mapped_to_write() {
        let fd = for_reading(create_fixed("shunt-test", 4096).unwrap()).unwrap();
        assert_eq!(Mapping::map(&fd, 4096).unwrap_err(), Errno::ACCESS);
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::BADF));
    }
}
