//! The kernel's interest list of an epoll instance, as `/proc/PID/fdinfo` shows it.

use std::ffi::CStr;
use std::io::Write;
use std::os::fd::RawFd;

use rustix::buffer::spare_capacity;
use rustix::fs::{CWD, Mode, OFlags, openat, readlinkat_raw};

use crate::base::private::close_owned;

/// One registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) fd: RawFd,
    pub(super) events: u32,
    pub(super) data: u64,
    /// The inode of the registered file, whatever `fd` names by now.
    pub(super) inode: u64,
}

/// Lists all registrations of the epoll instance `fd` of a process. Returns `None` if it is not
/// one, or the list cannot be read.
pub(super) fn of(pid: u32, fd: RawFd) -> Option<Vec<Listed>> {
    let mut name = [0; 48];
    let mut target = [std::mem::MaybeUninit::<u8>::uninit(); 32];
    let link = path(&mut name, format_args!("/proc/{pid}/fd/{fd}"))?;
    let (target, _) = readlinkat_raw(CWD, link, &mut target).ok()?;
    if *target != *b"anon_inode:[eventpoll]" {
        return None;
    }
    let text = read(path(&mut name, format_args!("/proc/{pid}/fdinfo/{fd}"))?)?;
    text.split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"tfd:")).map(parse).collect()
}

/// Parses a line such as
/// `tfd:        5 events:       19 data:                5  pos:0 ino:3e1 sdev:8`.
fn parse(line: &[u8]) -> Option<Listed> {
    let mut words = std::str::from_utf8(line).ok()?.split([':', ' ']).filter(|one| !one.is_empty());
    let mut after = |name| words.find(|word| *word == name).and_then(|_| words.next());
    Some(Listed {
        fd: after("tfd")?.parse().ok()?,
        events: u32::from_str_radix(after("events")?, 16).ok()?,
        data: u64::from_str_radix(after("data")?, 16).ok()?,
        inode: u64::from_str_radix(after("ino")?, 16).ok()?,
    })
}

fn read(path: &CStr) -> Option<Vec<u8>> {
    let file = openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = Vec::new();
    let whole = loop {
        text.reserve(4096);
        match rustix::io::read(&file, spare_capacity(&mut text)) {
            Ok(0) => break true,
            Ok(_) => {}
            Err(_) => break false,
        }
    };
    close_owned(file);
    whole.then_some(text)
}

/// Formats a path without allocating.
fn path<'b>(buffer: &'b mut [u8; 48], name: std::fmt::Arguments<'_>) -> Option<&'b CStr> {
    buffer.fill(0);
    let mut rest = &mut buffer[..47];
    rest.write_fmt(name).ok()?;
    CStr::from_bytes_until_nul(buffer).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernel_is_understood() {
        let line = b"tfd:        7 events: 4000201d data: ffffffff00000065  pos:0 ino:1b5a sdev:8";
        let listed = Listed { fd: 7, events: 0x4000_201d, data: 0xffff_ffff_0000_0065, inode: 0x1b5a };
        assert_eq!(parse(line), Some(listed));
        assert_eq!(parse(b"tfd: 7 events: x"), None);
    }
}
