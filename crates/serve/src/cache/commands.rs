//! The commands of memcached's text protocol. The answers, also to malformed commands, are those of
//! memcached 1.6.18, and in the order of its checks.

use std::borrow::Cow;

use super::items::{Item, Items, New};
use super::reader::{self, Found};
use super::{At, Cache, Get, MAX_ITEM, MAX_KEY, meta, numbers};
use crate::cache::memory::{Head, now};
use crate::service::Verdict;
use crate::service::store::Session;

/// memcached's `MAX_TOKENS`: one more than the words that are recognized.
const MAX_TOKENS: usize = 24;
/// memcached's `sizeof(item)` and the unique number, for the bound of an item.
const ITEM_HEAD: usize = 48 + 8;

pub(super) const BAD_FORMAT: &[u8] = b"CLIENT_ERROR bad command line format";
pub(super) const TOO_LARGE: &[u8] = b"SERVER_ERROR object too large for cache";
const BAD_EXPIRY: &[u8] = b"CLIENT_ERROR invalid exptime argument";
const NO_MEMORY: &[u8] = b"SERVER_ERROR out of memory storing object";
pub(super) const NOT_A_NUMBER: &[u8] = b"CLIENT_ERROR cannot increment or decrement non-numeric value";

/// The words of a line.
pub(super) struct Tokens<'a> {
    line: &'a [u8],
    words: [&'a [u8]; MAX_TOKENS],
    count: usize,
}

impl<'a> Tokens<'a> {
    /// Splits a line at its spaces. A zero byte ends it.
    pub(super) fn read(line: &'a [u8]) -> Tokens<'a> {
        let line = &line[..line.iter().position(|byte| *byte == 0).unwrap_or(line.len())];
        let words = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
        let mut tokens = Tokens { line, words: [b""; MAX_TOKENS], count: 0 };
        for word in words.take(MAX_TOKENS - 1) {
            tokens.words[tokens.count] = word;
            tokens.count += 1;
        }
        tokens
    }

    /// Returns the number of words and one more, as memcached counts.
    pub(super) fn count(&self) -> usize {
        self.count + 1
    }

    /// Returns a word, which is empty after the last.
    pub(super) fn at(&self, index: usize) -> &'a [u8] {
        self.words.get(index).copied().unwrap_or(b"")
    }

    pub(super) fn after(&self, index: usize) -> impl Iterator<Item = &'a [u8]> {
        self.words[..self.count].iter().skip(index).copied()
    }

    /// Returns all words from an index on, also those that are not recognized.
    fn all_after(&self, index: usize) -> impl Iterator<Item = &'a [u8]> {
        self.line.split(|byte| *byte == b' ').filter(|word| !word.is_empty()).skip(index)
    }

    fn has_noreply(&self) -> bool {
        self.count > 0 && self.words[self.count - 1] == b"noreply"
    }
}

/// How an item is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Set,
    Add,
    Replace,
    Append,
    Prepend,
    Cas,
}

impl Mode {
    fn named(name: &[u8]) -> Option<Mode> {
        Some(match name {
            b"set" => Mode::Set,
            b"add" => Mode::Add,
            b"replace" => Mode::Replace,
            b"append" => Mode::Append,
            b"prepend" => Mode::Prepend,
            b"cas" => Mode::Cas,
            _ => return None,
        })
    }
}

/// The result of storing an item.
#[derive(Clone, Copy, Debug)]
pub(super) enum Outcome {
    Stored(Item),
    NotStored,
    Exists,
    NotFound,
    NoMemory,
}

/// A command that stores an item.
pub(super) struct Update<'a> {
    pub(super) key: &'a [u8],
    pub(super) flags: u32,
    pub(super) seconds: i32,
    /// The length of the value, without its line end.
    pub(super) length: usize,
    pub(super) cas: u64,
}

impl<'a> Update<'a> {
    /// Reads the line of a command with data, after the count of its words was checked.
    fn read(tokens: &Tokens<'a>, mode: Mode) -> Option<Update<'a>> {
        let key = tokens.at(1);
        if key.len() > MAX_KEY {
            return None;
        }
        let flags = numbers::unsigned_half(tokens.at(2))?;
        let seconds = numbers::signed_half(tokens.at(3))?;
        let length = numbers::signed_half(tokens.at(4))?;
        let cas = if mode == Mode::Cas { numbers::unsigned(tokens.at(5))? } else { 0 };
        let length = usize::try_from(length).ok().filter(|length| *length <= i32::MAX as usize - 2)?;
        Some(Update { key, flags, seconds, length, cas })
    }
}

/// Returns the bytes that memcached needs for an item.
pub(super) fn size(key: usize, flags: u32, value: usize) -> usize {
    ITEM_HEAD + key + 1 + if flags == 0 { 0 } else { 4 } + value + 2
}

pub(super) fn fits(key: usize, flags: u32, value: usize) -> bool {
    size(key, flags, value) <= MAX_ITEM
}

/// Returns the bytes of data after the line, if the command is accepted so far.
pub(super) fn data(tokens: &Tokens<'_>) -> Option<usize> {
    if tokens.at(0) == b"ms" {
        return meta::data(tokens);
    }
    let mode = Mode::named(tokens.at(0))?;
    if !has_update_words(tokens, mode) {
        return None;
    }
    let update = Update::read(tokens, mode)?;
    fits(update.key.len(), update.flags, update.length).then_some(update.length + 2)
}

fn has_update_words(tokens: &Tokens<'_>, mode: Mode) -> bool {
    let least = if mode == Mode::Cas { 7 } else { 6 };
    tokens.count() == least || tokens.count() == least + 1
}

/// Makes a line of an answer.
pub(super) fn said(text: &[u8]) -> Vec<u8> {
    [text, b"\r\n"].concat()
}

impl Cache {
    /// Serves a command with its data.
    pub(super) fn command(&self, session: &mut Session, tokens: &Tokens<'_>, data: &[u8]) -> Verdict {
        let name = tokens.at(0);
        if tokens.count() < 2 || name.len() < 2 {
            return Verdict::Reply(said(b"ERROR"));
        }
        if name[0] == b'm' && name.len() == 2 {
            return Verdict::Reply(self.meta(session, tokens, data));
        }
        if let Some(get) = Get::named(name) {
            return Verdict::Reply(self.get_all(get, tokens));
        }
        let silent = tokens.has_noreply();
        let words = tokens.count();
        let answer: Cow<'static, [u8]> = match name {
            _ if let Some(mode) = Mode::named(name) => match has_update_words(tokens, mode) {
                true => self.update(session, tokens, mode, data).into(),
                // The last word has no meaning yet.
                false => return Verdict::Reply(said(b"ERROR")),
            },
            b"delete" if (3..=5).contains(&words) => self.delete(tokens).into(),
            b"incr" | b"decr" if matches!(words, 4 | 5) => self.arithmetic(tokens, name == b"incr"),
            b"touch" if matches!(words, 4 | 5) => self.touch(tokens).into(),
            b"flush_all" if (2..=4).contains(&words) => self.flush(tokens).into(),
            b"verbosity" if matches!(words, 3 | 4) => self.set_verbosity(tokens).into(),
            b"version" => return Verdict::Reply(said(b"VERSION 1.6.18")),
            b"stats" => return Verdict::Reply(self.stats(tokens)),
            b"quit" => return Verdict::Close(Vec::new()),
            b"shutdown" => return Verdict::Reply(said(b"ERROR: shutdown not enabled")),
            _ if tokens.at(words - 2).starts_with(b"HTTP/") && !is_known(name) => {
                return Verdict::Close(Vec::new());
            }
            _ => return Verdict::Reply(said(b"ERROR")),
        };
        Verdict::Reply(if silent { Vec::new() } else { said(&answer) })
    }

    // ---- reading

    /// Appends the value of a key, if there is one.
    pub(super) fn get(&self, get: Get, expires: u32, key: &[u8], now: u32, to: &mut Vec<u8>) {
        let found = match get {
            Get { with_cas: false, touches: false } => reader::get(&self.memory, key, now, to),
            _ => Found::Unknown,
        };
        let is_hit = match found {
            Found::Hit => true,
            Found::Miss => false,
            Found::Unknown => self.get_locked(get, expires, key, now, to),
        };
        let mut count = self.count();
        match (get.touches, is_hit) {
            (true, true) => (count.touch, count.touch_hits) = (count.touch + 1, count.touch_hits + 1),
            (true, false) => count.touch += 1,
            (false, true) => (count.get, count.get_hits) = (count.get + 1, count.get_hits + 1),
            (false, false) => count.get += 1,
        }
    }

    /// Appends the value of a key. Returns true if there is one.
    fn get_locked(&self, get: Get, expires: u32, key: &[u8], now: u32, to: &mut Vec<u8>) -> bool {
        let mut items = self.items();
        let Some(item) = items.find(key, now) else { return false };
        items.touch(item, now);
        if get.touches {
            items.set_expires(item, expires);
        }
        items.answer(item, get.with_cas, to);
        true
    }

    /// Serves a line with at most one key, or with an error.
    fn get_all(&self, get: Get, tokens: &Tokens<'_>) -> Vec<u8> {
        if tokens.count() < 3 {
            return said(b"ERROR");
        }
        let now = now().0;
        let (expires, first) = match get.touches {
            true => match numbers::signed_half(tokens.at(1)) {
                Some(seconds) => (self.expiry(seconds, now), 2),
                None => return said(BAD_EXPIRY),
            },
            false => (0, 1),
        };
        if tokens.all_after(first).any(|key| key.len() > MAX_KEY) {
            return said(BAD_FORMAT);
        }
        // With a zero byte in the line there may be several. They are too odd to be served one by
        // one.
        if tokens.all_after(first).nth(1).is_some() {
            return said(b"ERROR");
        }
        let mut to = Vec::new();
        tokens.after(first).for_each(|key| self.get(get, expires, key, now, &mut to));
        to.extend_from_slice(b"END\r\n");
        to
    }

    /// Serves the first key of several.
    pub(super) fn begin_get(&self, session: &mut Session, message: &[u8]) -> Vec<u8> {
        let tokens = Tokens::read(message);
        let Some(get) = Get::named(tokens.at(0)) else { return said(b"ERROR") };
        let now = now().0;
        let seconds = if get.touches { numbers::signed_half(tokens.at(1)).unwrap_or(0) } else { 0 };
        let expires = self.expiry(seconds, now);
        session.set(At::Get as usize, get.word());
        session.set(At::Expires as usize, expires.into());
        let mut to = Vec::new();
        self.get(get, expires, tokens.at(if get.touches { 2 } else { 1 }), now, &mut to);
        to
    }

    // ---- storing

    fn update(&self, session: &mut Session, tokens: &Tokens<'_>, mode: Mode, data: &[u8]) -> &'static [u8] {
        let Some(update) = Update::read(tokens, mode) else { return BAD_FORMAT };
        let now = now().0;
        if !fits(update.key.len(), update.flags, update.length) {
            session.set(At::Swallow as usize, update.length as u64 + 2);
            if mode == Mode::Set {
                self.forget(update.key, now);
            }
            self.count().too_large += 1;
            return TOO_LARGE;
        }
        self.count().set += 1;
        let Some(value) = data.strip_suffix(b"\r\n") else { return b"CLIENT_ERROR bad data chunk" };
        let expires = self.expiry(update.seconds, now);
        let new = New { key: update.key, flags: update.flags, expires, value: [value, b""], marks: 0 };
        match self.store_item(&mut self.items(), new, mode, update.cas, false, now) {
            Outcome::Stored(_) => b"STORED",
            Outcome::NotStored => b"NOT_STORED",
            Outcome::Exists => b"EXISTS",
            Outcome::NotFound => b"NOT_FOUND",
            Outcome::NoMemory => NO_MEMORY,
        }
    }

    /// Removes an item whose replacement failed, because its value is not the client's any more.
    pub(super) fn forget(&self, key: &[u8], now: u32) {
        let mut items = self.items();
        if let Some(item) = items.find(key, now) {
            items.remove(item);
        }
    }

    /// Stores an item if the mode and the unique number allow it. With `takes_stale`, an older number
    /// than the item's makes the new item a stale one.
    pub(super) fn store_item(
        &self,
        items: &mut Items,
        mut new: New<'_>,
        mode: Mode,
        cas: u64,
        takes_stale: bool,
        now: u32,
    ) -> Outcome {
        let Some(old) = items.find(new.key, now) else {
            if mode == Mode::Cas {
                self.count().cas_misses += 1;
            }
            return match mode {
                Mode::Set | Mode::Add => store(items, &new, now),
                Mode::Cas => Outcome::NotFound,
                Mode::Replace | Mode::Append | Mode::Prepend => Outcome::NotStored,
            };
        };
        let is_match = cas != 0 && cas == items.cas(old);
        match mode {
            Mode::Set | Mode::Replace => store(items, &new, now),
            Mode::Add => Outcome::NotStored,
            Mode::Cas if is_match => {
                self.count().cas_hits += 1;
                store(items, &new, now)
            }
            Mode::Cas if takes_stale && cas != 0 && cas < items.cas(old) => {
                self.count().cas_hits += 1;
                new.expires = items.expires(old);
                new.marks |= super::items::STALE | items.marks(old) & super::items::TOKEN_SENT;
                store(items, &new, now)
            }
            Mode::Cas => {
                self.count().cas_badval += 1;
                Outcome::Exists
            }
            Mode::Append | Mode::Prepend if cas != 0 && !is_match => Outcome::Exists,
            Mode::Append | Mode::Prepend => {
                let mut value = Vec::new();
                items.value(old, &mut value);
                let flags = items.flags(old);
                if !fits(new.key.len(), flags, value.len() + new.value[0].len()) {
                    return Outcome::NotStored;
                }
                let (first, second) = match mode {
                    Mode::Append => (&value[..], new.value[0]),
                    _ => (new.value[0], &value[..]),
                };
                let expires = items.expires(old);
                store(items, &New { key: new.key, flags, expires, value: [first, second], marks: 0 }, now)
            }
        }
    }

    // ---- the others

    fn delete(&self, tokens: &Tokens<'_>) -> &'static [u8] {
        let (words, silent) = (tokens.count(), tokens.has_noreply());
        let is_zero = tokens.at(2) == b"0";
        if words > 3 && !(words == 4 && (is_zero || silent) || words == 5 && is_zero && silent) {
            return b"CLIENT_ERROR bad command line format.  Usage: delete <key> [noreply]";
        }
        if tokens.at(1).len() > MAX_KEY {
            return BAD_FORMAT;
        }
        let mut items = self.items();
        let found = items.find(tokens.at(1), now().0);
        found.into_iter().for_each(|item| items.remove(item));
        let mut count = self.count();
        match found {
            Some(_) => count.delete_hits += 1,
            None => count.delete_misses += 1,
        }
        if found.is_some() { b"DELETED" } else { b"NOT_FOUND" }
    }

    fn arithmetic(&self, tokens: &Tokens<'_>, adds: bool) -> Cow<'static, [u8]> {
        if tokens.at(1).len() > MAX_KEY {
            return BAD_FORMAT.into();
        }
        let Some(delta) = numbers::unsigned(tokens.at(2)) else {
            return b"CLIENT_ERROR invalid numeric delta argument"[..].into();
        };
        match self.add(&mut self.items(), tokens.at(1), adds, delta, 0, now().0) {
            Added::Sum(_, sum) => sum.to_string().into_bytes().into(),
            Added::NotANumber => NOT_A_NUMBER.into(),
            Added::NoMemory => b"SERVER_ERROR out of memory"[..].into(),
            Added::NotFound | Added::Exists => {
                let mut count = self.count();
                match adds {
                    true => count.incr_misses += 1,
                    false => count.decr_misses += 1,
                }
                b"NOT_FOUND"[..].into()
            }
        }
    }

    /// Adds to the number of an item, or subtracts, if `cas` is 0 or the item's number.
    pub(super) fn add(
        &self,
        items: &mut Items,
        key: &[u8],
        adds: bool,
        delta: u64,
        cas: u64,
        now: u32,
    ) -> Added {
        let Some(item) = items.find(key, now) else { return Added::NotFound };
        let length = items.value_length(item);
        // memcached keeps longer values in pieces, and takes none of them for a number.
        if length == 0 || size(key.len(), items.flags(item), length) > MAX_ITEM / 2 {
            return Added::NotANumber;
        }
        if cas != 0 && cas != items.cas(item) {
            return Added::Exists;
        }
        let mut value = Vec::new();
        items.value(item, &mut value);
        value.truncate(value.iter().position(|byte| *byte == 0).unwrap_or(length));
        let Some(number) = numbers::unsigned(&value) else { return Added::NotANumber };
        let sum = if adds { number.wrapping_add(delta) } else { number.saturating_sub(delta) };
        let mut digits = Vec::new();
        numbers::write(sum, &mut digits);
        let mut count = self.count();
        match adds {
            true => count.incr_hits += 1,
            false => count.decr_hits += 1,
        }
        drop(count);
        if digits.len() <= length {
            digits.resize(length, b' ');
            items.overwrite(item, &digits);
            return Added::Sum(item, sum);
        }
        let (flags, expires) = (items.flags(item), items.expires(item));
        let new = New { key, flags, expires, value: [&digits, b""], marks: 0 };
        items.store(&new, now).map_or(Added::NoMemory, |item| Added::Sum(item, sum))
    }

    fn touch(&self, tokens: &Tokens<'_>) -> &'static [u8] {
        if tokens.at(1).len() > MAX_KEY {
            return BAD_FORMAT;
        }
        let Some(seconds) = numbers::signed_half(tokens.at(2)) else { return BAD_EXPIRY };
        let now = now().0;
        let expires = self.expiry(seconds, now);
        let mut items = self.items();
        let found = items.find(tokens.at(1), now);
        if let Some(item) = found {
            items.touch(item, now);
            items.set_expires(item, expires);
        }
        let mut count = self.count();
        count.touch += 1;
        count.touch_hits += u64::from(found.is_some());
        if found.is_some() { b"TOUCHED" } else { b"NOT_FOUND" }
    }

    fn flush(&self, tokens: &Tokens<'_>) -> &'static [u8] {
        self.count().flush += 1;
        let seconds = match tokens.count() == if tokens.has_noreply() { 3 } else { 2 } {
            true => 0,
            false => match numbers::signed_half(tokens.at(1)) {
                Some(seconds) => seconds,
                None => return BAD_EXPIRY,
            },
        };
        let now = now().0;
        let oldest = if seconds > 0 { self.expiry(seconds, now) } else { now } - 1;
        let mut items = self.items();
        if oldest <= now {
            let cas = items.next_cas();
            items.memory.set_head(Head::OldestCas, cas);
        }
        items.memory.set_head(Head::OldestLive, oldest.into());
        b"OK"
    }

    fn set_verbosity(&self, tokens: &Tokens<'_>) -> &'static [u8] {
        let Some(level) = numbers::unsigned_half(tokens.at(1)) else { return BAD_FORMAT };
        self.counts.verbosity.store(level.into(), std::sync::atomic::Ordering::Relaxed);
        b"OK"
    }
}

/// The result of adding to a number.
#[derive(Clone, Copy, Debug)]
pub(super) enum Added {
    Sum(Item, u64),
    NotANumber,
    NotFound,
    Exists,
    NoMemory,
}

fn store(items: &mut Items, new: &New<'_>, now: u32) -> Outcome {
    items.store(new, now).map_or(Outcome::NoMemory, Outcome::Stored)
}

/// Returns whether memcached knows the command, and so does not take its line for one of HTTP.
fn is_known(name: &[u8]) -> bool {
    matches!(name.first(), Some(b'm' | b'g' | b's' | b'a' | b'c' | b'i' | b'd' | b't'))
        && (name[0] != b'm' || name.len() == 2)
        || matches!(name, b"flush_all" | b"verbosity" | b"lru_crawler" | b"watch" | b"lru")
        || Mode::named(name).is_some()
}
