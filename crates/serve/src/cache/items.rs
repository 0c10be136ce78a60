//! The items of the cache: finds, stores, evicts and moves them in the shared memory. All of it runs
//! under one lock; `memory` describes what readers without it see meanwhile.
//!
//! Contents are appended to the *active* segment. The states of a segment:
//!
//! ```text
//! free ──► active ──► sealed ──► free      all its contents are dead, or were moved
//!   └────► entries                         for ever
//! ```
//!
//! One free segment is always kept, so that the contents of a sealed one can be moved. If an eighth
//! of the sealed segment with the least live bytes is dead, its contents are moved. Otherwise items
//! are evicted first: those that were not used for the longest time, or, for a content that needs
//! more than an eighth, as many of that segment as it needs.

use super::memory::{ENTRY, FETCHED, Index, Memory, SEGMENT, Word};

/// Marks of an item, for the meta commands.
pub(super) const STALE: u16 = 1;
pub(super) const TOKEN_SENT: u16 = 2;
pub(super) const BINARY_KEY: u16 = 4;

/// Bytes in front of each content: the index of its entry, and the size of the block.
const BLOCK: usize = 8;
/// The bytes of a content besides the first line and the value.
const REST: usize = b"\r\n\r\nEND\r\n".len();
/// The most items whose use is checked for one eviction.
const TRIES: usize = 64;

/// A found item. It is valid until the next change of the items.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    entry: Index,
    hash: u32,
}

/// An item to store.
#[derive(Clone, Copy, Debug)]
pub(super) struct New<'a> {
    pub(super) key: &'a [u8],
    pub(super) flags: u32,
    /// When it expires. 0 is never.
    pub(super) expires: u32,
    /// The value, in two parts.
    pub(super) value: [&'a [u8]; 2],
    pub(super) marks: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// Active or sealed.
    Log,
    /// Head, buckets or entries.
    Fixed,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    state: State,
    /// Bytes of blocks that were appended, and of those that are live.
    fill: usize,
    live: usize,
}

/// Counters of the items.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub(super) items: u64,
    /// Bytes of live contents and their entries.
    pub(super) bytes: u64,
    pub(super) total: u64,
    pub(super) evictions: u64,
    pub(super) evicted_unfetched: u64,
    pub(super) expired: u64,
    pub(super) flushed: u64,
    /// Bytes that were moved to free segments.
    pub(super) moved: u64,
}

/// The items. `include/shunt/content.h` reads them.
#[derive(Debug)]
pub(super) struct Items {
    pub(super) memory: std::sync::Arc<Memory>,
    segments: Vec<Segment>,
    free: Vec<usize>,
    active: usize,
    /// Entries that were never used, and the first of a list of others.
    fresh: std::ops::Range<Index>,
    spare: Index,
    entry_segments: usize,
    /// The item that is evicted next, and the newest.
    oldest: Index,
    newest: Index,
    last_cas: u64,
    pub(super) counters: Counters,
}

impl Items {
    pub(super) fn new(memory: std::sync::Arc<Memory>) -> Items {
        let (count, fixed) = memory.segments();
        let state = |at| if at < fixed { State::Fixed } else { State::Free };
        let segments = (0..count).map(|at| Segment { state: state(at), fill: 0, live: 0 }).collect();
        let (first, end) = Memory::entries_of(0);
        let mut items = Items {
            memory,
            segments,
            free: (fixed..count).rev().collect(),
            active: 0,
            fresh: first..end,
            spare: 0,
            entry_segments: 0,
            oldest: 0,
            newest: 0,
            last_cas: 0,
            counters: Counters::default(),
        };
        items.activate();
        items
    }

    /// Returns the next unique number.
    pub(super) fn next_cas(&mut self) -> u64 {
        self.last_cas += 1;
        self.last_cas
    }

    // ---- reading

    /// Finds an item that has neither expired nor been flushed.
    pub(super) fn find(&mut self, key: &[u8], now: u32) -> Option<Item> {
        let hash = self.memory.hash(key);
        let item = Item { entry: self.look_up(key, hash)?, hash };
        if self.memory.is_flushed(item.entry, now) {
            self.counters.flushed += 1;
        } else if self.memory.is_expired(item.entry, now) {
            self.counters.expired += 1;
        } else {
            return Some(item);
        }
        self.remove(item);
        None
    }

    fn look_up(&self, key: &[u8], hash: u32) -> Option<Index> {
        let mut entry = self.memory.first(hash);
        while entry != 0 {
            let chain = self.memory.get(entry, Word::Chain);
            if (chain >> 32) as u32 == hash && self.memory.has_key(entry, key) == Some(true) {
                return Some(entry);
            }
            entry = chain as Index;
        }
        None
    }

    fn content(&self, entry: Index) -> usize {
        self.memory.get(entry, Word::Content) as usize
    }

    fn content_length(&self, entry: Index) -> usize {
        self.memory.get(entry, Word::Lengths) as u32 as usize
    }

    /// Notes a use of the item.
    pub(super) fn touch(&self, item: Item, now: u32) {
        self.memory.note_use(item.entry, now);
    }

    /// Appends the answer to `get` without its last line, and with the unique number for `gets`.
    pub(super) fn answer(&self, item: Item, with_cas: bool, to: &mut Vec<u8>) {
        let (content, length) = (self.content(item.entry), self.content_length(item.entry));
        let line = length - REST - self.value_length(item);
        let copy = |from: usize, length: usize, to: &mut Vec<u8>| {
            let begin = to.len();
            to.resize(begin + length, 0);
            self.memory.take(content + from, &mut to[begin..]);
        };
        copy(0, line, to);
        if with_cas {
            to.push(b' ');
            super::numbers::write(self.cas(item), to);
        }
        copy(line, length - line - b"END\r\n".len(), to);
    }

    /// Appends the value.
    pub(super) fn value(&self, item: Item, to: &mut Vec<u8>) {
        let (content, length) = (self.content(item.entry), self.content_length(item.entry));
        let (begin, value) = (to.len(), self.value_length(item));
        to.resize(begin + value, 0);
        let line = length - REST - value;
        self.memory.take(content + line + b"\r\n".len(), &mut to[begin..]);
    }

    pub(super) fn value_length(&self, item: Item) -> usize {
        (self.memory.get(item.entry, Word::Value) >> 32) as usize
    }

    pub(super) fn flags(&self, item: Item) -> u32 {
        self.memory.get(item.entry, Word::Value) as u32
    }

    pub(super) fn cas(&self, item: Item) -> u64 {
        self.memory.get(item.entry, Word::Cas)
    }

    pub(super) fn expires(&self, item: Item) -> u32 {
        self.memory.get(item.entry, Word::Times) as u32
    }

    /// Returns the second of the last use, or of the storing.
    pub(super) fn last_use(&self, item: Item) -> u32 {
        self.memory.get(item.entry, Word::Used) as u32
    }

    pub(super) fn was_fetched(&self, item: Item) -> bool {
        self.memory.get(item.entry, Word::Used) & FETCHED != 0
    }

    pub(super) fn marks(&self, item: Item) -> u16 {
        (self.memory.get(item.entry, Word::Lengths) >> 48) as u16
    }

    // ---- changing an item

    pub(super) fn set_marks(&mut self, item: Item, marks: u16) {
        let lengths = self.memory.get(item.entry, Word::Lengths) & ((1 << 48) - 1);
        self.change(item, Word::Lengths, lengths | u64::from(marks) << 48);
    }

    pub(super) fn set_expires(&mut self, item: Item, expires: u32) {
        let times = self.memory.get(item.entry, Word::Times) >> 32 << 32;
        self.change(item, Word::Times, times | u64::from(expires));
    }

    /// Gives the item a new unique number.
    pub(super) fn renew_cas(&mut self, item: Item) {
        let cas = self.next_cas();
        self.change(item, Word::Cas, cas);
    }

    fn change(&self, item: Item, word: Word, value: u64) {
        self.memory.change(item.hash, || self.memory.set(item.entry, word, value));
    }

    /// Replaces the value by one of the same length, with a new unique number.
    pub(super) fn overwrite(&mut self, item: Item, value: &[u8]) {
        debug_assert_eq!(value.len(), self.value_length(item));
        let cas = self.next_cas();
        let end = self.content(item.entry) + self.content_length(item.entry);
        let at = end - b"\r\nEND\r\n".len() - value.len();
        self.memory.change(item.hash, || {
            self.memory.put(at, value);
            self.memory.set(item.entry, Word::Cas, cas);
        });
    }

    /// Stores an item in the place of the one with its key. Returns `None` if there is no memory,
    /// and nothing is changed except that others may have been evicted.
    pub(super) fn store(&mut self, new: &New<'_>, now: u32) -> Option<Item> {
        let mut line = Vec::with_capacity(300);
        line.extend_from_slice(b"VALUE ");
        line.extend_from_slice(new.key);
        line.push(b' ');
        super::numbers::write(new.flags, &mut line);
        line.push(b' ');
        let value = new.value[0].len() + new.value[1].len();
        super::numbers::write(value as u64, &mut line);
        let length = line.len() + value + REST;
        let size = (BLOCK + length).next_multiple_of(8);

        let entry = self.take_entry(now)?;
        let Some(block) = self.place(size, now) else {
            self.give_entry(entry);
            return None;
        };
        self.memory.set_block(block, (size as u64) << 32 | u64::from(entry));
        let mut at = block + BLOCK;
        for part in [&line, &b"\r\n"[..], new.value[0], new.value[1], b"\r\nEND\r\n"] {
            self.memory.put(at, part);
            at += part.len();
        }
        self.segments[block / SEGMENT].live += size;
        self.counters.items += 1;
        self.counters.total += 1;
        self.counters.bytes += (size + ENTRY) as u64;

        let (hash, cas) = (self.memory.hash(new.key), self.next_cas());
        let old = self.look_up(new.key, hash);
        let memory = self.memory.clone();
        memory.set(entry, Word::Content, (block + BLOCK) as u64);
        let lengths = length as u64 | (new.key.len() as u64) << 32 | u64::from(new.marks) << 48;
        memory.set(entry, Word::Lengths, lengths);
        memory.set(entry, Word::Cas, cas);
        memory.set(entry, Word::Used, u64::from(now) | cas << 34);
        memory.set(entry, Word::Times, u64::from(new.expires) | u64::from(now) << 32);
        memory.set(entry, Word::Value, u64::from(new.flags) | (value as u64) << 32);
        memory.change(hash, || {
            if let Some(old) = old {
                self.unchain(old, hash);
            }
            memory.set(entry, Word::Chain, u64::from(memory.first(hash)) | u64::from(hash) << 32);
            memory.set_first(hash, entry);
        });
        if let Some(old) = old {
            self.discard(old);
        }
        self.link_newest(entry);
        Some(Item { entry, hash })
    }

    /// Removes an item.
    pub(super) fn remove(&mut self, item: Item) {
        let memory = self.memory.clone();
        memory.change(item.hash, || self.unchain(item.entry, item.hash));
        self.discard(item.entry);
    }

    /// Takes an entry out of its chain.
    fn unchain(&self, entry: Index, hash: u32) {
        let next = self.memory.get(entry, Word::Chain) as Index;
        let mut at = self.memory.first(hash);
        if at == entry {
            return self.memory.set_first(hash, next);
        }
        while at != 0 {
            let chain = self.memory.get(at, Word::Chain);
            if chain as Index == entry {
                return self.memory.set(at, Word::Chain, chain >> 32 << 32 | u64::from(next));
            }
            at = chain as Index;
        }
        debug_assert!(false, "the entry is in its chain");
    }

    /// Frees an entry that is in no chain, and its content.
    fn discard(&mut self, entry: Index) {
        let block = self.content(entry) - BLOCK;
        let size = (self.memory.block(block) >> 32) as usize;
        self.segments[block / SEGMENT].live -= size;
        self.counters.items -= 1;
        self.counters.bytes -= (size + ENTRY) as u64;
        self.unlink(entry);
        self.give_entry(entry);
    }

    // ---- the order of eviction

    fn link_newest(&mut self, entry: Index) {
        self.memory.set(entry, Word::Order, self.newest.into());
        match self.newest {
            0 => self.oldest = entry,
            newest => self.set_newer(newest, entry),
        }
        self.newest = entry;
    }

    fn unlink(&mut self, entry: Index) {
        let order = self.memory.get(entry, Word::Order);
        let (older, newer) = (order as Index, (order >> 32) as Index);
        match older {
            0 => self.oldest = newer,
            older => self.set_newer(older, newer),
        }
        match newer {
            0 => self.newest = older,
            newer => {
                let order = self.memory.get(newer, Word::Order);
                self.memory.set(newer, Word::Order, order >> 32 << 32 | u64::from(older));
            }
        }
    }

    fn set_newer(&mut self, entry: Index, newer: Index) {
        let order = self.memory.get(entry, Word::Order);
        self.memory.set(entry, Word::Order, u64::from(order as u32) | u64::from(newer) << 32);
    }

    /// Evicts one item. Returns the bytes of its content, or `None` if there is no item.
    fn evict(&mut self, now: u32) -> Option<usize> {
        for _ in 0..TRIES {
            let entry = self.oldest;
            if entry == 0 {
                return None;
            }
            if self.memory.is_expired(entry, now)
                || self.memory.is_flushed(entry, now)
                || !self.memory.take_reference(entry)
            {
                break;
            }
            self.unlink(entry);
            self.link_newest(entry);
        }
        Some(self.evict_this(self.oldest, now))
    }

    fn evict_this(&mut self, entry: Index, now: u32) -> usize {
        let size = (self.memory.block(self.content(entry) - BLOCK) >> 32) as usize;
        if self.memory.is_expired(entry, now) {
            self.counters.expired += 1;
        } else if self.memory.is_flushed(entry, now) {
            self.counters.flushed += 1;
        } else {
            self.counters.evictions += 1;
            let is_fetched = self.memory.get(entry, Word::Used) & FETCHED != 0;
            self.counters.evicted_unfetched += u64::from(!is_fetched);
        }
        self.remove(Item { entry, hash: (self.memory.get(entry, Word::Chain) >> 32) as u32 });
        size
    }

    // ---- entries

    /// Takes an unused entry, and evicts an item if there is none.
    fn take_entry(&mut self, now: u32) -> Option<Index> {
        loop {
            if self.spare != 0 {
                let entry = self.spare;
                self.spare = self.memory.get(entry, Word::Chain) as Index;
                return Some(entry);
            }
            if let Some(entry) = self.fresh.next() {
                return Some(entry);
            }
            if !self.add_entries() {
                self.evict(now)?;
            }
        }
    }

    fn give_entry(&mut self, entry: Index) {
        self.memory.set(entry, Word::Content, 0);
        self.memory.set(entry, Word::Chain, self.spare.into());
        self.spare = entry;
    }

    /// Makes a segment one of entries, if contents can do without it.
    fn add_entries(&mut self) -> bool {
        let logs = self.segments.iter().filter(|segment| segment.state != State::Fixed).count();
        let live: usize = self.segments.iter().map(|segment| segment.live).sum();
        if self.entry_segments + 1 >= logs || logs < 4 {
            return false;
        }
        // Every move gains at least the difference, an eighth of a segment.
        while self.free.len() < 2 && live + 2 * SEGMENT <= (logs - 1) * SEGMENT / 8 * 7 {
            let Some(least) = self.least_live() else { return false };
            self.compact(least);
        }
        if self.free.len() < 2 {
            return false;
        }
        let segment = self.free.pop().expect("just counted");
        self.segments[segment].state = State::Fixed;
        self.entry_segments += 1;
        let (first, end) = Memory::entries_of(segment);
        self.fresh = first..end;
        true
    }

    // ---- contents

    /// Returns the place of a block of `size` bytes. Evicts and moves items until there is one.
    fn place(&mut self, size: usize, now: u32) -> Option<usize> {
        loop {
            if let Some(block) = self.append(size) {
                return Some(block);
            }
            if self.free.len() > 1 {
                self.activate();
                continue;
            }
            let least = self.least_live()?;
            let dead = SEGMENT - self.segments[least].live;
            if dead >= size.max(SEGMENT / 8) {
                self.compact(least);
            } else if size > SEGMENT / 8 {
                self.evict_from(least, size, now);
            } else {
                let mut freed = 0;
                while freed < SEGMENT / 64 {
                    freed += self.evict(now)?;
                }
            }
        }
    }

    fn append(&mut self, size: usize) -> Option<usize> {
        let segment = &mut self.segments[self.active];
        if segment.state != State::Log || segment.fill + size > SEGMENT {
            return None;
        }
        segment.fill += size;
        Some(self.active * SEGMENT + segment.fill - size)
    }

    /// Begins to append to a free segment.
    fn activate(&mut self) {
        self.active = self.free.pop().expect("one is always kept");
        self.segments[self.active] = Segment { state: State::Log, fill: 0, live: 0 };
    }

    fn least_live(&self) -> Option<usize> {
        let logs = self.segments.iter().enumerate().filter(|(_, segment)| segment.state == State::Log);
        logs.min_by_key(|(_, segment)| segment.live).map(|(at, _)| at)
    }

    /// Returns the entries with contents in a segment, with the places and sizes of their blocks.
    fn blocks(&self, segment: usize) -> Vec<(Index, usize, usize)> {
        let (mut at, end) = (segment * SEGMENT, segment * SEGMENT + self.segments[segment].fill);
        let mut live = Vec::new();
        while at < end {
            let block = self.memory.block(at);
            let (entry, size) = (block as Index, (block >> 32) as usize);
            if self.content(entry) == at + BLOCK {
                live.push((entry, at, size));
            }
            at += size;
        }
        live
    }

    /// Moves the contents of a segment, and frees it.
    fn compact(&mut self, segment: usize) {
        let blocks = if self.segments[segment].live == 0 { Vec::new() } else { self.blocks(segment) };
        if segment == self.active {
            self.activate();
        }
        let mut copy = Vec::new();
        for (entry, from, size) in blocks {
            let to = self.append(size).unwrap_or_else(|| {
                self.activate();
                self.append(size).expect("a whole segment holds what was in one")
            });
            copy.resize(size, 0);
            self.memory.take(from, &mut copy);
            self.memory.put(to, &copy);
            let hash = (self.memory.get(entry, Word::Chain) >> 32) as u32;
            self.memory.change(hash, || self.memory.set(entry, Word::Content, (to + BLOCK) as u64));
            self.segments[to / SEGMENT].live += size;
            self.counters.moved += size as u64;
        }
        self.segments[segment] = Segment { state: State::Free, fill: 0, live: 0 };
        self.free.push(segment);
    }

    /// Evicts items of a segment until `size` bytes of it are dead: first those that were not used
    /// since they were last considered.
    fn evict_from(&mut self, segment: usize, size: usize, now: u32) {
        for spares_used in [true, false] {
            for (entry, _, _) in self.blocks(segment) {
                if SEGMENT - self.segments[segment].live >= size {
                    return;
                }
                if !spares_used || !self.memory.take_reference(entry) {
                    self.evict_this(entry, now);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use super::super::memory::LEAST;
    use super::*;
    use crate::cache::memory::Head;

    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % limit
        }
    }

    fn items() -> Items {
        Items::new(Arc::new(Memory::new(LEAST, false).unwrap()))
    }

    fn value(number: u64, length: usize) -> Vec<u8> {
        (0..length).map(|at| (number.wrapping_mul(31) as usize + at) as u8).collect()
    }

    /// Checks the structure: chains, the order, and the counts.
    fn check(items: &Items) {
        let (mut entry, mut count, mut older) = (items.oldest, 0, 0);
        let mut live = vec![0; items.segments.len()];
        while entry != 0 {
            let order = items.memory.get(entry, Word::Order);
            assert_eq!(order as Index, older);
            let hash = (items.memory.get(entry, Word::Chain) >> 32) as u32;
            let mut at = items.memory.first(hash);
            while at != entry {
                assert_ne!(at, 0, "the entry is in its chain");
                at = items.memory.get(at, Word::Chain) as Index;
            }
            let block = items.memory.block(items.content(entry) - BLOCK);
            assert_eq!(block as Index, entry);
            live[items.content(entry) / SEGMENT] += (block >> 32) as usize;
            (older, entry, count) = (entry, (order >> 32) as Index, count + 1);
        }
        assert_eq!((items.newest, items.counters.items), (older, count));
        for (segment, live) in items.segments.iter().zip(live) {
            assert_eq!(segment.live, live);
        }
        assert!(!items.free.is_empty());
    }

    #[test]
    fn the_items_are_those_of_a_map_until_memory_is_short() {
        let (mut items, mut map, mut random) = (items(), HashMap::new(), Random(1));
        for number in 0..60_000 {
            let key = format!("key-{}", random.below(3000)).into_bytes();
            match random.below(4) {
                0 => {
                    let found = items.find(&key, 100);
                    assert_eq!(found.is_some(), map.remove(&key).is_some());
                    found.into_iter().for_each(|item| items.remove(item));
                }
                1 => {
                    let mut got = Vec::new();
                    let found = items.find(&key, 100).map(|item| items.value(item, &mut got));
                    assert_eq!(found.map(|()| &got), map.get(&key));
                }
                _ => {
                    let length = random.below(if number % 50 == 0 { 100_000 } else { 1500 });
                    let value = value(number, length as usize);
                    let (first, second) = value.split_at(value.len() / 3);
                    let new = New { key: &key, flags: 7, expires: 0, value: [first, second], marks: 0 };
                    items.store(&new, 100).expect("there is memory");
                    map.insert(key, value);
                }
            }
            if number % 5000 == 0 {
                check(&items);
            }
        }
        check(&items);
        assert_eq!(items.counters.evictions, 0, "{:?}", items.counters);
        assert!(items.counters.moved > 0);
        assert_eq!(items.counters.items as usize, map.len());
    }

    #[test]
    fn what_is_used_stays_and_every_found_value_is_the_last_one() {
        let (mut items, mut map, mut random) = (items(), HashMap::new(), Random(2));
        let kept = New { key: b"kept", flags: 0, expires: 0, value: [b"value", b""], marks: 0 };
        items.store(&kept, 100).unwrap();
        for number in 0..400_000_u64 {
            let key = format!("key-{}", random.below(200_000)).into_bytes();
            let length = match number % 1000 {
                0 => random.below(1 << 20) as usize,
                _ => random.below(300) as usize,
            };
            let value = value(number, length);
            let new = New { key: &key, flags: 7, expires: 0, value: [&value, b""], marks: 0 };
            items.store(&new, 100).expect("evicts");
            map.insert(key, value);
            if number % 100 == 0 {
                let item = items.find(b"kept", 100).expect("it is used");
                items.touch(item, 100);
                let key = format!("key-{}", random.below(200_000)).into_bytes();
                let mut got = Vec::new();
                if let Some(item) = items.find(&key, 100) {
                    items.value(item, &mut got);
                    assert_eq!(Some(&got), map.get(&key));
                }
            }
            if number % 50_000 == 0 {
                check(&items);
            }
        }
        check(&items);
        assert!(items.counters.evictions > 1000 && items.counters.items > 10_000, "{:?}", items.counters);
    }

    #[test]
    fn any_mixture_of_sizes_finds_room() {
        let (mut items, mut random) = (items(), Random(3));
        let large = vec![7; (1 << 20) - 100];
        for number in 0..9000_u64 {
            // Phases of large items only, small items only, and all sizes.
            let length = match number / 500 % 3 {
                0 => (1 << 19) + random.below(1 << 19) as usize - 100,
                1 => random.below(30) as usize,
                _ => {
                    let bits = 6 + random.below(14);
                    random.below(1 << bits) as usize
                }
            };
            let key = number.to_string();
            let value = [&large[..length], b""];
            let new = New { key: key.as_bytes(), flags: 0, expires: 0, value, marks: 0 };
            let item = items.store(&new, 100).expect("evicts");
            assert_eq!(items.value_length(item), length);
        }
        check(&items);
    }

    #[test]
    fn expired_and_flushed_items_are_not_found() {
        let mut items = items();
        let new = New { key: b"key", flags: 0, expires: 200, value: [b"value", b""], marks: 0 };
        items.store(&new, 100).unwrap();
        assert!(items.find(b"key", 199).is_some() && items.find(b"key", 200).is_none());
        assert_eq!((items.counters.items, items.counters.expired), (0, 1));
        items.store(&New { expires: 0, ..new }, 100).unwrap();
        items.memory.set_head(Head::OldestLive, 150);
        assert!(items.find(b"key", 149).is_some() && items.find(b"key", 150).is_none());
        items.store(&New { expires: 0, ..new }, 151).unwrap();
        assert!(items.find(b"key", 151).is_some());
    }
}
