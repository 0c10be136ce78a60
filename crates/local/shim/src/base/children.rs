//! Questions about child processes. [`may_hold`] asks whether a child that the shim did not see
//! being made still holds a socket. [`any_of_family`] searches the descendants of a process.
//!
//! `may_hold` is called before a close whose effect would reach those children too: a close that
//! resets the connection, or the close of a socket that the broker still holds.

use std::ffi::CStr;
use std::io::Write;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RawDir, fstat, openat, statat};
use rustix::io::{Errno, Result, read};
use rustix::process::{WaitId, WaitIdOptions, waitid};

use crate::base::private::{borrow, close_owned};

/// Bytes of directory entries that are read at a time. Three directories are open together, so
/// three such buffers are on the stack. One buffer is larger than any entry.
const ENTRIES: usize = 512;

/// An open directory or file. Dropping it calls the shim's own close, because `OwnedFd` would call
/// the program's close, which is a hook.
pub(crate) struct Opened(Option<OwnedFd>);

/// Returns whether a child of this process may hold the socket `fd`: the child has a descriptor of
/// it, or its descriptors cannot be read. Costs one system call if there are no children.
pub(crate) fn may_hold(fd: RawFd) -> bool {
    exist() && any_holds(fd).unwrap_or(true)
}

/// Returns whether this process has children, in whichever way they were made.
fn exist() -> bool {
    // The call reaps nothing. `__WALL` includes children whose end raises no SIGCHLD.
    let all = WaitIdOptions::from_bits_retain(libc::__WALL as u32);
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT | all;
    !matches!(waitid(WaitId::All, look), Err(Errno::CHILD))
}

fn any_holds(fd: RawFd) -> Result<bool> {
    let socket = fstat(borrow(fd))?;
    any_entry(&open(CWD, c"/proc/self/task")?, |threads, thread| {
        let mut name = [0; 64];
        let list = open(threads, write(&mut name, format_args!("{}/children", thread.to_string_lossy()))?)?;
        any_number(&list, |child| {
            let mut name = [0; 64];
            let held = match open(CWD, write(&mut name, format_args!("/proc/{child}/fd"))?) {
                // The child has ended meanwhile.
                Err(Errno::NOENT) => return Ok(false),
                held => held?,
            };
            any_entry(&held, |directory, number| {
                let held = statat(directory, number, AtFlags::empty());
                Ok(held.is_ok_and(|held| (held.st_dev, held.st_ino) == (socket.st_dev, socket.st_ino)))
            })
        })
    })
}

/// Returns whether `is_it` holds for a process or one of its descendants that are still reachable
/// through their parents.
pub(crate) fn any_of_family(pid: u32, is_it: impl Fn(u32) -> Result<bool>) -> Result<bool> {
    let mut family = vec![pid];
    while let Some(pid) = family.pop() {
        if is_it(pid)? {
            return Ok(true);
        }
        let mut name = [0; 64];
        let threads = match open(CWD, write(&mut name, format_args!("/proc/{pid}/task"))?) {
            // The process has ended meanwhile.
            Err(Errno::NOENT) => continue,
            threads => threads?,
        };
        any_entry(&threads, |threads, thread| {
            let mut name = [0; 64];
            let list =
                open(threads, write(&mut name, format_args!("{}/children", thread.to_string_lossy()))?)?;
            any_number(&list, |child| {
                family.push(child);
                Ok(false)
            })
        })?;
    }
    Ok(false)
}

/// Returns whether `is_it` holds for any entry of a directory, except hidden ones.
pub(crate) fn any_entry(
    directory: &Opened,
    mut is_it: impl FnMut(&Opened, &CStr) -> Result<bool>,
) -> Result<bool> {
    let mut buffer = [const { MaybeUninit::uninit() }; ENTRIES];
    let mut entries = RawDir::new(directory, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name();
        if !name.to_bytes().starts_with(b".") && is_it(directory, name)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns whether `is_it` holds for any number in a file of numbers that end with a space each.
fn any_number(file: &Opened, mut is_it: impl FnMut(u32) -> Result<bool>) -> Result<bool> {
    let mut buffer = [0; 128];
    let mut number = 0;
    loop {
        let count = read(file, &mut buffer)?;
        if count == 0 {
            return Ok(false);
        }
        for byte in &buffer[..count] {
            match byte {
                b'0'..=b'9' => number = number * 10 + u32::from(byte - b'0'),
                _ if is_it(std::mem::take(&mut number))? => return Ok(true),
                _ => {}
            }
        }
    }
}

/// Opens a file or directory for reading.
pub(crate) fn open(directory: impl AsFd, name: &CStr) -> Result<Opened> {
    openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map(|fd| Opened(Some(fd)))
}

impl Opened {
    /// Returns its file descriptor.
    pub(crate) fn number(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Opened {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("taken when dropped").as_fd()
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(close_owned);
    }
}

/// Formats a path into `buffer`, without allocating.
pub(crate) fn write<'b>(buffer: &'b mut [u8; 64], name: std::fmt::Arguments<'_>) -> Result<&'b CStr> {
    let mut rest = &mut buffer[..63];
    rest.write_fmt(name).map_err(|_| Errno::NAMETOOLONG)?;
    CStr::from_bytes_until_nul(buffer).map_err(|_| Errno::NAMETOOLONG)
}
