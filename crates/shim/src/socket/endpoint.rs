//! Endpoints: the connected TCP sockets of this process.
//!
//! They live in a slab that is never given back, so that a hook that still holds one while another thread
//! closes its descriptor reads stale numbers at worst, never freed memory; generations tell the difference.

use std::cell::Cell;
use std::mem::offset_of;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

use shunt_abi::option::SocketOption;
use shunt_abi::page::{self, Counter};
use shunt_abi::reason::{Reason, Road};
use shunt_ring::LaneHeader;
use shunt_sys::tcp::{Beside, Opener};
use shunt_transport::{Rx, Tx};

use crate::base::above::Above;
use crate::base::clib::is_single_threaded;
use crate::base::lock::Lock;
use crate::base::names::{EndpointRef, EpollRef};
use crate::base::pace::{Pace, Unanswered};
use crate::base::private::PrivateFd;
use crate::base::table::{self, Entry};
use crate::base::waiter::Slot;
use crate::base::{kernel, order, process};
use crate::socket::family::{self, Holders, Shareable};
use crate::socket::keepalive::Keepalive;
use crate::socket::links::{Attachment, Growth, Peer};
use crate::socket::low_water::LowWater;
use crate::socket::stall::Backlog;

const CHUNK: usize = 256;
const CHUNKS: usize = 4096;
/// How many there can be.
pub(crate) const MOST: usize = CHUNK * CHUNKS;
/// In place of the number of names: the program has closed them all while calls waited, which hold the socket by a
/// descriptor of the shim's. No program has so many.
const HELD: u32 = u32::MAX;

/// Where an endpoint is on its way to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Stage {
    /// On TCP, with nothing in preparation.
    Plain = 0,
    /// Shown to the broker.
    Offered = 1,
    /// On a link: calls take the locks.
    Attached = 2,
}

/// The sending direction and what belongs to its lock.
#[derive(Default)]
pub(crate) struct TxSide {
    pub(crate) tx: Tx,
    pub(crate) at: Option<Attachment>,
    pub(crate) seen: Seen,
    /// TCP has ended with bytes of ours unread, and the broker has been given time to say why.
    pub(crate) awaited_death: bool,
    /// The same, and somebody else had the other socket for a while.
    pub(crate) looked_for_holder: bool,
}

/// What has been seen of the lane that a direction has now. Of the next it says nothing.
#[derive(Default)]
pub(crate) struct Seen {
    /// The waits for room in it.
    pub(crate) backlog: Backlog,
    /// When bytes of it were first found unread, and how far the receiver was then: what it had read of the lane, and what it had to
    /// read of TCP before.
    pub(crate) unread_since: Option<(u64, [u64; 2])>,
    /// Bytes of the ring, from its first, with memory behind them.
    pub(crate) backed: Growth,
    /// Bytes of the spill, from its first, with memory behind them.
    pub(crate) spill_backed: Growth,
    /// Bytes of it have been sent that are to be looked at again: see [`crate::life::overdue`].
    pub(crate) is_listed: Cell<bool>,
    /// What both lanes had carried when that was last asked for [`crate::life::idle`].
    pub(crate) moved: Option<u64>,
    /// Sends of which it has taken something.
    pub(crate) sends: u32,
}

/// The receiving direction and what belongs to its lock.
#[derive(Default)]
pub(crate) struct RxSide {
    pub(crate) rx: Rx,
    pub(crate) at: Option<Attachment>,
    /// The road that `shunt status` was told last.
    told_on_lane: bool,
    pub(crate) pace: Pace,
}

/// One connected TCP socket.
#[derive(Default)]
#[repr(C, align(128))]
pub(crate) struct Endpoint {
    /// First, since that is where [`at_once`] finds it: what the table says of its numbers, and why nothing is answered at once, if there is a reason.
    ready: AtomicU64,
    index: AtomicU32,
    generation: AtomicU32,
    stage: AtomicU32,
    /// Threads inside a kernel receive or poll on the socket (L4).
    receivers_in_kernel: AtomicU32,
    /// Threads inside a kernel send on the socket (L4).
    senders_in_kernel: AtomicU32,
    /// Data operations since the last offer, and how many the next offer takes; or [`NEVER`].
    pub(crate) operations: AtomicU32,
    pub(crate) offer_after: AtomicU32,
    /// When it was last offered; 0: never.
    pub(crate) offered_at: AtomicU64,
    /// The number of the message to the broker that offered it last; 0: never.
    pub(crate) offered_as: AtomicU64,
    /// Whether it has been counted as used, and as being on shared memory.
    counted_as_used: AtomicBool,
    counted_on_shm: AtomicBool,
    /// See [`has_moved`](Self::has_moved).
    moved: AtomicBool,
    entry: AtomicPtr<page::Entry>,
    /// Descriptors of this process that name the socket, or [`HELD`].
    names: AtomicU32,
    /// Calls that have begun to wait on it, and are not over: see [`crate::ops::hold`].
    calls: AtomicU32,
    /// One of them.
    pub(crate) fd: AtomicI32,
    /// A private descriptor by which calls go on that began before code came whose closes no hook
    /// sees. 0: there is none.
    kept: AtomicI32,
    pub(crate) nonblocking: AtomicU32,
    /// Directions that were shut down: 1 reading, 2 writing.
    shut: AtomicU32,
    /// Why the endpoint must never be offered, as a reason code.
    barred: AtomicU32,
    /// The option that has kept it from shared memory, packed; 0: none has.
    option: AtomicU64,
    /// Its peer's address is of no other program of this host.
    remote: AtomicBool,
    /// This end called connect.
    opened: AtomicBool,
    /// That call has not said that it is connected.
    was_begun: AtomicBool,
    /// The waiter that the peer wakes for bytes: 0 nobody, else its slot + 1. An epoll instance owns it as long as
    /// the socket is registered, a thread while it sleeps.
    owner: AtomicU32,
    /// Changed by [`change_low_water`](Self::change_low_water).
    pub(crate) low_water: LowWater,
    /// TCP_INQ is set, as far as this process knows.
    pub(crate) tells_waiting: AtomicBool,
    /// The kernel has told a waiter that the peer sends no more.
    peer_finished: AtomicBool,
    /// Its last bytes have gone by a lane: see [`count_sent`](Self::count_sent).
    sent_by_lane: AtomicBool,
    /// An error that the kernel cannot be made to tell, and that is told once.
    owed: AtomicI32,
    /// It stands for one that the kernel has, and is told no more once somebody has taken that.
    owed_for_kernel: AtomicU32,
    /// What the kernel's counts lack, or have too much, apart from the bytes of lanes of this process's own.
    pub(crate) beside_kernel: Lock<Beside>,
    /// SO_RCVTIMEO and SO_SNDTIMEO in nanoseconds; 0 means none.
    pub(crate) receive_timeout: AtomicU64,
    pub(crate) send_timeout: AtomicU64,
    /// Since when the end of the peer's stream, of which the lane has told, has been awaited from TCP; 0: it is not.
    pub(crate) end_awaited_since: AtomicU64,
    /// Keepalive probes while it is on shared memory.
    pub(crate) keepalive: Keepalive,
    /// Which processes hold the socket.
    pub(crate) holders: Holders,
    /// The fork that is under way has been prepared for it.
    is_prepared: AtomicBool,
    /// See [`crate::socket::distance`].
    pub(crate) distance: AtomicU32,
    pub(crate) unanswered: Unanswered,
    pub(crate) tx: Lock<TxSide>,
    pub(crate) rx: Lock<RxSide>,
    /// Where the set that its marks go to keeps its registration, if that is still so.
    pub(crate) record: AtomicUsize,
    /// The epoll instances it is registered with.
    pub(crate) epolls: Lock<Vec<EpollRef>>,
}

/// There will be no offer any more.
pub(crate) const NEVER: u32 = 0;

/// What has been shut down so far.
pub(crate) struct Shut {
    pub(crate) both: bool,
}

impl EndpointRef {
    /// The endpoint, if this still is its name.
    #[inline]
    pub(crate) fn resolve(self) -> Option<&'static Endpoint> {
        let endpoint = at(self.index())?;
        (endpoint.generation.load(Acquire) == self.generation()).then_some(endpoint)
    }
}

/// The endpoint behind `fd`, if it is one.
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

/// The same by one look at the table and one at the endpoint, if it has been [remembered](Endpoint::remember).
#[inline(always)]
fn remembered(fd: RawFd) -> Option<&'static Endpoint> {
    let (entry, word) = table::remembered(fd)?;
    // SAFETY: what is remembered lives as long as the process.
    let ready = unsafe { &*word }.load(SeqCst);
    // Of one that is free the word says nothing, as does the table of what is none; and no name is as long as that of nothing remembered.
    let name = ready & !(APART | OWES | HAS_LOW_WATER | SETTLED);
    // SAFETY: as in `at_once`: an entry that is as a remembered word is an endpoint's, whose first field that is.
    (name == entry && name != 0).then(|| unsafe { &*word.cast::<Endpoint>() })
}

/// In [`Endpoint::ready`]: it is on no link.
const APART: u64 = 1 << 63;
/// The same: it may have an error to tell.
const OWES: u64 = 1 << 62;
/// The same: a receive must know its [low water](LowWater).
const HAS_LOW_WATER: u64 = 1 << 61;

/// The same: see [`Endpoint::is_settled`].
const SETTLED: u64 = 1 << 60;

/// The endpoint behind `fd`, if it is on a link, owes nothing and has been [remembered](Endpoint::remember): what most calls find, by one look at
/// the table and one at the endpoint. `None`: [`behind`] says.
#[inline(always)]
pub(crate) fn at_once(fd: RawFd) -> Option<&'static Endpoint> {
    // It may be another's by now, or another connection: then it is not what the table says.
    let ready = table::glance(fd)?;
    // SAFETY: what is remembered is of an endpoint, and endpoints are never freed.
    Some(unsafe { &*ready.cast::<Endpoint>() })
}

const _: () = assert!(offset_of!(Endpoint, ready) == 0);

/// The first endpoint of each chunk.
static SLAB: [AtomicPtr<Endpoint>; CHUNKS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS];
/// Ends one that only calls have held, which are over.
pub(crate) static END_HELD: Above<EndpointRef> = Above::new();
/// Endpoints that are on a link.
static ATTACHED: AtomicU32 = AtomicU32::new(0);
static FREE: Lock<Free> = Lock::new(Free { list: Vec::new(), made: 0 });

struct Free {
    list: Vec<u32>,
    made: u32,
}

/// How many there are or have been: all have lower indices.
pub(crate) fn made() -> usize {
    FREE.lock().made as usize
}

/// The endpoint with this index, in use or not.
pub(crate) fn at(index: u32) -> Option<&'static Endpoint> {
    let chunk = SLAB.get(index as usize / CHUNK)?.load(Acquire);
    // SAFETY: a chunk that is not null has so many, and is never freed.
    (!chunk.is_null()).then(|| unsafe { &*chunk.add(index as usize % CHUNK) })
}

/// Made where it stays: it is larger than the stacks of some threads.
fn make_chunk() -> *mut Endpoint {
    let mut chunk = Box::<[Endpoint]>::new_uninit_slice(CHUNK);
    for endpoint in &mut chunk {
        endpoint.write(Endpoint::default());
    }
    Box::into_raw(chunk).cast()
}

/// Makes an endpoint for the newly connected socket `fd`, to be offered after so many operations. `None` when a million are in use.
pub(crate) fn allocate(fd: i32, nonblocking: bool, offer_after: u32) -> Option<EndpointRef> {
    process::note_use();
    family::prepare();
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
    endpoint.fd.store(fd, Relaxed);
    endpoint.names.store(1, Relaxed);
    endpoint.nonblocking.store(nonblocking.into(), Relaxed);
    endpoint.offer_after.store(offer_after, Relaxed);
    endpoint.holders.begin(family::strays());
    let name = EndpointRef::new(index, endpoint.generation.load(Acquire));
    endpoint.ready.store(Entry::Endpoint(name).pack() | APART, Release);
    Some(name)
}

/// Whether the endpoint is behind one of the numbers that stdin, stdout and stderr read and write. Those calls are
/// libc's own and cannot be seen, so it stays on TCP for as long as it is.
pub(crate) fn is_standard_stream(endpoint: &Endpoint) -> bool {
    let entry = Entry::Endpoint(endpoint.reference());
    STANDARD_STREAMS.into_iter().any(|fd| table::look_up(fd) == entry)
}

pub(crate) const STANDARD_STREAMS: std::ops::RangeInclusive<RawFd> = 0..=2;

/// Whether any endpoint is on a link.
pub(crate) fn any_is_attached() -> bool {
    ATTACHED.load(Acquire) > 0
}

/// Every endpoint in use.
pub(crate) fn all() -> impl Iterator<Item = &'static Endpoint> {
    let made = FREE.lock().made;
    (0..made).filter_map(at).filter(|endpoint| endpoint.names.load(Relaxed) > 0)
}

/// Takes the locks of every endpoint, and what there is one of, so that no thread is in the middle of anything while the process
/// is copied. Says whether none is on a lane that is not closed, as one may be that came onto it, or was made, since the
/// fork was prepared.
pub(crate) fn hold_locks() -> bool {
    let mut ready = true;
    let mut held = 0;
    loop {
        // Others may wait for this one with an endpoint's lock in their hands, so it is not kept while endpoints' are taken.
        FREE.hold();
        // SAFETY: taken above, and other threads only read the number without it.
        let made = unsafe { FREE.value().made };
        if made == held {
            return ready;
        }
        // SAFETY: taken above.
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

/// In both processes.
///
/// # Safety
/// After [`hold_locks`], on the same thread.
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

/// Has what was made since the fork was prepared held by the child too. The locks are held.
pub(crate) fn expect_child_of_new() {
    // SAFETY: the caller holds it.
    let made = unsafe { FREE.value().made };
    let new = |endpoint: &&Endpoint| endpoint.names.load(Relaxed) > 0 && !endpoint.is_prepared.load(Relaxed);
    (0..made).filter_map(at).filter(new).for_each(Endpoint::expect_child);
}

/// Frees the locks of every endpoint in a child that nobody announced.
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

/// No other thread of the parent's has come along that was inside the kernel, or waited.
pub(crate) fn after_fork_in_child() {
    for endpoint in all() {
        endpoint.calls.store(0, Relaxed);
        endpoint.receivers_in_kernel.store(0, Relaxed);
        endpoint.senders_in_kernel.store(0, Relaxed);
        endpoint.owner.store(0, Relaxed);
        // That was the parent's conversation with the broker.
        endpoint.offered_as.store(0, Relaxed);
    }
}

/// A descriptor by which calls hold a socket has moved to another number.
pub(crate) fn renumber(old: RawFd, new: RawFd) {
    for endpoint in all() {
        if endpoint.is_held() {
            let _ = endpoint.fd.compare_exchange(old, new, AcqRel, Relaxed);
        }
        let _ = endpoint.kept.compare_exchange(old, new, AcqRel, Relaxed);
    }
}

impl Shareable for Endpoint {
    fn holders(&self) -> &Holders {
        &self.holders
    }

    fn may_be_held_by(&self, pid: u32) -> bool {
        family::may_hold(pid, self.fd.load(Relaxed))
    }

    /// A program may pass a socket on to anybody; one that has the shim says itself what it has.
    fn is_held_beyond(&self, _: u32) -> Option<bool> {
        None
    }
}

/// Whether a connection is barred for this reason because its socket may be in other hands, or have a number that is not known.
fn is_of_unlisted(reason: u32) -> bool {
    use Reason::*;
    [Fork, Shared, Exec, PassedOn, OwnTable, Duplicated].iter().any(|one| *one as u32 == reason)
}

/// Counts one more.
#[inline]
fn raise(count: &AtomicU32) {
    change(count, 1);
}

/// Counts one less.
#[inline]
fn lower(count: &AtomicU32) {
    change(count, -1);
}

/// By plain moves in a process with one thread, as its locks are taken: see [`crate::base::lock`]. Behind the shield, so that no handler comes in
/// between.
#[inline(always)]
fn change(count: &AtomicU32, by: i32) {
    if is_single_threaded() {
        count.store(count.load(Relaxed).wrapping_add_signed(by), Relaxed);
    } else {
        count.fetch_add(by.cast_unsigned(), SeqCst);
    }
}

impl Endpoint {
    /// Its place, which another has once this is free.
    #[inline]
    pub(crate) fn index(&self) -> u32 {
        self.index.load(Relaxed)
    }

    /// Its name.
    pub(crate) fn reference(&self) -> EndpointRef {
        EndpointRef::new(self.index.load(Relaxed), self.generation.load(Acquire))
    }

    #[inline]
    pub(crate) fn stage(&self) -> Stage {
        match self.stage.load(SeqCst) {
            0 => Stage::Plain,
            1 => Stage::Offered,
            _ => Stage::Attached,
        }
    }

    pub(crate) fn set_stage(&self, stage: Stage) {
        let is_attached = stage == Stage::Attached;
        let was_attached = self.stage.swap(stage as u32, SeqCst) == Stage::Attached as u32;
        match (was_attached, is_attached) {
            (false, true) => {
                ATTACHED.fetch_add(1, AcqRel);
                self.ready.fetch_and(!APART, SeqCst);
            }
            (true, false) => {
                ATTACHED.fetch_sub(1, AcqRel);
                self.ready.fetch_or(APART, SeqCst);
            }
            _ => {}
        }
    }

    /// Makes a change to what is known of its low water.
    pub(crate) fn change_low_water(&self, change: impl FnOnce(&LowWater)) {
        change(&self.low_water);
        if self.low_water.is_none() {
            self.ready.fetch_and(!HAS_LOW_WATER, SeqCst);
        }
        // Also if another thread has set it meanwhile.
        if !self.low_water.is_none() {
            self.ready.fetch_or(HAS_LOW_WATER, SeqCst);
        }
    }

    /// Has [`at_once`] find it by this number.
    pub(crate) fn remember(&self, fd: RawFd) {
        table::remember(fd, std::ptr::from_ref(self).cast());
    }

    #[inline]
    pub(crate) fn is_attached(&self) -> bool {
        self.stage.load(SeqCst) == Stage::Attached as u32
    }

    /// Enters a kernel receive or poll; `false`, and not entered, if calls must take the lock instead.
    ///
    /// The other half of the handshake is in [`is_quiet_for_receive`](Self::is_quiet_for_receive): the stage is
    /// set before the count is read, here the count is raised before the stage is read.
    #[inline]
    pub(crate) fn enter_receive(&self) -> bool {
        raise(&self.receivers_in_kernel);
        if self.is_attached() {
            self.leave_receive();
            return false;
        }
        true
    }

    /// Enters while the receive lock is held.
    #[inline]
    pub(crate) fn enter_receive_locked(&self) {
        raise(&self.receivers_in_kernel);
    }

    #[inline]
    pub(crate) fn leave_receive(&self) {
        lower(&self.receivers_in_kernel);
        self.end_if_held_by_nobody();
    }

    /// As [`enter_receive`](Self::enter_receive), for sending.
    #[inline]
    pub(crate) fn enter_send(&self) -> bool {
        raise(&self.senders_in_kernel);
        if self.is_attached() {
            self.leave_send();
            return false;
        }
        true
    }

    #[inline]
    pub(crate) fn enter_send_locked(&self) {
        raise(&self.senders_in_kernel);
    }

    #[inline]
    pub(crate) fn leave_send(&self) {
        lower(&self.senders_in_kernel);
        self.end_if_held_by_nobody();
    }

    /// A call begins to wait: from here on it holds the socket, as in the kernel, whoever closes the number that it was given.
    pub(crate) fn begin_call(&self) {
        self.calls.fetch_add(1, SeqCst);
    }

    /// It is over.
    pub(crate) fn end_call(&self) {
        self.calls.fetch_sub(1, SeqCst);
        self.end_if_held_by_nobody();
    }

    /// Calls that wait, here or in the kernel.
    pub(crate) fn calls_in_progress(&self) -> u32 {
        let counts = [&self.calls, &self.receivers_in_kernel, &self.senders_in_kernel];
        counts.into_iter().fold(0, |sum, count| sum.saturating_add(count.load(SeqCst)))
    }

    /// Has the calls in progress go on by a private descriptor, whatever becomes of the descriptor
    /// that they were given: code has come whose closes no hook sees.
    pub(crate) fn keep_for_calls(&self) {
        if self.calls_in_progress() == 0 || self.is_held() || self.kept.load(SeqCst) > 0 {
            return;
        }
        if let Some(kept) = PrivateFd::duplicate(self.fd.load(Relaxed)) {
            self.kept.store(kept.into_raw(), SeqCst);
            self.end_if_held_by_nobody();
        }
    }

    /// Returns that descriptor.
    pub(crate) fn kept(&self) -> Option<RawFd> {
        Some(self.kept.load(SeqCst)).filter(|kept| *kept > 0)
    }

    /// Takes that descriptor from the endpoint; -1 if there is none.
    pub(crate) fn take_kept(&self) -> RawFd {
        match self.kept.swap(0, SeqCst) {
            0 => -1,
            kept => kept,
        }
    }

    /// The program's last number of it goes, and calls keep it, by `fd`.
    pub(crate) fn hold(&self, fd: RawFd) {
        self.fd.store(fd, Relaxed);
        self.names.store(HELD, SeqCst);
    }

    /// Whether nothing but calls in progress has it.
    pub(crate) fn is_held(&self) -> bool {
        self.names.load(SeqCst) == HELD
    }

    /// Whether a descriptor or a call has it.
    pub(crate) fn is_in_use(&self) -> bool {
        self.names.load(SeqCst) > 0
    }

    /// Takes it from the calls, of which there are no more: whoever is told `true` ends it. Each call looks after it has left and
    /// whoever closes after [`hold`](Self::hold), so one of them does.
    pub(crate) fn let_go_of_held(&self) -> bool {
        self.names.compare_exchange(HELD, 0, SeqCst, SeqCst).is_ok()
    }

    #[inline]
    pub(crate) fn end_if_held_by_nobody(&self) {
        // Written before the calls are counted, and read after a call has ended: one of the two ends it.
        if self.kept.load(SeqCst) > 0 {
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

    /// A child that is about to be made will hold the socket too.
    pub(crate) fn expect_child(&self) {
        self.is_prepared.store(true, Relaxed);
        if !family::expect_child(self) {
            self.bar(Reason::Shared);
        }
    }

    /// That fork is over.
    pub(crate) fn end_fork(&self) {
        if self.is_prepared.load(Relaxed) {
            self.is_prepared.store(false, Relaxed);
        }
    }

    /// Whether it is on a link with this peer.
    pub(crate) fn is_linked_with(&self, peer: &Peer) -> bool {
        self.rx.lock().at.is_some_and(|at| std::ptr::eq(at.link.peer, peer))
    }

    /// Whether no thread is inside a kernel receive or poll. Asked under the receive lock, when attached.
    pub(crate) fn is_quiet_for_receive(&self) -> bool {
        self.receivers_in_kernel.load(SeqCst) == 0
    }

    /// Whether no thread is inside a kernel send. Asked under the send lock, when attached.
    #[inline]
    pub(crate) fn is_quiet_for_send(&self) -> bool {
        self.senders_in_kernel.load(SeqCst) == 0
    }

    /// Makes `slot` the waiter that is woken for bytes, unless another one is, and says so in the lane: under the lock, since
    /// once the endpoint has left the lane, that may be another connection's.
    pub(crate) fn wait_on(&self, side: &RxSide, slot: Slot) -> bool {
        let Some(at) = side.at else { return false };
        let owner = self.claim(slot);
        if owner.is_ok() || owner == Err(slot) {
            at.incoming().0.set_rx_waiter(Some(slot.0));
        }
        owner.is_ok()
    }

    /// The same for the waiter of an epoll instance, which stays one until it is taken back, and then looks how it is. A mark of a
    /// connection that was there before would give this one its place in the order of events.
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

    /// An error says whose it is.
    fn claim(&self, slot: Slot) -> Result<(), Slot> {
        let owner = self.owner.compare_exchange(0, slot.0 as u32 + 1, AcqRel, Acquire);
        owner.map(|_| ()).map_err(|word| Slot(word as usize - 1))
    }

    /// Gives that up.
    pub(crate) fn unclaim(&self, slot: Slot) {
        let _ = self.owner.compare_exchange(slot.0 as u32 + 1, 0, AcqRel, Relaxed);
    }

    /// The waiter that is woken for bytes.
    pub(crate) fn owner(&self) -> Option<Slot> {
        self.owner.load(Acquire).checked_sub(1).map(|slot| Slot(slot as usize))
    }

    /// Says who called connect, before anybody else knows of the endpoint.
    pub(crate) fn set_opener(&self, opener: Opener) {
        self.opened.store(opener == Opener::Us, Relaxed);
    }

    /// Who did.
    pub(crate) fn opener(&self) -> Opener {
        if self.opened.load(Relaxed) { Opener::Us } else { Opener::Peer }
    }

    /// Says whether it was not connected yet when this end's connect returned.
    pub(crate) fn set_begun(&self, begun: bool) {
        self.was_begun.store(begun, Relaxed);
    }

    /// Whether it may not be connected yet, or was refused.
    pub(crate) fn was_begun(&self) -> bool {
        self.was_begun.load(Relaxed)
    }

    /// Another descriptor names the socket.
    pub(crate) fn add_name(&self) {
        self.names.fetch_add(1, AcqRel);
    }

    /// A descriptor no longer does; `true` if it was the last.
    pub(crate) fn drop_name(&self) -> bool {
        self.names.fetch_sub(1, SeqCst) == 1
    }

    /// What [`add_shut`](Self::add_shut) has noted.
    pub(crate) fn shut(&self) -> u32 {
        self.shut.load(Acquire)
    }

    /// Whether the sending direction was shut down.
    pub(crate) fn has_shut_writing(&self) -> bool {
        self.shut.load(Acquire) & 2 != 0
    }

    /// Whether both directions were: TCP answers whatever comes by a reset.
    pub(crate) fn has_shut_both(&self) -> bool {
        self.shut.load(Acquire) == 3
    }

    /// Notes a shutdown.
    pub(crate) fn add_shut(&self, reads: bool, writes: bool) -> Shut {
        let bits = u32::from(reads) | u32::from(writes) << 1;
        Shut { both: self.shut.fetch_or(bits, AcqRel) | bits == 3 }
    }

    /// Whether a direction has been shut down.
    pub(crate) fn is_shut(&self) -> bool {
        self.shut.load(Acquire) != 0
    }

    /// Notes that the kernel has said so: it need not be asked for any more.
    pub(crate) fn note_peer_finished(&self) {
        self.peer_finished.store(true, Relaxed);
    }

    /// Whether it has.
    pub(crate) fn has_peer_finished(&self) -> bool {
        self.peer_finished.load(Relaxed)
    }

    /// The next call that asks is told this error; in place of the kernel's own, if it has one now.
    pub(crate) fn owe(&self, fd: i32, errno: i32) {
        self.owed_for_kernel.store(kernel::has_error(fd).into(), Relaxed);
        self.owed.store(errno, Relaxed);
        // In this order, and the reverse when it is told: if there is one, this says so.
        self.ready.fetch_or(OWES, SeqCst);
    }

    /// That error, or 0.
    #[inline]
    fn owed(&self) -> i32 {
        self.owed.load(Relaxed)
    }

    /// Whether there is such an error.
    #[inline]
    pub(crate) fn owes(&self) -> bool {
        self.owed() != 0
    }

    /// Whether there is one that the kernel does not show.
    pub(crate) fn owes_alone(&self) -> bool {
        self.owes()
            && self.owed_for_kernel.load(Relaxed) == 0
            && !self.shared_lane().is_some_and(LaneHeader::is_reset_told)
    }

    /// That error, or 0 also if another process that shares the socket has told it.
    pub(crate) fn still_owed(&self, fd: i32) -> i32 {
        let is_kernels = self.owed_for_kernel.load(Relaxed) != 0 && kernel::has_error(fd);
        if is_kernels || self.owes_alone() { self.owed() } else { 0 }
    }

    /// Where processes that share the socket say that they have told of its reset, which only the shim knows.
    fn shared_lane(&self) -> Option<&'static LaneHeader> {
        self.tx.lock().at.map(|at| at.outgoing().0)
    }

    /// Tells it.
    #[inline]
    pub(crate) fn take_owed(&self, fd: i32) -> Option<i32> {
        self.tell_owed(|| kernel::take_error(fd).is_some())
    }

    /// Tells it to a caller who takes the kernel's error by `take_kernels`, which says whether there still was one.
    pub(crate) fn tell_owed(&self, take_kernels: impl FnOnce() -> bool) -> Option<i32> {
        if !self.owes() {
            return None;
        }
        let stands_alone = self.owes_alone();
        self.ready.fetch_and(!OWES, SeqCst);
        let errno = self.owed.swap(0, Relaxed);
        self.shared_lane().into_iter().for_each(LaneHeader::note_reset_told);
        (errno != 0 && (take_kernels() || stands_alone)).then_some(errno)
    }

    /// Never offer this endpoint again.
    pub(crate) fn bar(&self, reason: Reason) {
        // Before the stage is read: see `attach::adopt`. That others may hold the socket is to be known when it is closed.
        let becomes = |before| (!is_of_unlisted(before)).then_some(reason as u32);
        let _ = self.barred.fetch_update(SeqCst, SeqCst, becomes);
    }

    /// Whether it is barred because others may hold the socket who are not listed as its [holders](Self::holders).
    pub(crate) fn has_unlisted_holders(&self) -> bool {
        is_of_unlisted(self.barred.load(SeqCst))
    }

    /// This option is one that shared memory does not emulate.
    pub(crate) fn blame(&self, option: SocketOption) {
        self.option.store(option.pack(), Relaxed);
        if let Some(entry) = self.entry() {
            entry.option.store(option.pack(), Relaxed);
        }
    }

    /// What was blamed last, packed.
    pub(crate) fn blamed(&self) -> u64 {
        self.option.load(Relaxed)
    }

    /// It is used. Counts it the first time.
    pub(crate) fn count_use(&self) {
        if !self.counted_as_used.swap(true, Relaxed) {
            process::count(Counter::Connections, 1);
        }
    }

    /// Whether a call has moved bytes of it by TCP, as far as this program knows.
    pub(crate) fn has_moved(&self) -> bool {
        self.moved.load(Relaxed)
    }

    pub(crate) fn note_moved(&self) {
        self.moved.store(true, Relaxed);
    }

    /// Counts it, the first time it is on shared memory.
    pub(crate) fn count_on_shm(&self) {
        if !self.counted_on_shm.swap(true, Relaxed) {
            process::count(Counter::ConnectionsOnShm, 1);
        }
    }

    /// Whether it has not been offered, and nothing is known of it that the kernel does not know.
    pub(crate) fn is_young(&self) -> bool {
        self.offered_at.load(Relaxed) == 0 && self.stage() == Stage::Plain && !self.owes()
    }

    /// Whether an epoll instance has it.
    pub(crate) fn is_in_a_set(&self) -> bool {
        let mut epolls = self.epolls.briefly();
        let has_it = !epolls.value().is_empty();
        epolls.end();
        has_it
    }

    /// Why it must not be offered.
    pub(crate) fn barred(&self) -> Option<Reason> {
        let code = self.barred.load(SeqCst);
        if code == 0 { None } else { Reason::parse(code as u16) }
    }

    /// Whether it is barred, and has left its link by now.
    pub(crate) fn is_back(&self) -> bool {
        self.barred().is_some() && !self.is_attached()
    }

    /// Whether it is the kernel's for good: barred, and on no link. Its data calls need not be announced (L4).
    #[inline]
    pub(crate) fn is_settled(&self) -> bool {
        self.ready.load(Relaxed) & SETTLED != 0
    }

    /// Makes it so if it can be. Under the locks, as [`adopt`](crate::life::attach::adopt), which is either over or finds it barred.
    pub(crate) fn settle(&self) {
        let can_be = || self.barred().is_some() && self.stage() == Stage::Plain && !self.owes();
        if can_be() {
            let (_tx, _rx) = (self.tx.lock(), self.rx.lock());
            if can_be() {
                self.ready.fetch_or(SETTLED, SeqCst);
            }
        }
    }

    /// Notes that its peer is on another host.
    pub(crate) fn note_remote(&self) {
        self.remote.store(true, Relaxed);
    }

    /// Whether it is, as far as has been found out.
    #[inline]
    pub(crate) fn is_remote(&self) -> bool {
        self.remote.load(Relaxed)
    }

    /// Its row in the page.
    pub(crate) fn entry(&self) -> Option<&'static page::Entry> {
        let entry = self.entry.load(Acquire);
        // SAFETY: rows lie in the page, which stays mapped for the life of the process.
        (!entry.is_null()).then(|| unsafe { &*entry })
    }

    pub(crate) fn set_entry(&self, entry: Option<&'static page::Entry>) {
        let pointer = entry.map_or(std::ptr::null_mut(), |entry| std::ptr::from_ref(entry).cast_mut());
        self.entry.store(pointer, Release);
    }

    /// Adds to the bytes that TCP received, for `shunt status`.
    #[inline]
    pub(crate) fn count_received(&self, bytes: usize) {
        if bytes != 0 {
            self.note_moved();
        }
        if let Some(entry) = self.entry() {
            entry.tcp_received.store(entry.tcp_received.load(Relaxed) + bytes as u64, Relaxed);
        }
    }

    /// From now on bytes go by a lane.
    pub(crate) fn note_lane(&self) {
        self.sent_by_lane.store(true, Relaxed);
    }

    /// Adds to the bytes that TCP sent. What it sends first after a lane it holds back (Nagle) for as long as it has no word that
    /// what came before the lane has arrived, which would have come with the answers that lanes have carried.
    #[inline]
    pub(crate) fn count_sent(&self, bytes: usize) {
        if bytes != 0 {
            self.note_moved();
        }
        if !self.is_remote() {
            order::note_by_tcp();
        }
        if self.sent_by_lane.load(Relaxed) && self.sent_by_lane.swap(false, Relaxed) {
            kernel::push(self.fd.load(Relaxed));
        }
        if let Some(entry) = self.entry() {
            entry.tcp_sent.store(entry.tcp_sent.load(Relaxed) + bytes as u64, Relaxed);
        }
    }

    /// Returns whether an end that the lane has told of is awaited from TCP: see [`crate::life::ending`].
    #[inline]
    pub(crate) fn awaits_end(&self) -> bool {
        self.end_awaited_since.load(Relaxed) != 0
    }

    /// Reports the sending direction for `shunt status`. Under its lock.
    pub(crate) fn report_tx(&self, side: &TxSide) {
        let Some(entry) = self.entry() else { return };
        entry.shm_sent.store(side.tx.lane_total(), Relaxed);
        process::count_tcp(entry, page::Which::Sent);
        let (road, reason) = described(side.tx.on_lane(), side.tx.reason());
        let word = road as u64 | u64::from(reason as u16) << 16;
        let _ = entry.roads.fetch_update(Relaxed, Relaxed, |old| Some(old & !0xffff_00ff | word));
    }

    /// Reports what has been received, and the road if it has changed. Under the lock.
    #[inline(always)]
    pub(crate) fn report_received(&self, side: &mut RxSide) {
        self.report_road(side);
        self.count_from_lane(side.rx.lane_total());
    }

    /// Reports the road if it has changed, as it may have after any look at what there is to receive. Under the lock.
    #[inline(always)]
    pub(crate) fn report_road(&self, side: &mut RxSide) {
        if side.told_on_lane != side.rx.on_lane() {
            self.report_rx(side);
        }
    }

    /// Reports that so many bytes have been received by lanes.
    #[inline(always)]
    pub(crate) fn count_from_lane(&self, total: u64) {
        if let Some(entry) = self.entry() {
            entry.shm_received.store(total, Relaxed);
        }
    }

    /// Reports the receiving direction. Under its lock.
    pub(crate) fn report_rx(&self, side: &mut RxSide) {
        side.told_on_lane = side.rx.on_lane();
        let Some(entry) = self.entry() else { return };
        entry.shm_received.store(side.rx.lane_total(), Relaxed);
        process::count_tcp(entry, page::Which::Received);
        let (road, reason) = described(side.rx.on_lane(), side.rx.reason());
        let word = (road as u64) << 8 | u64::from(reason as u16) << 32;
        let _ = entry.roads.fetch_update(Relaxed, Relaxed, |old| Some(old & !0xffff_0000_ff00 | word));
    }

    /// Gives the slot back. Nothing of it is attached any more.
    pub(crate) fn free(&self) {
        let name = self.reference();
        self.ready.store(APART, SeqCst);
        self.generation.fetch_add(1, AcqRel);
        if let Some(entry) = self.entry() {
            process::unlist(entry);
        }
        self.set_entry(None);
        if self.stage() != Stage::Plain {
            self.set_stage(Stage::Plain);
        }
        self.operations.store(0, Relaxed);
        self.offered_at.store(0, Relaxed);
        self.offered_as.store(0, Relaxed);
        self.counted_as_used.store(false, Relaxed);
        self.counted_on_shm.store(false, Relaxed);
        self.moved.store(false, Relaxed);
        self.option.store(0, Relaxed);
        self.barred.store(0, Relaxed);
        self.remote.store(false, Relaxed);
        self.was_begun.store(false, Relaxed);
        self.shut.store(0, Relaxed);
        self.owed.store(0, Relaxed);
        self.beside_kernel.set(Beside::default());
        self.peer_finished.store(false, Relaxed);
        self.sent_by_lane.store(false, Relaxed);
        self.low_water.clear();
        self.keepalive.clear();
        self.end_awaited_since.store(0, Relaxed);
        self.tells_waiting.store(false, Relaxed);
        self.owner.store(0, Relaxed);
        self.receive_timeout.store(0, Relaxed);
        self.send_timeout.store(0, Relaxed);
        self.distance.store(0, Relaxed);
        self.unanswered.answer();
        self.tx.set(TxSide::default());
        self.rx.set(RxSide::default());
        if self.is_in_a_set() {
            self.epolls.lock().clear();
        }
        FREE.lock().list.push(name.index());
    }
}

fn described(on_lane: bool, reason: Reason) -> (Road, Reason) {
    if on_lane { (Road::Shm, Reason::None) } else { (Road::Tcp, reason) }
}
