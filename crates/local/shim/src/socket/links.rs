//! The links and peers of this process.
//!
//! A link is shared memory between two processes, with a pair of lanes for each of its connections.
//! It is mapped when the broker announces it, and unmapped when its peer has ended and no endpoint
//! uses it any more.
//!
//! The structures themselves are reused, never freed. So a reference to one is always valid, and a
//! process that meets a million peers needs memory only for those that it has at a time.
//!
//! ```text
//! announced ----> mapped ------ sealed ------> open ----- peer ended -----> gone ----> unmapped
//!                 (not touched)                attachments                  last user  (reused)
//! ```
//!
//! Example: the broker announces a link to both processes, and each maps it. The broker seals the
//! memory and pairs a connection, and [`Link::open`] allows its use. When the peer exits, the link
//! is `gone`. The last endpoint, sleeper or epoll instance that leaves it calls `RETIRE`, which
//! unmaps it.

use std::cell::{Cell, UnsafeCell};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

use shunt_abi::geometry::{CONNS, Geometry, Side, WAITERS};
use shunt_abi::page::Counter;
use shunt_abi::reason::Reason;
use shunt_ring::bytes::{MappedRing, Ring, SPILL};
use shunt_ring::copy::Method;
use shunt_ring::lane::Stamp;
use shunt_ring::link::LinkView;
use shunt_ring::user::Fault;
use shunt_ring::{LaneHeader, Sink, Source, WaiterLine};
use shunt_sys::mapping::Mapping;

use crate::base::lock::{AcrossFork, Lock};
use crate::base::names::EndpointRef;
use crate::base::private::PrivateFd;
use crate::base::rank;
use crate::base::upcall::Upcall;
use crate::base::waiter::Slot;
use crate::base::{budget, order, process};
use crate::socket::endpoint::Seen;

/// The process at the other side of some links. It may be this process itself.
pub(crate) struct Peer {
    doorbells: [AtomicI32; WAITERS],
    /// Set when there was no descriptor left for one of the doorbells.
    mute: AtomicBool,
}

/// Every peer that was ever made. A peer that no broker knows any more may still need its
/// doorbells.
static PEERS: Lock<Vec<&'static Peer>, { rank::PEERS }> = Lock::new(Vec::new());

/// Updates the doorbells after a private descriptor has moved to another number.
pub(crate) fn renumber(old: i32, new: i32) {
    PEERS.lock().iter().for_each(|peer| peer.renumber(old, new));
}

/// Returns the lock of the list of peers.
pub(crate) fn across_fork() -> &'static impl AcrossFork {
    &PEERS
}

impl Peer {
    /// Makes a peer, which is never freed.
    pub(crate) fn make() -> &'static Peer {
        let doorbells = [const { AtomicI32::new(-1) }; WAITERS];
        let peer = Box::leak(Box::new(Peer { doorbells, mute: AtomicBool::new(false) }));
        PEERS.lock().push(peer);
        peer
    }

    /// Reuses the structure for another process. Its doorbells have been closed.
    pub(crate) fn reuse(&self) {
        self.mute.store(false, Relaxed);
    }

    /// Marks the peer as one with a doorbell for which this process had no descriptor left.
    /// Connections with the peer stay on TCP, because without the doorbell they would be slow.
    pub(crate) fn set_mute(&self) {
        self.mute.store(true, Relaxed);
    }

    /// Returns whether [`set_mute`](Self::set_mute) was called.
    pub(crate) fn is_mute(&self) -> bool {
        self.mute.load(Relaxed)
    }

    /// Stores the doorbell of the peer's waiter `slot`, and closes the one that it replaces.
    pub(crate) fn set_doorbell(&self, slot: usize, doorbell: PrivateFd) {
        let old = self.doorbells[slot].swap(doorbell.into_raw(), SeqCst);
        PrivateFd::close_raw(old);
    }

    /// Returns the slots whose doorbells this process has.
    pub(crate) fn known_slots(&self) -> impl Iterator<Item = usize> {
        (0..WAITERS).filter(|&slot| self.doorbells[slot].load(Relaxed) >= 0)
    }

    fn renumber(&self, old: i32, new: i32) {
        for doorbell in &self.doorbells {
            let _ = doorbell.compare_exchange(old, new, SeqCst, Relaxed);
        }
    }

    /// Closes every doorbell.
    pub(crate) fn forget_doorbells(&self) {
        for doorbell in &self.doorbells {
            PrivateFd::close_raw(doorbell.swap(-1, SeqCst));
        }
    }
}

/// Unmaps a link that will not be used again.
pub(crate) static RETIRE: Upcall<&'static Link> = Upcall::new();

/// One side of a link.
pub(crate) struct Link {
    identity: UnsafeCell<Identity>,
    mapping: Lock<Option<Mapping>, { rank::MAPPING }>,
    conns: [AtomicU64; CONNS],
    /// Bytes of the rings and spills on which this process sends that have memory, for connections
    /// that no endpoint uses now.
    kept: [ThreadCache; CONNS],
    used: AtomicU32,
    gone: AtomicBool,
    /// See [`open`](Self::open).
    is_open: AtomicBool,
    /// See [`set_orphan`](Self::set_orphan).
    orphan: AtomicBool,
}

/// The identity of a link, from its announcement until it is retired.
pub(crate) struct Identity {
    /// The broker's id of the link.
    pub(crate) id: u64,
    /// The side of this process.
    pub(crate) side: Side,
    /// The process at the other side.
    pub(crate) peer: &'static Peer,
    /// The broker that made the link, counted by the hellos. The ids mean nothing to another
    /// broker.
    pub(crate) epoch: u32,
    view: LinkView,
}

// SAFETY: the identity is written only in `new` and `reuse`, while no other thread uses the link.
unsafe impl Sync for Link {}

impl Deref for Link {
    type Target = Identity;

    #[inline]
    fn deref(&self) -> &Identity {
        // SAFETY: the reader uses the link, or holds the control lock: see `reuse`.
        unsafe { &*self.identity.get() }
    }
}

impl Identity {
    pub(crate) fn new(
        id: u64,
        side: Side,
        peer: &'static Peer,
        epoch: u32,
        mapping: &Mapping,
        geometry: Geometry,
    ) -> Identity {
        // A limited address space may have no room for the spills.
        let has_spills = mapping.len() >= geometry.link_bytes();
        // SAFETY: the mapping has `geometry.link_bytes()` bytes, or those before the spills. The
        // link keeps it as long as it has this identity.
        let view = unsafe { LinkView::new(mapping.as_ptr(), geometry, has_spills) };
        Identity { id, side, peer, epoch, view }
    }
}

impl Link {
    pub(crate) fn new(identity: Identity, mapping: Mapping) -> Link {
        keep_unsealed(&mapping);
        Link {
            identity: UnsafeCell::new(identity),
            mapping: Lock::new(Some(mapping)),
            conns: [const { AtomicU64::new(0) }; CONNS],
            kept: [const { ThreadCache::new() }; CONNS],
            used: AtomicU32::new(0),
            gone: AtomicBool::new(false),
            is_open: AtomicBool::new(false),
            orphan: AtomicBool::new(false),
        }
    }

    /// Allows the use of the memory, because the broker has paired a connection on the link, and so
    /// has sealed it. The caller holds the control lock.
    pub(crate) fn open(&self) {
        if !self.is_open() {
            self.note_sealed();
            if self.view.has_spills() {
                self.view.set_maps_spills(self.side);
            }
            self.peer.known_slots().for_each(|slot| self.view.set_known(self.side, slot));
        }
    }

    /// Records that no process can punch holes into the memory any more. Touching or unmapping it
    /// waits for no other process. The caller holds the control lock.
    pub(crate) fn note_sealed(&self) {
        if let Some(mapping) = &*self.mapping.lock() {
            mapping.set_stays(false);
            // Otherwise a child would fault at its first access. The control lock is held, so no
            // child has been made since the seal.
            let _ = mapping.leave_to_children();
        }
        self.is_open.store(true, Release);
    }

    /// Returns whether the memory may be touched. Before it is sealed, the peer could punch holes
    /// into it, and so block a thread that touches, copies or unmaps it (L5). A link that is never
    /// sealed stays mapped.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Acquire)
    }

    /// Closes both lanes of a connection that does not come about.
    pub(crate) fn close_lanes(&self, conn: usize) {
        for side in [Side::A, Side::B] {
            self.view().lane(conn, side).close();
        }
    }

    /// Reuses the structure for another link.
    ///
    /// # Safety
    /// The caller holds the control lock, and the link has been retired: no endpoint,
    /// sleeper, epoll instance or list refers to it.
    pub(crate) unsafe fn reuse(&self, identity: Identity, mapping: Mapping) {
        // SAFETY: the caller's promise. Before it has the control lock, a thread reads only `gone`
        // and `used` of a retired link (`control::retire`).
        unsafe { *self.identity.get() = identity };
        keep_unsealed(&mapping);
        *self.mapping.lock() = Some(mapping);
        self.gone.store(false, Release);
        self.is_open.store(false, Release);
        self.orphan.store(false, Release);
    }

    /// Returns the view of the shared memory.
    #[inline]
    pub(crate) fn view(&self) -> &LinkView {
        &self.view
    }

    /// Returns the endpoint that uses `conn`.
    #[inline]
    pub(crate) fn endpoint(&self, conn: usize) -> Option<EndpointRef> {
        self.conns[conn].load(Acquire).checked_sub(1).map(EndpointRef::unpack)
    }

    /// Assigns `conn` to an endpoint. Returns `false` if another one uses it, which an honest
    /// broker never causes.
    pub(crate) fn occupy(&self, conn: usize, endpoint: EndpointRef) -> bool {
        debug_assert!(self.is_open());
        let taken = self.conns[conn].compare_exchange(0, endpoint.pack() + 1, AcqRel, Relaxed).is_ok();
        if taken {
            self.used.fetch_add(1, AcqRel);
        }
        taken
    }

    /// Frees `conn` after its endpoint has left it.
    pub(crate) fn vacate(&self, conn: usize) {
        if self.conns[conn].swap(0, AcqRel) != 0 && self.used.fetch_sub(1, AcqRel) == 1 {
            EMPTY_AT.store(process::now(), Relaxed);
        }
    }

    /// Records that the peer has ended, so that no new connection will use this link.
    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Release);
    }

    /// Records that the broker of the link is lost. No broker passes new doorbells to the peer any
    /// more.
    pub(crate) fn set_orphan(&self) {
        self.orphan.store(true, Release);
        self.set_gone();
    }

    /// Returns whether the peer can never notify this waiter of bytes on the link.
    pub(crate) fn is_deaf_to(&self, slot: Slot) -> bool {
        self.orphan.load(Acquire) && !self.view.is_known(self.side.other(), slot.0)
    }

    /// Returns whether the peer has ended, or the broker of the link is lost.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Acquire)
    }

    /// Unmaps the memory. No endpoint and no epoll instance uses the link any more.
    pub(crate) fn unmap(&self) {
        *self.mapping.lock() = None;
        for bytes in self.kept.iter().flat_map(|kept| [&kept.ring, &kept.spill]) {
            budget::release(bytes.swap(0, Relaxed));
        }
    }

    /// Returns whether nothing will use the mapping again.
    pub(crate) fn is_idle_for_good(&self) -> bool {
        self.is_gone() && self.used.load(Acquire) == 0
    }

    /// Rings the doorbell of the peer's waiter `slot`.
    #[cold]
    fn ring(&self, slot: usize) {
        PrivateFd::lend(&self.peer.doorbells[slot], |fd| {
            process::count(Counter::DoorbellsRung, 1);
            let _ = shunt_sys::eventfd::ring(fd);
        });
    }
}

/// Keeps memory into which the peer may still punch holes from being unmapped, and from being
/// inherited by a child. Either would wait for a punch.
fn keep_unsealed(mapping: &Mapping) {
    mapping.set_stays(true);
    let _ = mapping.keep_from_children();
}

/// The size of the first page, which a lane with few bytes in flight gets and keeps.
pub(crate) const FIRST_PAGE: usize = 4096;
/// When the last connection of a link left it; 0 once the broker has had the time to remove the
/// link. See `crate::life::idle`.
pub(crate) static EMPTY_AT: AtomicU64 = AtomicU64::new(0);
/// When the first lane grew beyond [`FIRST_PAGE`], or when such lanes were last checked; 0 if there
/// are none. See `crate::life::idle`.
pub(crate) static GROWN_AT: AtomicU64 = AtomicU64::new(0);

/// A ring for writing. Each page gets its memory before it is touched. A lane with few bytes in
/// flight stays on its first page, so it asks for memory once.
pub(crate) struct Backed<'a> {
    ring: MappedRing,
    /// Bytes at the start of the ring that are known to have memory.
    backed: &'a Growth,
    /// Bytes at the start of the spill that are known to have memory.
    spill_backed: &'a Growth,
}

/// The number of bytes at the start of a ring that are known to have memory. They are charged to
/// the [budget] until the link is unmapped. When an endpoint leaves the link, the link keeps the
/// charge for the next one.
#[derive(Debug, Default)]
pub(crate) struct Growth(Cell<usize>);

impl Growth {
    #[inline]
    pub(crate) fn get(&self) -> usize {
        self.0.get()
    }

    fn take_over(kept: &AtomicUsize) -> Growth {
        let bytes = kept.swap(0, Relaxed);
        note_growth(bytes);
        Growth(Cell::new(bytes))
    }

    fn leave(&self, kept: &AtomicUsize) {
        kept.store(self.0.replace(0), Relaxed);
    }
}

/// The memory of the ring and the spill of a connection that no endpoint uses.
#[derive(Debug)]
struct ThreadCache {
    ring: AtomicUsize,
    spill: AtomicUsize,
}

impl ThreadCache {
    const fn new() -> ThreadCache {
        ThreadCache { ring: AtomicUsize::new(0), spill: AtomicUsize::new(0) }
    }
}

impl Seen {
    /// Begins the record of a lane. The memory that the connection's ring and spill already have
    /// belongs to the endpoint from now on.
    pub(crate) fn take_over(link: &Link, conn: usize) -> Seen {
        let ThreadCache { ring, spill } = &link.kept[conn];
        let (backed, spill_backed) = (Growth::take_over(ring), Growth::take_over(spill));
        Seen { backed, spill_backed, ..Seen::default() }
    }

    /// Returns the memory of the lane to the link. It stays charged, because only the end of the
    /// link frees it.
    pub(crate) fn leave_memory(&self, at: &Attachment) {
        let ThreadCache { ring, spill } = &at.link.kept[at.conn];
        self.backed.leave(ring);
        self.spill_backed.leave(spill);
    }

    /// Returns whether the lane has more memory than its first page.
    pub(crate) fn has_grown(&self) -> bool {
        self.backed.get() > FIRST_PAGE || self.spill_backed.get() > 0
    }
}

impl Drop for Growth {
    fn drop(&mut self) {
        budget::release(self.0.replace(0));
    }
}

/// Notes the memory that a ring or a spill has now. `crate::life::idle` checks the lane later if
/// that is more than its first page.
fn note_growth(bytes: usize) {
    if bytes > FIRST_PAGE && GROWN_AT.load(Relaxed) == 0 {
        GROWN_AT.store(process::now(), Relaxed);
    }
}

impl<'a> Backed<'a> {
    #[inline]
    pub(crate) fn new(ring: MappedRing, seen: &'a Seen) -> Backed<'a> {
        Backed { ring, backed: &seen.backed, spill_backed: &seen.spill_backed }
    }
}

impl Backed<'_> {
    /// Returns whether this range of the ring is known to have memory.
    #[inline]
    pub(crate) fn is_backed(&self, at: u64, count: usize) -> bool {
        self.end_of(at, count) <= self.backed.get()
    }

    /// Returns the end of a range, at most that of the ring. A range that wraps around needs all of
    /// the ring.
    #[inline]
    fn end_of(&self, at: u64, count: usize) -> usize {
        (at as usize + count).min(self.ring.len())
    }
}

impl Ring for Backed<'_> {
    fn len(&self) -> usize {
        self.ring.len()
    }

    #[inline]
    fn spill_len(&self) -> usize {
        self.ring.spill_len()
    }

    #[inline]
    fn back(&self, at: u64, count: usize) -> Result<(), Reason> {
        if at >= SPILL {
            let end = ((at - SPILL) as usize + count).min(self.spill_len());
            return if end <= self.spill_backed.get() { Ok(()) } else { self.back_spill_up_to(end) };
        }
        if self.is_backed(at, count) { Ok(()) } else { self.back_up_to(self.end_of(at, count)) }
    }

    fn fill(&self, at: u64, count: usize, source: &mut Source<'_>, method: Method) -> Result<(), Fault> {
        self.ring.fill(at, count, source, method)
    }

    fn drain(&self, at: u64, count: usize, sink: &mut Sink<'_>) -> Result<(), Fault> {
        self.ring.drain(at, count, sink)
    }
}

impl Backed<'_> {
    #[cold]
    fn back_up_to(&self, end: usize) -> Result<(), Reason> {
        self.grow(self.backed, 0, end)
    }

    #[cold]
    fn back_spill_up_to(&self, end: usize) -> Result<(), Reason> {
        self.grow(self.spill_backed, SPILL, end)
    }

    /// Requests memory for the first `end` bytes from position `first` on.
    fn grow(&self, backed: &Growth, first: u64, end: usize) -> Result<(), Reason> {
        let (from, to) = (backed.get(), end.next_multiple_of(4096));
        let refused = |reason| {
            process::count(Counter::RingsNotGrown, 1);
            Err(reason)
        };
        if !budget::charge(to - from, first == 0 && from == 0 && to <= FIRST_PAGE) {
            return refused(Reason::MemoryBudget);
        }
        let (start, _) = self.ring.run(first + from as u64, 0);
        if shunt_sys::mapping::back(start, to - from).is_err() {
            budget::release(to - from);
            return refused(Reason::NoMemory);
        }
        backed.0.set(to);
        note_growth(to);
        Ok(())
    }
}

/// The place of an endpoint on a link.
#[derive(Clone, Copy)]
pub(crate) struct Attachment {
    /// The link.
    pub(crate) link: &'static Link,
    /// The index of the connection within the link.
    pub(crate) conn: usize,
    /// The connection's bit in the ready bits of a waiter.
    bit: u64,
    outgoing: Lane,
    incoming: Lane,
    /// The waiters of the peer.
    waiters: &'static [WaiterLine; WAITERS],
}

/// A lane of the link. It is looked up once, because every call needs it.
#[derive(Clone, Copy)]
struct Lane {
    header: &'static LaneHeader,
    ring: MappedRing,
}

/// Keeps a link mapped and its identity unchanged for a thread that uses it or sleeps on it. The
/// endpoint may detach meanwhile.
pub(crate) struct Pin(Attachment);

impl std::ops::Deref for Pin {
    type Target = Attachment;

    fn deref(&self) -> &Attachment {
        &self.0
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.link.used.fetch_sub(1, AcqRel);
        if self.0.link.is_idle_for_good() {
            RETIRE.call(self.0.link);
        }
    }
}

impl Pin {
    /// Returns the attachment without a destructor, for a sleep. Its stack frames may be abandoned
    /// or unwound, and then the journal ends the pin.
    pub(crate) fn by_hand(self) -> Attachment {
        let at = self.0;
        std::mem::forget(self);
        at
    }
}

impl Attachment {
    /// Returns the place `conn` on the link. It is valid as long as the link keeps its identity.
    pub(crate) fn new(link: &'static Link, conn: usize) -> Attachment {
        let lane = |sender| Lane { header: link.view.lane(conn, sender), ring: link.view.ring(conn, sender) };
        let waiters = link.view.waiters(link.side.other());
        Attachment {
            link,
            conn,
            bit: 1 << conn,
            outgoing: lane(link.side),
            incoming: lane(link.side.other()),
            waiters,
        }
    }

    /// Pins the attachment for use without a lock. The caller holds the lock of a direction of the
    /// endpoint, or the control lock.
    pub(crate) fn pin(self) -> Pin {
        self.link.used.fetch_add(1, AcqRel);
        Pin(self)
    }

    /// Ends the pin that [`Pin::by_hand`] left.
    pub(crate) fn unpin(self) {
        drop(Pin(self));
    }

    /// Returns the lane on which this end sends.
    #[inline]
    pub(crate) fn outgoing(&self) -> (&'static LaneHeader, MappedRing) {
        (self.outgoing.header, self.outgoing.ring)
    }

    /// Returns the lane from which this end receives.
    #[inline]
    pub(crate) fn incoming(&self) -> (&'static LaneHeader, MappedRing) {
        (self.incoming.header, self.incoming.ring)
    }

    /// Returns the ring of the receiving lane by reference, because a copy would take registers.
    #[inline(always)]
    pub(crate) fn incoming_ring(&self) -> &MappedRing {
        &self.incoming.ring
    }

    /// Notifies the peer's waiter of bytes. Called after they were published.
    #[inline(always)]
    pub(crate) fn announce_bytes(&self) {
        if let Some(sleeper) = self.mark_bytes() {
            self.ring(sleeper);
        }
    }

    /// Sets the ready bit of the peer's waiter. Returns the waiter if it sleeps; the caller must
    /// then [ring](Self::ring) it.
    #[inline(always)]
    pub(crate) fn mark_bytes(&self) -> Option<&'static WaiterLine> {
        let lane = self.outgoing().0;
        let slot = lane.rx_waiter()?;
        let stamp = || lane.stamp(Stamp { at: order::now(), behind: order::last_by_tcp() });
        let waiter = &self.waiters[slot];
        waiter.notify_after(self.bit, stamp).then_some(waiter)
    }

    /// Rings the doorbell of a waiter that [`mark_bytes`](Self::mark_bytes) returned.
    #[cold]
    pub(crate) fn ring(&self, sleeper: &'static WaiterLine) {
        let before = std::ptr::from_ref(sleeper).addr() - self.waiters.as_ptr().addr();
        self.link.ring(before / size_of::<WaiterLine>());
    }

    /// Notifies this end's own waiter for space, as the peer does after a read. Called after the
    /// lane has spilled.
    pub(crate) fn announce_own_space(&self) {
        if let Some(slot) = self.outgoing().0.take_space_wanted()
            && self.link.view().waiter(self.link.side, slot).notify(self.conn)
        {
            Slot(slot).ring();
        }
    }

    /// Returns whether the peer has mapped the spills.
    pub(crate) fn can_spill(&self) -> bool {
        self.link.view().maps_spills(self.link.side.other())
    }

    /// Returns whether the waiter that this end notifies of bytes is asleep.
    pub(crate) fn receiver_sleeps(&self) -> bool {
        self.outgoing().0.rx_waiter().is_some_and(|slot| self.waiters[slot].is_sleeping())
    }

    /// Notifies the sender at the other end if it waits for space. Called after a read.
    #[inline]
    pub(crate) fn announce_space(&self) {
        if let Some(slot) = self.incoming().0.take_space_wanted()
            && self.waiters[slot].notify(self.conn)
        {
            self.link.ring(slot);
        }
    }
}
