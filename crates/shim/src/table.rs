//! What each descriptor of the process is to us: one look-up answers "nothing" for everything that is no TCP
//! socket (L7).
//!
//! Two levels, so that a process with few descriptors pays for few. Chunks are never freed.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::*};

use crate::endpoint::{Endpoint, EndpointRef};
use crate::epoll::{Epoll, EpollRef};

const CHUNK: usize = 1024;
const CHUNKS: usize = 1024;

type Chunk = [AtomicU64; CHUNK];

static TABLE: [AtomicPtr<Chunk>; CHUNKS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS];

/// What a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Nothing of ours.
    None,
    /// A TCP socket that is not connected.
    Unconnected,
    /// A connected TCP socket.
    Endpoint(EndpointRef),
    /// An epoll instance.
    Epoll(EpollRef),
    /// One of the shim's own descriptors: the program must neither close nor use it.
    Private,
}

impl Entry {
    fn pack(self) -> u64 {
        match self {
            Entry::None => 0,
            Entry::Unconnected => 1,
            Entry::Private => 2,
            Entry::Endpoint(endpoint) => 3 | endpoint.pack() << 3,
            Entry::Epoll(epoll) => 4 | epoll.pack() << 3,
        }
    }

    #[inline]
    fn unpack(word: u64) -> Entry {
        match word & 7 {
            1 => Entry::Unconnected,
            2 => Entry::Private,
            3 => Entry::Endpoint(EndpointRef::unpack(word >> 3)),
            4 => Entry::Epoll(EpollRef::unpack(word >> 3)),
            _ => Entry::None,
        }
    }
}

#[inline]
fn cell(fd: i32) -> Option<&'static AtomicU64> {
    let chunk = TABLE.get(fd as u32 as usize / CHUNK)?.load(Acquire);
    // SAFETY: a chunk that is not null is never freed.
    (!chunk.is_null()).then(|| unsafe { &(*chunk)[fd as usize % CHUNK] })
}

/// What `fd` is.
#[inline]
pub(crate) fn look_up(fd: i32) -> Entry {
    match cell(fd) {
        Some(cell) => Entry::unpack(cell.load(Acquire)),
        None => Entry::None,
    }
}

/// The endpoint behind `fd`, if it is one.
#[inline]
pub(crate) fn endpoint(fd: i32) -> Option<&'static Endpoint> {
    match look_up(fd) {
        Entry::Endpoint(endpoint) => endpoint.resolve(),
        _ => None,
    }
}

/// The epoll instance behind `fd`, if it is one that we saw being made.
#[inline]
pub(crate) fn epoll(fd: i32) -> Option<&'static Epoll> {
    match look_up(fd) {
        Entry::Epoll(epoll) => epoll.resolve(),
        _ => None,
    }
}

/// Says what `fd` is from now on, and returns what it was. A descriptor beyond the table stays unknown, and so
/// on TCP.
pub(crate) fn replace(fd: i32, entry: Entry) -> Entry {
    if fd < 0 || fd as usize >= CHUNK * CHUNKS {
        return Entry::None;
    }
    if cell(fd).is_none() {
        if entry == Entry::None {
            return Entry::None;
        }
        let fresh = Box::into_raw(Box::new([const { AtomicU64::new(0) }; CHUNK]));
        let slot = &TABLE[fd as usize / CHUNK];
        if slot.compare_exchange(std::ptr::null_mut(), fresh, AcqRel, Acquire).is_err() {
            // SAFETY: it was made above and nobody else has seen it.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
    match cell(fd) {
        Some(cell) => Entry::unpack(cell.swap(entry.pack(), AcqRel)),
        None => Entry::None,
    }
}

/// Every descriptor from `first` to `last` that is something to us.
pub(crate) fn known(first: u32, last: u32) -> impl Iterator<Item = (i32, Entry)> {
    (first as usize / CHUNK..CHUNKS.min(last as usize / CHUNK + 1))
        .filter(|&index| !TABLE[index].load(Relaxed).is_null())
        .flat_map(|index| index * CHUNK..(index + 1) * CHUNK)
        .filter(move |fd| (first as usize..=last as usize).contains(fd))
        .map(|fd| (fd as i32, look_up(fd as i32)))
        .filter(|(_, entry)| *entry != Entry::None)
}

/// A descriptor that is `entry`.
pub(crate) fn name_of(entry: Entry) -> Option<i32> {
    known(0, u32::MAX).find(|(_, other)| *other == entry).map(|(fd, _)| fd)
}
