//! Passes items from any thread to the thread that they are for.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

/// An inbox for each thread.
#[derive(Debug)]
pub struct Inboxes<T>(Vec<Inbox<T>>);

#[derive(Debug)]
struct Inbox<T> {
    items: Mutex<Vec<T>>,
    is_filled: AtomicBool,
    wake: Arc<OwnedFd>,
}

impl<T> Inboxes<T> {
    /// Makes empty inboxes. `wakes` has the eventfd of each thread.
    pub fn new(wakes: &[Arc<OwnedFd>]) -> Inboxes<T> {
        let inbox = |wake: &Arc<OwnedFd>| Inbox {
            items: Mutex::new(Vec::new()),
            is_filled: AtomicBool::new(false),
            wake: wake.clone(),
        };
        Inboxes(wakes.iter().map(inbox).collect())
    }

    /// Returns true if there is such a thread.
    pub fn has(&self, thread: usize) -> bool {
        thread < self.0.len()
    }

    /// Puts an item into the inbox of a thread, if there is one, and wakes the thread.
    pub fn send(&self, thread: usize, item: T) {
        let Some(inbox) = self.0.get(thread) else { return };
        inbox.items.lock().unwrap_or_else(PoisonError::into_inner).push(item);
        if !inbox.is_filled.swap(true, SeqCst) {
            let _ = rustix::io::write(&*inbox.wake, &1u64.to_ne_bytes());
        }
    }

    /// Takes the items of a thread's inbox.
    pub fn take(&self, thread: usize) -> Vec<T> {
        let Some(inbox) = self.0.get(thread) else { return Vec::new() };
        if !inbox.is_filled.load(SeqCst) || !inbox.is_filled.swap(false, SeqCst) {
            return Vec::new();
        }
        std::mem::take(&mut *inbox.items.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
