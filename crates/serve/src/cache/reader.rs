//! Reads items while another thread changes them, without its lock. So threads that serve hits share no
//! cache line that they write.
//!
//! Everything that is read before [`Memory::read`] has compared the bucket's count may be parts of two
//! states: an entry that has another key by now, or the length of one content and the place of another. So
//! chains have a bound here, and copies are checked.

use super::MAX_ITEM;
use super::memory::{Index, Memory, Word};

/// The longest chain that is followed.
const STEPS: usize = 64;
/// More bytes than those of a content beside its value.
const BESIDE: usize = 512;
const END: usize = b"END\r\n".len();

/// What a reader has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Hit,
    Miss,
    /// It has changed meanwhile, or has to be removed: look again under the lock.
    Unknown,
}

/// Appends the answer to `get` without its last line, if there is an item with this key.
pub(super) fn get(memory: &Memory, key: &[u8], now: u32, to: &mut Vec<u8>) -> Found {
    let (hash, begin) = (memory.hash(key), to.len());
    match memory.read(hash, || look_up(memory, hash, key, now, to)) {
        Some(Some(entry)) => {
            memory.note_use(entry, now);
            Found::Hit
        }
        found => {
            to.truncate(begin);
            if found.is_some() { Found::Miss } else { Found::Unknown }
        }
    }
}

/// Returns the entry of a key, whose answer it has appended, `Some(None)` if there is none, or `None` if
/// that cannot be said.
fn look_up(memory: &Memory, hash: u32, key: &[u8], now: u32, to: &mut Vec<u8>) -> Option<Option<Index>> {
    let mut entry = memory.first(hash);
    for _ in 0..STEPS {
        if entry == 0 {
            return Some(None);
        }
        let chain = memory.try_get(entry, Word::Chain)?;
        if (chain >> 32) as u32 == hash && has_key(memory, entry, key)? {
            let is_live = !memory.is_flushed(entry, now) && !memory.is_expired(entry, now);
            return is_live.then(|| append(memory, entry, to))?.map(|()| Some(entry));
        }
        entry = chain as Index;
    }
    None
}

fn has_key(memory: &Memory, entry: Index, key: &[u8]) -> Option<bool> {
    let mut found = [0; 256];
    let length = (memory.get(entry, Word::Lengths) >> 32) as u16 as usize;
    if length != key.len() {
        return Some(false);
    }
    let content = memory.get(entry, Word::Content) as usize;
    let found = found.get_mut(..length)?;
    memory.try_take(content.checked_add(b"VALUE ".len())?, found).then(|| found == key)
}

fn append(memory: &Memory, entry: Index, to: &mut Vec<u8>) -> Option<()> {
    let content = memory.get(entry, Word::Content) as usize;
    let length = (memory.get(entry, Word::Lengths) as u32 as usize).checked_sub(END)?;
    if length > MAX_ITEM + BESIDE {
        return None;
    }
    let begin = to.len();
    to.resize(begin + length, 0);
    memory.try_take(content, &mut to[begin..]).then_some(())
}
