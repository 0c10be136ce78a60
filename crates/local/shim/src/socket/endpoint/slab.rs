//! The slots of all endpoints, and the ways to find one.
//!
//! A slab of chunks, which are never freed. A hook may still use an endpoint while another thread
//! closes its descriptor. Such a hook reads stale values at worst, never freed memory. Generations
//! distinguish a reused slot from the connection that had it before.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicPtr, Ordering::*};

use shunt_abi::page::Counter;

use super::phase::{Phase, Word};
use super::{ATTACHED, Endpoint};
use crate::base::lock::Lock;
use crate::base::names::EndpointRef;
use crate::base::private::PrivateFd;
use crate::base::table::{self, Entry};
use crate::base::{process, rank};
use crate::socket::sharing;

const CHUNK: usize = 256;
const CHUNKS: usize = 4096;
/// The largest number of endpoints in the process.
pub(crate) const MOST: usize = CHUNK * CHUNKS;

/// The first endpoint of each chunk.
static SLAB: [AtomicPtr<Endpoint>; CHUNKS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS];
pub(super) static FREE: Lock<Free, { rank::ENDPOINT_LIST }> = Lock::new(Free { list: Vec::new(), made: 0 });

pub(super) struct Free {
    list: Vec<u32>,
    pub(super) made: u32,
}

impl EndpointRef {
    /// Returns the endpoint, if its slot has not been reused.
    #[inline]
    pub(crate) fn resolve(self) -> Option<&'static Endpoint> {
        let endpoint = at(self.index())?;
        (endpoint.identity.generation() == self.generation()).then_some(endpoint)
    }
}

/// Returns the endpoint behind `fd`, if there is one.
#[inline]
pub(crate) fn behind(fd: RawFd) -> Option<&'static Endpoint> {
    remembered(fd).or_else(|| look_behind(fd))
}

#[inline(never)]
fn look_behind(fd: RawFd) -> Option<&'static Endpoint> {
    match table::look_up(fd) {
        Entry::Endpoint(name) => name.resolve(),
        _ => None,
    }
}

/// Returns the endpoint behind `fd`, if it was [remembered](Endpoint::remember). This takes one
/// load of the table and one of the endpoint.
#[inline(always)]
fn remembered(fd: RawFd) -> Option<&'static Endpoint> {
    let (entry, word) = table::remembered(fd)?;
    // SAFETY: a remembered word is a field of an endpoint, and endpoints are never freed.
    let ready = unsafe { &*word }.load(SeqCst);
    // The name is 0 in the word of a free endpoint. Without a remembered word it has all its bits
    // set, as no entry has. An entry of 0 is a descriptor that the shim does not know.
    let name = Word::entry(ready);
    // SAFETY: as in `at_once`. An entry that equals a remembered word is that of an endpoint, and
    // the word is its first field.
    (name == entry && name != 0).then(|| unsafe { &*word.cast::<Endpoint>() })
}

/// Returns the endpoint behind `fd` on the fast path, by one load of the table and one of the
/// endpoint. The endpoint must be attached, have no pending error, and have been
/// [remembered](Endpoint::remember). Otherwise this returns `None`, and the caller uses [`behind`].
#[inline(always)]
pub(crate) fn at_once(fd: RawFd) -> Option<&'static Endpoint> {
    // The slot may have been reused for another connection. Then its word differs from the table's
    // entry.
    let ready = table::glance(fd)?;
    // SAFETY: only words of endpoints are remembered, and endpoints are never freed.
    Some(unsafe { &*ready.cast::<Endpoint>() })
}

/// Returns how many slots have ever been made. All indices are lower.
pub(crate) fn made() -> usize {
    FREE.lock().made as usize
}

/// Returns the endpoint with this index, whether or not it is in use.
pub(crate) fn at(index: u32) -> Option<&'static Endpoint> {
    let chunk = SLAB.get(index as usize / CHUNK)?.load(Acquire);
    // SAFETY: a chunk that is not null has `CHUNK` endpoints, and is never freed.
    (!chunk.is_null()).then(|| unsafe { &*chunk.add(index as usize % CHUNK) })
}

/// Makes a chunk directly on the heap, because it is larger than the stacks of some threads.
fn make_chunk() -> *mut Endpoint {
    let mut chunk = Box::<[Endpoint]>::new_uninit_slice(CHUNK);
    for endpoint in &mut chunk {
        endpoint.write(Endpoint::default());
    }
    Box::into_raw(chunk).cast()
}

/// Makes an endpoint for the newly connected socket `fd`, to be offered after `offer_after`
/// operations. Returns `None` if [`MOST`] endpoints are in use.
pub(crate) fn allocate(fd: i32, nonblocking: bool, offer_after: u32) -> Option<EndpointRef> {
    process::note_use();
    sharing::prepare();
    let index = {
        let mut free = FREE.lock();
        match free.list.pop() {
            Some(index) => index,
            None => {
                let index = free.made;
                let chunk = SLAB.get(index as usize / CHUNK)?;
                if (index as usize).is_multiple_of(CHUNK) {
                    chunk.store(make_chunk(), Release);
                }
                free.made += 1;
                index
            }
        }
    };
    let endpoint = at(index)?;
    endpoint.identity.set_index(index);
    endpoint.socket.begin(fd);
    endpoint.options.set_nonblocking(nonblocking);
    endpoint.offer.restart_with(offer_after);
    endpoint.sharing.holders.begin(sharing::strays());
    Some(endpoint.identity.begin())
}

/// Returns every endpoint in use.
pub(crate) fn all() -> impl Iterator<Item = &'static Endpoint> {
    let made = FREE.lock().made;
    (0..made).filter_map(at).filter(|endpoint| endpoint.is_in_use())
}

/// Updates the endpoints after a private descriptor that holds a socket has moved to another
/// number.
pub(crate) fn renumber(old: RawFd, new: RawFd) {
    for endpoint in all() {
        endpoint.socket.renumber(old, new);
    }
}

impl Endpoint {
    /// Frees the slot. The endpoint is detached by now.
    pub(crate) fn free(&self) {
        let name = self.reference();
        if self.identity.end() == Phase::Attached {
            ATTACHED.fetch_sub(1, AcqRel);
        }
        if let Some(entry) = self.entry() {
            process::unlist(entry);
        } else if self.statistics.was_short() {
            process::count(Counter::ConnectionsShort, 1);
        }
        // The kernel ends the connection only once this descriptor is closed too. A call that still
        // counts was interrupted by the handler that closes the socket, and does not use it again.
        if self.kept().is_some() {
            PrivateFd::close_raw(self.take_kept());
        }
        self.reset();
        FREE.lock().list.push(name.index());
    }
}
