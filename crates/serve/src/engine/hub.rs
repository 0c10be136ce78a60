//! Bytes from one connection to others, possibly of another thread, and the topics that connections
//! subscribe to.
//!
//! A handle names a connection: its thread, its index there, and a generation, so that no later
//! connection has it. Each thread has an inbox. Bytes for its own connections need none.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use super::inboxes::Inboxes;
use crate::service::Effect;

/// Something that a thread does for a callback of another connection, or of the service.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    /// Bytes for the connection with this handle.
    Bytes { to: u64, bytes: Arc<[u8]>, is_answer: bool },
    /// A timer of the service, for the first thread.
    Arm { timer: usize, after: u32, every: u32, context: u64 },
}

/// The inboxes and topics of a service.
#[derive(Debug)]
pub(crate) struct Hub {
    inboxes: Inboxes<Item>,
    /// The handles of the subscribers of each topic.
    topics: Mutex<HashMap<u64, Vec<u64>>>,
    /// Bytes in all inboxes.
    queued: AtomicI64,
}

/// The most bytes in all inboxes. A connection whose bytes do not fit loses them, and is closed.
const QUEUED: i64 = 32 << 20;

/// Returns the handle of a connection of a thread.
pub(crate) fn handle(thread: usize, generation: u32, id: u32) -> u64 {
    (thread as u64) << 56 | u64::from(generation & 0xff_ffff) << 32 | u64::from(id)
}

/// Returns the thread of a handle, and the index of the connection there.
pub(crate) fn place(handle: u64) -> (usize, usize) {
    ((handle >> 56) as usize, handle as u32 as usize)
}

impl Item {
    /// Returns the thread that the item is for.
    pub(crate) fn thread(&self) -> usize {
        match self {
            Item::Bytes { to, .. } => place(*to).0,
            Item::Arm { .. } => 0,
        }
    }

    fn size(&self) -> i64 {
        match self {
            Item::Bytes { bytes, .. } => bytes.len() as i64 + 64,
            Item::Arm { .. } => 64,
        }
    }
}

impl Hub {
    /// `wakes` has the eventfd of each thread.
    pub(crate) fn new(wakes: &[Arc<OwnedFd>]) -> Hub {
        Hub { inboxes: Inboxes::new(wakes), topics: Mutex::new(HashMap::new()), queued: AtomicI64::new(0) }
    }

    /// Puts an item into the inbox of its thread. If bytes do not fit, the receiver gets no bytes
    /// instead, for which it is closed.
    pub(crate) fn send(&self, item: Item) {
        let thread = item.thread();
        if !self.inboxes.has(thread) {
            return;
        }
        let size = item.size();
        let item = match item {
            Item::Bytes { to, .. } if self.queued.load(SeqCst) + size > QUEUED => {
                Item::Bytes { to, bytes: Arc::from([]), is_answer: false }
            }
            item => item,
        };
        self.queued.fetch_add(item.size(), SeqCst);
        self.inboxes.send(thread, item);
    }

    /// Takes the items of a thread's inbox.
    pub(crate) fn take(&self, thread: usize) -> Vec<Item> {
        let items = self.inboxes.take(thread);
        // Threads that get nothing share nothing.
        if !items.is_empty() {
            self.queued.fetch_sub(items.iter().map(Item::size).sum::<i64>(), SeqCst);
        }
        items
    }

    pub(crate) fn subscribe(&self, topic: u64, handle: u64) {
        self.topics().entry(topic).or_default().push(handle);
    }

    pub(crate) fn unsubscribe(&self, topic: u64, handle: u64) {
        let mut topics = self.topics();
        let Some(handles) = topics.get_mut(&topic) else { return };
        if let Some(at) = handles.iter().position(|one| *one == handle) {
            handles.swap_remove(at);
        }
        if handles.is_empty() {
            topics.remove(&topic);
        }
    }

    /// Appends an item for each subscriber of a topic.
    fn publish(&self, topic: u64, bytes: &Arc<[u8]>, items: &mut Vec<Item>) {
        let topics = self.topics();
        let handles = topics.get(&topic).map_or(&[][..], Vec::as_slice);
        items.extend(handles.iter().map(|to| Item::Bytes {
            to: *to,
            bytes: bytes.clone(),
            is_answer: false,
        }));
    }

    /// Carries out an effect that does not change its own connection, by items for any thread.
    pub(crate) fn carry_out(&self, effect: Effect, items: &mut Vec<Item>) {
        match effect {
            Effect::Publish { topic, bytes } => self.publish(topic, &bytes, items),
            Effect::Send { to, bytes, is_answer } => items.push(Item::Bytes { to, bytes, is_answer }),
            Effect::Arm { timer, after, every, context } => {
                items.push(Item::Arm { timer, after, every, context });
            }
            // The connection's own, or those of all backends (see `Shared::carry_out`).
            Effect::Subscribe(_)
            | Effect::Unsubscribe(_)
            | Effect::Register { .. }
            | Effect::Unregister { .. } => {}
        }
    }

    fn topics(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Vec<u64>>> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
