//! Descriptors by their numbers, across exec: one is left to the program that this process becomes, which takes it by the number that it
//! was told.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

use crate::{Errno, Result, raw};

/// Whatever this process becomes has `fd` at `number`. What has that number here is closed: it must be nobody's.
pub fn leave(fd: OwnedFd, number: i32) -> Result<()> {
    if fd.as_raw_fd() == number {
        fcntl_setfd(&fd, FdFlags::empty())?;
        // It is the next program's.
        std::mem::forget(fd);
        return Ok(());
    }
    let arguments = [fd.as_raw_fd() as usize, usize::try_from(number).map_err(|_| Errno::BADF)?, 0, 0, 0, 0];
    // SAFETY: the arguments are values, and the caller has nothing at that number.
    unsafe { raw::call(libc::SYS_dup3, arguments) }.map(drop)
}

/// What was left at `number`, which the next program does not get. EBADF: nothing was.
pub fn take(number: i32) -> Result<OwnedFd> {
    if number <= libc::STDERR_FILENO {
        return Err(Errno::BADF);
    }
    // SAFETY: borrowed for the next call only, which says whether there is one.
    let there = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl_getfd(there)?;
    fcntl_setfd(there, FdFlags::CLOEXEC)?;
    // SAFETY: it is open, and whoever started this program says that it is for us.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_at_a_number_is_there() {
        let (reader, writer) = std::io::pipe().unwrap();
        // No test of this program has as many.
        leave(writer.into(), 900).unwrap();
        let taken = take(900).unwrap();
        assert!(fcntl_getfd(&taken).unwrap().contains(FdFlags::CLOEXEC));
        leave(taken, 900).unwrap();
        let taken = take(900).unwrap();
        rustix::io::write(&taken, b"x").unwrap();
        drop(taken);
        let mut bytes = [0; 2];
        assert_eq!(rustix::io::read(&reader, &mut bytes), Ok(1));
        assert_eq!(rustix::io::read(&reader, &mut bytes), Ok(0), "nobody else has it");
        assert_eq!(take(900).map(drop), Err(Errno::BADF));
        assert_eq!(take(0).map(drop), Err(Errno::BADF));
    }
}
