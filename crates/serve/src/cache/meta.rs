//! The meta commands: mg, ms, md, ma, mn and me. As in `commands`, the answers and the order of checks
//! are those of memcached 1.6.18.

use super::commands::{Added, BAD_FORMAT, Mode, NOT_A_NUMBER, Outcome, TOO_LARGE, Tokens, fits, said, size};
use super::items::{BINARY_KEY, Item, Items, New, STALE, TOKEN_SENT};
use super::{At, Cache, MAX_KEY, numbers};
use crate::cache::memory::now;
use crate::service::store::Session;

/// The most words, and the most bytes of an opaque one.
const MAX_WORDS: usize = 20;
const MAX_OPAQUE: usize = 32;

const BAD_TOKEN: &[u8] = b"CLIENT_ERROR bad token in command line format";
const LONG_OPAQUE: &[u8] = b"CLIENT_ERROR opaque token too long";

/// An error's line.
type Refused = &'static [u8];

/// The flags of a command.
#[derive(Debug, Default)]
struct Flags {
    no_update: bool,
    value: bool,
    makes_stale: bool,
    silent: bool,
    key: Option<Vec<u8>>,
    mode: u8,
    vivify: Option<i32>,
    ttl: Option<i32>,
    recache: Option<i32>,
    client: u32,
    cas: Option<u64>,
    delta: Option<u64>,
    initial: u64,
}

impl Flags {
    /// Reads the flags from the word `first` on. Errors of single flags are reported after all were
    /// read, as the last one; `Err` has the message.
    fn read(tokens: &Tokens<'_>, first: usize) -> Result<Flags, Refused> {
        let (mut flags, mut seen, mut error) = (Flags::default(), [false; 127], None);
        for word in tokens.after(first) {
            let flag = usize::from(word[0]);
            if flag >= 127 || std::mem::replace(&mut seen[flag], true) {
                return Err(b"CLIENT_ERROR duplicate flag");
            }
            let rest = &word[1..];
            let mut number = |text: &[u8]| {
                let number = numbers::signed_half(text);
                if number.is_none() {
                    error = Some(BAD_TOKEN);
                }
                Some(number.unwrap_or(0))
            };
            match word[0] {
                b'b' => match numbers::decode(tokens.at(1)) {
                    Some(key) => flags.key = Some(key),
                    None => error = Some(b"CLIENT_ERROR error decoding key"),
                },
                b'N' => flags.vivify = number(rest),
                b'T' => flags.ttl = number(rest),
                b'R' => flags.recache = number(rest),
                b'l' | b'h' | b'O' | b'P' | b'L' | b'k' | b's' | b't' | b'c' | b'f' => {}
                b'v' => flags.value = true,
                b'u' => flags.no_update = true,
                b'q' => flags.silent = true,
                b'F' => match numbers::unsigned_half(rest) {
                    Some(client) => flags.client = client,
                    None => error = error.or(Some(BAD_FORMAT)),
                },
                b'C' => match numbers::unsigned(rest) {
                    Some(cas) => flags.cas = Some(cas),
                    None => error = Some(BAD_TOKEN),
                },
                b'M' if word.len() == 2 => flags.mode = word[1],
                b'M' => error = Some(b"CLIENT_ERROR incorrect length for M token"),
                b'J' => match numbers::unsigned(rest) {
                    Some(initial) => flags.initial = initial,
                    None => error = Some(b"CLIENT_ERROR invalid numeric initial value"),
                },
                b'D' => match numbers::unsigned(rest) {
                    Some(delta) => flags.delta = Some(delta),
                    None => error = Some(b"CLIENT_ERROR invalid numeric delta value"),
                },
                b'I' => flags.makes_stale = true,
                _ => return Err(b"CLIENT_ERROR invalid flag"),
            }
        }
        error.map_or(Ok(flags), Err)
    }

    fn key<'a>(&'a self, tokens: &Tokens<'a>) -> &'a [u8] {
        self.key.as_deref().unwrap_or(tokens.at(1))
    }

    fn mark(&self) -> u16 {
        if self.key.is_some() { BINARY_KEY } else { 0 }
    }
}

/// A checked `ms`.
struct Set {
    flags: Flags,
    mode: Mode,
    length: usize,
}

/// Checks an `ms` as far as its line allows. An error has the bytes of data to discard.
fn read_set(tokens: &Tokens<'_>) -> Result<Set, (Refused, usize)> {
    if tokens.count() < 3 {
        return Err((b"ERROR", 0));
    }
    if tokens.at(1).len() > MAX_KEY || tokens.count() == 3 {
        return Err((BAD_FORMAT, 0));
    }
    if tokens.count() > MAX_WORDS {
        return Err((b"CLIENT_ERROR options flags too long", 0));
    }
    let length = numbers::signed_half(tokens.at(2)).and_then(|length| usize::try_from(length).ok());
    let length = length.filter(|length| *length <= i32::MAX as usize - 2).ok_or((BAD_FORMAT, 0))?;
    let discard = |why| (why, length + 2);
    let flags = Flags::read(tokens, 3).map_err(discard)?;
    let has_long_opaque = tokens.after(2).any(|word| word[0] == b'O' && word.len() > MAX_OPAQUE);
    let mode = match flags.mode {
        0 | b'S' => Mode::Set,
        b'E' => Mode::Add,
        b'A' => Mode::Append,
        b'P' => Mode::Prepend,
        b'R' => Mode::Replace,
        _ => return Err(discard(b"CLIENT_ERROR invalid mode for ms M token")),
    };
    if has_long_opaque {
        return Err(discard(LONG_OPAQUE));
    }
    let mode = match mode {
        Mode::Set | Mode::Replace if flags.cas.is_some() => Mode::Cas,
        mode => mode,
    };
    if !fits(flags.key(tokens).len(), flags.client, length) {
        return Err(discard(TOO_LARGE));
    }
    Ok(Set { flags, mode, length })
}

/// Returns the bytes of data after the line of an `ms`, if it is accepted so far.
pub(super) fn data(tokens: &Tokens<'_>) -> Option<usize> {
    read_set(tokens).ok().map(|set| set.length + 2)
}

fn write_key(key: &[u8], is_binary: bool, to: &mut Vec<u8>) {
    to.extend_from_slice(b" k");
    if is_binary {
        numbers::encode(key, to);
        to.extend_from_slice(b" b");
    } else {
        to.extend_from_slice(key);
    }
}

fn write_number(name: u8, number: impl Into<u64>, to: &mut Vec<u8>) {
    to.extend_from_slice(&[b' ', name]);
    numbers::write(number, to);
}

/// Writes the words that are returned as they came: the opaque one, and the key.
fn write_plain(tokens: &Tokens<'_>, key: &[u8], is_binary: bool, to: &mut Vec<u8>) -> Result<(), Refused> {
    for word in tokens.after(2) {
        match word[0] {
            b'O' if word.len() > MAX_OPAQUE => return Err(LONG_OPAQUE),
            b'O' => {
                to.push(b' ');
                to.extend_from_slice(word);
            }
            b'k' => write_key(key, is_binary, to),
            _ => {}
        }
    }
    Ok(())
}

fn write_ttl(items: &Items, item: Item, now: u32, to: &mut Vec<u8>) {
    match items.expires(item) {
        0 => to.extend_from_slice(b" t-1"),
        expires => write_number(b't', expires.wrapping_sub(now), to),
    }
}

impl Cache {
    pub(super) fn meta(&self, session: &mut Session, tokens: &Tokens<'_>, data: &[u8]) -> Vec<u8> {
        let answer = match tokens.at(0)[1] {
            b'g' => self.meta_get(tokens),
            b's' => self.meta_set(session, tokens, data),
            b'd' => self.meta_delete(tokens),
            b'a' => self.meta_arithmetic(tokens),
            b'e' => self.meta_debug(tokens),
            b'n' => Ok(said(b"MN")),
            _ => Err(&b"ERROR"[..]),
        };
        answer.unwrap_or_else(said)
    }

    fn meta_get(&self, tokens: &Tokens<'_>) -> Result<Vec<u8>, Refused> {
        check_words(tokens, b"CLIENT_ERROR options flags are too long")?;
        let flags = Flags::read(tokens, 2)?;
        let (key, now) = (flags.key(tokens), now().0);
        let mut items = self.items();
        let (mut found, mut is_new) = (items.find(key, now), false);
        if found.is_none() && flags.vivify.is_some() {
            let new = New { key, flags: 0, expires: 0, value: [b"", b""], marks: 0 };
            found = items.store(&new, now);
            is_new = found.is_some();
        }
        let mut to = Vec::new();
        let Some(item) = found else {
            to.extend_from_slice(b"EN");
            write_plain(tokens, key, flags.key.is_some(), &mut to)?;
            to.extend_from_slice(b"\r\n");
            let mut count = self.count();
            match flags.ttl {
                Some(_) => count.touch += 1,
                None => count.get += 1,
            }
            return Ok(if flags.silent { Vec::new() } else { to });
        };
        if flags.value {
            to.extend_from_slice(b"VA ");
            numbers::write(items.value_length(item) as u64, &mut to);
        } else {
            to.extend_from_slice(b"HD");
        }
        let won = self.write_found(&mut items, item, is_new, tokens, &flags, now, &mut to)?;
        let marks = items.marks(item);
        if marks & TOKEN_SENT != 0 {
            to.extend_from_slice(b" Z");
        }
        if marks & STALE != 0 {
            to.extend_from_slice(b" X");
        }
        if won || marks & (STALE | TOKEN_SENT) == STALE {
            to.extend_from_slice(b" W");
            items.set_marks(item, marks | TOKEN_SENT);
        }
        to.extend_from_slice(b"\r\n");
        if flags.value {
            items.value(item, &mut to);
            to.extend_from_slice(b"\r\n");
        }
        if !flags.no_update {
            items.touch(item, now);
        }
        let mut count = self.count();
        match flags.ttl {
            Some(_) => (count.touch, count.touch_hits) = (count.touch + 1, count.touch_hits + 1),
            None => (count.get, count.get_hits) = (count.get + 1, count.get_hits + 1),
        }
        Ok(to)
    }

    /// Writes what the flags of `mg` ask for. Returns true if the client has won the right to renew
    /// the item.
    #[allow(clippy::too_many_arguments, reason = "one loop over all flags, in their order")]
    fn write_found(
        &self,
        items: &mut Items,
        item: Item,
        is_new: bool,
        tokens: &Tokens<'_>,
        flags: &Flags,
        now: u32,
        to: &mut Vec<u8>,
    ) -> Result<bool, Refused> {
        let mut won = false;
        for word in tokens.after(2) {
            match word[0] {
                b'T' => items.set_expires(item, self.expiry(flags.ttl.unwrap_or(0), now)),
                b'N' if is_new => {
                    items.set_expires(item, self.expiry(flags.vivify.unwrap_or(0), now));
                    won = true;
                }
                b'R' => {
                    let (expires, marks) = (items.expires(item), items.marks(item));
                    let limit = self.expiry(flags.recache.unwrap_or(0), now);
                    won |= marks & TOKEN_SENT == 0 && !is_new && expires != 0 && expires < limit;
                }
                b's' => write_number(b's', items.value_length(item) as u64, to),
                b't' => write_ttl(items, item, now, to),
                b'c' => write_number(b'c', items.cas(item), to),
                b'f' => write_number(b'f', items.flags(item), to),
                b'l' => write_number(b'l', now.saturating_sub(items.last_use(item)), to),
                b'h' => write_number(b'h', u64::from(items.was_fetched(item)), to),
                b'O' if word.len() > MAX_OPAQUE => return Err(LONG_OPAQUE),
                b'O' => {
                    to.push(b' ');
                    to.extend_from_slice(word);
                }
                b'k' => write_key(flags.key(tokens), items.marks(item) & BINARY_KEY != 0, to),
                _ => {}
            }
        }
        Ok(won)
    }

    fn meta_set(&self, session: &mut Session, tokens: &Tokens<'_>, data: &[u8]) -> Result<Vec<u8>, Refused> {
        let now = now().0;
        let set = read_set(tokens).map_err(|(why, discard)| {
            session.set(At::Swallow as usize, discard as u64);
            if why == TOO_LARGE {
                let key = Flags::read(tokens, 3).ok();
                self.forget(key.as_ref().map_or(tokens.at(1), |flags| flags.key(tokens)), now);
                self.count().too_large += 1;
            }
            why
        })?;
        self.count().set += 1;
        let value = data.strip_suffix(b"\r\n").ok_or(&b"CLIENT_ERROR bad data chunk"[..])?;
        let (flags, mode) = (&set.flags, set.mode);
        let new = New {
            key: flags.key(tokens),
            flags: flags.client,
            expires: self.expiry(flags.ttl.unwrap_or(0), now),
            value: [value, b""],
            marks: flags.mark(),
        };
        let mut items = self.items();
        let takes_stale = flags.makes_stale && mode == Mode::Cas;
        let stored = self.store_item(&mut items, new, mode, flags.cas.unwrap_or(0), takes_stale, now);
        let mut to = match stored {
            Outcome::Stored(_) if flags.silent => return Ok(Vec::new()),
            Outcome::Stored(_) => b"HD".to_vec(),
            Outcome::Exists => b"EX".to_vec(),
            Outcome::NotFound => b"NF".to_vec(),
            Outcome::NotStored => b"NS".to_vec(),
            Outcome::NoMemory => return Err(b"SERVER_ERROR out of memory storing object"),
        };
        for word in tokens.after(3) {
            match word[0] {
                b'O' => {
                    to.push(b' ');
                    to.extend_from_slice(word);
                }
                b'k' => write_key(new.key, flags.key.is_some(), &mut to),
                b'c' => {
                    let cas = if let Outcome::Stored(item) = stored { items.cas(item) } else { 0 };
                    write_number(b'c', cas, &mut to);
                }
                _ => {}
            }
        }
        to.extend_from_slice(b"\r\n");
        Ok(to)
    }

    fn meta_delete(&self, tokens: &Tokens<'_>) -> Result<Vec<u8>, Refused> {
        check_words(tokens, b"CLIENT_ERROR options flags too long")?;
        let flags = Flags::read(tokens, 2).map_err(|_| &b"CLIENT_ERROR invalid or duplicate flag"[..])?;
        let (key, now) = (flags.key(tokens), now().0);
        let mut rest = Vec::new();
        write_plain(tokens, key, flags.key.is_some(), &mut rest)?;
        let mut items = self.items();
        let code: &[u8] = match items.find(key, now) {
            None => {
                self.count().delete_misses += 1;
                b"NF"
            }
            Some(item) if flags.cas.is_some_and(|cas| cas != items.cas(item)) => {
                self.count().delete_misses += 1;
                b"EX"
            }
            Some(item) => {
                if flags.makes_stale {
                    if let Some(seconds) = flags.ttl {
                        items.set_expires(item, self.expiry(seconds, now));
                    }
                    let marks = items.marks(item) & !TOKEN_SENT | STALE;
                    items.set_marks(item, marks);
                    items.renew_cas(item);
                } else {
                    self.count().delete_hits += 1;
                    items.remove(item);
                }
                if flags.silent {
                    return Ok(Vec::new());
                }
                b"HD"
            }
        };
        Ok([code, &rest, b"\r\n"].concat())
    }

    fn meta_arithmetic(&self, tokens: &Tokens<'_>) -> Result<Vec<u8>, Refused> {
        check_words(tokens, b"CLIENT_ERROR options flags too long")?;
        let flags = Flags::read(tokens, 2).map_err(|_| &b"CLIENT_ERROR invalid or duplicate flag"[..])?;
        let adds = match flags.mode {
            0 | b'I' | b'+' => true,
            b'D' | b'-' => false,
            _ => return Err(b"CLIENT_ERROR invalid mode for ma M token"),
        };
        let (key, now) = (flags.key(tokens), now().0);
        let mut items = self.items();
        let delta = flags.delta.unwrap_or(1);
        let mut is_new = false;
        let found = match self.add(&mut items, key, adds, delta, flags.cas.unwrap_or(0), now) {
            Added::Sum(item, sum) => Ok((item, sum)),
            Added::NotANumber => return Err(NOT_A_NUMBER),
            Added::NoMemory => return Err(b"SERVER_ERROR out of memory"),
            Added::Exists => Err(b"EX"),
            Added::NotFound if flags.vivify.is_some() => {
                let mut digits = Vec::new();
                numbers::write(flags.initial, &mut digits);
                let new = New { key, flags: 0, expires: 0, value: [&digits, b""], marks: 0 };
                let item = items.store(&new, now);
                is_new = true;
                Ok((item.ok_or(&b"SERVER_ERROR Out of memory allocating new item"[..])?, flags.initial))
            }
            Added::NotFound => {
                let mut count = self.count();
                match adds {
                    true => count.incr_misses += 1,
                    false => count.decr_misses += 1,
                }
                Err(b"NF")
            }
        };
        let mut to = Vec::new();
        let (item, sum) = match found {
            Ok(found) => found,
            Err(code) => {
                to.extend_from_slice(code);
                write_plain(tokens, key, flags.key.is_some(), &mut to)?;
                to.extend_from_slice(b"\r\n");
                return Ok(to);
            }
        };
        let sum = sum.to_string();
        if flags.value {
            to.extend_from_slice(b"VA ");
            numbers::write(sum.len() as u64, &mut to);
        } else {
            to.extend_from_slice(b"HD");
        }
        for word in tokens.after(2) {
            match word[0] {
                b'c' => write_number(b'c', items.cas(item), &mut to),
                b't' => write_ttl(&items, item, now, &mut to),
                b'T' => items.set_expires(item, self.expiry(flags.ttl.unwrap_or(0), now)),
                b'N' if is_new => items.set_expires(item, self.expiry(flags.vivify.unwrap_or(0), now)),
                b'O' if word.len() > MAX_OPAQUE => return Err(LONG_OPAQUE),
                b'O' => {
                    to.push(b' ');
                    to.extend_from_slice(word);
                }
                b'k' => write_key(key, flags.key.is_some(), &mut to),
                _ => {}
            }
        }
        to.extend_from_slice(b"\r\n");
        if flags.value {
            to.extend_from_slice(sum.as_bytes());
            to.extend_from_slice(b"\r\n");
        }
        Ok(if flags.silent && !is_new { Vec::new() } else { to })
    }

    fn meta_debug(&self, tokens: &Tokens<'_>) -> Result<Vec<u8>, Refused> {
        if tokens.count() < 3 || tokens.at(1).len() > MAX_KEY {
            return Err(BAD_FORMAT);
        }
        let decoded = match tokens.count() >= 4 && tokens.at(2) == b"b" {
            true => Some(numbers::decode(tokens.at(1)).ok_or(BAD_FORMAT)?),
            false => None,
        };
        let (key, now) = (decoded.as_deref().unwrap_or(tokens.at(1)), now().0);
        self.count().meta += 1;
        let mut items = self.items();
        let Some(item) = items.find(key, now) else { return Ok(said(b"EN")) };
        let mut to = b"ME ".to_vec();
        match items.marks(item) & BINARY_KEY {
            0 => to.extend_from_slice(key),
            _ => numbers::encode(key, &mut to),
        }
        let expires = match items.expires(item) {
            0 => -1,
            expires => i64::from(now) - i64::from(expires),
        };
        let (flags, length) = (items.flags(item), items.value_length(item));
        let text = format!(
            " exp={expires} la={} cas={} fetch={} cls=1 size={}\r\n",
            now.saturating_sub(items.last_use(item)),
            items.cas(item),
            if items.was_fetched(item) { "yes" } else { "no" },
            size(key.len(), flags, length),
        );
        to.extend_from_slice(text.as_bytes());
        Ok(to)
    }
}

fn check_words(tokens: &Tokens<'_>, too_many: Refused) -> Result<(), Refused> {
    match tokens.count() {
        ..3 => Err(b"ERROR"),
        _ if tokens.at(1).len() > MAX_KEY => Err(BAD_FORMAT),
        count if count > MAX_WORDS => Err(too_many),
        _ => Ok(()),
    }
}
