//! The memory of the cache, which user space and the kernel share. `include/shunt/content.h` has
//! the same layout, and the kernel's way to read it.
//!
//! ```text
//! segment 0        head: settings and the kernel's counters, 4 KiB; then entries
//! segments 1..=k   buckets: a sequence count, and the index of the first entry of a chain
//! others           free, or entries, or a log of blocks: an entry's index, a size, a content
//! ```
//!
//! A segment has 2 MiB and stays inside one element of the BPF map. An *entry* is one item: its
//! chain, its times, and the place of its content. An entry's memory is only ever an entry, so a
//! late note of a use by the kernel cannot change anything else. The *content* is the answer to
//! `get`:
//! `VALUE KEY FLAGS LENGTH`, a line end, the value, and `END`.
//!
//! One thread at a time changes the memory (see `items`). It makes the sequence count of a bucket
//! odd before it changes the chain, an entry or a content that the bucket leads to, and even
//! afterwards. A reader, in the kernel or in another thread (see `reader`), copies the content, and
//! uses the copy only if the count was even before and is the same afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*, fence};

use crate::service::store::{Store, StoreError};

/// The size of a segment. `SHUNT_SEGMENT` in content.h.
pub(crate) const SEGMENT: usize = 2 << 20;
/// The bytes of the head, of an entry and of a bucket.
const HEAD: usize = 4096;
pub(crate) const ENTRY: usize = 64;
const BUCKET: usize = 16;
/// The least memory: enough for the largest item and for a segment that is being moved.
pub(crate) const LEAST: usize = 8 * SEGMENT;
/// Bytes of memory for each bucket.
const PER_BUCKET: usize = 256;

/// The words of the head.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Head {
    /// The number of buckets less one.
    Mask,
    /// The secret that keys are hashed with.
    Seed,
    /// Items that were stored in this second or earlier are flushed, once it has come. 0: none.
    OldestLive,
    /// Items with a lower number are flushed too.
    OldestCas,
    /// The kernel's counters.
    KernelHits,
    KernelMisses,
    /// Lookups that the kernel left to user space.
    KernelLeft,
}

/// The words of an entry.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Word {
    /// The next entry of the chain, and above it the hash.
    Chain,
    /// The position of the content.
    Content,
    /// The length of the content, of the key (from bit 32) and the marks (from bit 48).
    Lengths,
    /// The unique number.
    Cas,
    /// The second of the last use, and above it [`FETCHED`], [`REFERENCED`] and part of the number.
    Used,
    /// When it expires, and when it was stored (from bit 32).
    Times,
    /// The client's flags, and the length of the value (from bit 32).
    Value,
    /// The neighbours in the order of eviction: the older, and the newer (from bit 32).
    Order,
}

/// The item was read since it was stored.
pub(crate) const FETCHED: u64 = 1 << 32;
/// The item was used since it was last considered for eviction.
pub(crate) const REFERENCED: u64 = 1 << 33;

/// The index of an entry: its offset, in entries. 0 is none.
pub(crate) type Index = u32;

/// The memory, with a typed access to its words.
#[derive(Debug)]
pub(crate) struct Memory {
    store: Arc<Store>,
    mask: u64,
    seed: u64,
}

impl Memory {
    /// Creates a memory of `size` bytes, rounded up to whole segments.
    pub(crate) fn new(size: usize, in_kernel: bool) -> Result<Memory, StoreError> {
        let size = size.max(LEAST).next_multiple_of(SEGMENT);
        let store = Store::new_contents(size, in_kernel)?;
        let mask = (size / PER_BUCKET).next_power_of_two() as u64 - 1;
        // With a known seed, keys could be chosen that all share one bucket.
        let seed = *shunt_key::nonce().first_chunk().expect("it has 32 bytes");
        let memory = Memory { store, mask, seed: u64::from_ne_bytes(seed) };
        memory.set_head(Head::Mask, mask);
        memory.set_head(Head::Seed, memory.seed);
        Ok(memory)
    }

    pub(crate) fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Returns the number of segments, and how many the head and the buckets take.
    pub(crate) fn segments(&self) -> (usize, usize) {
        let buckets = (self.mask as usize + 1) * BUCKET;
        (self.store.len() / SEGMENT, 1 + buckets.div_ceil(SEGMENT))
    }

    /// Returns the index of the first entry of a segment and of the one after its last.
    pub(crate) fn entries_of(segment: usize) -> (Index, Index) {
        let first = if segment == 0 { HEAD / ENTRY } else { segment * SEGMENT / ENTRY };
        (first as Index, ((segment + 1) * SEGMENT / ENTRY) as Index)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        self.store.at(offset).expect("inside")
    }

    pub(crate) fn head(&self, word: Head) -> u64 {
        self.word(word as usize * 8).load(Relaxed)
    }

    pub(crate) fn set_head(&self, word: Head, value: u64) {
        self.word(word as usize * 8).store(value, Release);
    }

    pub(crate) fn get(&self, entry: Index, word: Word) -> u64 {
        self.word(entry as usize * ENTRY + word as usize * 8).load(Relaxed)
    }

    pub(crate) fn set(&self, entry: Index, word: Word, value: u64) {
        self.word(entry as usize * ENTRY + word as usize * 8).store(value, Relaxed);
    }

    /// Returns true if the entry has this key, or `None` if its words are of two states (see
    /// [`Self::read`]), which cannot happen under the lock.
    pub(crate) fn has_key(&self, entry: Index, key: &[u8]) -> Option<bool> {
        let mut found = [0; 256];
        let length = (self.get(entry, Word::Lengths) >> 32) as u16 as usize;
        if length != key.len() {
            return Some(false);
        }
        let content = self.get(entry, Word::Content) as usize;
        let found = found.get_mut(..length)?;
        self.try_take(content.checked_add(b"VALUE ".len())?, found).then(|| found == key)
    }

    /// Returns true if the entry's item has expired.
    pub(crate) fn is_expired(&self, entry: Index, now: u32) -> bool {
        let expires = self.get(entry, Word::Times) as u32;
        expires != 0 && expires <= now
    }

    /// Returns true if the entry's item is older than `flush_all`.
    pub(crate) fn is_flushed(&self, entry: Index, now: u32) -> bool {
        let (live, cas) = (self.head(Head::OldestLive), self.head(Head::OldestCas));
        live != 0
            && live <= u64::from(now)
            && (self.get(entry, Word::Times) >> 32 <= live || self.get(entry, Word::Cas) < cas)
    }

    /// Notes a use of an entry. The kernel notes uses too, at any time.
    pub(crate) fn note_use(&self, entry: Index, now: u32) {
        let word = self.word(entry as usize * ENTRY + Word::Used as usize * 8);
        let before = word.load(Relaxed);
        let after = before >> 32 << 32 | FETCHED | REFERENCED | u64::from(now);
        if before != after {
            let _ = word.compare_exchange(before, after, Relaxed, Relaxed);
        }
    }

    /// Clears the mark of a use. Returns true if there was one.
    pub(crate) fn take_reference(&self, entry: Index) -> bool {
        let word = self.word(entry as usize * ENTRY + Word::Used as usize * 8);
        word.fetch_and(!REFERENCED, Relaxed) & REFERENCED != 0
    }

    pub(crate) fn hash(&self, key: &[u8]) -> u32 {
        let mut state = self.seed ^ key.len() as u64;
        for chunk in key.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            state = (state ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            state ^= state >> 32;
        }
        (state.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
    }

    fn bucket(&self, hash: u32) -> usize {
        SEGMENT + (u64::from(hash) & self.mask) as usize * BUCKET
    }

    /// Returns the first entry of the hash's chain.
    pub(crate) fn first(&self, hash: u32) -> Index {
        self.word(self.bucket(hash) + 8).load(Relaxed) as Index
    }

    pub(crate) fn set_first(&self, hash: u32, entry: Index) {
        self.word(self.bucket(hash) + 8).store(entry.into(), Relaxed);
    }

    /// Makes a change of what the hash's bucket leads to, which readers see as a whole.
    pub(crate) fn change<T>(&self, hash: u32, change: impl FnOnce() -> T) -> T {
        let count = self.word(self.bucket(hash));
        let before = count.load(Relaxed);
        count.store(before + 1, Relaxed);
        fence(SeqCst);
        let result = change();
        fence(SeqCst);
        count.store(before + 2, Release);
        result
    }

    /// Reads what the hash's bucket leads to, without the lock of those that change it. Returns
    /// `None` if it has changed meanwhile. So whatever `read` finds may be parts of two states, and
    /// must be checked.
    pub(crate) fn read<T>(&self, hash: u32, read: impl FnOnce() -> Option<T>) -> Option<T> {
        let count = self.word(self.bucket(hash));
        let before = count.load(Acquire);
        if before % 2 == 1 {
            return None;
        }
        let found = read();
        fence(Acquire);
        found.filter(|_| count.load(Relaxed) == before)
    }

    /// Copies bytes. Returns false if they are not inside.
    #[must_use]
    pub(crate) fn try_take(&self, offset: usize, bytes: &mut [u8]) -> bool {
        self.store.try_take(offset, bytes)
    }

    /// Returns the word of an entry as [`Self::get`] does, or `None` if the entry is not inside.
    pub(crate) fn try_get(&self, entry: Index, word: Word) -> Option<u64> {
        self.store.at(entry as usize * ENTRY + word as usize * 8).map(|word| word.load(Relaxed))
    }

    /// Writes bytes that no entry leads to.
    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) {
        self.store.put(offset, bytes);
    }

    /// Copies bytes.
    pub(crate) fn take(&self, offset: usize, bytes: &mut [u8]) {
        self.store.take(offset, bytes);
    }

    pub(crate) fn block(&self, position: usize) -> u64 {
        self.word(position).load(Relaxed)
    }

    pub(crate) fn set_block(&self, position: usize, value: u64) {
        self.word(position).store(value, Relaxed);
    }
}

/// Returns the second and the nanosecond. The clock is the kernel's `bpf_ktime_get_ns`. It begins
/// at [`EPOCH`], because small numbers have meanings.
pub(crate) fn now() -> (u32, u64) {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (time.tv_sec as u32 + EPOCH, time.tv_nsec as u64)
}

/// `SHUNT_EPOCH` in content.h.
const EPOCH: u32 = 64;
