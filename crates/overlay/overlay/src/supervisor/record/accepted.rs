//! The accepted connections of a record that no call has got yet: by the fds of the socket that the
//! program is to get, and of the conversation about it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use super::{ACCEPTED, ACCEPTED_AT, ENTRY, NEVER, Record};

/// The bit of an entry that says that the question was sent. fds are smaller.
const ASKED: u64 = 1 << 63;
/// The half of an entry with the socket. The other one has the conversation.
const SOCKET: u64 = u32::MAX as u64;

/// The entry of an accepted connection, until it is dropped. `None` if there was no room.
#[derive(Debug)]
pub(in crate::supervisor) struct Entry(Option<(Arc<Record>, usize)>);

/// The conversation in an entry. It must be [cleared](Noted::clear) before its fd is closed, or used
/// for another connection: a successor would take another socket with this fd for it.
#[derive(Debug)]
pub(in crate::supervisor) struct Noted(Option<(Arc<Record>, usize)>);

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
        entry.set(socket);
        entry
    }

    /// Changes the fds of an entry, unless `change` returns `None`.
    fn change(&self, index: usize, change: impl FnMut(u64) -> Option<u64>) {
        let _ = self.word(entry_at(index)).fetch_update(SeqCst, SeqCst, change);
    }

    /// Returns the accepted connections that a killed supervisor has left.
    pub(in crate::supervisor) fn left(self: &Arc<Record>) -> Vec<Left> {
        let of_entry = |index: usize| {
            let packed = self.word(entry_at(index)).load(SeqCst);
            let number = |half: u64| (half != 0).then(|| half as i32 - 1);
            Some(Left {
                socket: number(packed & SOCKET)?,
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
    /// Notes the socket that the program is to get, without a conversation.
    pub(in crate::supervisor) fn set(&self, socket: &OwnedFd) {
        let Some((record, index)) = &self.0 else { return };
        record.word(entry_at(*index)).store(half(socket), SeqCst);
    }

    /// Notes the conversation about the connection, before the question is sent.
    pub(in crate::supervisor) fn begin(&self, conversation: &OwnedFd) -> Noted {
        if let Some((record, index)) = &self.0 {
            record.change(*index, |packed| Some(half(conversation) << 32 | packed & SOCKET));
        }
        self.noted()
    }

    /// Returns the note of the conversation that the entry has.
    pub(in crate::supervisor) fn noted(&self) -> Noted {
        Noted(self.0.clone())
    }

    /// Notes that the question about the connection was sent.
    pub(in crate::supervisor) fn set_asked(&self) {
        if let Some((record, index)) = &self.0 {
            record.word(entry_at(*index)).fetch_or(ASKED, SeqCst);
        }
    }
}

impl Noted {
    /// Removes the conversation from the entry, if it is there.
    pub(in crate::supervisor) fn clear(&self, conversation: &OwnedFd) {
        let Some((record, index)) = &self.0 else { return };
        // The entry may be another connection's by now. But only one can have this fd.
        let is_there = |packed: u64| (packed & !ASKED) >> 32 == half(conversation);
        record.change(*index, |packed| is_there(packed).then_some(packed & SOCKET));
    }
}

/// Returns what an entry has for a descriptor: its fd and 1, because 0 stands for none.
fn half(fd: &OwnedFd) -> u64 {
    fd.as_raw_fd() as u64 + 1
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
