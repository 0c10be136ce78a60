//! Sealed memfds: memory that two processes share and neither can shrink under the other (L5).

use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::{pwrite, retry_on_intr};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::process::{Resource, getrlimit};
use thiserror::Error;

use crate::{Errno, Result};

/// Why a descriptor is not memory that can be mapped without risk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SealError {
    /// Not a memfd at all.
    #[error("the descriptor is not a memfd")]
    NotMemfd,
    /// A memfd whose size its owner could still change.
    #[error("the memfd is not sealed against shrinking and growing: seal it before it is sent")]
    NotSealed,
    /// It could not be mapped.
    #[error("there is no room in this process for the memory")]
    NoMemory,
    /// Of another size.
    #[error("the memfd has {0} bytes, not the size its kind must have")]
    Size(u64),
}

/// A file that grows beyond RLIMIT_FSIZE is SIGXFSZ for the program, even in memory.
fn allow_size(len: usize) -> Result<()> {
    let limit = getrlimit(Resource::Fsize).current;
    if limit.is_some_and(|limit| limit < len as u64) { Err(Errno::FBIG) } else { Ok(()) }
}

/// Makes a zeroed, close-on-exec memfd of exactly `len` bytes whose size and seals are final.
pub fn create_sealed(name: &str, len: usize) -> Result<OwnedFd> {
    allow_size(len)?;
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, len as u64)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Makes a close-on-exec memfd that holds `bytes` and can never change again.
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

/// Checks that `fd` is a memfd of exactly `len` bytes that nobody can shrink or grow any more.
pub fn verify_sealed(fd: impl AsFd, len: usize) -> std::result::Result<(), SealError> {
    // Only memfds have seals; files of any other kind answer EINVAL.
    let seals = fcntl_get_seals(&fd).map_err(|_| SealError::NotMemfd)?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err(SealError::NotSealed);
    }
    let size = fstat(&fd).map_err(|_: Errno| SealError::NotMemfd)?.st_size as u64;
    if size == len as u64 { Ok(()) } else { Err(SealError::Size(size)) }
}

/// What a memfd holds that can never change again, read where it is.
#[derive(Debug)]
pub struct Final {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: memory that nobody writes.
unsafe impl Send for Final {}
// SAFETY: as above.
unsafe impl Sync for Final {}

impl Final {
    /// Maps the `len` bytes of `fd` if they are final: neither their number nor what they are can be changed by anybody.
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
        // SAFETY: mapped as long as `self` lives. By the seals nobody can write it or take it away (`verify_final`), so it
        // may be seen as a slice although others have it too.
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

/// Checks that `fd` is a memfd of exactly `len` bytes, and that nobody can change those bytes any more.
pub fn verify_final(fd: impl AsFd, len: usize) -> std::result::Result<(), SealError> {
    let seals = fcntl_get_seals(&fd).map_err(|_| SealError::NotMemfd)?;
    if !seals.contains(SealFlags::WRITE) {
        return Err(SealError::NotSealed);
    }
    verify_sealed(fd, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_final_is_read_where_it_is() {
        let fd = create_with("shunt-test", b"hello").unwrap();
        assert_eq!(&*Final::map(&fd, 5).unwrap(), b"hello");
        assert_eq!(Final::map(&fd, 4).unwrap_err(), SealError::Size(5));
        assert!(Final::map(create_with("shunt-test", b"").unwrap(), 0).unwrap().is_empty());
        let open = create_sealed("shunt-test", 5).unwrap();
        assert_eq!(Final::map(&open, 5).unwrap_err(), SealError::NotSealed);
    }

    #[test]
    fn a_sealed_memfd_cannot_change_its_size() {
        let fd = create_sealed("shunt-test", 8192).unwrap();
        assert_eq!(verify_sealed(&fd, 8192), Ok(()));
        assert_eq!(verify_sealed(&fd, 4096), Err(SealError::Size(8192)));
        assert!(ftruncate(&fd, 4096).is_err());
        assert!(ftruncate(&fd, 16384).is_err());
        assert!(fcntl_add_seals(&fd, SealFlags::WRITE).is_err());
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn contents_are_final() {
        let fd = create_with("shunt-test", b"hello").unwrap();
        assert_eq!(verify_sealed(&fd, 5), Ok(()));
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
