//! Marks of promised connections, which a supervisor reads without its router. So it knows from
//! which of its accepted connections it must await the router's answer, also if that is stopped.
//!
//! Each network namespace has a file of [`SLOTS`] bytes. Byte `cookie % SLOTS` is the number of
//! marks of such cookies, or 255 if there are more. A slot that two sockets share is harmless: the
//! supervisor awaits an answer that it does not need.
//!
//! Router and supervisor each write first and read then, so at least one of them sees the other:
//!
//! ```text
//! router:      writes the mark ──► checks that the socket is in the backlog, or its
//!                                  supervisor waits ──► sends the promise
//! supervisor:  accepts, or stops waiting ──► reads the mark ──► uses the overlay
//! ```
//!
//! A container can write to its namespace's file, and so harms only itself.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};
use shunt_sys::Errno;

use crate::lock::lock;

/// The number of slots. Few connections are promised and not yet taken.
const SLOTS: usize = 4096;

/// The marks of a network namespace.
#[derive(Debug)]
pub(crate) struct Marks {
    file: OwnedFd,
    counts: Mutex<Vec<u32>>,
}

/// A mark, until it is dropped.
#[derive(Debug)]
pub(crate) struct Mark {
    marks: Arc<Marks>,
    slot: usize,
}

impl Marks {
    pub(crate) fn new() -> Result<Marks, Errno> {
        let file = memfd_create("shunt-marks", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, SLOTS as u64)?;
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok(Marks { file, counts: Mutex::new(vec![0; SLOTS]) })
    }

    /// Marks a socket. The mark is written when this returns.
    pub(crate) fn add(self: &Arc<Marks>, cookie: u64) -> Result<Mark, Errno> {
        let slot = slot(cookie);
        self.change(slot, |count| count + 1)?;
        Ok(Mark { marks: self.clone(), slot })
    }

    fn change(&self, slot: usize, change: impl FnOnce(u32) -> u32) -> Result<(), Errno> {
        let mut counts = lock(&self.counts);
        let count = change(counts[slot]);
        pwrite(&self.file, &[count.min(u8::MAX.into()) as u8], slot as u64)?;
        counts[slot] = count;
        Ok(())
    }
}

impl AsFd for Marks {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // If this fails, supervisors wait for the router longer than they have to.
        let _ = self.marks.change(self.slot, |count| count - 1);
    }
}

/// Returns `true` if the socket with that cookie may be marked in `file`. The file is another
/// process's, so all errors count as a mark.
pub(crate) fn may_be_marked(file: BorrowedFd<'_>, cookie: u64) -> bool {
    let mut count = [0];
    pread(file, &mut count, slot(cookie) as u64) != Ok(1) || count != [0]
}

fn slot(cookie: u64) -> usize {
    (cookie % SLOTS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_marked_until_the_last_mark_of_its_slot_is_dropped() {
        let marks = Arc::new(Marks::new().unwrap());
        let is_marked = |cookie| may_be_marked(marks.as_fd(), cookie);
        assert!(!is_marked(7));
        let many: Vec<Mark> = (0..300).map(|_| marks.add(7).unwrap()).collect();
        let other = marks.add(7 + SLOTS as u64).unwrap();
        assert!(is_marked(7) && !is_marked(8));
        drop(many);
        assert!(is_marked(7));
        drop(other);
        assert!(!is_marked(7));
    }

    #[test]
    fn every_socket_counts_as_marked_in_a_file_that_has_no_marks() {
        let empty = memfd_create("empty", MemfdFlags::CLOEXEC).unwrap();
        assert!(may_be_marked(empty.as_fd(), 7));
    }
}
