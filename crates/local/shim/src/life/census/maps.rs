//! A parser of `/proc/self/maps`, line by line.

use std::os::fd::OwnedFd;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use crate::base::private::close_owned;

/// The longest part of a name that is kept.
const NAME: usize = 128;

/// A line of the file.
pub(super) struct Mapping {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) is_executable: bool,
    pub(super) is_writable: bool,
    pub(super) inode: u64,
    /// The start of the first of the adjacent mappings of the same file.
    pub(super) object: usize,
    name: [u8; NAME],
    len: usize,
}

impl Mapping {
    /// Makes the mapping of a segment of an object that the dynamic linker has loaded.
    pub(super) fn of_object(range: std::ops::Range<usize>, object: usize, path: &[u8]) -> Mapping {
        let (name, len) = kept(path);
        let (from, to) = (range.start, range.end);
        Mapping { from, to, is_executable: true, is_writable: false, inode: 0, object, name, len }
    }

    /// Returns the whole path, if it is a path and has been kept whole.
    pub(super) fn path(&self) -> Option<&[u8]> {
        (self.len < NAME && self.name().starts_with(b"/")).then(|| self.name())
    }

    /// Returns the last bytes of the path, or the kernel's name of the mapping.
    pub(super) fn name(&self) -> &[u8] {
        &self.name[..self.len]
    }
}

/// The mappings of the process, in the order of their addresses.
pub(super) struct Lines<'a> {
    file: Option<OwnedFd>,
    text: &'a mut [u8],
    /// The part of the text that has been read and not been parsed.
    from: usize,
    to: usize,
    is_over: bool,
    has_failed: bool,
    /// The object of the last line: its inode and its start.
    last: (u64, usize),
}

impl<'a> Lines<'a> {
    pub(super) fn open(text: &'a mut [u8]) -> Option<Lines<'a>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = openat(CWD, c"/proc/self/maps", flags, Mode::empty()).ok()?;
        let lines =
            Lines { file: Some(file), text, from: 0, to: 0, is_over: false, has_failed: false, last: (0, 0) };
        Some(lines)
    }

    /// Returns whether all mappings have been read.
    pub(super) fn is_whole(&self) -> bool {
        self.is_over && !self.has_failed
    }

    pub(super) fn next(&mut self) -> Option<Mapping> {
        loop {
            let rest = &self.text[self.from..self.to];
            if let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let mapping = parse(&rest[..end], self.last);
                self.from += end + 1;
                let Some(mapping) = mapping else {
                    self.has_failed = true;
                    continue;
                };
                self.last = (mapping.inode, mapping.object);
                return Some(mapping);
            }
            if self.is_over || self.has_failed {
                return None;
            }
            self.fill();
        }
    }

    fn fill(&mut self) {
        self.text.copy_within(self.from..self.to, 0);
        (self.from, self.to) = (0, self.to - self.from);
        let Some(file) = &self.file else { return };
        match rustix::io::read(file, &mut self.text[self.to..]) {
            // A line that does not fit into the buffer is an error.
            Ok(0) => {
                self.is_over = self.to == 0;
                self.has_failed = self.to != 0;
            }
            Ok(count) => self.to += count,
            Err(Errno::INTR) => {}
            Err(_) => self.has_failed = true,
        }
    }
}

impl Drop for Lines<'_> {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            close_owned(file);
        }
    }
}

/// Parses a line such as `7f00-7f01 r-xp 00001000 fe:00 42    /usr/lib/x.so`. `last` is the inode
/// and the start of the object of the line before.
fn parse(line: &[u8], last: (u64, usize)) -> Option<Mapping> {
    let line = line.trim_ascii_end();
    let mut words = line.splitn(6, |byte| *byte == b' ');
    let mut word = || words.next().and_then(|word| std::str::from_utf8(word).ok());
    let (from, to) = word()?.split_once('-')?;
    let access = word()?.as_bytes();
    let offset = u64::from_str_radix(word()?, 16).ok()?;
    let _device = word()?;
    let inode = word()?.parse().ok()?;
    let from = usize::from_str_radix(from, 16).ok()?;
    let path = words.next().unwrap_or_default().trim_ascii_start();
    let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
    let (name, len) = kept(path);
    let is_same = inode != 0 && inode == last.0 && offset != 0;
    Some(Mapping {
        from,
        to: usize::from_str_radix(to, 16).ok()?,
        is_executable: access.get(2) == Some(&b'x'),
        is_writable: access.get(1) == Some(&b'w'),
        inode,
        object: if is_same { last.1 } else { from },
        name,
        len,
    })
}

/// Returns the last bytes of a path, and their number.
fn kept(path: &[u8]) -> ([u8; NAME], usize) {
    let kept = &path[path.len().saturating_sub(NAME)..];
    let mut name = [0; NAME];
    name[..kept.len()].copy_from_slice(kept);
    (name, kept.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_understood() {
        let first =
            parse(b"7f00-7f10 r--p 00000000 fe:00 42                         /a b/x.so", (0, 0)).unwrap();
        assert_eq!((first.from, first.to, first.object, first.inode), (0x7f00, 0x7f10, 0x7f00, 42));
        assert!(!first.is_executable && !first.is_writable && first.name() == b"/a b/x.so");
        let code = parse(b"7f10-7f20 r-xp 00001000 fe:00 42  /a b/x.so (deleted)", (42, 0x7f00)).unwrap();
        assert!(code.is_executable && code.object == 0x7f00 && code.name() == b"/a b/x.so");
        // Another copy of the same file.
        assert_eq!(parse(b"8f00-8f10 r-xp 00000000 fe:00 42 /x", (42, 0x7f00)).unwrap().object, 0x8f00);
        let nameless = parse(b"7f30-7f40 rwxp 00000000 00:00 0 ", (42, 0x7f00)).unwrap();
        assert!(nameless.is_executable && nameless.is_writable && nameless.name().is_empty());
        assert!(parse(b"7f30-7f40", (0, 0)).is_none());
    }
}
