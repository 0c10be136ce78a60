//! Sealed memfds: memory that two processes share, which neither can take away from the other (L5).
//!
//! While a process punches a hole in a memfd, every process that touches one of its pages sleeps in
//! the kernel. The punch takes longer the more mappings the file has. So a process that can punch
//! holes can stop the other processes that use the memory. Therefore a memfd is *sealed* before a
//! process touches it that does not trust its creator:
//!
//! ```text
//! create ── SHRINK, GROW ──> fixed ── each writer maps it ── FUTURE_WRITE, SEAL ──> sealed
//!                                                                                    │
//!                                                             passed to readers  <───┘
//! ```
//!
//! `F_SEAL_FUTURE_WRITE` makes hole punching and MADV_REMOVE fail with EPERM and forbids new
//! writable mappings. Existing writable mappings keep working. The kernel adds a seal under the
//! inode lock, which a punch holds too. So a process that sees the seal knows that no punch is
//! under way. It also means that adding a seal can take as long as a punch.
//!
//! A memfd can have holes from the beginning. A process that touches one, be it only to read, makes
//! the page from its own account, and gets SIGBUS if there is no memory. Memory of more than a page
//! or two is therefore *whole* before it is passed on: every page is allocated, from the account of
//! its maker, and by its seals it stays so.

use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs,
    ftruncate, memfd_create,
};
use rustix::io::{pwrite, retry_on_intr};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::process::{Resource, getrlimit};
use thiserror::Error;

use crate::mapping::Mapping;
use crate::{Errno, Result};

/// Why a descriptor is not memory that can be mapped safely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SealError {
    /// Not a memfd at all.
    #[error("the descriptor is not a memfd")]
    NotMemfd,
    /// A memfd whose size its owner could still change.
    #[error("the memfd is not sealed against shrinking and growing: seal it before it is sent")]
    NotSealed,
    /// A memfd into which its owner could still punch holes.
    #[error(
        "the memfd is not sealed against later writers: map it, then add F_SEAL_FUTURE_WRITE and F_SEAL_SEAL"
    )]
    Writable,
    /// A memfd of huge pages. Touching one raises SIGBUS when no huge page is left.
    #[error("the memfd is of huge pages: make it of ordinary ones")]
    NotTmpfs,
    /// A memfd of which pages are missing, which would be made from the account of their reader.
    #[error("the memfd has holes: allocate all of it before it is sent")]
    Holes,
    /// It could not be mapped.
    #[error("there is no room in this process for the memory")]
    NoMemory,
    /// Of another size.
    #[error("the memfd has {0} bytes, not the size its kind must have")]
    Size(u64),
}

/// Checks RLIMIT_FSIZE: a file that grows beyond it raises SIGXFSZ in the program, even in memory.
fn allow_size(len: usize) -> Result<()> {
    let limit = getrlimit(Resource::Fsize).current;
    if limit.is_some_and(|limit| limit < len as u64) { Err(Errno::FBIG) } else { Ok(()) }
}

/// The `f_type` that `fstatfs` returns for ordinary memfds.
const TMPFS: i64 = 0x0102_1994;
/// The seals of memory whose size is final.
const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);
/// The seals that forbid hole punching and new writable mappings.
const CLOSED: SealFlags = SealFlags::FUTURE_WRITE.union(SealFlags::SEAL);

/// Creates a zeroed, close-on-exec memfd of exactly `len` bytes, whose size is final. It can be
/// mapped for writing, and holes can be punched in it, until it is [sealed](seal).
pub fn create_fixed(name: &str, len: usize) -> Result<OwnedFd> {
    allow_size(len)?;
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, len as u64)?;
    fcntl_add_seals(&fd, FIXED)?;
    Ok(fd)
}

/// Creates a zeroed, close-on-exec memfd of exactly `len` bytes, maps it, and seals it. No other
/// mapping can ever write it.
pub fn create_sealed(name: &str, len: usize) -> Result<(OwnedFd, Mapping)> {
    let fd = create_fixed(name, len)?;
    let mapping = Mapping::map(&fd, len)?;
    seal(&fd)?;
    Ok((fd, mapping))
}

/// Creates a memfd as [`create_sealed`] does, and allocates every page of it.
pub fn create_whole(name: &str, len: usize) -> Result<(OwnedFd, Mapping)> {
    let fd = create_fixed(name, len)?;
    fill(&fd, len)?;
    let mapping = Mapping::map(&fd, len)?;
    seal(&fd)?;
    Ok((fd, mapping))
}

/// Allocates every page of the first `len` bytes that is missing, from the account of this process.
/// The seals do not matter, since no byte changes.
pub fn fill(fd: impl AsFd, len: usize) -> Result<()> {
    retry_on_intr(|| fallocate(&fd, FallocateFlags::empty(), 0, len as u64))
}

/// Forbids hole punching and new writable mappings for good. Existing mappings keep working.
///
/// Blocks while another process that holds the file punches a hole, for as long as that process
/// likes.
pub fn seal(fd: impl AsFd) -> Result<()> {
    fcntl_add_seals(fd, CLOSED)
}

/// Creates a close-on-exec memfd that holds `bytes` and can never change again.
pub fn create_with(name: &str, bytes: &[u8]) -> Result<OwnedFd> {
    allow_size(bytes.len())?;
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut written = 0;
    while written < bytes.len() {
        written += retry_on_intr(|| pwrite(&fd, &bytes[written..], written as u64))?;
    }
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
    Ok(fd)
}

/// Checks that `fd` is a memfd of exactly `len` bytes whose size is final.
pub fn verify_fixed(fd: impl AsFd, len: usize) -> std::result::Result<(), SealError> {
    check(fd, len).map(drop)
}

/// Checks that `fd` is a memfd of exactly `len` bytes that can neither shrink nor lose pages, and
/// that no hole is being punched in it now.
pub fn verify_sealed(fd: impl AsFd, len: usize) -> std::result::Result<(), SealError> {
    if check(fd, len)?.contains(CLOSED) { Ok(()) } else { Err(SealError::Writable) }
}

/// Checks what [`verify_sealed`] does, and that every page is allocated, as it will be from then
/// on.
///
/// Where the system makes huge pages of shared memory (`shmem_enabled`), the last one may reach
/// behind the end of the file. As much may be missing elsewhere: less than 2 MiB.
pub fn verify_whole(fd: impl AsFd, len: usize) -> std::result::Result<(), SealError> {
    verify_sealed(&fd, len)?;
    verify_filled(fd, len)
}

/// Checks that every page of a memfd is allocated whose seals rule out later holes.
fn verify_filled(fd: impl AsFd, len: usize) -> std::result::Result<(), SealError> {
    // In units of 512 bytes; pages that are swapped out count too.
    let blocks = fstat(fd).map_err(|_: Errno| SealError::NotMemfd)?.st_blocks as u64;
    if blocks >= (len as u64).div_ceil(512) { Ok(()) } else { Err(SealError::Holes) }
}

/// Returns the seals of a memfd of ordinary pages and of a final size of `len` bytes.
fn check(fd: impl AsFd, len: usize) -> std::result::Result<SealFlags, SealError> {
    // Only memfds have seals; files of any other kind answer EINVAL.
    let seals = fcntl_get_seals(&fd).map_err(|_| SealError::NotMemfd)?;
    if !seals.contains(FIXED) {
        return Err(SealError::NotSealed);
    }
    let of: i64 = fstatfs(&fd).map_err(|_: Errno| SealError::NotMemfd)?.f_type;
    if of != TMPFS {
        return Err(SealError::NotTmpfs);
    }
    let size = fstat(&fd).map_err(|_: Errno| SealError::NotMemfd)?.st_size as u64;
    if size == len as u64 { Ok(seals) } else { Err(SealError::Size(size)) }
}

/// A read-only mapping of a memfd whose contents are final.
#[derive(Debug)]
pub struct Final {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: memory that no process writes.
unsafe impl Send for Final {}
// SAFETY: as above.
unsafe impl Sync for Final {}

impl Final {
    /// Maps the `len` bytes of `fd` if its seals make both its size and its contents final, and
    /// every page is allocated.
    pub fn map(fd: impl AsFd, len: usize) -> std::result::Result<Final, SealError> {
        verify_final(&fd, len)?;
        if len == 0 {
            return Ok(Final { start: NonNull::dangling(), len });
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let start = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE, fd, 0) };
        let start = start.ok().and_then(|start| NonNull::new(start.cast()));
        Ok(Final { start: start.ok_or(SealError::NoMemory)?, len })
    }
}

impl Deref for Final {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped as long as `self` lives. By the seals no process can write it or take it
        // away (`verify_final`), so it may be a slice although other processes map it too.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Final {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: ours since `map`, and no slice outlives `self`.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

/// Checks that `fd` is a memfd of exactly `len` bytes whose contents are final, and that every page
/// is allocated.
pub fn verify_final(fd: impl AsFd, len: usize) -> std::result::Result<(), SealError> {
    let seals = fcntl_get_seals(&fd).map_err(|_| SealError::NotMemfd)?;
    if !seals.contains(SealFlags::WRITE) {
        return Err(SealError::NotSealed);
    }
    verify_fixed(&fd, len)?;
    verify_filled(fd, len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Shown;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn what_is_final_is_read_where_it_is() {
        let fd = create_with("shunt-test", b"hello").unwrap();
        assert_eq!(&*Final::map(&fd, 5).unwrap(), b"hello");
        assert_eq!(Final::map(&fd, 4).unwrap_err(), SealError::Size(5));
        assert!(Final::map(create_with("shunt-test", b"").unwrap(), 0).unwrap().is_empty());
        let open = create_fixed("shunt-test", 5).unwrap();
        assert_eq!(Final::map(&open, 5).unwrap_err(), SealError::NotSealed);
    }

    #[test]
    fn a_sealed_memfd_cannot_change_its_size() {
        let (fd, mapping) = create_sealed("shunt-test", 8192).unwrap();
        assert_eq!((verify_fixed(&fd, 8192), verify_sealed(&fd, 8192)), (Ok(()), Ok(())));
        assert_eq!(verify_sealed(&fd, 4096), Err(SealError::Size(8192)));
        mapping.word(8).unwrap().store(7, Relaxed);
        assert!(ftruncate(&fd, 4096).is_err());
        assert!(ftruncate(&fd, 16384).is_err());
        assert!(fcntl_add_seals(&fd, SealFlags::WRITE).is_err());
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn nobody_punches_holes_into_sealed_memory_or_maps_it_for_writing() {
        let fd = create_fixed("shunt-test", 8192).unwrap();
        let punch = || {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&fd, flags, 0, 4096)
        };
        let writer = Mapping::map(&fd, 8192).unwrap();
        writer.word(0).unwrap().store(7, Relaxed);
        assert_eq!((punch(), verify_sealed(&fd, 8192)), (Ok(()), Err(SealError::Writable)));
        seal(&fd).unwrap();
        writer.word(0).unwrap().store(9, Relaxed);
        assert_eq!((punch(), verify_sealed(&fd, 8192)), (Err(Errno::PERM), Ok(())));
        // SAFETY: inside the mapping.
        let removed =
            unsafe { rustix::mm::madvise(writer.as_ptr().cast(), 4096, rustix::mm::Advice::LinuxRemove) };
        // The mapping is made without access first, and is refused when it asks for access.
        assert_eq!((removed, Mapping::map(&fd, 8192).unwrap_err()), (Err(Errno::PERM), Errno::ACCESS));
        let reader = Shown::map(&fd, 8192).unwrap();
        assert_eq!(reader.word(0).map(|word| word.load(Relaxed)), Some(9));
    }

    /// Touching a huge page raises SIGBUS when the system has none left.
    #[test]
    fn huge_pages_are_refused() {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        // A kernel without huge pages refuses the flag.
        let Ok(fd) = memfd_create("shunt-test", flags) else { return };
        ftruncate(&fd, 2 << 20).unwrap();
        fcntl_add_seals(&fd, FIXED | CLOSED).unwrap();
        assert_eq!(verify_sealed(&fd, 2 << 20), Err(SealError::NotTmpfs));
    }

    #[test]
    fn memory_with_holes_is_not_whole() {
        let (fd, mapping) = create_sealed("shunt-test", 4 * 4096).unwrap();
        mapping.word(0).unwrap().store(7, Relaxed);
        mapping.word(2 * 4096).unwrap().store(7, Relaxed);
        assert_eq!(
            (verify_sealed(&fd, 4 * 4096), verify_whole(&fd, 4 * 4096)),
            (Ok(()), Err(SealError::Holes))
        );
        fill(&fd, 4 * 4096).unwrap();
        assert_eq!(verify_whole(&fd, 4 * 4096), Ok(()));
        assert_eq!(mapping.word(2 * 4096).map(|word| word.load(Relaxed)), Some(7));
        let (fd, _mapping) = create_whole("shunt-test", 5000).unwrap();
        assert_eq!((verify_whole(&fd, 5000), verify_whole(&fd, 4096)), (Ok(()), Err(SealError::Size(5000))));
        assert_eq!(verify_whole(create_fixed("shunt-test", 4096).unwrap(), 4096), Err(SealError::Writable));
    }

    /// The maker of final memory may have left pages out, and can still fill them.
    #[test]
    fn final_memory_with_holes_is_not_read_until_it_is_filled() {
        let fd = create_fixed("shunt-test", 3 * 4096).unwrap();
        pwrite(&fd, b"hello", 4096).unwrap();
        fcntl_add_seals(&fd, SealFlags::WRITE).unwrap();
        assert_eq!(verify_final(&fd, 3 * 4096), Err(SealError::Holes));
        assert_eq!(Final::map(&fd, 3 * 4096).unwrap_err(), SealError::Holes);
        fill(&fd, 3 * 4096).unwrap();
        assert_eq!(&Final::map(&fd, 3 * 4096).unwrap()[4094..4102], b"\0\0hello\0");
    }

    #[test]
    fn contents_are_final() {
        let fd = create_with("shunt-test", b"hello").unwrap();
        assert_eq!(verify_fixed(&fd, 5), Ok(()));
        assert!(pwrite(&fd, b"x", 0).is_err());
        let mut back = [0; 8];
        assert_eq!(rustix::io::pread(&fd, &mut back, 0), Ok(5));
        assert_eq!(&back[..5], b"hello");
    }

    #[test]
    fn everything_else_is_refused() {
        let open = memfd_create("shunt-test", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, 4096).unwrap();
        assert_eq!(verify_sealed(&open, 4096), Err(SealError::NotSealed));
        fcntl_add_seals(&open, SealFlags::SHRINK).unwrap();
        assert_eq!(verify_sealed(&open, 4096), Err(SealError::NotSealed));

        let (reader, _writer) = std::io::pipe().unwrap();
        assert_eq!(verify_sealed(&reader, 0), Err(SealError::NotMemfd));
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(verify_sealed(&file, file.metadata().unwrap().len() as usize).is_err());
    }
}
