//! The bytes of bodies that a cache causes to be in memory: those that are stored, those that arrive, and
//! those that wait for slow clients, although they may not be stored any more.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The number of bytes of one holder, which all holders of a cache count together.
#[derive(Debug)]
pub(crate) struct Held {
    all: Arc<AtomicUsize>,
    bytes: usize,
}

impl Held {
    pub(crate) fn new(all: &Arc<AtomicUsize>) -> Held {
        Held { all: all.clone(), bytes: 0 }
    }

    /// Changes the number of bytes, and returns that of all holders.
    pub(crate) fn set(&mut self, bytes: usize) -> usize {
        self.all.fetch_add(bytes.wrapping_sub(self.bytes), Relaxed);
        self.bytes = bytes;
        self.all.load(Relaxed)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Relaxed);
    }
}

/// A stored body.
#[derive(Debug)]
pub struct StoredBody {
    bytes: Box<[u8]>,
    _held: Held,
}

impl StoredBody {
    pub(super) fn new(bytes: Vec<u8>, mut held: Held) -> StoredBody {
        held.set(bytes.len());
        StoredBody { bytes: bytes.into(), _held: held }
    }
}

impl Deref for StoredBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}
