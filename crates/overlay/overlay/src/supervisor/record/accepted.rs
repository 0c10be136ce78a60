//! The accepted connections of a record that no call has got yet: by the fds of the socket that the
//! program is to get, and of the conversation about it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use super::{ACCEPTED, ACCEPTED_AT, ENTRY, NEVER, Record};

/// The bit of an entry that says that the question was sent. fds are smaller.
const ASKED: u64 = 1 << 63;

/// The entry of an accepted connection, until it is dropped. `None` if there was no room.
#[derive(Debug)]
pub(in crate::supervisor) struct Entry(Option<(Arc<Record>, usize)>);

/// An entry that a killed supervisor has left.
#[derive(Debug)]
pub(in crate::supervisor) struct Left {
    pub(in crate::supervisor) entry: Entry,
    pub(in crate::supervisor) socket: i32,
    pub(in crate::supervisor) conversation: Option<i32>,
    /// The question about it has been sent.
    pub(in crate::supervisor) is_asked: bool,
    /// The cookie of the listening socket.
    pub(in crate::supervisor) cookie: u64,
}

impl Record {
    /// Notes an accepted connection of that listening socket.
    pub(in crate::supervisor) fn accepted(self: &Arc<Record>, socket: &OwnedFd, cookie: u64) -> Entry {
        let Some(index) = self.accepted.lock().expect(NEVER).take() else { return Entry(None) };
        let entry = Entry(Some((self.clone(), index)));
        self.word(entry_at(index) + 8).store(cookie, SeqCst);
        entry.set(socket, None);
        entry
    }

    /// Returns the accepted connections that a killed supervisor has left.
    pub(in crate::supervisor) fn left(self: &Arc<Record>) -> Vec<Left> {
        let of_entry = |index: usize| {
            let packed = self.word(entry_at(index)).load(SeqCst);
            let number = |half: u64| (half != 0).then(|| half as i32 - 1);
            Some(Left {
                socket: number(packed & u64::from(u32::MAX))?,
                conversation: number((packed & !ASKED) >> 32),
                is_asked: packed & ASKED != 0,
                cookie: self.word(entry_at(index) + 8).load(SeqCst),
                entry: Entry(Some((self.clone(), index))),
            })
        };
        (0..ACCEPTED).filter_map(of_entry).collect()
    }
}

impl Entry {
    /// Notes the socket that the program is to get, and the conversation about it.
    pub(in crate::supervisor) fn set(&self, socket: &OwnedFd, conversation: Option<&OwnedFd>) {
        let Some((record, index)) = &self.0 else { return };
        let half = |fd: Option<&OwnedFd>| fd.map_or(0, |fd| fd.as_raw_fd() as u64 + 1);
        record.word(entry_at(*index)).store(half(conversation) << 32 | half(Some(socket)), SeqCst);
    }
}

impl Entry {
    /// Notes that the question about the connection was sent.
    pub(in crate::supervisor) fn set_asked(&self) {
        if let Some((record, index)) = &self.0 {
            record.word(entry_at(*index)).fetch_or(ASKED, SeqCst);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let Some((record, index)) = self.0.take() else { return };
        record.word(entry_at(index)).store(0, SeqCst);
        record.accepted.lock().expect(NEVER).put(index);
    }
}

pub(super) fn entry_at(index: usize) -> usize {
    ACCEPTED_AT + index * ENTRY
}
