//! Asks the file of a mapping whether an address there is data. This is asked only of the few
//! places outside of all functions that look like a system call.

use std::os::fd::OwnedFd;

use rustix::fs::{CWD, Mode, OFlags, fstat, openat};
use shunt_census::Memory;

use super::maps::Mapping;
use crate::base::private::close_owned;

/// An object's file.
struct Source(Option<OwnedFd>);

impl Source {
    /// Opens the file of a mapping. Returns `None` if another file is at its path by now.
    fn open(mapping: &Mapping) -> Option<Source> {
        // Opening a pipe at that path would wait for its other end.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let source = Source(Some(openat(CWD, mapping.path()?, flags, Mode::empty()).ok()?));
        let is_its = fstat(source.0.as_ref()?).is_ok_and(|file| file.st_ino == mapping.inode);
        is_its.then_some(source)
    }
}

impl Memory for Source {
    fn read(&self, offset: u64, into: &mut [u8]) -> bool {
        let read = |file| rustix::io::pread(file, &mut *into, offset);
        self.0.as_ref().map(read).is_some_and(|count| count == Ok(into.len()))
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Some(file) = self.0.take() {
            close_owned(file);
        }
    }
}

/// Returns whether the byte at `address`, in this mapping, is certainly data.
pub(super) fn is_data(mapping: &Mapping, memory: &impl Memory, address: u64) -> bool {
    Source::open(mapping)
        .is_some_and(|file| shunt_census::is_data(memory, mapping.object as u64, &file, address))
}
