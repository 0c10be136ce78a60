//! The kernel engine's user-space side: loads the program of engine.bpf.h with a service, and
//! accesses its maps. Each worker has its own. Nothing is pinned, so everything is freed when the
//! process ends.
//!
//! Sockets have places in one sockmap. Conversation `number` owns `1 << stride_bits` consecutive
//! places: position 0 is its client, position `i + 1` is its connection to backend `i`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use aya::maps::{HashMap, MapData, RingBuf, SockMap};
use aya::programs::{Iter, ProgramError, SkMsg, SkSkb};
use aya::{Btf, Ebpf, EbpfLoader};
use rustix::net::sockopt::socket_cookie;
use shunt_sys::mapping::Mapping;
use shunt_sys::tuning::set_receive_low_water;
use zerocopy::{FromBytes, IntoBytes};

use super::backends::Backends;
use super::choose::Hashing;
use super::limiter::Limit;
use crate::service::native::RawVerdict;
use crate::service::store::{Session, Store};
use crate::service::verifier::{Complaint, LoadError, check_loadable};
use crate::service::{Key, Verdict};

/// A loaded kernel engine.
pub(crate) struct Kernel {
    sockets: SockMap<MapData>,
    cookies: HashMap<MapData, u64, u32>,
    left: RingBuf<MapData>,
    conversations: Mapping,
    ends: Mapping,
    placed: Mapping,
    points: Mapping,
    /// Answers that the program has not sent yet, unless it sends none.
    answers: Option<Mapping>,
    stride_bits: u32,
    /// Unused conversation numbers.
    free: Vec<u32>,
    /// Why sockets cannot leave the map before their connection ends, if the kernel lacks support.
    stays: Option<LoadError>,
    // Dropped last: the program is detached after the map is empty.
    loaded: Ebpf,
}

/// The memory that a service shares with the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stores<'a> {
    pub(crate) state: Option<&'a Store>,
    pub(crate) contents: Option<&'a Store>,
    /// The rate limit, whose buckets are behind the state.
    pub(crate) limit: Option<&'a Limit>,
}

/// Places in the sockmap, for all conversations of a worker.
const PLACES: u32 = 1 << 15;
/// The base-2 logarithm of the most places that a conversation can have.
const MOST_BITS: u32 = 8;
/// Sizes of `struct shunt_conversation` and, below, of `struct shunt_end`, in bytes.
const CONVERSATION: usize = SESSION_AT + Session::BYTES;
const KEPT_AT: usize = (BUCKET_AT + 1) * 8;
/// The word `bucket`.
const BUCKET_AT: usize = TIMERS_AT + 2 * Session::TIMERS;
/// The first word of `due` in `struct shunt_conversation`. Those of `known` follow.
const TIMERS_AT: usize = 14;
const VERDICT_AT: usize = KEPT_AT + KEPT;
const SESSION_AT: usize = VERDICT_AT + size_of::<RawVerdict>();
const END: usize = 8 * 8;
/// The size of `struct shunt_answer` in answer.bpf.h, and the most conversations that have one.
const ANSWER: usize = 16 + 2048 + 256;
const ANSWERS: u32 = 8192;
/// `SHUNT_KEPT` and `SHUNT_POINTS` in engine.bpf.h.
pub(crate) const KEPT: usize = 512;
const POINTS: usize = 65536;

/// The 64-bit words of `struct shunt_conversation`, in order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Of {
    Word,
    Why,
    Outstanding,
    Backend,
    KeptLength,
    Messages,
    Bytes,
    Replies,
    Several,
    Deciding,
    KeptKey,
    KeptNumber,
}

/// `enum shunt_deciding` in engine.bpf.h: the program's use of the service's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Deciding {
    Idle,
    Now,
    /// The message has been passed to user space, with this verdict.
    Done(Verdict),
    /// The message has been passed to user space, and the rate limit has counted it.
    Paid,
}

/// What the program has written to the ring buffer about the conversation with this number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Left {
    /// It has been passed to user space.
    Passed(u32),
    /// A timer is due earlier than user space knows.
    Earlier(u32),
}

/// `SHUNT_IS_EARLIER` in engine.bpf.h.
const IS_EARLIER: u32 = 1 << 31;

/// The 64-bit words of `struct shunt_end`, in order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Has {
    IsThere,
    Redirected,
    Written,
    Acknowledged,
    Passed,
    Messages,
    Leaves,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Kernel").field("free", &self.free.len()).finish_non_exhaustive()
    }
}

impl Kernel {
    /// Loads a service. With `is_auto` the program returns a conversation as soon as user space
    /// would be faster.
    pub(crate) fn load(
        object: &[u8],
        stores: Stores<'_>,
        backends: usize,
        is_auto: bool,
        answers: bool,
    ) -> Result<Kernel, LoadError> {
        check_loadable(object)?;
        let stride_bits = (backends as u32 + 1).next_power_of_two().ilog2().clamp(1, MOST_BITS);
        let count = PLACES >> stride_bits;
        let refused = |error: &(dyn std::error::Error + 'static)| LoadError::of(error);
        let mut loaded = EbpfLoader::new()
            .override_global("shunt_stride_bits", &stride_bits, true)
            .override_global("shunt_limit_interval", &stores.limit.map_or(0, |limit| limit.interval), true)
            .override_global("shunt_limit_burst", &stores.limit.map_or(0, |limit| limit.burst), true)
            .override_global("shunt_limit_at", &stores.limit.map_or(0, |limit| limit.at as u64), true)
            .override_global("shunt_is_auto", &u32::from(is_auto), true)
            .override_global("shunt_answers_clients", &u32::from(answers), true)
            .map_max_entries("shunt_answers", if answers { ANSWERS.min(count) } else { 1 })
            .map_max_entries("shunt_sockets", PLACES)
            .map_max_entries("shunt_cookies", PLACES)
            .map_max_entries("shunt_ends", PLACES)
            .map_max_entries("shunt_conversations", count)
            .load(object)
            .map_err(|error| refused(&error))?;
        for (store, map) in [(stores.state, "shunt_memories"), (stores.contents, "shunt_contents")] {
            if let Some(store) = store {
                store.lend(loaded.map_mut(map).ok_or(LoadError::OtherVersion)?)?;
            }
        }
        // This must come before the maps are taken out, because loading uses their descriptors.
        let stays = load_leaving(&mut loaded).err();
        let program = loaded.program_mut(PROGRAM).ok_or(LoadError::NotAService)?;
        let program: &mut SkSkb = program.try_into().map_err(|_| LoadError::NotAService)?;
        program.load().map_err(|error| match &error {
            ProgramError::LoadError { verifier_log, .. } => {
                match Complaint::read(PROGRAM, &verifier_log.to_string()) {
                    Some(complaint) => LoadError::Unsafe(complaint),
                    None => refused(&error),
                }
            }
            _ => refused(&error),
        })?;
        if answers {
            sending(&mut loaded)?.load().map_err(|error| refused(&error))?;
        }
        let map = |loaded: &mut Ebpf, name| loaded.take_map(name).ok_or(LoadError::NotAService);
        let sockets: SockMap<MapData> =
            map(&mut loaded, "shunt_sockets")?.try_into().map_err(|_| LoadError::NotAService)?;
        let cookies = map(&mut loaded, "shunt_cookies")?.try_into().map_err(|_| LoadError::NotAService)?;
        let left = map(&mut loaded, "shunt_left")?.try_into().map_err(|_| LoadError::NotAService)?;
        let mapped = |loaded: &mut Ebpf, name, each: usize, count: u32| {
            let map: aya::maps::Map = map(loaded, name)?;
            let aya::maps::Map::Array(data) = &map else { return Err(LoadError::NotAService) };
            let is_ours = data.info().is_ok_and(|info| info.value_size() as usize == each);
            if !is_ours {
                return Err(LoadError::OtherVersion);
            }
            let len = (each * count as usize).next_multiple_of(rustix::param::page_size());
            Mapping::map_of_kernel(data.fd(), len).map_err(|error| refused(&std::io::Error::from(error)))
        };
        let conversations = mapped(&mut loaded, "shunt_conversations", CONVERSATION, count)?;
        let ends = mapped(&mut loaded, "shunt_ends", END, PLACES)?;
        let placed = mapped(&mut loaded, "shunt_placed", 3 * 8, 1)?;
        let points = mapped(&mut loaded, "shunt_points", 8, POINTS as u32)?;
        let answers = match answers {
            true => Some(mapped(&mut loaded, "shunt_answers", ANSWER, ANSWERS.min(count))?),
            false => None,
        };
        if answers.is_some() {
            sending(&mut loaded)?.attach(sockets.fd()).map_err(|error| refused(&error))?;
        }
        let program = loaded.program_mut(PROGRAM).ok_or(LoadError::NotAService)?;
        let program: &mut SkSkb = program.try_into().map_err(|_| LoadError::NotAService)?;
        program.attach(sockets.fd()).map_err(|error| refused(&error))?;
        let free = (0..count).rev().collect();
        Ok(Kernel {
            sockets,
            cookies,
            left,
            conversations,
            ends,
            placed,
            points,
            answers,
            stride_bits,
            free,
            stays,
            loaded,
        })
    }

    /// Publishes the mapping of keys to backends. The kernel must own no conversation meanwhile.
    pub(crate) fn set_backends(&self, backends: &Backends) {
        let (hashing, points) = (backends.chooser.hashing, backends.chooser.placement.points());
        let is_known = hashing != Hashing::Service && points.len() <= POINTS;
        let count = if is_known { backends.list.len() } else { 0 };
        let settings = [count as u64, u64::from(hashing == Hashing::Ketama), points.len() as u64];
        for (at, value) in settings.into_iter().enumerate() {
            self.placed.word(at * 8).expect("inside").store(value, SeqCst);
        }
        for (at, point) in points.iter().take(POINTS).enumerate() {
            let value = u64::from(point.value) << 32 | u64::from(point.backend);
            self.points.word(at * 8).expect("inside").store(value, SeqCst);
        }
    }

    /// Returns how many backends of a conversation can have a place in the map.
    pub(crate) fn reach(&self) -> usize {
        (1 << self.stride_bits) - 1
    }

    /// Allocates a conversation number and zeroes its words, if a number is left.
    pub(crate) fn take_number(&mut self) -> Option<u32> {
        let number = self.free.pop()?;
        let begin = number as usize * CONVERSATION;
        let zeroed = self.conversations.zero(begin, KEPT_AT);
        let first = self.place(number, 0) as usize * END;
        let zeroed = zeroed && self.ends.zero(first, END << self.stride_bits);
        debug_assert!(zeroed, "inside");
        Some(number)
    }

    /// Frees the number of a conversation that has no socket in the map.
    pub(crate) fn give_number(&mut self, number: u32) {
        self.free.push(number);
    }

    /// Zeroes the words of a position before another socket takes it.
    pub(crate) fn clear(&mut self, number: u32, position: usize) {
        let zeroed = self.ends.zero(self.place(number, position) as usize * END, END);
        debug_assert!(zeroed, "inside");
    }

    /// Puts a socket into the map: the program then handles its unread data and all data that
    /// arrives.
    pub(crate) fn insert(&mut self, number: u32, position: usize, socket: &OwnedFd) -> std::io::Result<()> {
        let place = self.place(number, position);
        let cookie = socket_cookie(socket)?;
        self.cookies.insert(cookie, place, 0).map_err(std::io::Error::other)?;
        if let Err(error) = self.sockets.set(place, socket, 0) {
            let _ = self.cookies.remove(&cookie);
            return Err(std::io::Error::other(error));
        }
        // Setting SO_RCVLOWAT makes the kernel process data that arrived before, without waiting
        // for the next segment.
        let _ = set_receive_low_water(socket, 1);
        self.has(number, position, Has::IsThere).store(1, SeqCst);
        Ok(())
    }

    /// Removes a socket whose connection is over. Redirected bytes that it has not sent are lost.
    pub(crate) fn remove(&mut self, number: u32, position: usize, socket: &OwnedFd) {
        self.has(number, position, Has::IsThere).store(0, SeqCst);
        let _ = self.sockets.clear_index(&self.place(number, position));
        if let Ok(cookie) = socket_cookie(socket) {
            let _ = self.cookies.remove(&cookie);
        }
    }

    /// Returns why sockets cannot leave the map before their connection ends, if they cannot.
    pub(crate) fn stays(&self) -> Option<&LoadError> {
        self.stays.as_ref()
    }

    /// Removes from the map those sockets that can leave it and whose [`Has::Leaves`] is set. The
    /// iterator visits every TCP socket of the network namespace.
    pub(crate) fn let_leave(&mut self) -> std::io::Result<()> {
        let program =
            self.loaded.program_mut(LEAVING).and_then(|program| <&mut Iter>::try_from(program).ok());
        program.map_or(Ok(()), shunt_kernel::visit_sockets)
    }

    /// Returns a word of a conversation.
    pub(crate) fn of(&self, number: u32, word: Of) -> &AtomicU64 {
        self.conversations.word(number as usize * CONVERSATION + word as usize * 8).expect("inside")
    }

    /// Returns a word of one of a conversation's sockets.
    pub(crate) fn has(&self, number: u32, position: usize, word: Has) -> &AtomicU64 {
        self.ends.word(self.place(number, position) as usize * END + word as usize * 8).expect("inside")
    }

    /// Returns when a timer of a conversation is due, and the same as user space knows it, in
    /// nanoseconds.
    pub(crate) fn timer(&self, number: u32, timer: usize) -> (&AtomicU64, &AtomicU64) {
        let word = |at: usize| self.conversations.word(number as usize * CONVERSATION + at * 8);
        let at = TIMERS_AT + timer;
        (word(at).expect("inside"), word(at + Session::TIMERS).expect("inside"))
    }

    /// Returns the bucket of the client.
    pub(crate) fn bucket(&self, number: u32) -> &AtomicU64 {
        self.conversations.word(number as usize * CONVERSATION + BUCKET_AT * 8).expect("inside")
    }

    /// Returns true if the program has passed the conversation to user space.
    pub(crate) fn gave_back(&self, number: u32) -> bool {
        self.of(number, Of::Word).load(SeqCst) & 1 == 0
    }

    /// Gives the program the state of a connection, before it owns the conversation.
    pub(crate) fn put_session(&self, number: u32, session: &Session) {
        let is_inside =
            self.conversations.put(number as usize * CONVERSATION + SESSION_AT, session.as_bytes());
        debug_assert!(is_inside);
    }

    /// Returns the state of a connection, after the program has stopped using it.
    pub(crate) fn session(&self, number: u32) -> Session {
        let mut session = Session::default();
        let at = number as usize * CONVERSATION + SESSION_AT;
        let is_inside = self.conversations.take(at, session.as_mut_bytes());
        debug_assert!(is_inside);
        session
    }

    /// Returns whether the program uses the state of a conversation that it does not own any more.
    pub(crate) fn deciding(&self, number: u32) -> Deciding {
        match self.of(number, Of::Deciding).load(SeqCst) {
            0 => Deciding::Idle,
            1 => Deciding::Now,
            3 => Deciding::Paid,
            _ => {
                let mut bytes = [0; size_of::<RawVerdict>()];
                let is_inside =
                    self.conversations.take(number as usize * CONVERSATION + VERDICT_AT, &mut bytes);
                debug_assert!(is_inside);
                let verdict = RawVerdict::read_from_bytes(&bytes).expect("of this size");
                Deciding::Done(verdict.verdict(usize::MAX))
            }
        }
    }

    /// Returns the key of the pending message.
    pub(crate) fn kept_key(&self, number: u32) -> Key {
        let value = self.of(number, Of::KeptNumber).load(SeqCst);
        match self.of(number, Of::KeptKey).load(SeqCst) {
            0 => Key::Number(value),
            1 => {
                let begin = value as u32 as usize;
                Key::Bytes(begin..begin + (value >> 32) as usize)
            }
            _ => Key::Backend(value),
        }
    }

    /// Discards the last answer, after the program has stopped using it.
    pub(crate) fn forget_answer(&self, number: u32) {
        let words = self.answers.as_ref();
        if let Some(length) = words.and_then(|answers| answers.word(number as usize * ANSWER)) {
            length.store(0, SeqCst);
        }
    }

    /// Returns the kept beginning of the pending message.
    pub(crate) fn kept(&self, number: u32) -> Vec<u8> {
        let length = (self.of(number, Of::KeptLength).load(SeqCst) as usize).min(KEPT);
        let begin = number as usize * CONVERSATION + KEPT_AT;
        let words = (begin..begin + length.next_multiple_of(8)).step_by(8);
        let word = |at| self.conversations.word(at).expect("inside").load(SeqCst).to_ne_bytes();
        let mut kept: Vec<u8> = words.flat_map(word).collect();
        kept.truncate(length);
        kept
    }

    /// Returns the number of the next conversation that the program has passed to user space, or that
    /// has an earlier timer.
    pub(crate) fn next_left(&mut self) -> Option<Left> {
        let item = self.left.next()?;
        let number = u32::from_ne_bytes(item.get(..4)?.try_into().expect("four bytes"));
        let is_earlier = number & IS_EARLIER != 0;
        Some(if is_earlier { Left::Earlier(number & !IS_EARLIER) } else { Left::Passed(number) })
    }

    /// Returns a descriptor that is readable while `next_left` has one to return.
    pub(crate) fn events(&self) -> BorrowedFd<'_> {
        self.left.as_fd()
    }

    fn place(&self, number: u32, position: usize) -> u32 {
        (number << self.stride_bits) + position as u32
    }
}

/// Loads the iterator that takes sockets out of the map. Not every kernel accepts it.
fn load_leaving(loaded: &mut Ebpf) -> Result<(), LoadError> {
    let refused = |error: &(dyn std::error::Error + 'static)| LoadError::of(error);
    let types = Btf::from_sys_fs().map_err(|error| refused(&error))?;
    let program = loaded.program_mut(LEAVING).ok_or(LoadError::NotAService)?;
    let program: &mut Iter = program.try_into().map_err(|_| LoadError::NotAService)?;
    program.load("tcp", &types).map_err(|error| refused(&error))
}

/// Returns the program that sends answers in place of messages.
fn sending(loaded: &mut Ebpf) -> Result<&mut SkMsg, LoadError> {
    let program = loaded.program_mut(SENDING).ok_or(LoadError::OtherVersion)?;
    program.try_into().map_err(|_| LoadError::NotAService)
}

const PROGRAM: &str = "shunt_arrived";
const SENDING: &str = "shunt_sending";
const LEAVING: &str = "shunt_leaving";
