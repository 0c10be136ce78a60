//! Children: those that hold a socket of ours although we have not seen them being made, and those of a child that has become
//! another program. The first is asked where the answer would end the connection for them, too: before a close that resets, or
//! one of a socket that the broker still holds.

use std::ffi::CStr;
use std::io::Write;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RawDir, fstat, openat, statat};
use rustix::io::{Errno, Result, read};
use rustix::process::{WaitId, WaitIdOptions, waitid};

use crate::base::private::{borrow, close_owned};

/// Memory for the entries of a directory that are read at a time, of three directories at once: one is larger than any.
const ENTRIES: usize = 512;

/// A directory or a file, closed as our own descriptors are: what `OwnedFd` calls is the program's close, which is a hook.
pub(crate) struct Opened(Option<OwnedFd>);

/// Whether a child of this process may hold the socket `fd`: it has a descriptor of it, or cannot be looked into. One
/// system call where there are no children.
pub(crate) fn may_hold(fd: RawFd) -> bool {
    exist() && any_holds(fd).unwrap_or(true)
}

/// Whether this process has children, however they were made.
fn exist() -> bool {
    // Looks and takes nothing. Children whose end is told by no SIGCHLD count too.
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
                // It has ended meanwhile.
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

/// Whether `is_it` says so of a process, or of any that it has made and that are still its family's.
pub(crate) fn any_of_family(pid: u32, is_it: impl Fn(u32) -> Result<bool>) -> Result<bool> {
    let mut family = vec![pid];
    while let Some(pid) = family.pop() {
        if is_it(pid)? {
            return Ok(true);
        }
        let mut name = [0; 64];
        let threads = match open(CWD, write(&mut name, format_args!("/proc/{pid}/task"))?) {
            // It has ended meanwhile.
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

/// Whether `is_it` says so of any entry of a directory.
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

/// Whether `is_it` says so of any number in a file that separates them by spaces.
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

/// Opens it for reading.
pub(crate) fn open(directory: impl AsFd, name: &CStr) -> Result<Opened> {
    openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map(|fd| Opened(Some(fd)))
}

impl Opened {
    /// Which descriptor it is.
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

/// A name without allocating.
pub(crate) fn write<'b>(buffer: &'b mut [u8; 64], name: std::fmt::Arguments<'_>) -> Result<&'b CStr> {
    let mut rest = &mut buffer[..63];
    rest.write_fmt(name).map_err(|_| Errno::NAMETOOLONG)?;
    CStr::from_bytes_until_nul(buffer).map_err(|_| Errno::NAMETOOLONG)
}
