//! Links and peers as this process holds them.
//!
//! A link is mapped when the broker announces it and unmapped when its peer has gone and no endpoint uses it any
//! more. The structures themselves are kept and used again, so that a reference to one is always valid, and a process
//! that meets a million others in its life needs no more memory than for those it knows at a time.

use std::cell::{Cell, UnsafeCell};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

use shunt_abi::geometry::{CONNS, Geometry, Side, WAITERS};
use shunt_abi::page::Counter;
use shunt_abi::reason::Reason;
use shunt_ring::bytes::{MappedRing, Ring, SPILL};
use shunt_ring::lane::Stamp;
use shunt_ring::link::LinkView;
use shunt_ring::user::Fault;
use shunt_ring::{LaneHeader, Sink, Source, WaiterLine};
use shunt_sys::mapping::Mapping;

use crate::base::above::Above;
use crate::base::lock::Lock;
use crate::base::names::EndpointRef;
use crate::base::private::PrivateFd;
use crate::base::waiter::Slot;
use crate::base::{budget, order, process};
use crate::socket::endpoint::Seen;

/// Another process, or this one, at the far side of links.
pub(crate) struct Peer {
    doorbells: [AtomicI32; WAITERS],
    /// There was no descriptor for one of its doorbells.
    mute: AtomicBool,
}

/// Every peer that was ever made: who is known to no broker any more may still be rung.
static PEERS: Lock<Vec<&'static Peer>> = Lock::new(Vec::new());

/// A private descriptor has moved to another number; it may be a doorbell.
pub(crate) fn renumber(old: i32, new: i32) {
    PEERS.lock().iter().for_each(|peer| peer.renumber(old, new));
}

/// Takes the lock of the list of peers over a fork: see `crate::fork`.
pub(crate) fn hold_lock() {
    std::mem::forget(PEERS.lock());
}

/// # Safety
/// After [`hold_lock`], on the same thread, or in the child that it has made.
pub(crate) unsafe fn release_lock() {
    // SAFETY: the caller's promise.
    unsafe { PEERS.release() };
}

/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn reset_lock() {
    // SAFETY: the caller's promise.
    unsafe { PEERS.reset() };
}

impl Peer {
    /// A new one, for ever.
    pub(crate) fn make() -> &'static Peer {
        let doorbells = [const { AtomicI32::new(-1) }; WAITERS];
        let peer = Box::leak(Box::new(Peer { doorbells, mute: AtomicBool::new(false) }));
        PEERS.lock().push(peer);
        peer
    }

    /// Makes the structure another process's. Its doorbells have been forgotten.
    pub(crate) fn reuse(&self) {
        self.mute.store(false, Relaxed);
    }

    /// This process has no descriptor left for a doorbell of the peer's: what they share would be slow.
    pub(crate) fn set_mute(&self) {
        self.mute.store(true, Relaxed);
    }

    /// See [`set_mute`](Self::set_mute).
    pub(crate) fn is_mute(&self) -> bool {
        self.mute.load(Relaxed)
    }

    /// Keeps the doorbell of the peer's waiter `slot`; the one it replaces is closed.
    pub(crate) fn set_doorbell(&self, slot: usize, doorbell: PrivateFd) {
        let old = self.doorbells[slot].swap(doorbell.into_raw(), SeqCst);
        PrivateFd::close_raw(old);
    }

    /// The slots whose doorbells are held.
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

/// Unmaps a link that nobody will use again.
pub(crate) static RETIRE: Above<&'static Link> = Above::new();

/// One side of one link.
pub(crate) struct Link {
    identity: UnsafeCell<Identity>,
    mapping: Lock<Option<Mapping>>,
    conns: [AtomicU64; CONNS],
    /// Bytes of the rings that this process has sent on with memory behind them, where no
    /// connection has them now, and those of their spills.
    kept: [Kept; CONNS],
    used: AtomicU32,
    gone: AtomicBool,
    /// See [`open`](Self::open).
    is_open: AtomicBool,
    /// See [`set_orphan`](Self::set_orphan).
    orphan: AtomicBool,
}

/// What a link is, from when it is announced until nobody uses it any more.
pub(crate) struct Identity {
    /// The broker's name for it.
    pub(crate) id: u64,
    /// Which side this process is.
    pub(crate) side: Side,
    /// Who is at the other.
    pub(crate) peer: &'static Peer,
    /// The broker that made it, counted by its hellos; another broker's names mean nothing to it.
    pub(crate) epoch: u32,
    view: LinkView,
}

// SAFETY: the identity is written only in `new` and `reuse`, when nobody else uses the link.
unsafe impl Sync for Link {}

impl Deref for Link {
    type Target = Identity;

    #[inline]
    fn deref(&self) -> &Identity {
        // SAFETY: whoever reads it uses the link, or holds the control lock: see `reuse`.
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
        // Where the address space is limited, there may be no room for them.
        let has_spills = mapping.len() >= geometry.link_bytes();
        // SAFETY: the mapping has `geometry.link_bytes()` bytes, or those before the spills, and the
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
            kept: [const { Kept::new() }; CONNS],
            used: AtomicU32::new(0),
            gone: AtomicBool::new(false),
            is_open: AtomicBool::new(false),
            orphan: AtomicBool::new(false),
        }
    }

    /// The broker has paired a connection on it, so the memory is sealed: it may be touched from
    /// now on. Under the control lock.
    pub(crate) fn open(&self) {
        if !self.is_open() {
            self.note_sealed();
            if self.view.has_spills() {
                self.view.set_maps_spills(self.side);
            }
            self.peer.known_slots().for_each(|slot| self.view.set_known(self.side, slot));
        }
    }

    /// The memory can be punched no more: to touch it or to unmap it waits for no other process.
    /// Under the control lock.
    pub(crate) fn note_sealed(&self) {
        if let Some(mapping) = &*self.mapping.lock() {
            mapping.set_stays(false);
            // Without it a child would end at its first touch. No child has been made since, as the
            // control lock is held.
            let _ = mapping.leave_to_children();
        }
        self.is_open.store(true, Release);
    }

    /// Returns whether the memory may be touched. Before, the peer could punch holes into it, and
    /// so keep whoever touches, copies or unmaps it waiting (L5). One that is never sealed stays
    /// mapped.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Acquire)
    }

    /// Ends both lanes of a connection that does not come about.
    pub(crate) fn close_lanes(&self, conn: usize) {
        for side in [Side::A, Side::B] {
            self.view().lane(conn, side).close();
        }
    }

    /// Makes the structure another link.
    ///
    /// # Safety
    /// The caller holds the control lock, and the link has been retired: no endpoint, sleeper, epoll instance or list
    /// has it.
    pub(crate) unsafe fn reuse(&self, identity: Identity, mapping: Mapping) {
        // SAFETY: the caller's promise. Whoever looks at a retired link reads only `gone` and `used` before it has the
        // control lock (`control::retire`).
        unsafe { *self.identity.get() = identity };
        keep_unsealed(&mapping);
        *self.mapping.lock() = Some(mapping);
        self.gone.store(false, Release);
        self.is_open.store(false, Release);
        self.orphan.store(false, Release);
    }

    /// The views of the shared memory.
    #[inline]
    pub(crate) fn view(&self) -> &LinkView {
        &self.view
    }

    /// The endpoint that uses `conn`.
    #[inline]
    pub(crate) fn endpoint(&self, conn: usize) -> Option<EndpointRef> {
        self.conns[conn].load(Acquire).checked_sub(1).map(EndpointRef::unpack)
    }

    /// Gives `conn` to an endpoint; `false` if it is taken, which an honest broker never causes.
    pub(crate) fn occupy(&self, conn: usize, endpoint: EndpointRef) -> bool {
        debug_assert!(self.is_open());
        let taken = self.conns[conn].compare_exchange(0, endpoint.pack() + 1, AcqRel, Relaxed).is_ok();
        if taken {
            self.used.fetch_add(1, AcqRel);
        }
        taken
    }

    /// Takes `conn` back.
    pub(crate) fn vacate(&self, conn: usize) {
        if self.conns[conn].swap(0, AcqRel) != 0 && self.used.fetch_sub(1, AcqRel) == 1 {
            EMPTY_AT.store(process::now(), Relaxed);
        }
    }

    /// The peer has ended: no new connection will use this link.
    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Release);
    }

    /// The broker that made it has gone: nobody makes doorbells known to its peer any more.
    pub(crate) fn set_orphan(&self) {
        self.orphan.store(true, Release);
        self.set_gone();
    }

    /// Whether whoever has this waiter is never going to be rung for what comes by the link.
    pub(crate) fn is_deaf_to(&self, slot: Slot) -> bool {
        self.orphan.load(Acquire) && !self.view.is_known(self.side.other(), slot.0)
    }

    /// Whether it has, or the broker that made the link.
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

    /// Whether nothing will use the mapping again.
    pub(crate) fn is_idle_for_good(&self) -> bool {
        self.is_gone() && self.used.load(Acquire) == 0
    }

    /// Wakes a waiter of the peer's, that of `slot`.
    #[cold]
    fn ring(&self, slot: usize) {
        PrivateFd::lend(&self.peer.doorbells[slot], |fd| {
            process::count(Counter::DoorbellsRung, 1);
            let _ = shunt_sys::eventfd::ring(fd);
        });
    }
}

/// Memory that the peer may still punch is not unmapped, and no child has it: either would wait for
/// a punch.
fn keep_unsealed(mapping: &Mapping) {
    mapping.set_stays(true);
    let _ = mapping.keep_from_children();
}

/// A lane with little under way has so much memory, and keeps it.
pub(crate) const FIRST_PAGE: usize = 4096;
/// When a link was last left by its last connection; 0: the broker has had the time to say that it
/// is no more. See `crate::life::idle`.
pub(crate) static EMPTY_AT: AtomicU64 = AtomicU64::new(0);
/// When the first lane grew beyond that, or such lanes were last looked at: see `crate::life::idle`; 0: there are none.
pub(crate) static GROWN_AT: AtomicU64 = AtomicU64::new(0);

/// A ring to write to, of which each page gets its memory before it is touched. That is asked for once, since a lane with
/// little under way stays on its first page.
pub(crate) struct Backed<'a> {
    ring: MappedRing,
    /// Bytes of it, from the first, that are known to have memory.
    backed: &'a Growth,
    /// Bytes of the spill, from its first, that are known to have memory.
    spill_backed: &'a Growth,
}

/// Bytes of a ring, from its first, that are known to have memory. They are charged to the [budget]
/// until the link is unmapped: when an endpoint leaves the link, the link keeps the charge for the
/// next.
#[derive(Default)]
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

/// What the ring and the spill of a connection keep that no endpoint has.
#[derive(Debug)]
struct Kept {
    ring: AtomicUsize,
    spill: AtomicUsize,
}

impl Kept {
    const fn new() -> Kept {
        Kept { ring: AtomicUsize::new(0), spill: AtomicUsize::new(0) }
    }
}

impl Seen {
    /// Begins with a lane of a connection on a link: what its ring and its spill have is an
    /// endpoint's from now on.
    pub(crate) fn take_over(link: &Link, conn: usize) -> Seen {
        let Kept { ring, spill } = &link.kept[conn];
        let (backed, spill_backed) = (Growth::take_over(ring), Growth::take_over(spill));
        Seen { backed, spill_backed, ..Seen::default() }
    }

    /// The lane is no longer this endpoint's. Its memory stays charged: only the end of its link
    /// frees it.
    pub(crate) fn leave_memory(&self, at: &Attachment) {
        let Kept { ring, spill } = &at.link.kept[at.conn];
        self.backed.leave(ring);
        self.spill_backed.leave(spill);
    }

    /// Whether the lane has more memory than its first page.
    pub(crate) fn has_grown(&self) -> bool {
        self.backed.get() > FIRST_PAGE || self.spill_backed.get() > 0
    }
}

impl Drop for Growth {
    fn drop(&mut self) {
        budget::release(self.0.replace(0));
    }
}

/// A ring or a spill has so much memory now: if that is more than its first page, `crate::life::idle` looks at
/// it later.
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
    /// Whether this part of it is known to have memory.
    #[inline]
    pub(crate) fn is_backed(&self, at: u64, count: usize) -> bool {
        self.end_of(at, count) <= self.backed.get()
    }

    /// Positions count from the beginning of the ring, and go round it.
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

    fn fill(&self, at: u64, count: usize, source: &mut Source<'_>) -> Result<(), Fault> {
        self.ring.fill(at, count, source)
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

    /// Has the first `end` bytes from position `first` on get memory.
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

/// Where an endpoint is on a link.
#[derive(Clone, Copy)]
pub(crate) struct Attachment {
    /// The link.
    pub(crate) link: &'static Link,
    /// The connection within it.
    pub(crate) conn: usize,
    /// Its bit in the marks of a waiter.
    bit: u64,
    outgoing: Lane,
    incoming: Lane,
    /// Whom the peer waits by.
    waiters: &'static [WaiterLine; WAITERS],
}

/// A lane of the link, found once: every call needs it.
#[derive(Clone, Copy)]
struct Lane {
    header: &'static LaneHeader,
    ring: MappedRing,
}

/// Keeps a link mapped, and what it is, for whoever is about to use it or sleeps on it: the endpoint may leave
/// meanwhile.
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
    /// Without a destructor, for a sleep: its frames may be left without their knowledge, or be unwound, and then the
    /// journal ends the pin.
    pub(crate) fn by_hand(self) -> Attachment {
        let at = self.0;
        std::mem::forget(self);
        at
    }
}

impl Attachment {
    /// Where `conn` is, for as long as the link has its identity.
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

    /// For use without a lock. Called under the lock of the direction that says where the endpoint is, or under the
    /// control lock.
    pub(crate) fn pin(self) -> Pin {
        self.link.used.fetch_add(1, AcqRel);
        Pin(self)
    }

    /// Ends what [`Pin::by_hand`] began.
    pub(crate) fn unpin(self) {
        drop(Pin(self));
    }

    /// The lane this end sends on.
    #[inline]
    pub(crate) fn outgoing(&self) -> (&'static LaneHeader, MappedRing) {
        (self.outgoing.header, self.outgoing.ring)
    }

    /// The lane this end receives from.
    #[inline]
    pub(crate) fn incoming(&self) -> (&'static LaneHeader, MappedRing) {
        (self.incoming.header, self.incoming.ring)
    }

    /// Its ring, where that is read anew at each use: a copy takes registers.
    #[inline(always)]
    pub(crate) fn incoming_ring(&self) -> &MappedRing {
        &self.incoming.ring
    }

    /// Wakes whoever waits for bytes at the other end. After publishing.
    #[inline(always)]
    pub(crate) fn announce_bytes(&self) {
        if let Some(sleeper) = self.mark_bytes() {
            self.ring(sleeper);
        }
    }

    /// The same, but if somebody sleeps there only says by which waiter, which is to be [rung](Self::ring) then.
    #[inline(always)]
    pub(crate) fn mark_bytes(&self) -> Option<&'static WaiterLine> {
        let lane = self.outgoing().0;
        let slot = lane.rx_waiter()?;
        let stamp = || lane.stamp(Stamp { at: order::now(), behind: order::last_by_tcp() });
        let waiter = &self.waiters[slot];
        waiter.notify_after(self.bit, stamp).then_some(waiter)
    }

    /// Wakes that.
    #[cold]
    pub(crate) fn ring(&self, sleeper: &'static WaiterLine) {
        let before = std::ptr::from_ref(sleeper).addr() - self.waiters.as_ptr().addr();
        self.link.ring(before / size_of::<WaiterLine>());
    }

    /// Wakes the waiter of this end that waits for space, as the peer does. After the lane has spilled.
    pub(crate) fn announce_own_space(&self) {
        if let Some(slot) = self.outgoing().0.take_space_wanted()
            && self.link.view().waiter(self.link.side, slot).notify(self.conn)
        {
            Slot(slot).ring();
        }
    }

    /// Whether the peer has mapped the spills.
    pub(crate) fn can_spill(&self) -> bool {
        self.link.view().maps_spills(self.link.side.other())
    }

    /// Whether the waiter that is woken for our bytes sleeps all the same.
    pub(crate) fn receiver_sleeps(&self) -> bool {
        self.outgoing().0.rx_waiter().is_some_and(|slot| self.waiters[slot].is_sleeping())
    }

    /// Wakes the sender at the other end if it waits for space. After reading.
    #[inline]
    pub(crate) fn announce_space(&self) {
        if let Some(slot) = self.incoming().0.take_space_wanted()
            && self.waiters[slot].notify(self.conn)
        {
            self.link.ring(slot);
        }
    }
}
