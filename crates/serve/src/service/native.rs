//! The native half of a service: C functions behind a table, as `include/shunt/native.h` lays it
//! out. This is the only module of the crate with `unsafe` code.
//!
//! The invariant: a table has the layout of its version, and its functions only read the bytes that
//! they get, write the verdict, and change the state that the verdict points at. service.h ensures
//! this for services that use its functions. Any other service is a program that its user chose to
//! run.

use std::ffi::{CStr, c_char, c_int};
use std::mem::offset_of;
use std::sync::Arc;

use thiserror::Error;
use zerocopy::FromBytes;

use super::contents::{Stored, Table as ContentTable};
use super::store::{Session, Store};
use super::{Answer, Effect, Joined, Key, Parse, Properties, Refusal, Service, Share, Verdict};

/// `SHUNT_MAX_MESSAGE` in service.h.
const MAX_MESSAGE: u32 = 64 * 1024;
/// `SHUNT_MAX_REPLY` in service.h.
const MAX_REPLY: usize = 256;
/// `SHUNT_MAX_HEAD` and `SHUNT_MAX_TAIL` in service.h.
const MAX_HEAD: usize = 64;
const MAX_TAIL: usize = 8;
/// `SHUNT_PINS` in service.h.
const PINS: usize = 4;
/// `SHUNT_MAX_KEY` in service.h.
const MAX_KEY: usize = 64;
/// `SHUNT_NATIVE_VERSION` in native.h.
const VERSION: u32 = 6;
/// `SHUNT_EFFECTS` in service.h.
const EFFECTS: usize = 4;

/// `struct shunt_native`.
#[repr(C)]
struct Table {
    version: u32,
    verdict_size: u32,
    service: *const Declaration,
    parse: unsafe extern "C" fn(*const u8, u32) -> c_int,
    parse_reply: unsafe extern "C" fn(*const u8, u32) -> c_int,
    decide: unsafe extern "C" fn(*const u8, u32, *mut RawVerdict),
    refuse: unsafe extern "C" fn(*const u8, u32, u32, *mut RawVerdict),
    accepted: unsafe extern "C" fn(*mut RawVerdict),
    part: unsafe extern "C" fn(*const u8, u32, *mut Share, *mut RawPiece) -> c_int,
    join: unsafe extern "C" fn(*const u8, u32, *mut Share, *mut RawPiece) -> c_int,
    timer: unsafe extern "C" fn(u64, *mut RawVerdict),
    service_timer: unsafe extern "C" fn(u64, *mut RawVerdict),
    closed: unsafe extern "C" fn(*mut RawVerdict),
    started: unsafe extern "C" fn(*mut RawVerdict),
    replied: unsafe extern "C" fn(*const u8, u32, *const u8, u32, *mut RawVerdict),
    put: unsafe extern "C" fn(*const ContentTable, *const u8, u32, *mut RawVerdict) -> c_int,
}

// SAFETY: a table and everything that it points at is constant.
unsafe impl Sync for Table {}

/// `struct shunt_service`. Its functions are called through the table.
#[repr(C)]
struct Declaration {
    name: *const c_char,
    parse: *const (),
    parse_reply: *const (),
    decide: *const (),
    refuse: *const (),
    accepted: *const (),
    max_message: u32,
    retry: u32,
    part: *const (),
    join: *const (),
    state: u64,
    answers: u32,
    unused: u32,
    timer: *const (),
    service_timer: *const (),
    closed: *const (),
    started: *const (),
    replied: *const (),
}

/// `struct shunt_piece`.
#[repr(C)]
struct RawPiece {
    offset: u32,
    length: u32,
    head_length: u32,
    tail_length: u32,
    head: [u8; MAX_HEAD],
    tail: [u8; MAX_TAIL],
}

/// `struct shunt_effect`.
#[repr(C)]
#[derive(Clone, Copy, Default, FromBytes)]
struct RawEffect {
    kind: u32,
    end: u32,
    number: u64,
    after: u32,
    every: u32,
}

/// `struct shunt_verdict`.
#[repr(C)]
#[derive(Clone, Copy, FromBytes)]
pub(crate) struct RawVerdict {
    action: u32,
    why: u32,
    one_way: u32,
    key: u32,
    number: u64,
    key_offset: u32,
    key_length: u32,
    reply_length: u32,
    reply: [u8; MAX_REPLY],
    pinned: u32,
    pins: [u64; PINS],
    key_words: [u64; MAX_KEY / 8],
    effects: u32,
    padding: u32,
    effect: [RawEffect; EFFECTS],
    /// The addresses of the state of the service and of the connection. Unused in the kernel.
    memory: u64,
    session: u64,
}

const _: () = assert!(size_of::<RawVerdict>() == 512 && offset_of!(RawVerdict, reply) == 36);

/// The native half of a service.
#[derive(Clone)]
pub struct Native {
    table: &'static Table,
    name: &'static str,
    store: Option<Arc<Store>>,
}

impl std::fmt::Debug for Native {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Native({})", self.name)
    }
}

/// Declares a function for each symbol of build.rs, which returns that builtin service.
macro_rules! builtins {
    ($($symbol:ident $name:ident),*) => {
        unsafe extern "C" {
            $(static $symbol: Table;)*
        }
        $(pub(super) fn $name() -> Native {
            // SAFETY: this build compiled the table with its own native.h.
            Native::new(unsafe { &$symbol }).expect("of this version")
        })*
    };
}

builtins!(
    shunt_builtin_echo echo,
    shunt_builtin_length_echo length_echo,
    shunt_builtin_length_router length_router,
    shunt_builtin_line_cache line_cache,
    shunt_builtin_line_counter line_counter,
    shunt_builtin_line_echo line_echo,
    shunt_builtin_line_hub line_hub,
    shunt_builtin_memcached_router memcached_router,
    shunt_builtin_redis_router redis_router,
    shunt_builtin_thrift_forwarder thrift_forwarder
);

/// An error that makes a native half unusable.
#[derive(Debug, Error)]
pub enum NativeError {
    /// The dynamic loader's error.
    #[error("its native half cannot be loaded: {0}")]
    Loader(libloading::Error),
    /// Another version of shunt built it.
    #[error("it was built by another version of shunt: build it again with `shunt serve build`")]
    Version,
}

impl Native {
    /// Loads the native half from a shared library, which stays loaded.
    pub(super) fn load(path: &str) -> Result<Native, NativeError> {
        // SAFETY: loading a library can run any code, like a program that its user starts. The
        // loading of one from `shunt serve build` runs none.
        let library = unsafe { libloading::Library::new(path) }.map_err(NativeError::Loader)?;
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        // SAFETY: in every version of native.h this symbol is a table that begins with its version.
        let table: *const Table = unsafe { library.get::<*const Table>(b"shunt_native\0") }
            .map(|symbol| *symbol)
            .map_err(NativeError::Loader)?;
        // SAFETY: the library is never unloaded.
        Native::new(unsafe { &*table }).ok_or(NativeError::Version)
    }

    /// Returns `None` if the table has another version.
    fn new(table: &'static Table) -> Option<Native> {
        if table.version != VERSION || table.verdict_size as usize != size_of::<RawVerdict>() {
            return None;
        }
        // SAFETY: a table of this version has a declaration, whose name is a C string or null.
        let name = unsafe {
            let name = (*table.service).name;
            if name.is_null() { "unnamed" } else { CStr::from_ptr(name).to_str().unwrap_or("unnamed") }
        };
        Some(Native { table, name, store: None })
    }

    /// Returns the size of the service's state, 0 if it has none.
    pub fn state(&self) -> usize {
        self.declaration().state as usize
    }

    /// Gives the service the memory for its state. Without one it counts nothing, and finds its
    /// tables full.
    pub fn with_store(self, store: Arc<Store>) -> Native {
        debug_assert!(store.len() >= self.state(), "of another service");
        Native { store: Some(store), ..self }
    }

    /// Returns an empty verdict that leads the native half to its state.
    fn verdict(&self, session: &mut Session) -> RawVerdict {
        let memory = self.store.as_ref().map_or(0, |store| store.as_ptr().expose_provenance());
        let session = session.as_mut_ptr().expose_provenance();
        RawVerdict { memory: memory as u64, session: session as u64, ..RawVerdict::default() }
    }

    fn declaration(&self) -> &'static Declaration {
        // SAFETY: as in `new`.
        unsafe { &*self.table.service }
    }
}

impl Service for Native {
    fn name(&self) -> &str {
        self.name
    }

    fn properties(&self) -> Properties {
        let declaration = self.declaration();
        let max_message = match declaration.max_message {
            0 => MAX_MESSAGE,
            stated => stated,
        };
        Properties {
            max_message: max_message as usize,
            replies: !declaration.parse_reply.is_null(),
            retry: declaration.retry != 0,
            answers: declaration.answers != 0,
            sees_replies: !declaration.replied.is_null(),
        }
    }

    fn parse(&self, bytes: &[u8]) -> Parse {
        // SAFETY: the function reads what it is given, and no more.
        parsed(unsafe { (self.table.parse)(bytes.as_ptr(), length(bytes)) })
    }

    fn parse_reply(&self, bytes: &[u8]) -> Parse {
        // SAFETY: the function reads what it is given, and no more.
        parsed(unsafe { (self.table.parse_reply)(bytes.as_ptr(), length(bytes)) })
    }

    fn decide_in(&self, session: &mut Session, message: &[u8]) -> Verdict {
        let mut verdict = self.verdict(session);
        // SAFETY: the function reads what it is given, and writes the verdict and the state. The
        // store is mapped, the session is ours.
        unsafe { (self.table.decide)(message.as_ptr(), length(message), &mut verdict) };
        verdict.verdict(message.len()).copied(&|stored| self.stored(stored))
    }

    fn refuse_in(&self, session: &mut Session, head: &[u8], why: Refusal) -> Answer {
        let mut verdict = self.verdict(session);
        // SAFETY: as in `decide_in`.
        unsafe { (self.table.refuse)(head.as_ptr(), length(head), why as u32, &mut verdict) };
        verdict.answer()
    }

    fn accepted_in(&self, session: &mut Session) -> Answer {
        let mut verdict = self.verdict(session);
        // SAFETY: as in `decide_in`.
        unsafe { (self.table.accepted)(&mut verdict) };
        verdict.answer()
    }

    fn timer_in(&self, session: &mut Session, context: u64) -> Answer {
        let mut verdict = self.verdict(session);
        // SAFETY: as in `decide_in`.
        unsafe { (self.table.timer)(context, &mut verdict) };
        verdict.answer()
    }

    fn service_timer(&self, context: u64) -> Answer {
        let mut session = Session::default();
        let mut verdict = self.verdict(&mut session);
        // SAFETY: as in `decide_in`.
        unsafe { (self.table.service_timer)(context, &mut verdict) };
        verdict.answer()
    }

    fn closed_in(&self, session: &mut Session) -> Answer {
        let mut verdict = self.verdict(session);
        // SAFETY: as in `decide_in`.
        unsafe { (self.table.closed)(&mut verdict) };
        verdict.answer()
    }

    fn started(&self) -> Answer {
        let mut session = Session::default();
        let mut verdict = self.verdict(&mut session);
        // SAFETY: as in `decide_in`.
        unsafe { (self.table.started)(&mut verdict) };
        verdict.answer()
    }

    fn replied_in(&self, session: &mut Session, message: &[u8], reply: &[u8]) -> Answer {
        let mut verdict = self.verdict(session);
        let (asked, given) = ((message.as_ptr(), length(message)), (reply.as_ptr(), length(reply)));
        // SAFETY: as in `decide_in`, for both slices.
        unsafe { (self.table.replied)(asked.0, asked.1, given.0, given.1, &mut verdict) };
        verdict.answer()
    }

    fn stored(&self, stored: Stored) -> Vec<u8> {
        match &self.store {
            Some(store) => stored.take(store),
            None => stored.head,
        }
    }

    fn put(&self, table: &ContentTable, key: &[u8], content: Option<&[u8]>) -> bool {
        let mut session = Session::default();
        let mut verdict = self.verdict(&mut session);
        let words = (table.key as usize).min(MAX_KEY / 8);
        if key.len() > words * 8 {
            return false;
        }
        let mut padded = [0; MAX_KEY];
        padded[..key.len()].copy_from_slice(key);
        for (word, bytes) in verdict.key_words.iter_mut().zip(padded.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        let (bytes, length) = content.map_or((std::ptr::null(), 0), |bytes| (bytes.as_ptr(), length(bytes)));
        // SAFETY: as in `decide_in`. The table is that of a store in this state (see `Layout`).
        unsafe { (self.table.put)(table, bytes, length, &mut verdict) == 0 }
    }

    fn part(&self, message: &[u8], share: &mut Share) -> Option<Vec<u8>> {
        let mut piece = RawPiece::default();
        // SAFETY: the function reads what it is given, and writes the share and the piece.
        let more = unsafe { (self.table.part)(message.as_ptr(), length(message), share, &mut piece) };
        (more != 0).then(|| piece.bytes(message))
    }

    fn join(&self, answer: &[u8], share: &mut Share) -> Joined {
        let mut piece = RawPiece::default();
        // SAFETY: the function reads what it is given, and writes the share and the piece.
        let joined = unsafe { (self.table.join)(answer.as_ptr(), length(answer), share, &mut piece) };
        Joined { bytes: piece.bytes(answer), is_alone: joined == 0 }
    }
}

/// Returns the length for C. Messages are far shorter than the saturated value.
fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

/// Converts a parser's result.
pub(crate) fn parsed(result: c_int) -> Parse {
    match result {
        0 => Parse::More,
        1.. => Parse::Message(result as usize),
        _ => Parse::Refused(Refusal::from_code(result.unsigned_abs())),
    }
}

impl Default for RawPiece {
    fn default() -> RawPiece {
        RawPiece {
            offset: 0,
            length: 0,
            head_length: 0,
            tail_length: 0,
            head: [0; MAX_HEAD],
            tail: [0; MAX_TAIL],
        }
    }
}

impl RawPiece {
    /// Builds the bytes of the piece: head, a range of `of`, tail. Ranges are clipped to the bytes
    /// that exist.
    fn bytes(&self, of: &[u8]) -> Vec<u8> {
        let begin = of.len().min(self.offset as usize);
        let end = of.len().min(begin.saturating_add(self.length as usize));
        let head = &self.head[..MAX_HEAD.min(self.head_length as usize)];
        let tail = &self.tail[..MAX_TAIL.min(self.tail_length as usize)];
        [head, &of[begin..end], tail].concat()
    }
}

impl Default for RawVerdict {
    fn default() -> RawVerdict {
        RawVerdict {
            action: 0,
            why: 0,
            one_way: 0,
            key: 0,
            number: 0,
            key_offset: 0,
            key_length: 0,
            reply_length: 0,
            reply: [0; MAX_REPLY],
            pinned: 0,
            pins: [0; PINS],
            key_words: [0; MAX_KEY / 8],
            effects: 0,
            padding: 0,
            effect: [RawEffect::default(); EFFECTS],
            memory: 0,
            session: 0,
        }
    }
}

impl RawVerdict {
    /// Converts the verdict about a message of this many bytes. An invalid one is a refusal as
    /// malformed.
    pub(crate) fn verdict(&self, message: usize) -> Verdict {
        let verdict = self.plain(message);
        match self.effects() {
            effects if effects.is_empty() => verdict,
            effects => Verdict::With(effects, Box::new(verdict)),
        }
    }

    fn plain(&self, message: usize) -> Verdict {
        match self.action {
            0 => Verdict::Drop,
            1 => Verdict::Echo,
            2 => match self.key(message) {
                Some(key) => Verdict::Forward { key, one_way: self.one_way != 0 },
                None => Verdict::Refuse(Refusal::Malformed),
            },
            3 => Verdict::Reply(self.reply()),
            4 => Verdict::Close(self.reply()),
            5 => Verdict::Refuse(Refusal::from_code(self.why)),
            6 => Verdict::More,
            7 => Verdict::Split,
            // 8 and 9 are only for the kernel.
            10 => Verdict::Defer,
            11 => Verdict::Stored(Stored {
                head: self.reply(),
                at: self.number,
                length: self.key_length,
                pins: self.pins[..PINS.min(self.pinned as usize)].to_vec(),
            }),
            _ => Verdict::Refuse(Refusal::Malformed),
        }
    }

    /// Returns the effects. Bytes that an effect has sent are not in later ones, nor in the reply.
    fn effects(&self) -> Vec<Effect> {
        let count = EFFECTS.min(self.effects as usize);
        let mut begin = 0;
        let effects = self.effect[..count].iter().filter_map(|effect| {
            let end = MAX_REPLY.min(effect.end as u16 as usize);
            let mut bytes = || {
                let bytes = self.reply.get(begin..end).unwrap_or_default();
                begin = end.max(begin);
                Arc::from(bytes)
            };
            Some(match effect.kind {
                1 => Effect::Subscribe(effect.number),
                2 => Effect::Unsubscribe(effect.number),
                3 => Effect::Publish { topic: effect.number, bytes: bytes() },
                4 => Effect::Send { to: effect.number, bytes: bytes(), is_answer: false },
                5 => Effect::Send { to: effect.number, bytes: bytes(), is_answer: true },
                7 => Effect::Register { address: bytes(), weight: effect.number as u32 },
                8 => Effect::Unregister { address: bytes() },
                6 => Effect::Arm {
                    timer: (effect.end >> 16) as usize,
                    after: effect.after,
                    every: effect.every,
                    context: effect.number,
                },
                _ => return None,
            })
        });
        effects.collect()
    }

    /// Converts the verdict of `refuse` or `accepted`, where actions that need a message are
    /// invalid.
    pub(crate) fn answer(&self) -> Answer {
        let answer = match self.action {
            0 => Answer::Nothing,
            3 => Answer::Reply(self.reply()),
            _ => Answer::Close(self.reply()),
        };
        match self.effects() {
            effects if effects.is_empty() => answer,
            effects => Answer::With(effects, Box::new(answer)),
        }
    }

    fn key(&self, message: usize) -> Option<Key> {
        match self.key {
            0 => Some(Key::Number(self.number)),
            1 => {
                let begin = self.key_offset as usize;
                let end = begin.checked_add(self.key_length as usize)?;
                (end <= message).then_some(Key::Bytes(begin..end))
            }
            2 => Some(Key::Backend(self.number)),
            _ => None,
        }
    }

    fn reply(&self) -> Vec<u8> {
        // Those that take bytes.
        let sent = self.effect[..EFFECTS.min(self.effects as usize)].iter();
        let sent = sent.filter(|effect| matches!(effect.kind, 3..=5 | 7 | 8));
        let begin = sent.map(|effect| effect.end as usize).max().unwrap_or(0);
        let end = MAX_REPLY.min(self.reply_length as usize);
        self.reply[begin.min(end)..end].to_vec()
    }
}
