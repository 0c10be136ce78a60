//! The calls of a record. Each thread of the supervisor has a *slot*, to which the kernel writes the
//! call that the thread receives, and the thread the steps that it is about to make.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

use shunt_sys::Errno;
use shunt_sys::seccomp::{self, Listener, Notification};

use super::{NEVER, Record, SLOT, SLOTS, SLOTS_AT};

const PHASE_AT: usize = seccomp::RECORD;
const HOST_AT: usize = PHASE_AT + 4;
const SENT_AT: usize = PHASE_AT + 8;
const INODE_AT: usize = PHASE_AT + 16;
const TRIES_AT: usize = PHASE_AT + 24;
const CONVERSATION_AT: usize = PHASE_AT + 28;

/// Bits of a slot's phase.
const COMMITS: u32 = 1;
const NONBLOCKING: u32 = 2;
const GIVES: u32 = 4;
const BEGINS: u32 = 8;
const TAKEN: u32 = 16;
const REPLY_SHIFT: u32 = 8;
/// The answer to a call whose socket was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::supervisor) enum Reply {
    /// The kernel makes the call, on the new socket.
    Proceed = 0,
    /// connect has succeeded.
    Connected = 1,
    /// connect is under way, as far as the program sees.
    InProgress = 2,
}

/// The place of a thread for its call.
#[derive(Debug)]
pub(crate) struct Slot {
    record: Arc<Record>,
    pub(super) index: usize,
}

/// The state of a call that a killed supervisor has received.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::supervisor) struct Phase {
    /// Commit was about to be sent on this descriptor, on which that many bytes had been sent.
    pub(in crate::supervisor) commit: Option<(i32, u64)>,
    pub(in crate::supervisor) conversation: i32,
    /// The program has the host connection, and the router knows.
    pub(in crate::supervisor) is_taken: bool,
    pub(in crate::supervisor) reply: u32,
    /// The program's file was made non-blocking for a moment.
    pub(in crate::supervisor) nonblocking: bool,
    /// connect was about to begin for a non-blocking program.
    pub(in crate::supervisor) begins: bool,
    /// A socket with this inode was about to be given to the program.
    pub(in crate::supervisor) gives: Option<u64>,
    /// The number of supervisors that have taken it over.
    pub(in crate::supervisor) tries: u32,
}

impl Record {
    /// Claims a place for a thread's call.
    pub(crate) fn claim(self: &Arc<Record>) -> Option<Arc<Slot>> {
        let index = self.slots.lock().expect(NEVER).take()?;
        Some(Arc::new(Slot { record: self.clone(), index }))
    }

    /// Returns the calls that a killed supervisor has received, and may not have answered.
    pub(in crate::supervisor) fn calls(self: &Arc<Record>) -> Vec<(Notification, Arc<Slot>, Phase)> {
        let of_slot = |index: usize| {
            let notification = self.notification(index)?;
            let slot = Slot { record: self.clone(), index };
            let phase = slot.phase();
            Some((notification, Arc::new(slot), phase))
        };
        (0..SLOTS).filter_map(of_slot).collect()
    }
}

impl Slot {
    /// Receives the next call in this place.
    pub(in crate::supervisor) fn receive(&self, listener: &Listener) -> Result<Notification, Errno> {
        self.half(PHASE_AT).store(0, SeqCst);
        self.half(TRIES_AT).store(0, SeqCst);
        listener.next_into(&self.record.memory, slot_at(self.index))
    }

    /// Notes a call that was received elsewhere.
    pub(in crate::supervisor) fn store(&self, notification: &Notification) {
        let is_inside = notification.store(&self.record.memory, slot_at(self.index));
        debug_assert!(is_inside);
    }

    /// Notes that Commit is about to be sent on this host connection, with the conversation about
    /// it.
    pub(in crate::supervisor) fn commits(
        &self,
        (host, sent): (&OwnedFd, u64),
        conversation: Option<&OwnedFd>,
        reply: Reply,
    ) {
        let conversation = conversation.map_or(0, |socket| socket.as_raw_fd() as u32);
        self.half(CONVERSATION_AT).store(conversation, SeqCst);
        self.half(HOST_AT).store(host.as_raw_fd() as u32, SeqCst);
        self.word(SENT_AT).store(sent, SeqCst);
        self.half(PHASE_AT).fetch_or(COMMITS | (reply as u32) << REPLY_SHIFT, SeqCst);
    }

    pub(in crate::supervisor) fn commits_not(&self) {
        self.half(PHASE_AT).fetch_and(!COMMITS, SeqCst);
    }

    /// Notes that the program has the host connection.
    pub(in crate::supervisor) fn taken(&self) {
        self.half(PHASE_AT).fetch_or(TAKEN, SeqCst);
    }

    /// Notes that connect is about to begin for a non-blocking program.
    pub(in crate::supervisor) fn begins(&self) {
        self.half(PHASE_AT).fetch_or(BEGINS, SeqCst);
    }

    /// Notes that the program's file is about to be non-blocking for a moment, or was.
    pub(in crate::supervisor) fn set_nonblocking(&self, is_nonblocking: bool) {
        match is_nonblocking {
            true => self.half(PHASE_AT).fetch_or(NONBLOCKING, SeqCst),
            false => self.half(PHASE_AT).fetch_and(!NONBLOCKING, SeqCst),
        };
    }

    /// Notes that a socket with this inode is about to be given to the program.
    pub(in crate::supervisor) fn gives(&self, inode: u64) {
        self.word(INODE_AT).store(inode, SeqCst);
        self.half(PHASE_AT).store(GIVES, SeqCst);
    }

    /// Notes that another supervisor takes the call over.
    pub(in crate::supervisor) fn count_try(&self) {
        self.half(PHASE_AT).store(0, SeqCst);
        self.half(TRIES_AT).fetch_add(1, SeqCst);
    }

    fn phase(&self) -> Phase {
        let bits = self.half(PHASE_AT).load(SeqCst);
        let has = |bit| bits & bit != 0;
        Phase {
            commit: has(COMMITS)
                .then(|| (self.half(HOST_AT).load(SeqCst) as i32, self.word(SENT_AT).load(SeqCst))),
            conversation: self.half(CONVERSATION_AT).load(SeqCst) as i32,
            is_taken: has(TAKEN),
            reply: bits >> REPLY_SHIFT,
            nonblocking: has(NONBLOCKING),
            begins: has(BEGINS),
            gives: has(GIVES).then(|| self.word(INODE_AT).load(SeqCst)),
            tries: self.half(TRIES_AT).load(SeqCst),
        }
    }

    fn half(&self, at: usize) -> &AtomicU32 {
        self.record.half(slot_at(self.index) + at)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        self.record.word(slot_at(self.index) + at)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let is_inside = self.record.memory.zero(slot_at(self.index), SLOT);
        debug_assert!(is_inside);
        self.record.slots.lock().expect(NEVER).put(self.index);
    }
}

pub(super) fn slot_at(index: usize) -> usize {
    SLOTS_AT + index * SLOT
}
