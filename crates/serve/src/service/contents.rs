//! Content stores in the state of a service, from Rust: the answer from one, and its filling with
//! files. `include/shunt/contents.h` has the algorithm, which only the service's native half executes.
//!
//! A content stays pinned from the decision of a service until its bytes are copied here:
//!
//! ```text
//! decide (either half) ── Verdict::Stored, pinned ──► Stored::take: copied, unpinned
//! ```

use std::sync::atomic::Ordering::SeqCst;

use super::store::Store;

/// An answer from a content store, whose content is pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The bytes in front of the content.
    pub(crate) head: Vec<u8>,
    /// The offset and the length of the content in the state.
    pub(crate) at: u64,
    pub(crate) length: u32,
    /// The offsets of pinned entries.
    pub(crate) pins: Vec<u64>,
}

/// `SHUNT_MAX_CONTENT` and `SHUNT_DYING`.
const MOST: usize = 1 << 20;
const DYING: u64 = 1 << 61;

impl Stored {
    /// Returns the answer's bytes, and unpins the content. Must be called once for each decision.
    pub fn take(self, store: &Store) -> Vec<u8> {
        let mut bytes = self.head;
        let begin = bytes.len();
        bytes.resize(begin + (self.length as usize).min(MOST), 0);
        if let Ok(at) = usize::try_from(self.at) {
            store.take(at, &mut bytes[begin..]);
        }
        for pin in self.pins {
            let Some(word) = usize::try_from(pin).ok().and_then(|pin| store.at(pin)) else { continue };
            if word.fetch_sub(1, SeqCst) == DYING + 1 {
                // The last of several pins frees it.
                let _ = word.compare_exchange(DYING, 0, SeqCst, SeqCst);
            }
        }
        bytes
    }
}

/// The place of a content store in the state. `struct shunt_table` in table.h has the same layout.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Table {
    pub(crate) head: u64,
    pub(crate) sets: u64,
    pub(crate) clocks: u64,
    pub(crate) slots: u64,
    pub(crate) count: u32,
    /// Sizes and offsets in words.
    pub(crate) slot: u32,
    pub(crate) key: u32,
    pub(crate) value_at: u32,
    pub(crate) value: u32,
    pub(crate) is_lru: u32,
    pub(crate) contents: u64,
    pub(crate) room: u64,
}
