//! Copies descriptors and memory of another process. The kernel allows that to a process that may
//! trace the other: one of the same user, or one with CAP_SYS_PTRACE.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::{Errno, Result, raw};

/// PIDFD_THREAD: the pidfd refers to a thread instead of a process. Linux 6.9.
const PIDFD_THREAD: u32 = libc::O_EXCL as u32;

/// Duplicates the fd `number` of the thread `thread`. Fails with EPERM if this process may not
/// trace it, with ESRCH if there is no such thread, and with EBADF if there is no such fd.
pub fn descriptor(thread: u32, number: i32) -> Result<OwnedFd> {
    let pid = Pid::from_raw(thread as i32).ok_or(Errno::SRCH)?;
    let by_thread = pidfd_open(pid, PidfdFlags::from_bits_retain(PIDFD_THREAD));
    // Older kernels accept only the main thread. All threads nearly always share its fd table.
    let pidfd = match by_thread {
        Err(Errno::INVAL) => pidfd_open(pid, PidfdFlags::empty())?,
        opened => opened?,
    };
    let arguments = [pidfd.as_raw_fd() as usize, number as usize, 0, 0, 0, 0];
    // SAFETY: the arguments are values.
    let fd = unsafe { raw::call(libc::SYS_pidfd_getfd, arguments)? };
    // SAFETY: the kernel has just made this descriptor for us, close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Copies the bytes at `address` in another process. Fails with EFAULT if not all of them are
/// mapped.
pub fn read(thread: u32, address: u64, into: &mut [u8]) -> Result<()> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: the kernel writes at most `into.len()` bytes to `into`.
    unsafe { transfer(libc::SYS_process_vm_readv, thread, address, local) }
}

/// Copies `bytes` to `address` in another process. Fails with EFAULT if not all of them can be
/// written.
pub fn write(thread: u32, address: u64, bytes: &[u8]) -> Result<()> {
    let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: the kernel only reads `bytes`.
    unsafe { transfer(libc::SYS_process_vm_writev, thread, address, local) }
}

/// Runs process_vm_readv or process_vm_writev.
///
/// # Safety
/// `local` must be memory of this process that `call` may read or write.
unsafe fn transfer(call: i64, thread: u32, address: u64, local: libc::iovec) -> Result<()> {
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: local.iov_len };
    let (local_at, remote_at) = (&raw const local as usize, &raw const remote as usize);
    // SAFETY: the caller's promise. Both descriptions outlive the call, and `remote` is the other
    // process's memory.
    let count = unsafe { raw::call(call, [thread as usize, local_at, 1, remote_at, 1, 0])? };
    if count == local.iov_len { Ok(()) } else { Err(Errno::FAULT) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn descriptors_and_memory_of_a_thread_are_had() {
        let this = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let (reader, writer) = std::io::pipe().unwrap();
        let copy = descriptor(this, writer.as_raw_fd()).unwrap();
        drop(writer);
        rustix::io::write(&copy, b"x").unwrap();
        let mut byte = [0];
        assert_eq!(rustix::io::read(reader.as_fd(), &mut byte), Ok(1));
        assert_eq!(descriptor(this, 1 << 20).unwrap_err(), Errno::BADF);
        let mut there = [1u8, 2, 3];
        write(this, there.as_mut_ptr() as u64, &[4, 5, 6]).unwrap();
        let mut copied = [0; 3];
        read(this, there.as_ptr() as u64, &mut copied).unwrap();
        assert_eq!(copied, [4, 5, 6]);
        assert_eq!(read(this, 8, &mut copied), Err(Errno::FAULT));
    }
}
