//! The builtin cache: memcached's text protocol, over items that user space and the kernel share.
//!
//! User space serves every command, under one lock. The kernel half (`services/cache.c`) answers a
//! `get` of one key from the same memory; `memory` describes how it reads safely.
//!
//! A *message* is a command with its data. Two commands are several messages, so that nothing
//! unbounded waits in memory. The connection's state says which of them is next:
//!
//! ```text
//! Command ── value too large ──► Swallow(n) ── n bytes of data ──► Command
//!         ── get of several keys ──► Get ── a key ──► Get ── line end ──► Command
//! ```

mod binary;
mod commands;
mod items;
pub(crate) mod memory;
mod meta;
mod numbers;
mod reader;
mod stats;

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::per_thread::PerThread;
use crate::service::store::{Session, Store, StoreError};
use crate::service::{Answer, Joined, Parse, Properties, Refusal, Service, Share, Verdict};
use commands::Tokens;
use items::Items;
use memory::Memory;

/// The most bytes of a key.
const MAX_KEY: usize = 250;
/// The most bytes of an item, as memcached counts them.
const MAX_ITEM: usize = 1 << 20;
/// The most bytes of a line that has not ended, and of a `get` that has not.
const MAX_LINE: usize = 2048;
const MAX_GET: usize = 256 * 1024;
/// The most bytes of a message: an item, and a line that ended in one read.
const MAX_MESSAGE: usize = MAX_ITEM + 128 * 1024;

/// Returns the half for the kernel. Empty if clang was missing when shunt was built.
pub fn object() -> &'static [u8] {
    aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/cache.bpf.o"))
}

/// The cache.
#[derive(Debug)]
pub struct Cache {
    items: Mutex<Items>,
    memory: Arc<Memory>,
    counts: Counts,
    commands: PerThread<Mutex<stats::Commands>>,
    threads: usize,
    began: Instant,
    /// The wall clock's time when the cache's clock was 0.
    zero: i64,
}

/// Counters of connections.
#[derive(Debug, Default)]
struct Counts {
    connections: AtomicU64,
    open: AtomicI64,
    verbosity: AtomicU64,
}

/// The words of the connection's state.
#[derive(Clone, Copy)]
enum At {
    /// Bytes of data to discard.
    Swallow,
    /// The command of the keys that follow, as [`Get`] in a word, or 0.
    Get,
    /// When items of this `gat` expire.
    Expires,
}

/// A command that returns values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Get {
    with_cas: bool,
    touches: bool,
}

impl Get {
    fn named(name: &[u8]) -> Option<Get> {
        let (with_cas, touches) = match name {
            b"get" | b"bget" => (false, false),
            b"gets" => (true, false),
            b"gat" => (false, true),
            b"gats" => (true, true),
            _ => return None,
        };
        Some(Get { with_cas, touches })
    }

    fn word(self) -> u64 {
        1 | u64::from(self.with_cas) << 1 | u64::from(self.touches) << 2
    }

    fn of_word(word: u64) -> Option<Get> {
        (word & 1 == 1).then_some(Get { with_cas: word & 2 != 0, touches: word & 4 != 0 })
    }
}

impl Cache {
    /// Creates a cache with `memory` bytes for its items and their index, rounded up to 2 MiB and
    /// to at least 16 MiB. With `in_kernel` the kernel shares the memory.
    pub fn new(memory: usize, threads: usize, in_kernel: bool) -> Result<Cache, StoreError> {
        let memory = Arc::new(Memory::new(memory, in_kernel)?);
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Ok(Cache {
            items: Mutex::new(Items::new(memory.clone())),
            memory,
            counts: Counts::default(),
            commands: PerThread::new(threads),
            threads,
            began: Instant::now(),
            zero: wall.cast_signed() - i64::from(memory::now().0),
        })
    }

    /// Returns the memory, for the kernel's programs.
    pub fn store(&self) -> &Arc<Store> {
        self.memory.store()
    }

    fn items(&self) -> MutexGuard<'_, Items> {
        // A panic leaves chains and counts that may not fit each other.
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the calling thread's counters of commands.
    fn count(&self) -> MutexGuard<'_, stats::Commands> {
        stats::locked(self.commands.own())
    }

    /// Converts a client's expiry time to the cache's clock. 0 is never.
    fn expiry(&self, seconds: i32, now: u32) -> u32 {
        const MOST_RELATIVE: i64 = 60 * 60 * 24 * 30;
        match i64::from(seconds) {
            0 => 0,
            1..=MOST_RELATIVE => now + seconds.cast_unsigned(),
            // Negative times have passed, as do absolute ones before the start.
            absolute => u32::try_from(absolute - self.zero).unwrap_or(1).max(1),
        }
    }

    /// Measures the line at the beginning of `bytes`, without its end.
    fn line(bytes: &[u8]) -> Result<usize, Parse> {
        let end = bytes.iter().position(|byte| *byte == b'\n').ok_or_else(|| {
            let spaces = bytes.iter().take_while(|byte| **byte == b' ').count();
            let rest = &bytes[spaces..];
            let is_get = spaces <= 100 && (rest.starts_with(b"get ") || rest.starts_with(b"gets "));
            match bytes.len() > if is_get { MAX_GET } else { MAX_LINE } {
                true => Parse::Refused(Refusal::TooLong),
                false => Parse::More,
            }
        })?;
        Ok(end)
    }

    /// Returns the length of the part of a `get` line with its first key, if the keys are several
    /// and all can be served one after another.
    fn first_of_several(line: &[u8]) -> Option<usize> {
        let mut tokens = line.split(|byte| *byte == b' ').filter(|token| !token.is_empty());
        let get = Get::named(tokens.next()?)?;
        if get.touches {
            numbers::signed_half(tokens.next()?)?;
        }
        let first = tokens.next()?;
        let mut rest = tokens.peekable();
        rest.peek()?;
        if first.len() > MAX_KEY || line.contains(&0) || rest.any(|key| key.len() > MAX_KEY) {
            return None;
        }
        Some(first.as_ptr().addr() - line.as_ptr().addr() + first.len())
    }

    /// Measures the next key of a `get`, or the end of its line.
    fn next_key(bytes: &[u8]) -> Parse {
        let spaces = bytes.iter().take_while(|byte| **byte == b' ').count();
        match bytes[spaces..].iter().position(|byte| matches!(byte, b' ' | b'\n')) {
            None => Parse::More,
            Some(length) if is_line_end(&bytes[spaces..=spaces + length]) => {
                Parse::Message(spaces + length + 1)
            }
            Some(length) => {
                let is_last = bytes[spaces + length] == b'\n' && bytes[spaces + length - 1] == b'\r';
                Parse::Message(spaces + length - usize::from(is_last))
            }
        }
    }

    fn get_next(&self, session: &mut Session, get: Get, key: &[u8]) -> Vec<u8> {
        let spaces = key.iter().take_while(|byte| **byte == b' ').count();
        let key = &key[spaces..];
        let mut to = Vec::new();
        if is_line_end(key) {
            session.set(At::Get as usize, 0);
            to.extend_from_slice(b"END\r\n");
        } else {
            self.get(get, session.get(At::Expires as usize) as u32, key, memory::now().0, &mut to);
        }
        to
    }
}

/// Returns the line without its end.
fn without_end(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    // memcached keeps the carriage return of an otherwise empty line.
    if line.len() > 1 { line.strip_suffix(b"\r").unwrap_or(line) } else { line }
}

fn is_line_end(bytes: &[u8]) -> bool {
    matches!(bytes, b"\n" | b"\r\n")
}

impl Service for Cache {
    fn name(&self) -> &str {
        "cache"
    }

    fn properties(&self) -> Properties {
        Properties {
            max_message: MAX_MESSAGE,
            replies: false,
            retry: false,
            answers: true,
            sees_replies: false,
        }
    }

    fn parse(&self, bytes: &[u8]) -> Parse {
        if binary::is_binary(bytes) {
            let is_there = binary::refusal(bytes).is_some();
            return if is_there { Parse::Refused(Refusal::UnknownVersion) } else { Parse::More };
        }
        let end = match Cache::line(bytes) {
            Ok(end) => end,
            Err(parse) => return parse,
        };
        let line = without_end(&bytes[..=end]);
        if line.first().is_some_and(|first| matches!(first, b'g' | b'b' | b' '))
            && let Some(length) = Cache::first_of_several(line)
        {
            return Parse::Message(length);
        }
        Parse::Message(end + 1 + commands::data(&Tokens::read(line)).unwrap_or(0))
    }

    fn parse_in(&self, session: &Session, bytes: &[u8]) -> Parse {
        match session.get(At::Swallow as usize) {
            0 if session.get(At::Get as usize) != 0 => Cache::next_key(bytes),
            0 => self.parse(bytes),
            swallow => Parse::Message(bytes.len().min(usize::try_from(swallow).unwrap_or(usize::MAX))),
        }
    }

    fn parse_reply(&self, _: &[u8]) -> Parse {
        Parse::Refused(Refusal::Malformed)
    }

    fn decide_in(&self, session: &mut Session, message: &[u8]) -> Verdict {
        let swallow = session.get(At::Swallow as usize);
        if swallow > 0 {
            session.set(At::Swallow as usize, swallow.saturating_sub(message.len() as u64));
            return Verdict::Reply(Vec::new());
        }
        if let Some(get) = Get::of_word(session.get(At::Get as usize)) {
            return Verdict::Reply(self.get_next(session, get, message));
        }
        let Some(end) = message.iter().position(|byte| *byte == b'\n') else {
            return Verdict::Reply(self.begin_get(session, message));
        };
        let data = &message[end + 1..];
        self.command(session, &Tokens::read(without_end(&message[..=end])), data)
    }

    fn refuse_in(&self, _: &mut Session, head: &[u8], why: Refusal) -> Answer {
        if why == Refusal::TooMany {
            return Answer::Reply(b"SERVER_ERROR too many requests\r\n".to_vec());
        }
        // To others memcached says nothing.
        Answer::Close(binary::refusal(head).unwrap_or_default())
    }

    fn accepted_in(&self, _: &mut Session) -> Answer {
        self.counts.connections.fetch_add(1, Relaxed);
        self.counts.open.fetch_add(1, Relaxed);
        Answer::Nothing
    }

    fn closed(&self) {
        self.counts.open.fetch_sub(1, Relaxed);
    }

    fn measures(&self) -> Vec<(&'static str, u64, bool)> {
        self.measured()
    }

    fn part(&self, _: &[u8], _: &mut Share) -> Option<Vec<u8>> {
        None
    }

    fn join(&self, answer: &[u8], _: &mut Share) -> Joined {
        Joined { bytes: answer.to_vec(), is_alone: true }
    }
}
