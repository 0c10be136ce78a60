//! Reads items while another thread changes them, without its lock. So threads that serve hits
//! share no cache line that they write.
//!
//! Everything that is read before [`Memory::read`] has compared the bucket's count may be parts of
//! two states: an entry that has another key by now, or the length of one content and the place of
//! another. So chains have a bound here, and copies are checked.

use super::MAX_ITEM;
use super::memory::{Index, Memory, Word};

/// The longest chain that is followed.
const STEPS: usize = 64;
/// A bound on the bytes of a content without its value.
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

/// Returns the entry of a key, whose answer it has appended, `Some(None)` if there is none, or
/// `None` if that cannot be said.
fn look_up(memory: &Memory, hash: u32, key: &[u8], now: u32, to: &mut Vec<u8>) -> Option<Option<Index>> {
    let mut entry = memory.first(hash);
    for _ in 0..STEPS {
        if entry == 0 {
            return Some(None);
        }
        let chain = memory.try_get(entry, Word::Chain)?;
        if (chain >> 32) as u32 == hash && memory.has_key(entry, key)? {
            let is_live = !memory.is_flushed(entry, now) && !memory.is_expired(entry, now);
            return is_live.then(|| append(memory, entry, to))?.map(|()| Some(entry));
        }
        entry = chain as Index;
    }
    None
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::super::items::{Items, New};
    use super::super::memory::LEAST;
    use super::*;

    const NOW: u32 = 100;

    fn new<'a>(key: &'a str, value: &'a [u8]) -> New<'a> {
        New { key: key.as_bytes(), flags: 0, expires: 0, value: [value, b""], marks: 0 }
    }

    /// Returns the key of a text `VALUE KEY 0 LENGTH`, a line end, bytes that are all equal, and a
    /// line end.
    fn checked(text: &[u8]) -> String {
        let end = text.windows(2).position(|end| end == b"\r\n").expect("a first line");
        let line = String::from_utf8(text[..end].to_vec()).unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let ["VALUE", key, "0", length] = words[..] else { panic!("{line}") };
        let value = text[end + 2..].strip_suffix(b"\r\n").expect("a last line end");
        assert_eq!(value.len(), length.parse::<usize>().unwrap());
        assert!(value.iter().all(|byte| *byte == value[0]), "parts of two values of {key}");
        key.to_owned()
    }

    #[test]
    fn a_reader_finds_whole_items_while_they_change() {
        let memory = Arc::new(Memory::new(LEAST, false).unwrap());
        let mut items = Items::new(memory.clone());
        let is_over = AtomicBool::new(false);
        let keys: Vec<String> = (0..8).map(|key| format!("key{key}")).collect();
        let hits: usize = std::thread::scope(|scope| {
            let read = || {
                let mut hits = 0;
                while !is_over.load(Relaxed) {
                    for key in &keys {
                        let mut text = b"before".to_vec();
                        match get(&memory, key.as_bytes(), NOW, &mut text) {
                            Found::Hit => {
                                assert_eq!(checked(&text[6..]), *key);
                                hits += 1;
                            }
                            Found::Miss | Found::Unknown => assert_eq!(text, b"before"),
                        }
                    }
                }
                hits
            };
            let readers = [scope.spawn(read), scope.spawn(read)];
            let large = vec![b'x'; 300_000];
            for number in 0..20_000_usize {
                // Others fill the memory, so that items are evicted and moved.
                if number % 40 == 0 {
                    items.store(&new(&format!("large{}", number % 997), &large), NOW).expect("evicts");
                }
                let key = &keys[number % keys.len()];
                let value = vec![b'a' + (number % 26) as u8; 1 + number * 7919 % 3000];
                items.store(&new(key, &value), NOW).expect("evicts");
                if number % 31 == 0
                    && let Some(item) = items.find(key.as_bytes(), NOW)
                {
                    items.remove(item);
                }
            }
            is_over.store(true, Relaxed);
            readers.map(|reader| reader.join().unwrap()).iter().sum()
        });
        assert!(hits > 100, "{hits}");
    }

    #[test]
    fn an_item_that_has_to_be_removed_is_left_to_the_lock() {
        let memory = Arc::new(Memory::new(LEAST, false).unwrap());
        let mut items = Items::new(memory.clone());
        items.store(&New { expires: NOW + 1, ..new("key", b"value") }, NOW).unwrap();
        let find = |key: &[u8], now| get(&memory, key, now, &mut Vec::new());
        assert_eq!([find(b"key", NOW), find(b"key", NOW + 1)], [Found::Hit, Found::Unknown]);
        assert_eq!(find(b"other", NOW), Found::Miss);
    }
}
