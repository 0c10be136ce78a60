//! The table of descriptors: what each descriptor of the process is to the shim. One look-up
//! answers "nothing" for every descriptor that is not a TCP socket (L7).
//!
//! The table has two levels, so that a process with few descriptors needs little memory. Chunks are
//! never freed.
//!
//! ```text
//!  UPPER.chunks[fd / 1024] ──> Chunk.cells[fd % 1024]   packed Entry
//!         │ wiped by the kernel in each forked child
//!         └── COPY: a fork that the shim sees restores UPPER from it
//! ```
//!
//! The kernel wipes the upper level in every child that gets a copy of this memory
//! (MADV_WIPEONFORK). A fork that the shim sees restores it. In a child made by a bare system call
//! it stays empty. A look-up that finds UPPER empty and COPY not empty calls [`STRAY`]. So
//! detecting such a child costs a normal look-up nothing.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

use rustix::mm::{Advice, madvise};
use shunt_abi::reason::Reason;

use crate::base::arch;
use crate::base::names::{EndpointRef, EpollRef};
use crate::base::upcall::Upcall;
use crate::base::{process, thread};

const CHUNK: usize = 1024;
const CHUNKS: usize = 1024;
/// Number of descriptors in a word of an `fd_set`.
pub(crate) const WORD: usize = 64;
/// Number of such words in a chunk.
const WORDS: usize = CHUNK / WORD;

struct Chunk {
    cells: [AtomicU64; CHUNK],
    /// The word that was last [remembered](remember) for each descriptor. While the word equals the
    /// descriptor's cell, a call may take the fast path, see [`glance`].
    words: [AtomicPtr<AtomicU64>; CHUNK],
    /// A bit for each descriptor that has ever been a connection or an epoll instance.
    pollable: [AtomicU64; WORDS],
    /// A bit for each descriptor that has ever been an epoll instance.
    epolls: [AtomicU64; WORDS],
}

/// The upper level of the table. It shares its memory pages with no other data.
#[repr(C)]
#[cfg_attr(target_arch = "x86_64", repr(align(4096)))]
#[cfg_attr(target_arch = "aarch64", repr(align(65536)))]
struct Upper {
    /// Whether this process is known to own the table: [`ASK`], [`HOME`] or [`SHARED`].
    whose: AtomicU32,
    chunks: [AtomicPtr<Chunk>; CHUNKS],
}

const _: () = assert!(align_of::<Upper>() == arch::LARGEST_PAGE);

/// Not known, so the process id must be checked. The kernel's wipe leaves this value in a child.
const ASK: u32 = 0;
/// This process owns the table.
const HOME: u32 = 1;
/// Another process may run in this memory at any time.
const SHARED: u32 = 2;

impl Upper {
    const fn new() -> Upper {
        let chunks = [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS];
        Upper { whose: AtomicU32::new(ASK), chunks }
    }
}

/// Called in a child of a fork that no hook saw, at its first look-up.
pub(crate) static STRAY: Upcall<()> = Upcall::new();

/// Whether the kernel wipes the upper level in children.
static IS_WIPED: AtomicBool = AtomicBool::new(false);

static UPPER: Upper = Upper::new();
/// A copy from which the upper level is restored. It is written after the upper level.
static COPY: [AtomicPtr<Chunk>; CHUNKS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS];

/// Whether a descriptor has ever been an epoll instance.
static HAD_EPOLL: AtomicBool = AtomicBool::new(false);

/// The word that stands for "nothing remembered". No cell has its value.
static NOTHING: AtomicU64 = AtomicU64::new(u64::MAX);

/// What a descriptor is to the shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Nothing.
    None,
    /// A TCP socket that is not connected, and the reason that will keep the connection on TCP.
    Unconnected(Reason),
    /// A connected TCP socket.
    Endpoint(EndpointRef),
    /// An epoll instance.
    Epoll(EpollRef),
    /// A descriptor of the shim. The program must neither close nor use it.
    Private,
    /// An io_uring, by its index among those that the shim inspects.
    Ring(u8),
}

/// Bit in the cell of an unconnected socket: an epoll instance may have it.
const REGISTERED: u64 = 1 << 32;

impl Entry {
    /// Returns the entry as an integer. It is 0 for nothing, and below 2^59 for a connection.
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

/// Makes the kernel wipe the upper level in children. On a kernel without that feature, children
/// made by bare system calls stay unnoticed.
pub(crate) fn start() {
    let pages = (&raw const UPPER).cast_mut().cast();
    // SAFETY: whole pages of this library. Their contents are restored in every child.
    let wiped = unsafe { madvise(pages, size_of::<Upper>(), Advice::LinuxWipeOnFork) };
    IS_WIPED.store(wiped.is_ok(), Relaxed);
}

/// Returns [`process::is_home`], without a system call where the answer is already known. The
/// answer is wrong in a child that runs in this memory and that no hook saw being made. So use it
/// only where a wrong answer merely keeps a connection on TCP.
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

/// Records that a child is made that runs in this memory at the same time as its parent.
pub(crate) fn share_memory() {
    UPPER.whose.store(SHARED, Relaxed);
}

/// Restores the upper level in a forked child.
pub(crate) fn restore() {
    for (upper, copy) in UPPER.chunks.iter().zip(&COPY) {
        upper.store(copy.load(Acquire), Release);
    }
}

/// Removes all entries except those of the shim's own descriptors.
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

/// Handles an empty place in the upper level: it was never used, or this is the child of a fork
/// that no hook saw.
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

/// Returns what `fd` is.
#[inline]
pub(crate) fn look_up(fd: i32) -> Entry {
    match cell(fd) {
        Some(cell) => Entry::unpack(cell.load(Acquire)),
        None => Entry::None,
    }
}

/// Returns the word that was last [remembered](remember) for `fd`, if it equals the descriptor's
/// entry. If `None`, use [`look_up`].
#[inline(always)]
pub(crate) fn glance(fd: i32) -> Option<*const AtomicU64> {
    let (entry, word) = remembered(fd)?;
    // SAFETY: a remembered word lives as long as the process.
    (unsafe { &*word }.load(SeqCst) == entry).then_some(word)
}

/// Returns the [packed](Entry::pack) entry of `fd`, and the word that was last
/// [remembered](remember) for it.
#[inline(always)]
pub(crate) fn remembered(fd: i32) -> Option<(u64, *const AtomicU64)> {
    let chunk = UPPER.chunks.get(fd as u32 as usize / CHUNK)?.load(Acquire);
    // SAFETY: as in `chunk`.
    let chunk = unsafe { chunk.as_ref() }?;
    let at = fd as usize % CHUNK;
    Some((chunk.cells[at].load(Acquire), chunk.words[at].load(Acquire)))
}

/// Makes [`glance`] compare the [packed](Entry::pack) entry of this descriptor with `word`, until
/// another word is remembered.
pub(crate) fn remember(fd: i32, word: *const AtomicU64) {
    if let Some(chunk) = chunk(fd as u32 as usize / CHUNK) {
        chunk.words[fd as usize % CHUNK].store(word.cast_mut(), Release);
    }
}

/// Returns a bit for each of the descriptors from `WORD * index` on. A set bit means that the
/// descriptor may be a connection or an epoll instance.
#[inline]
pub(crate) fn pollable(index: usize) -> u64 {
    chunk(index / WORDS).map_or(0, |chunk| chunk.pollable[index % WORDS].load(Acquire))
}

/// Returns a bit for each of the descriptors from `WORD * index` on. A set bit means that the
/// descriptor may be an epoll instance.
#[inline]
pub(crate) fn epolls(index: usize) -> u64 {
    chunk(index / WORDS).map_or(0, |chunk| chunk.epolls[index % WORDS].load(Acquire))
}

/// Returns whether one of the descriptors may be an epoll instance.
#[inline]
pub(crate) fn may_have_epolls(mut fds: impl Iterator<Item = i32>) -> bool {
    let first = chunk(0);
    let may_be_epoll = |fd: i32| {
        let at = fd as u32 as usize;
        // Most programs have descriptors of the first chunk only.
        let word = match first {
            Some(chunk) if at < CHUNK => chunk.epolls[at / WORD].load(Acquire),
            _ => epolls(at / WORD),
        };
        word >> (at % WORD) & 1 != 0
    };
    HAD_EPOLL.load(Acquire) && fds.any(may_be_epoll)
}

/// Number of descriptors that the table has room for.
pub(crate) const PLACES: usize = CHUNK * CHUNKS;

/// Returns whether the table has room for `fd`.
pub(crate) fn has_place_for(fd: i32) -> bool {
    (0..PLACES as i32).contains(&fd)
}

/// Sets the entry of `fd`, and returns the old one. A descriptor beyond the table stays unknown,
/// and so on TCP.
#[inline]
pub(crate) fn replace(fd: i32, entry: Entry) -> Entry {
    // Callers give a constant kind, so that most of them do not check it.
    if matches!(entry, Entry::Epoll(_)) {
        mark_epoll(fd, entry);
    }
    Entry::unpack(swap(fd, entry))
}

/// Sets the entry of a socket that has been connected. Returns the old entry, and whether an epoll
/// instance may have had the socket before.
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
    let (cell, word) = (&chunk.cells[at], entry.pack());
    if !matches!(entry, Entry::Endpoint(_) | Entry::Epoll(_)) {
        return cell.swap(word, AcqRel);
    }
    mark(&chunk.pollable[at / WORD], at);
    let before = cell.swap(word, AcqRel);
    // In a call that began before the shim's end. Either `clear` finds the entry, or this finds the
    // end, which precedes `clear`. An entry without state does no harm.
    if process::has_ended() { forget_again(cell, before) } else { before }
}

/// Marks a descriptor for [`epolls`], before it gets the entry.
#[inline(never)]
fn mark_epoll(fd: i32, entry: Entry) {
    let (index, at) = (fd as usize / CHUNK, fd as usize % CHUNK);
    if has_place_for(fd)
        && let Some(chunk) = chunk(index).or_else(|| make(index, entry))
    {
        mark(&chunk.epolls[at / WORD], at);
        HAD_EPOLL.store(true, Release);
    }
}

/// Sets the bit of a descriptor in its word.
#[inline(always)]
fn mark(word: &AtomicU64, at: usize) {
    let bit = 1 << (at % WORD);
    // Most descriptors have been one before, so the bit is set already.
    if word.load(Relaxed) & bit == 0 {
        word.fetch_or(bit, AcqRel);
    }
}

/// Forgets an entry that was written after the shim's end. Returns `before`, so that its caller need
/// not keep it.
#[cold]
#[inline(never)]
fn forget_again(cell: &AtomicU64, before: u64) -> u64 {
    cell.swap(Entry::None.pack(), AcqRel);
    before
}

#[cold]
#[inline(never)]
fn make(index: usize, entry: Entry) -> Option<&'static Chunk> {
    if entry == Entry::None {
        return None;
    }
    process::note_use();
    // Allocated in place, because the thread may have little stack.
    // SAFETY: zeroes are valid for atomics.
    let fresh = unsafe { Box::<Chunk>::new_zeroed().assume_init() };
    fresh.words.iter().for_each(|word| word.store((&raw const NOTHING).cast_mut(), Relaxed));
    let fresh = Box::into_raw(fresh);
    if UPPER.chunks[index].compare_exchange(std::ptr::null_mut(), fresh, AcqRel, Acquire).is_ok() {
        COPY[index].store(fresh, Release);
    } else {
        // SAFETY: it was made above, and no other thread has seen it.
        drop(unsafe { Box::from_raw(fresh) });
    }
    chunk(index)
}

/// Records that an unconnected socket is about to be registered in an epoll instance. [`connect`]
/// returns that.
pub(crate) fn note_registered(fd: i32) {
    let Some(cell) = cell(fd) else { return };
    let registered = |word| matches!(Entry::unpack(word), Entry::Unconnected(_)).then_some(word | REGISTERED);
    let _ = cell.fetch_update(AcqRel, Acquire, registered);
}

/// Gives an unconnected socket a reason to stay on TCP after it is connected. Returns `false` if
/// the descriptor is not, or no longer, an unconnected socket.
pub(crate) fn hold_back(fd: i32, reason: Reason) -> bool {
    let Some(cell) = cell(fd) else { return false };
    let held_back = |word| match Entry::unpack(word) {
        Entry::Unconnected(Reason::None) => Some(Entry::Unconnected(reason).pack() | word & REGISTERED),
        Entry::Unconnected(_) => Some(word),
        _ => None,
    };
    cell.fetch_update(AcqRel, Acquire, held_back).is_ok()
}

/// Returns every descriptor from `first` to `last` that has an entry.
pub(crate) fn known(first: u32, last: u32) -> impl Iterator<Item = (i32, Entry)> {
    (first as usize / CHUNK..CHUNKS.min(last as usize / CHUNK + 1))
        .filter(|&index| chunk(index).is_some())
        .flat_map(|index| index * CHUNK..(index + 1) * CHUNK)
        .filter(move |fd| (first as usize..=last as usize).contains(fd))
        .map(|fd| (fd as i32, look_up(fd as i32)))
        .filter(|(_, entry)| *entry != Entry::None)
}

/// Returns a descriptor whose entry is `entry`.
pub(crate) fn name_of(entry: Entry) -> Option<i32> {
    known(0, u32::MAX).find(|(_, other)| *other == entry).map(|(fd, _)| fd)
}
