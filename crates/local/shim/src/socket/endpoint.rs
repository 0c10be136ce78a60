//! Endpoints: the connected TCP sockets of this process.
//!
//! The slab of endpoints is never freed. A hook may still use an endpoint while another thread
//! closes its descriptor. Such a hook reads stale values at worst, never freed memory. Generations
//! distinguish a reused slot from the connection that had it before.
//!
//! [`Phase`] has the states of an endpoint, and their transitions. The other modules have its parts,
//! each with its own reset.

mod calls;
mod descriptors;
mod ends;
mod offer_clock;
mod options;
mod pending_error;
mod phase;
mod request_clock;
mod statistics;

use std::cell::Cell;
use std::mem::offset_of;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering::*};

use shunt_abi::option::SocketOption;
use shunt_abi::page::{self, Counter};
use shunt_abi::reason::{Reason, Transport};
use shunt_ring::LaneHeader;
use shunt_sys::tcp::{LaneBytes, Opener};
use shunt_transport::{Rx, Tx};

use crate::base::lock::Lock;
use crate::base::names::{EndpointRef, EpollRef};
use crate::base::pace::{Pace, Unanswered};
use crate::base::private::PrivateFd;
use crate::base::rank;
use crate::base::table::{self, Entry};
use crate::base::upcall::Upcall;
use crate::base::waiter::Slot;
use crate::base::{kernel, order, process};
use crate::socket::keepalive::Keepalive;
use crate::socket::links::{Attachment, Growth, Peer};
use crate::socket::low_water::LowWater;
use crate::socket::sharing::{self, Holders, Shareable};
use crate::socket::stall::Backlog;

use calls::Calls;
use descriptors::Descriptors;
use ends::{Ends, Shut};
pub(crate) use offer_clock::NEVER;
use offer_clock::OfferClock;
use options::Options;
use pending_error::PendingError;
pub(crate) use phase::{Event, Phase};
use phase::{HAS_ERROR, HAS_LOW_WATER, Word};
use request_clock::RequestClock;
use statistics::Statistics;

const CHUNK: usize = 256;
const CHUNKS: usize = 4096;
/// The largest number of endpoints in the process.
pub(crate) const MOST: usize = CHUNK * CHUNKS;

/// The sending direction and the state that its lock guards.
#[derive(Default)]
pub(crate) struct TxSide {
    pub(crate) tx: Tx,
    pub(crate) at: Option<Attachment>,
    pub(crate) seen: Seen,
    /// Set when TCP has ended while bytes of this end are unread at the peer, and the broker has
    /// been given time to report why.
    pub(crate) awaited_death: bool,
    /// Set when, in that situation, another process still held the peer's socket for some time.
    pub(crate) looked_for_holder: bool,
}

/// What this end has observed of the current lane of a direction. A new lane starts with an empty
/// record.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The waits for room in the lane.
    pub(crate) backlog: Backlog,
    /// When bytes of the lane were first found unread, and the receiver's progress at that time:
    /// the bytes it had read of the lane, and the TCP bytes that it still had to read before them.
    pub(crate) unread_since: Option<(u64, [u64; 2])>,
    /// Bytes at the start of the ring that have memory.
    pub(crate) backed: Growth,
    /// Bytes at the start of the spill that have memory.
    pub(crate) spill_backed: Growth,
    /// Set while bytes have been sent that [`crate::life::unread_timeout`] has yet to check.
    pub(crate) is_listed: Cell<bool>,
    /// The bytes that both lanes had carried at the last check by [`crate::life::idle`].
    pub(crate) moved: Option<u64>,
    /// Sends of which the lane has taken at least one byte.
    pub(crate) sends: u32,
}

/// The receiving direction and the state that its lock guards.
#[derive(Default)]
pub(crate) struct RxSide {
    pub(crate) rx: Rx,
    pub(crate) at: Option<Attachment>,
    /// Whether the page that `shunt status` reads shows the lane as this direction's transport.
    told_on_lane: bool,
    pub(crate) pace: Pace,
}

/// One connected TCP socket.
///
/// The words that calls on the fast path read are in the first two cache lines, and in `tx` and
/// `rx`.
#[derive(Default)]
#[repr(C, align(128))]
pub(crate) struct Endpoint {
    /// The endpoint's packed table entry, and its phase. It must be the first field, because
    /// [`at_once`] reads it through a pointer to the endpoint.
    word: Word,
    index: AtomicU32,
    generation: AtomicU32,
    calls: Calls,
    pending_error: PendingError,
    /// The waiter that the peer notifies of bytes: its slot + 1, or 0 for none. An epoll instance
    /// owns this field as long as the socket is registered; a thread owns it while it sleeps.
    owner: AtomicU32,
    /// Why the endpoint must never be offered, as a reason code.
    barred: AtomicU32,
    /// Set when the last bytes were sent by a lane: see [`count_sent`](Self::count_sent).
    sent_by_lane: AtomicBool,
    /// Set when the current fork has been prepared for this endpoint.
    is_prepared: AtomicBool,
    /// The address of the registration in the epoll instance that gets this endpoint's ready bits.
    /// The registration may be gone.
    pub(crate) record: AtomicUsize,
    statistics: Statistics,
    socket: Descriptors,
    pub(crate) options: Options,
    pub(crate) offer: OfferClock,
    ends: Ends,
    /// Corrections to the kernel's byte counts, other than the bytes of this process's lanes.
    pub(crate) beside_kernel: Lock<LaneBytes, { rank::UNCOUNTED }>,
    /// Keepalive probes while the endpoint is attached.
    pub(crate) keepalive: Keepalive,
    /// The processes that hold the socket.
    pub(crate) holders: Holders,
    pub(crate) unanswered: Unanswered,
    pub(crate) tx: Lock<TxSide, { rank::SENDING }>,
    pub(crate) rx: Lock<RxSide, { rank::RECEIVING }>,
    /// The epoll instances with which the endpoint is registered.
    pub(crate) epolls: Lock<Vec<EpollRef>, { rank::ENDPOINT_EPOLLS }>,
    request_clock: RequestClock,
}

const _: () = assert!(offset_of!(Endpoint, word) == 0);
const _: () = assert!(offset_of!(Endpoint, record) < 64 && offset_of!(Endpoint, statistics) < 64);
const _: () = assert!(offset_of!(Endpoint, options) + offset_of!(Options, low_water) < 128);

impl EndpointRef {
    /// Returns the endpoint, if its slot has not been reused.
    #[inline]
    pub(crate) fn resolve(self) -> Option<&'static Endpoint> {
        let endpoint = at(self.index())?;
        (endpoint.generation.load(Acquire) == self.generation()).then_some(endpoint)
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

/// The first endpoint of each chunk.
static SLAB: [AtomicPtr<Endpoint>; CHUNKS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS];
/// Ends an endpoint that only calls held, after the last of them has returned.
pub(crate) static END_HELD: Upcall<EndpointRef> = Upcall::new();
/// The number of attached endpoints.
static ATTACHED: AtomicU32 = AtomicU32::new(0);
static FREE: Lock<Free, { rank::ENDPOINT_LIST }> = Lock::new(Free { list: Vec::new(), made: 0 });

struct Free {
    list: Vec<u32>,
    made: u32,
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
    endpoint.index.store(index, Relaxed);
    endpoint.socket.begin(fd);
    endpoint.options.set_nonblocking(nonblocking);
    endpoint.offer.restart_with(offer_after);
    endpoint.holders.begin(sharing::strays());
    let name = EndpointRef::new(index, endpoint.generation.load(Acquire));
    endpoint.word.begin(Entry::Endpoint(name).pack());
    Some(name)
}

/// Returns whether the endpoint is behind stdin, stdout or stderr. libc reads and writes these
/// descriptors by internal calls that the shim cannot see, so the endpoint stays on TCP meanwhile.
pub(crate) fn is_standard_stream(endpoint: &Endpoint) -> bool {
    let entry = Entry::Endpoint(endpoint.reference());
    STANDARD_STREAMS.into_iter().any(|fd| table::look_up(fd) == entry)
}

pub(crate) const STANDARD_STREAMS: std::ops::RangeInclusive<RawFd> = 0..=2;

/// Returns whether any endpoint is attached.
pub(crate) fn any_is_attached() -> bool {
    ATTACHED.load(Acquire) > 0
}

/// Returns every endpoint in use.
pub(crate) fn all() -> impl Iterator<Item = &'static Endpoint> {
    let made = FREE.lock().made;
    (0..made).filter_map(at).filter(|endpoint| endpoint.is_in_use())
}

/// Takes the locks of every endpoint and of the free list before a fork, so that the child gets no
/// half-done change. Returns whether every attached endpoint has both lanes closed. That fails for
/// an endpoint that was attached or made since the fork was prepared.
pub(crate) fn hold_locks() -> bool {
    let mut ready = true;
    let mut held = 0;
    loop {
        // Another thread may wait for this lock while it holds an endpoint's lock, so this lock is
        // not held while the endpoints' locks are taken.
        FREE.hold();
        // SAFETY: the lock was taken above. Other threads only read the number without it.
        let made = unsafe { FREE.value().made };
        if made == held {
            return ready;
        }
        // SAFETY: the lock was taken above.
        unsafe { FREE.release() };
        for endpoint in (held..made).filter_map(at) {
            let tx = endpoint.tx.lock();
            ready &= tx.at.is_none_or(|at| at.outgoing().0.is_closed() && at.incoming().0.is_closed());
            std::mem::forget(tx);
            endpoint.rx.hold();
            endpoint.epolls.hold();
            endpoint.beside_kernel.hold();
        }
        held = made;
    }
}

/// Releases the locks after a fork, in the parent and in the child.
///
/// # Safety
/// The caller has called [`hold_locks`] on the same thread.
pub(crate) unsafe fn release_locks() {
    // SAFETY: the caller's promise.
    unsafe {
        for endpoint in (0..FREE.value().made).filter_map(at) {
            endpoint.beside_kernel.release();
            endpoint.epolls.release();
            endpoint.rx.release();
            endpoint.tx.release();
        }
        FREE.release();
    }
}

/// Records the child as a holder of the sockets that were made since the fork was prepared. The
/// caller holds the locks.
pub(crate) fn expect_child_of_new() {
    // SAFETY: the caller holds this lock.
    let made = unsafe { FREE.value().made };
    let new = |endpoint: &&Endpoint| endpoint.is_in_use() && !endpoint.is_prepared.load(Relaxed);
    (0..made).filter_map(at).filter(new).for_each(Endpoint::expect_child);
}

/// Frees the locks of every endpoint in a child of a fork that the shim did not see.
///
/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn reset_locks() {
    // SAFETY: the caller's promise.
    unsafe { FREE.reset() };
    for endpoint in all() {
        // SAFETY: the caller's promise.
        unsafe {
            endpoint.tx.reset();
            endpoint.rx.reset();
            endpoint.epolls.reset();
            endpoint.beside_kernel.reset();
        }
    }
}

/// Resets the counts of threads in calls, because the child has none of the parent's other threads.
pub(crate) fn after_fork_in_child() {
    for endpoint in all() {
        endpoint.calls.reset_in_child();
        endpoint.owner.store(0, Relaxed);
        endpoint.offer.forget_message();
    }
}

/// Updates the endpoints after a private descriptor that holds a socket has moved to another
/// number.
pub(crate) fn renumber(old: RawFd, new: RawFd) {
    for endpoint in all() {
        endpoint.socket.renumber(old, new);
    }
}

impl Shareable for Endpoint {
    fn holders(&self) -> &Holders {
        &self.holders
    }

    fn may_be_held_by(&self, pid: u32) -> bool {
        sharing::may_hold(pid, self.fd())
    }

    /// Returns `None`: a program may pass a socket on to any process. A process with the shim
    /// reports itself which sockets it has.
    fn is_held_beyond(&self, _: u32) -> Option<bool> {
        None
    }
}

/// Returns whether a bar for this reason means that unlisted processes may hold the socket, or that
/// it may have an unknown descriptor.
fn is_of_unlisted(reason: u32) -> bool {
    use Reason::*;
    [Fork, Shared, Exec, PassedOn, OwnTable, Duplicated].iter().any(|one| *one as u32 == reason)
}

impl Endpoint {
    /// Returns the index of the slot. Another endpoint has it once this one is free.
    #[inline]
    pub(crate) fn index(&self) -> u32 {
        self.index.load(Relaxed)
    }

    /// Returns the endpoint's handle.
    pub(crate) fn reference(&self) -> EndpointRef {
        EndpointRef::new(self.index.load(Relaxed), self.generation.load(Acquire))
    }

    #[inline(always)]
    pub(crate) fn phase(&self) -> Phase {
        self.word.phase(SeqCst)
    }

    /// Changes the phase by an event. Returns `false` if the event does nothing in this phase,
    /// perhaps because another thread was faster.
    pub(crate) fn change(&self, event: Event) -> bool {
        let Some((before, after)) = self.word.change(event) else { return false };
        match (before == Phase::Attached, after == Phase::Attached) {
            (false, true) => _ = ATTACHED.fetch_add(1, AcqRel),
            (true, false) => _ = ATTACHED.fetch_sub(1, AcqRel),
            _ => {}
        }
        true
    }

    /// Applies a change to the low-water state, and updates the flag in the word.
    pub(crate) fn change_low_water(&self, change: impl FnOnce(&LowWater)) {
        let low_water = &self.options.low_water;
        change(low_water);
        if low_water.is_none() {
            self.word.clear(HAS_LOW_WATER);
        }
        // Another thread may have set it meanwhile.
        if !low_water.is_none() {
            self.word.set(HAS_LOW_WATER);
        }
    }

    /// Lets [`at_once`] find the endpoint by this descriptor.
    pub(crate) fn remember(&self, fd: RawFd) {
        table::remember(fd, std::ptr::from_ref(self).cast());
    }

    #[inline]
    pub(crate) fn is_attached(&self) -> bool {
        self.word.is_attached()
    }

    /// Enters a kernel receive or poll. Returns `false`, without having entered, if calls must take
    /// the lock instead.
    ///
    /// The other half of the handshake is [`is_quiet_for_receive`](Self::is_quiet_for_receive).
    /// There the phase is set before the count is read. Here the count is raised before the phase
    /// is read.
    #[inline]
    pub(crate) fn enter_receive(&self) -> bool {
        self.calls.enter_receive();
        if self.is_attached() {
            self.leave_receive();
            return false;
        }
        true
    }

    /// Enters a kernel receive while the caller holds the receive lock.
    #[inline]
    pub(crate) fn enter_receive_locked(&self) {
        self.calls.enter_receive();
    }

    #[inline]
    pub(crate) fn leave_receive(&self) {
        self.calls.leave_receive();
        self.end_if_held_by_nobody();
    }

    /// Enters a kernel send, as [`enter_receive`](Self::enter_receive) does for receiving.
    #[inline]
    pub(crate) fn enter_send(&self) -> bool {
        self.calls.enter_send();
        if self.is_attached() {
            self.leave_send();
            return false;
        }
        true
    }

    #[inline]
    pub(crate) fn enter_send_locked(&self) {
        self.calls.enter_send();
    }

    #[inline]
    pub(crate) fn leave_send(&self) {
        self.calls.leave_send();
        self.end_if_held_by_nobody();
    }

    /// Begins a call that waits. As in the kernel, the call holds the socket from here on, even if
    /// another thread closes the descriptor.
    pub(crate) fn begin_call(&self) {
        self.calls.begin_wait();
    }

    /// Ends a call that [`begin_call`](Self::begin_call) began.
    pub(crate) fn end_call(&self) {
        self.calls.end_wait();
        self.end_if_held_by_nobody();
    }

    /// Returns the number of calls that wait, in the shim or in the kernel.
    pub(crate) fn calls_in_progress(&self) -> u32 {
        self.calls.in_progress()
    }

    /// Lets the calls in progress go on by a private descriptor, because code has been loaded whose
    /// closes no hook sees. The program may then close its own descriptor without ending them.
    pub(crate) fn keep_for_calls(&self) {
        if self.calls_in_progress() == 0 || self.is_held() || self.kept().is_some() {
            return;
        }
        // Such code may have closed the socket's fd before, and another socket may have it now.
        if table::look_up(self.fd()) != Entry::Endpoint(self.reference()) {
            return;
        }
        if let Some(kept) = PrivateFd::duplicate(self.fd()) {
            self.socket.set_kept(kept.into_raw());
            self.end_if_held_by_nobody();
        }
    }

    /// Returns the descriptor that [`keep_for_calls`](Self::keep_for_calls) made.
    pub(crate) fn kept(&self) -> Option<RawFd> {
        self.socket.kept()
    }

    /// Takes that descriptor from the endpoint. Returns -1 if there is none.
    pub(crate) fn take_kept(&self) -> RawFd {
        self.socket.take_kept()
    }

    /// Notes that the program has closed its last descriptor of the socket, and that calls hold it
    /// by `fd`.
    pub(crate) fn hold(&self, fd: RawFd) {
        self.socket.hold(fd);
    }

    /// Returns whether only calls in progress hold the socket.
    pub(crate) fn is_held(&self) -> bool {
        self.socket.is_held()
    }

    /// Returns whether a descriptor or a call holds the socket.
    pub(crate) fn is_in_use(&self) -> bool {
        self.socket.is_in_use()
    }

    /// Releases the socket after its last call. The thread that gets `true` must end the endpoint.
    /// Each call checks after it has left, and a close checks after [`hold`](Self::hold), so at
    /// least one of them sees the final state.
    pub(crate) fn let_go_of_held(&self) -> bool {
        self.socket.release_held()
    }

    #[inline]
    pub(crate) fn end_if_held_by_nobody(&self) {
        // `kept` is written before the calls are counted, and read after a call has ended. So one
        // of the two threads closes the descriptor.
        if self.kept().is_some() {
            self.close_kept_after_calls();
        }
        if self.is_held() && self.calls_in_progress() == 0 && self.let_go_of_held() {
            END_HELD.call(self.reference());
        }
    }

    #[cold]
    #[inline(never)]
    fn close_kept_after_calls(&self) {
        if self.calls_in_progress() == 0 {
            PrivateFd::close_raw(self.take_kept());
        }
    }

    /// Records a child that is about to be made as a holder of the socket.
    pub(crate) fn expect_child(&self) {
        self.is_prepared.store(true, Relaxed);
        if !sharing::expect_child(self) {
            self.bar(Reason::Shared);
        }
    }

    /// Notes that the fork which [`expect_child`](Self::expect_child) prepared is over.
    pub(crate) fn end_fork(&self) {
        if self.is_prepared.load(Relaxed) {
            self.is_prepared.store(false, Relaxed);
        }
    }

    /// Returns whether the endpoint is attached to a link with this peer.
    pub(crate) fn is_linked_with(&self, peer: &Peer) -> bool {
        self.rx.lock().at.is_some_and(|at| std::ptr::eq(at.link.peer, peer))
    }

    /// Returns whether no thread is inside a kernel receive or poll. If the endpoint is attached,
    /// the caller holds the receive lock.
    pub(crate) fn is_quiet_for_receive(&self) -> bool {
        self.calls.is_quiet_for_receive()
    }

    /// Returns whether no thread is inside a kernel send. If the endpoint is attached, the caller
    /// holds the send lock.
    #[inline]
    pub(crate) fn is_quiet_for_send(&self) -> bool {
        self.calls.is_quiet_for_send()
    }

    /// Makes `slot` the waiter that the peer notifies of bytes, unless another waiter is, and
    /// writes it to the lane. Returns whether `slot` has become the owner. The lock is needed
    /// because the lane may be another connection's once the endpoint has left it.
    pub(crate) fn wait_on(&self, side: &RxSide, slot: Slot) -> bool {
        let Some(at) = side.at else { return false };
        let owner = self.claim(slot);
        if owner.is_ok() || owner == Err(slot) {
            at.incoming().0.set_rx_waiter(Some(slot.0));
        }
        owner.is_ok()
    }

    /// Makes `slot`, the waiter of an epoll instance, the one that the peer notifies of bytes. It
    /// stays so until it is withdrawn, and checks its lanes later even if it does not sleep now. A
    /// ready bit left by an earlier connection is cleared first, because it would give this one a
    /// wrong place in the order of events.
    pub(crate) fn wait_on_in_a_set(&self, side: &RxSide, slot: Slot) -> bool {
        let Some(at) = side.at else { return false };
        let owner = self.claim(slot);
        if owner.is_ok() {
            at.link.view().waiter(at.link.side, slot.0).take_mark(at.conn);
        }
        if owner.is_ok() || owner == Err(slot) {
            at.incoming().0.set_lasting_rx_waiter(slot.0);
        }
        owner.is_ok()
    }

    /// Claims the ownership for `slot`. An error contains the owner.
    fn claim(&self, slot: Slot) -> Result<(), Slot> {
        let owner = self.owner.compare_exchange(0, slot.0 as u32 + 1, AcqRel, Acquire);
        owner.map(|_| ()).map_err(|word| Slot(word as usize - 1))
    }

    /// Gives up the ownership if `slot` has it.
    pub(crate) fn unclaim(&self, slot: Slot) {
        let _ = self.owner.compare_exchange(slot.0 as u32 + 1, 0, AcqRel, Relaxed);
    }

    /// Returns the waiter that the peer notifies of bytes.
    pub(crate) fn owner(&self) -> Option<Slot> {
        self.owner.load(Acquire).checked_sub(1).map(|slot| Slot(slot as usize))
    }

    /// Records which end called connect. Called before another thread can see the endpoint.
    pub(crate) fn set_opener(&self, opener: Opener) {
        self.socket.set_opener(opener);
    }

    /// Returns which end called connect.
    pub(crate) fn opener(&self) -> Opener {
        self.socket.opener()
    }

    /// Records whether this end's connect returned before the connection was established.
    pub(crate) fn set_begun(&self, begun: bool) {
        self.socket.set_begun_connect(begun);
    }

    /// Returns whether the connection may not be established yet, or was refused.
    pub(crate) fn was_begun(&self) -> bool {
        self.socket.has_begun_connect()
    }

    /// Returns a descriptor of the socket.
    #[inline]
    pub(crate) fn fd(&self) -> RawFd {
        self.socket.fd()
    }

    /// Makes the endpoint use another descriptor of the socket.
    pub(crate) fn set_fd(&self, fd: RawFd) {
        self.socket.set_fd(fd);
    }

    /// Counts another descriptor of the socket.
    pub(crate) fn add_name(&self) {
        self.socket.add();
    }

    /// Counts one descriptor of the socket less. Returns `true` if it was the last.
    pub(crate) fn drop_name(&self) -> bool {
        self.socket.remove()
    }

    /// Returns the bits that [`add_shut`](Self::add_shut) has recorded.
    pub(crate) fn shut(&self) -> u32 {
        self.ends.shut()
    }

    /// Returns whether the sending direction was shut down.
    pub(crate) fn has_shut_writing(&self) -> bool {
        self.ends.has_shut_writing()
    }

    /// Returns whether both directions were shut down. TCP then answers any data by a reset.
    pub(crate) fn has_shut_both(&self) -> bool {
        self.ends.has_shut_both()
    }

    /// Records a shutdown.
    pub(crate) fn add_shut(&self, reads: bool, writes: bool) -> Shut {
        self.ends.add_shut(reads, writes)
    }

    /// Returns whether any direction was shut down.
    pub(crate) fn is_shut(&self) -> bool {
        self.ends.shut() != 0
    }

    /// Records that the kernel has reported the end of the peer's stream, so that it need not be
    /// queried again.
    pub(crate) fn note_peer_finished(&self) {
        self.ends.note_peer_finished();
    }

    /// Records that a descriptor of the socket is being closed that an epoll instance has, while the
    /// socket has another.
    pub(crate) fn note_closed_in_epoll(&self) {
        self.socket.note_closed_in_epoll();
    }

    pub(crate) fn was_closed_in_epoll(&self) -> bool {
        self.socket.was_closed_in_epoll()
    }

    /// Records that the kernel has a FIN of the peer in whose place TCP would have sent a reset.
    pub(crate) fn note_fin_discounted(&self) {
        self.ends.note_fin_discounted();
    }

    pub(crate) fn is_fin_discounted(&self) -> bool {
        self.ends.is_fin_discounted()
    }

    /// Returns whether the kernel has reported the end of the peer's stream.
    pub(crate) fn has_peer_finished(&self) -> bool {
        self.ends.has_peer_finished()
    }

    /// Sets an error that the next call reports. If the kernel has an error now, this one replaces
    /// it.
    pub(crate) fn owe(&self, fd: i32, errno: i32) {
        self.pending_error.set(errno, kernel::has_error(fd));
        // The flag is set after the error, and cleared before the error is taken. So the flag is
        // set whenever there is an error.
        self.word.set(HAS_ERROR);
    }

    /// Returns whether an error is pending.
    #[inline]
    pub(crate) fn owes(&self) -> bool {
        self.pending_error.is_set()
    }

    /// Returns whether an error is pending that the kernel does not show.
    pub(crate) fn owes_alone(&self) -> bool {
        self.owes()
            && !self.pending_error.replaces_kernels()
            && !self.shared_lane().is_some_and(LaneHeader::is_reset_told)
    }

    /// Returns the pending error. Returns 0 if there is none, or if another process that shares the
    /// socket has reported it.
    pub(crate) fn still_owed(&self, fd: i32) -> i32 {
        let is_kernels = self.pending_error.replaces_kernels() && kernel::has_error(fd);
        if is_kernels || self.owes_alone() { self.pending_error.errno() } else { 0 }
    }

    /// Returns the lane in which the processes that share the socket note that they have reported
    /// its reset. Only the shim knows of this reset.
    fn shared_lane(&self) -> Option<&'static LaneHeader> {
        self.tx.lock().at.map(|at| at.outgoing().0)
    }

    /// Takes the pending error, to report it to the program.
    #[inline]
    pub(crate) fn take_owed(&self, fd: i32) -> Option<i32> {
        self.tell_owed(|| kernel::take_error(fd).is_some())
    }

    /// Takes the pending error for a caller that takes the kernel's error by `take_kernels`. That
    /// closure returns whether the kernel still had an error.
    pub(crate) fn tell_owed(&self, take_kernels: impl FnOnce() -> bool) -> Option<i32> {
        if !self.owes() {
            return None;
        }
        let stands_alone = self.owes_alone();
        self.word.clear(HAS_ERROR);
        let errno = self.pending_error.take();
        self.shared_lane().into_iter().for_each(LaneHeader::note_reset_told);
        errno.filter(|_| take_kernels() || stands_alone)
    }

    /// Bars the endpoint from shared memory for good.
    pub(crate) fn bar(&self, reason: Reason) {
        // This precedes the load of the phase: see `attach::adopt`. A reason that means unlisted
        // holders is kept, because the close of the socket needs it.
        let becomes = |before| (!is_of_unlisted(before)).then_some(reason as u32);
        let _ = self.barred.fetch_update(SeqCst, SeqCst, becomes);
    }

    /// Lets an endpoint whose other end was missing be offered again, at its next use. If its calls
    /// were not counted meanwhile, it has to wait for these.
    pub(crate) fn reopen(&self) {
        let (_tx, _rx) = (self.tx.lock(), self.rx.lock());
        let missing = Reason::PeerNotOffered as u32;
        if self.barred.compare_exchange(missing, 0, SeqCst, SeqCst).is_ok() {
            self.offer.set_awaits_calls(self.change(Event::Reopen));
            self.offer.restart_with(1);
        }
    }

    /// Returns whether the endpoint is barred because processes may hold its socket that are not
    /// among its [holders](Self::holders).
    pub(crate) fn has_unlisted_holders(&self) -> bool {
        is_of_unlisted(self.barred.load(SeqCst))
    }

    /// Records an option that shared memory does not emulate.
    pub(crate) fn blame(&self, option: SocketOption) {
        self.options.set_unsupported(option.pack());
        if let Some(entry) = self.entry() {
            entry.option.store(option.pack(), Relaxed);
        }
    }

    /// Returns the option that was recorded last, packed.
    pub(crate) fn blamed(&self) -> u64 {
        self.options.unsupported()
    }

    /// Counts the connection as used, once.
    pub(crate) fn count_use(&self) {
        self.statistics.count_use();
    }

    /// Returns whether a call has moved bytes by TCP, as far as this process knows.
    pub(crate) fn has_moved(&self) -> bool {
        self.statistics.has_moved()
    }

    pub(crate) fn note_moved(&self) {
        self.statistics.note_moved();
    }

    /// Counts the connection as attached, once.
    pub(crate) fn count_on_shm(&self) {
        self.statistics.count_attached();
    }

    /// Returns whether the endpoint was never offered, and the shim has no state of it beyond the
    /// kernel's.
    pub(crate) fn is_young(&self) -> bool {
        self.offer.offered_at() == 0 && self.phase().is_idle() && !self.owes()
    }

    /// Returns whether the endpoint is registered with an epoll instance.
    pub(crate) fn is_in_a_set(&self) -> bool {
        let mut epolls = self.epolls.briefly();
        let has_it = !epolls.value().is_empty();
        epolls.end();
        has_it
    }

    /// Returns why the endpoint must not be offered.
    pub(crate) fn barred(&self) -> Option<Reason> {
        let code = self.barred.load(SeqCst);
        if code == 0 { None } else { Reason::parse(code as u16) }
    }

    /// Returns whether the endpoint is barred, and detached by now.
    pub(crate) fn is_back(&self) -> bool {
        self.barred().is_some() && !self.is_attached()
    }

    /// Returns whether the endpoint stays on TCP for good: it is barred, and detached. Its data
    /// calls need not be counted (L4).
    #[inline]
    pub(crate) fn is_settled(&self) -> bool {
        self.word.phase(Relaxed) == Phase::Settled
    }

    /// Marks the endpoint as settled if it is barred and detached. It takes the locks, as
    /// [`adopt`](crate::life::attach::adopt) does, which then has either ended or finds the bar.
    pub(crate) fn settle(&self) {
        let can_be = || self.barred().is_some() && self.phase() == Phase::Tcp && !self.owes();
        if can_be() {
            let (_tx, _rx) = (self.tx.lock(), self.rx.lock());
            if can_be() {
                self.change(Event::Settle);
            }
        }
    }

    /// Returns the endpoint's row in the page.
    pub(crate) fn entry(&self) -> Option<&'static page::Entry> {
        self.statistics.row()
    }

    pub(crate) fn set_entry(&self, entry: Option<&'static page::Entry>) {
        self.statistics.set_row(entry);
    }

    /// Adds to the bytes received by TCP, for `shunt status`.
    #[inline]
    pub(crate) fn count_received(&self, bytes: usize) {
        if bytes != 0 {
            self.note_moved();
        }
        if let Some(entry) = self.entry() {
            entry.tcp_received.store(entry.tcp_received.load(Relaxed) + bytes as u64, Relaxed);
        }
    }

    /// Notes that the program sends, if someone asks for latencies ([`shunt_abi::latency`]).
    #[cold]
    #[inline(never)]
    pub(crate) fn note_request(&self) {
        if !process::is_latency_wanted() {
            return;
        }
        let wanted = process::latency_wanted();
        // The other end waits for requests, and its time from a send to the next is the client's.
        if self.opener() == Opener::Us && self.entry().is_some() && !self.request_clock.runs(&wanted) {
            self.request_clock.start(process::now(), &wanted);
        }
    }

    /// Notes that the program has received bytes, if someone asks for latencies or has asked.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_answer(&self) {
        let sent_at = self.request_clock.stop(&process::latency_wanted());
        if let (Some(sent_at), Some(entry)) = (sent_at, self.entry()) {
            entry.latency.add(process::now().saturating_sub(sent_at));
        }
    }

    /// Notes that the sending direction is on a lane from now on.
    pub(crate) fn note_lane(&self) {
        self.sent_by_lane.store(true, Relaxed);
    }

    /// Adds to the bytes sent by TCP. The first bytes after a lane are pushed. Otherwise Nagle's
    /// algorithm would hold them back: the acknowledgement of the bytes before the lane is late,
    /// because the answers went by lanes as well.
    #[inline]
    pub(crate) fn count_sent(&self, bytes: usize) {
        if bytes != 0 {
            self.note_moved();
        }
        if !self.offer.is_remote() {
            order::note_by_tcp();
        }
        if self.sent_by_lane.load(Relaxed) && self.sent_by_lane.swap(false, Relaxed) {
            kernel::push(self.fd());
        }
        if let Some(entry) = self.entry() {
            entry.tcp_sent.store(entry.tcp_sent.load(Relaxed) + bytes as u64, Relaxed);
        }
    }

    /// Returns whether TCP has yet to deliver an end that the lane has reported: see
    /// [`crate::life::ending`].
    #[inline]
    pub(crate) fn awaits_end(&self) -> bool {
        self.end_awaited_since().is_some()
    }

    /// Returns since when that end has been awaited.
    #[inline]
    pub(crate) fn end_awaited_since(&self) -> Option<u64> {
        self.ends.awaited_since()
    }

    /// Notes that from the time `now` on, that end is awaited.
    pub(crate) fn await_end(&self, now: u64) {
        self.ends.await_since(now);
    }

    pub(crate) fn stop_awaiting_end(&self) {
        self.ends.stop_awaiting();
    }

    /// Reports the sending direction for `shunt status`. The caller holds its lock.
    pub(crate) fn report_tx(&self, side: &TxSide) {
        let Some(entry) = self.entry() else { return };
        entry.shm_sent.store(side.tx.lane_total(), Relaxed);
        process::count_tcp(entry, page::Which::Sent);
        let (transport, reason) = described(side.tx.on_lane(), side.tx.reason());
        let word = transport as u64 | u64::from(reason as u16) << 16;
        let _ = entry.transports.fetch_update(Relaxed, Relaxed, |old| Some(old & !0xffff_00ff | word));
    }

    /// Reports the received bytes, and the transport if it has changed. The caller holds the lock.
    #[inline(always)]
    pub(crate) fn report_received(&self, side: &mut RxSide) {
        self.report_transport(side);
        self.count_from_lane(side.rx.lane_total());
    }

    /// Reports the transport if it has changed. Any check for data to receive may change it. The
    /// caller holds the lock.
    #[inline(always)]
    pub(crate) fn report_transport(&self, side: &mut RxSide) {
        if side.told_on_lane != side.rx.on_lane() {
            self.report_rx(side);
        }
    }

    /// Reports the total of bytes received by lanes.
    #[inline(always)]
    pub(crate) fn count_from_lane(&self, total: u64) {
        if let Some(entry) = self.entry() {
            entry.shm_received.store(total, Relaxed);
        }
    }

    /// Reports the receiving direction. The caller holds its lock.
    pub(crate) fn report_rx(&self, side: &mut RxSide) {
        side.told_on_lane = side.rx.on_lane();
        let Some(entry) = self.entry() else { return };
        entry.shm_received.store(side.rx.lane_total(), Relaxed);
        process::count_tcp(entry, page::Which::Received);
        let (transport, reason) = described(side.rx.on_lane(), side.rx.reason());
        let word = (transport as u64) << 8 | u64::from(reason as u16) << 32;
        let _ = entry.transports.fetch_update(Relaxed, Relaxed, |old| Some(old & !0xffff_0000_ff00 | word));
    }

    /// Frees the slot. The endpoint is detached by now.
    pub(crate) fn free(&self) {
        let name = self.reference();
        if self.word.free() == Phase::Attached {
            ATTACHED.fetch_sub(1, AcqRel);
        }
        self.generation.fetch_add(1, AcqRel);
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

    /// Makes the fields equal to those of a slot that was never used. [`allocate`] sets the ones
    /// that differ between connections.
    ///
    /// The pattern has no `..`, so a new field must be named here.
    fn reset(&self) {
        let Endpoint {
            // `free` has set these, because other threads may still look at them.
            word: _,
            generation: _,
            // A slot keeps its index.
            index: _,
            // The calls themselves lower their counts.
            calls: _,
            pending_error,
            owner,
            barred,
            sent_by_lane,
            is_prepared,
            record,
            statistics,
            socket,
            options,
            offer,
            ends,
            beside_kernel,
            keepalive,
            holders,
            unanswered,
            tx,
            rx,
            epolls,
            request_clock,
        } = self;
        pending_error.reset();
        owner.store(0, Relaxed);
        barred.store(0, Relaxed);
        sent_by_lane.store(false, Relaxed);
        // A fork that another thread is making may have prepared this socket, but not the next one.
        is_prepared.store(false, Relaxed);
        record.store(0, Relaxed);
        statistics.reset();
        socket.reset();
        options.reset();
        offer.reset();
        ends.reset();
        beside_kernel.set(LaneBytes::default());
        keepalive.clear();
        holders.begin(0);
        unanswered.answer();
        tx.set(TxSide::default());
        rx.set(RxSide::default());
        request_clock.reset();
        if self.is_in_a_set() {
            epolls.lock().clear();
        }
    }
}

fn described(on_lane: bool, reason: Reason) -> (Transport, Reason) {
    if on_lane { (Transport::Shm, Reason::None) } else { (Transport::Tcp, reason) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::signal::Shield;

    /// Describes each field of an endpoint that [`Endpoint::reset`] covers. The pattern has no
    /// `..`, so a new field must be named here.
    fn contents(endpoint: &Endpoint) -> Vec<(&'static str, String)> {
        let Endpoint {
            word: _,
            generation: _,
            index: _,
            calls: _,
            pending_error,
            owner,
            barred,
            sent_by_lane,
            is_prepared,
            record,
            statistics,
            socket,
            options,
            offer,
            ends,
            beside_kernel,
            keepalive,
            holders,
            unanswered,
            tx,
            rx,
            epolls,
            request_clock,
        } = endpoint;
        let (tx, rx) = (tx.lock(), rx.lock());
        let TxSide { tx, at, seen, awaited_death, looked_for_holder } = &*tx;
        let RxSide { rx, at: rx_at, told_on_lane, pace } = &*rx;
        assert!(at.is_none() && rx_at.is_none(), "a test has no link");
        vec![
            ("pending_error", format!("{pending_error:?}")),
            ("owner", format!("{owner:?}")),
            ("barred", format!("{barred:?}")),
            ("sent_by_lane", format!("{sent_by_lane:?}")),
            ("is_prepared", format!("{is_prepared:?}")),
            ("record", format!("{record:?}")),
            ("statistics", format!("{statistics:?}")),
            ("socket", format!("{socket:?}")),
            ("options", format!("{options:?}")),
            ("offer", format!("{offer:?}")),
            ("ends", format!("{ends:?}")),
            ("beside_kernel", format!("{:?}", *beside_kernel.lock())),
            ("keepalive", format!("{keepalive:?}")),
            ("holders", format!("{holders:?}")),
            ("unanswered", format!("{unanswered:?}")),
            ("tx", format!("{tx:?}")),
            ("seen", format!("{seen:?}")),
            ("awaited_death", format!("{awaited_death:?}")),
            ("looked_for_holder", format!("{looked_for_holder:?}")),
            ("rx", format!("{rx:?}")),
            ("told_on_lane", format!("{told_on_lane:?}")),
            ("pace", format!("{pace:?}")),
            ("epolls", format!("{:?}", *epolls.lock())),
            ("request_clock", format!("{request_clock:?}")),
        ]
    }

    /// Sets each field to a value that no new endpoint has. The test checks that it does.
    fn use_up(endpoint: &Endpoint) {
        endpoint.pending_error.use_up();
        endpoint.owner.store(1, Relaxed);
        endpoint.barred.store(2, Relaxed);
        endpoint.sent_by_lane.store(true, Relaxed);
        endpoint.is_prepared.store(true, Relaxed);
        endpoint.record.store(3, Relaxed);
        endpoint.statistics.use_up();
        endpoint.socket.use_up();
        endpoint.options.use_up();
        endpoint.offer.use_up();
        endpoint.ends.use_up();
        *endpoint.beside_kernel.lock() = LaneBytes { acked: 1, received: 2, sent: 3, queued: 4 };
        endpoint.keepalive.use_up();
        endpoint.holders.lose();
        (0..4).for_each(|_| endpoint.unanswered.note_check());
        endpoint.epolls.lock().push(EpollRef::new(1, 2));
        endpoint.request_clock.start(5, &(0..9));
        let mut tx = endpoint.tx.lock();
        tx.tx.adopt();
        tx.seen.sends = 13;
        tx.awaited_death = true;
        tx.looked_for_holder = true;
        let mut rx = endpoint.rx.lock();
        rx.rx.adopt();
        rx.told_on_lane = true;
        rx.pace = Pace::in_use();
    }

    /// A slot that was reused once kept state of the connection before.
    #[test]
    fn a_reused_slot_equals_a_new_one_in_every_field() {
        let _shield = Shield::raise();
        let (new, reused) = (Endpoint::default(), Endpoint::default());
        use_up(&reused);
        for ((field, used), (_, unused)) in contents(&reused).into_iter().zip(contents(&new)) {
            assert_ne!(used, unused, "`use_up` does not change `{field}`");
        }
        reused.reset();
        assert_eq!(contents(&reused), contents(&new));
    }
}
