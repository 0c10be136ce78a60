//! What each descriptor of the process is to us: one look-up answers "nothing" for everything that is no TCP
//! socket (L7).
//!
//! Two levels, so that a process with few descriptors pays for few. Chunks are never freed.
//!
//! The kernel wipes the upper level in every child that gets a copy of our memory. A fork that we see restores it; a child
//! made by a system call of the program's own finds nothing there, and is told apart by that from a process that never
//! had a socket, without a look-up costing more.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

use rustix::mm::{Advice, madvise};
use shunt_abi::reason::Reason;

use crate::base::above::Above;
use crate::base::arch;
use crate::base::names::{EndpointRef, EpollRef};
use crate::base::{process, thread};

const CHUNK: usize = 1024;
const CHUNKS: usize = 1024;
/// Descriptors in a word of a set for select.
pub(crate) const WORD: usize = 64;

struct Chunk {
    cells: [AtomicU64; CHUNK],
    /// What was last [remembered](remember) of each: a word that is as its cell if nothing stands against what is done [at a
    /// glance](glance).
    words: [AtomicPtr<AtomicU64>; CHUNK],
    /// A bit for every descriptor that has ever been a connection or an epoll instance.
    pollable: [AtomicU64; CHUNK / WORD],
}

/// The upper level, on pages of its own.
#[repr(C)]
#[cfg_attr(target_arch = "x86_64", repr(align(4096)))]
#[cfg_attr(target_arch = "aarch64", repr(align(65536)))]
struct Upper {
    /// Whether it must be asked who this process is: [`ASK`], [`HOME`] or [`SHARED`].
    whose: AtomicU32,
    chunks: [AtomicPtr<Chunk>; CHUNKS],
}

const _: () = assert!(align_of::<Upper>() == arch::LARGEST_PAGE);

/// As the kernel leaves it in a child.
const ASK: u32 = 0;
/// It has been asked, and is the one that the table is of.
const HOME: u32 = 1;
/// Another process may run in this memory at any time.
const SHARED: u32 = 2;

impl Upper {
    const fn new() -> Upper {
        let chunks = [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS];
        Upper { whose: AtomicU32::new(ASK), chunks }
    }
}

/// This process is a child that nobody announced.
pub(crate) static STRAY: Above<()> = Above::new();

/// The kernel wipes the upper level in children.
static IS_WIPED: AtomicBool = AtomicBool::new(false);

static UPPER: Upper = Upper::new();
/// What the upper level is restored from. Written after it.
static COPY: [AtomicPtr<Chunk>; CHUNKS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS];

/// What is remembered where nothing has been: as no cell is.
static NOTHING: AtomicU64 = AtomicU64::new(u64::MAX);

/// What a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Nothing of ours.
    None,
    /// A TCP socket that is not connected, and what will stand against shared memory once it is.
    Unconnected(Reason),
    /// A connected TCP socket.
    Endpoint(EndpointRef),
    /// An epoll instance.
    Epoll(EpollRef),
    /// One of the shim's own descriptors: the program must neither close nor use it.
    Private,
    /// An io_uring, by its place among those that are looked into.
    Ring(u8),
}

/// In the word of a socket that is not connected: a set may have it.
const REGISTERED: u64 = 1 << 32;

impl Entry {
    /// As a number, which is 0 for nothing, and for a connection below 2^59.
    pub(crate) fn pack(self) -> u64 {
        match self {
            Entry::None => 0,
            Entry::Unconnected(reason) => 1 | u64::from(reason as u16) << 3,
            Entry::Private => 2,
            Entry::Endpoint(endpoint) => 3 | endpoint.pack() << 3,
            Entry::Epoll(epoll) => 4 | epoll.pack() << 3,
            Entry::Ring(place) => 5 | u64::from(place) << 3,
        }
    }

    #[inline]
    fn unpack(word: u64) -> Entry {
        match word & 7 {
            1 => Entry::Unconnected(Reason::parse((word >> 3) as u16).unwrap_or_default()),
            2 => Entry::Private,
            3 => Entry::Endpoint(EndpointRef::unpack(word >> 3)),
            4 => Entry::Epoll(EpollRef::unpack(word >> 3)),
            5 => Entry::Ring((word >> 3) as u8),
            _ => Entry::None,
        }
    }
}

/// Has the upper level wiped in children. A kernel that cannot leaves children of such system calls unnoticed.
pub(crate) fn start() {
    let pages = (&raw const UPPER).cast_mut().cast();
    // SAFETY: whole pages of our own; what is in them is restored in every child.
    let wiped = unsafe { madvise(pages, size_of::<Upper>(), Advice::LinuxWipeOnFork) };
    IS_WIPED.store(wiped.is_ok(), Relaxed);
}

/// [`process::is_home`] without a system call, as far as has been seen: of a child that runs in this memory and that no hook has seen being
/// made, it is not known. So only for what would do no more harm there than to keep a connection on TCP.
#[inline]
pub(crate) fn is_home() -> bool {
    UPPER.whose.load(Relaxed) == HOME && !thread::this().is_lent.get() || ask_who_this_is()
}

#[cold]
#[inline(never)]
fn ask_who_this_is() -> bool {
    let is_home = process::is_home();
    if is_home {
        thread::this().is_lent.set(false);
        if IS_WIPED.load(Relaxed) {
            let _ = UPPER.whose.compare_exchange(ASK, HOME, Relaxed, Relaxed);
        }
    }
    is_home
}

/// A child is made that runs in this memory at the same time as the thread that makes it.
pub(crate) fn share_memory() {
    UPPER.whose.store(SHARED, Relaxed);
}

/// In a forked child.
pub(crate) fn restore() {
    for (upper, copy) in UPPER.chunks.iter().zip(&COPY) {
        upper.store(copy.load(Acquire), Release);
    }
}

/// Nothing is known of any descriptor any more, but which are our own.
pub(crate) fn clear() {
    for (fd, _) in known(0, u32::MAX).filter(|(_, entry)| *entry != Entry::Private) {
        replace(fd, Entry::None);
    }
}

#[inline]
fn cell(fd: i32) -> Option<&'static AtomicU64> {
    Some(&chunk(fd as u32 as usize / CHUNK)?.cells[fd as usize % CHUNK])
}

#[inline]
fn chunk(index: usize) -> Option<&'static Chunk> {
    let chunk = UPPER.chunks.get(index)?.load(Acquire);
    // SAFETY: a chunk that is not null is never freed.
    unsafe { chunk.as_ref() }.or_else(|| missing(index))
}

/// Nothing there: because there never was, or because this is a child that nobody announced.
#[cold]
#[inline(never)]
fn missing(index: usize) -> Option<&'static Chunk> {
    let present = || UPPER.chunks[index].load(Acquire);
    if COPY[index].load(Acquire).is_null() {
        return None;
    }
    if present().is_null() {
        STRAY.call(());
    }
    // SAFETY: as in `chunk`.
    unsafe { present().as_ref() }
}

/// What `fd` is.
#[inline]
pub(crate) fn look_up(fd: i32) -> Entry {
    match cell(fd) {
        Some(cell) => Entry::unpack(cell.load(Acquire)),
        None => Entry::None,
    }
}

/// The word that was last [remembered](remember) of `fd`, if it is as its entry is. `None`: [`look_up`] says what that is.
#[inline(always)]
pub(crate) fn glance(fd: i32) -> Option<*const AtomicU64> {
    let (entry, word) = remembered(fd)?;
    // SAFETY: what is remembered lives as long as the process.
    (unsafe { &*word }.load(SeqCst) == entry).then_some(word)
}

/// What `fd` is, [packed](Entry::pack), and the word that was last [remembered](remember) of it.
#[inline(always)]
pub(crate) fn remembered(fd: i32) -> Option<(u64, *const AtomicU64)> {
    let chunk = UPPER.chunks.get(fd as u32 as usize / CHUNK)?.load(Acquire);
    // SAFETY: as in `chunk`.
    let chunk = unsafe { chunk.as_ref() }?;
    let at = fd as usize % CHUNK;
    Some((chunk.cells[at].load(Acquire), chunk.words[at].load(Acquire)))
}

/// Has a [`glance`] at this descriptor compare its [packed](Entry::pack) entry with this word, for as long as nothing else is remembered.
pub(crate) fn remember(fd: i32, word: *const AtomicU64) {
    if let Some(chunk) = chunk(fd as u32 as usize / CHUNK) {
        chunk.words[fd as usize % CHUNK].store(word.cast_mut(), Release);
    }
}

/// Which of the descriptors from `WORD * index` on may be a connection or an epoll instance: a bit for each.
#[inline]
pub(crate) fn pollable(index: usize) -> u64 {
    const WORDS: usize = CHUNK / WORD;
    chunk(index / WORDS).map_or(0, |chunk| chunk.pollable[index % WORDS].load(Acquire))
}

/// How many descriptors something can be said of.
pub(crate) const PLACES: usize = CHUNK * CHUNKS;

/// Whether anything can be said of `fd`.
pub(crate) fn has_place_for(fd: i32) -> bool {
    (0..PLACES as i32).contains(&fd)
}

/// Says what `fd` is from now on, and returns what it was. A descriptor beyond the table stays unknown, and so
/// on TCP.
#[inline]
pub(crate) fn replace(fd: i32, entry: Entry) -> Entry {
    Entry::unpack(swap(fd, entry))
}

/// The same where a socket comes to be connected. Says also whether a set may have had it before.
pub(crate) fn connect(fd: i32, name: EndpointRef) -> (Entry, bool) {
    let word = swap(fd, Entry::Endpoint(name));
    (Entry::unpack(word), word & REGISTERED != 0)
}

fn swap(fd: i32, entry: Entry) -> u64 {
    if !has_place_for(fd) {
        return 0;
    }
    let (index, at) = (fd as usize / CHUNK, fd as usize % CHUNK);
    let Some(chunk) = chunk(index).or_else(|| make(index, entry)) else { return 0 };
    if matches!(entry, Entry::Endpoint(_) | Entry::Epoll(_)) {
        let (word, bit) = (&chunk.pollable[at / WORD], 1 << (at % WORD));
        // Most numbers have been one before.
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, AcqRel);
        }
    }
    chunk.cells[at].swap(entry.pack(), AcqRel)
}

#[cold]
#[inline(never)]
fn make(index: usize, entry: Entry) -> Option<&'static Chunk> {
    if entry == Entry::None {
        return None;
    }
    process::note_use();
    // Made where it stays: the thread may have little stack.
    // SAFETY: zeroes are valid for atomics.
    let fresh = unsafe { Box::<Chunk>::new_zeroed().assume_init() };
    fresh.words.iter().for_each(|word| word.store((&raw const NOTHING).cast_mut(), Relaxed));
    let fresh = Box::into_raw(fresh);
    if UPPER.chunks[index].compare_exchange(std::ptr::null_mut(), fresh, AcqRel, Acquire).is_ok() {
        COPY[index].store(fresh, Release);
    } else {
        // SAFETY: it was made above and nobody else has seen it.
        drop(unsafe { Box::from_raw(fresh) });
    }
    chunk(index)
}

/// A set is about to have this socket. Whoever connects it later is told that.
pub(crate) fn note_registered(fd: i32) {
    let Some(cell) = cell(fd) else { return };
    let registered = |word| matches!(Entry::unpack(word), Entry::Unconnected(_)).then_some(word | REGISTERED);
    let _ = cell.fetch_update(AcqRel, Acquire, registered);
}

/// Has a socket that is not connected stay on TCP once it is. `false`: it is no such socket, or not any more.
pub(crate) fn hold_back(fd: i32, reason: Reason) -> bool {
    let Some(cell) = cell(fd) else { return false };
    let held_back = |word| match Entry::unpack(word) {
        Entry::Unconnected(Reason::None) => Some(Entry::Unconnected(reason).pack() | word & REGISTERED),
        Entry::Unconnected(_) => Some(word),
        _ => None,
    };
    cell.fetch_update(AcqRel, Acquire, held_back).is_ok()
}

/// Every descriptor from `first` to `last` that is something to us.
pub(crate) fn known(first: u32, last: u32) -> impl Iterator<Item = (i32, Entry)> {
    (first as usize / CHUNK..CHUNKS.min(last as usize / CHUNK + 1))
        .filter(|&index| chunk(index).is_some())
        .flat_map(|index| index * CHUNK..(index + 1) * CHUNK)
        .filter(move |fd| (first as usize..=last as usize).contains(fd))
        .map(|fd| (fd as i32, look_up(fd as i32)))
        .filter(|(_, entry)| *entry != Entry::None)
}

/// A descriptor that is `entry`.
pub(crate) fn name_of(entry: Entry) -> Option<i32> {
    known(0, u32::MAX).find(|(_, other)| *other == entry).map(|(fd, _)| fd)
}
