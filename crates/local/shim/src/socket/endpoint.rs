//! Endpoints: the connected TCP sockets of this process.
//!
//! [`Phase`] has the states of an endpoint, and their transitions. The other modules have its parts,
//! each with its own reset, and the operations on them. `slab` has the slots of all endpoints.

mod calls;
mod corrections;
mod descriptors;
mod ends;
mod fork;
mod identity;
mod offer_clock;
mod options;
mod owner;
mod pending_error;
mod phase;
mod requests;
mod slab;
mod statistics;

use std::cell::Cell;
use std::mem::offset_of;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::*};

use shunt_abi::option::SocketOption;
use shunt_abi::reason::Reason;
use shunt_transport::{Rx, Tx};

use crate::base::lock::Lock;
use crate::base::names::{EndpointRef, EpollRef};
use crate::base::pace::Pace;
use crate::base::rank;
use crate::base::table::{self, Entry};
use crate::base::upcall::Upcall;
use crate::socket::custody::Custody;
use crate::socket::links::{Attachment, Growth, Peer};
use crate::socket::low_water::LowWater;
use crate::socket::sharing::{self, Holders, Shareable};
use crate::socket::stall::Backlog;

use calls::Calls;
use corrections::Corrections;
use descriptors::Descriptors;
use ends::Ends;
use fork::Sharing;
pub(crate) use fork::{after_fork_in_child, expect_child_of_new, hold_locks, release_locks, reset_locks};
use identity::Identity;
pub(crate) use offer_clock::NEVER;
use offer_clock::OfferClock;
use options::Options;
use owner::Notified;
use pending_error::PendingError;
use phase::HAS_LOW_WATER;
pub(crate) use phase::{Event, Phase};
use requests::Requests;
pub(crate) use slab::{MOST, all, allocate, at, at_once, behind, made, renumber};
use statistics::Statistics;

/// The sending direction and the state that its lock guards.
#[derive(Default)]
pub(crate) struct TxSide {
    pub(crate) tx: Tx,
    pub(crate) at: Option<Attachment>,
    pub(crate) seen: Seen,
    /// The sender of the bytes that TCP has yet to take.
    pub(crate) custody: Custody,
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
    /// It must be the first field, because its first word is [`at_once`]'s.
    identity: Identity,
    calls: Calls,
    pending_error: PendingError,
    /// Why the endpoint must never be offered, as a reason code.
    barred: AtomicU32,
    notified: Notified,
    statistics: Statistics,
    socket: Descriptors,
    pub(crate) options: Options,
    pub(crate) offer: OfferClock,
    ends: Ends,
    pub(crate) corrections: Corrections,
    pub(crate) sharing: Sharing,
    pub(crate) tx: Lock<TxSide, { rank::SENDING }>,
    pub(crate) rx: Lock<RxSide, { rank::RECEIVING }>,
    /// The epoll instances with which the endpoint is registered.
    pub(crate) epolls: Lock<Vec<EpollRef>, { rank::ENDPOINT_EPOLLS }>,
    pub(crate) requests: Requests,
}

const _: () = assert!(offset_of!(Endpoint, identity) + offset_of!(Identity, word) == 0);
const _: () = assert!(offset_of!(Endpoint, notified) < 64 && offset_of!(Endpoint, statistics) < 64);
const _: () = assert!(offset_of!(Endpoint, options) + offset_of!(Options, low_water) < 128);

/// Ends an endpoint that only calls held, after the last of them has returned.
pub(crate) static END_HELD: Upcall<EndpointRef> = Upcall::new();
/// The number of attached endpoints.
static ATTACHED: AtomicU32 = AtomicU32::new(0);

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

impl Shareable for Endpoint {
    fn holders(&self) -> &Holders {
        &self.sharing.holders
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
        self.identity.index()
    }

    /// Returns the endpoint's handle.
    pub(crate) fn reference(&self) -> EndpointRef {
        self.identity.reference()
    }

    #[inline(always)]
    pub(crate) fn phase(&self) -> Phase {
        self.identity.word.phase(SeqCst)
    }

    /// Changes the phase by an event. Returns `false` if the event does nothing in this phase,
    /// perhaps because another thread was faster.
    pub(crate) fn change(&self, event: Event) -> bool {
        let Some((before, after)) = self.identity.word.change(event) else { return false };
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
            self.identity.word.clear(HAS_LOW_WATER);
        }
        // Another thread may have set it meanwhile.
        if !low_water.is_none() {
            self.identity.word.set(HAS_LOW_WATER);
        }
    }

    /// Lets [`at_once`] find the endpoint by this descriptor.
    pub(crate) fn remember(&self, fd: RawFd) {
        table::remember(fd, std::ptr::from_ref(self).cast());
    }

    #[inline]
    pub(crate) fn is_attached(&self) -> bool {
        self.identity.word.is_attached()
    }

    /// Returns whether the endpoint is attached to a link with this peer.
    pub(crate) fn is_linked_with(&self, peer: &Peer) -> bool {
        self.rx.lock().at.is_some_and(|at| std::ptr::eq(at.link.peer, peer))
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
    /// among its [holders](Sharing::holders).
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
        self.identity.word.phase(Relaxed) == Phase::Settled
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

    /// Makes the fields equal to those of a slot that was never used. [`allocate`] sets the ones
    /// that differ between connections.
    ///
    /// The pattern has no `..`, so a new field must be named here.
    fn reset(&self) {
        let Endpoint {
            // `free` has ended it, because other threads may still look at it.
            identity: _,
            // The calls themselves lower their counts.
            calls: _,
            pending_error,
            barred,
            notified,
            statistics,
            socket,
            options,
            offer,
            ends,
            corrections,
            sharing,
            tx,
            rx,
            epolls,
            requests,
        } = self;
        pending_error.reset();
        barred.store(0, Relaxed);
        notified.reset();
        statistics.reset();
        socket.reset();
        options.reset();
        offer.reset();
        ends.reset();
        corrections.reset();
        sharing.reset();
        requests.reset();
        tx.set(TxSide::default());
        rx.set(RxSide::default());
        if self.is_in_a_set() {
            epolls.lock().clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::signal::Shield;

    /// Describes each field of an endpoint that [`Endpoint::reset`] covers. The fields that are
    /// structures of this module have a line for each of their own fields. The pattern has no `..`,
    /// so a new field must be named here.
    fn contents(endpoint: &Endpoint) -> Vec<(&'static str, String)> {
        let Endpoint {
            identity: _,
            calls: _,
            pending_error,
            barred,
            notified,
            statistics,
            socket,
            options,
            offer,
            ends,
            corrections,
            sharing,
            tx,
            rx,
            epolls,
            requests,
        } = endpoint;
        let Corrections { counts, keepalive } = corrections;
        let (tx, rx) = (tx.lock(), rx.lock());
        let TxSide { tx, at, seen, custody, awaited_death, looked_for_holder } = &*tx;
        let RxSide { rx, at: rx_at, told_on_lane, pace } = &*rx;
        assert!(at.is_none() && rx_at.is_none(), "a test has no link");
        vec![
            ("pending_error", format!("{pending_error:#?}")),
            ("barred", format!("{barred:?}")),
            ("notified", format!("{notified:#?}")),
            ("statistics", format!("{statistics:#?}")),
            ("socket", format!("{socket:#?}")),
            ("options", format!("{options:#?}")),
            ("offer", format!("{offer:#?}")),
            ("ends", format!("{ends:#?}")),
            ("counts", format!("{:#?}", *counts.lock())),
            ("keepalive", format!("{keepalive:#?}")),
            ("sharing", format!("{sharing:#?}")),
            ("requests", format!("{requests:#?}")),
            ("tx", format!("{tx:?}")),
            ("custody", format!("{custody:?}")),
            ("seen", format!("{seen:?}")),
            ("awaited_death", format!("{awaited_death:?}")),
            ("looked_for_holder", format!("{looked_for_holder:?}")),
            ("rx", format!("{rx:?}")),
            ("told_on_lane", format!("{told_on_lane:?}")),
            ("pace", format!("{pace:#?}")),
            ("epolls", format!("{:?}", *epolls.lock())),
        ]
    }

    /// Returns the lines of a description that are no structure's first or last.
    fn values(description: &str) -> impl Iterator<Item = &str> {
        let is_frame =
            |line: &str| line.ends_with(['{', '(', '[']) || line.trim().starts_with(['}', ')', ']']);
        description.lines().filter(move |line| !is_frame(line))
    }

    /// Sets each field to a value that no new endpoint has. The test checks that it does.
    fn use_up(endpoint: &Endpoint) {
        endpoint.pending_error.use_up();
        endpoint.barred.store(2, Relaxed);
        endpoint.notified.use_up();
        endpoint.statistics.use_up();
        endpoint.socket.use_up();
        endpoint.options.use_up();
        endpoint.offer.use_up();
        endpoint.ends.use_up();
        endpoint.corrections.use_up();
        endpoint.sharing.use_up();
        endpoint.requests.use_up();
        endpoint.epolls.lock().push(EpollRef::new(1, 2));
        let mut tx = endpoint.tx.lock();
        tx.tx.adopt();
        tx.seen.sends = 13;
        tx.custody = Custody::Refused;
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
        for ((field, used), (_, unused)) in contents(&reused).iter().zip(&contents(&new)) {
            for (used, unused) in values(used).zip(values(unused)) {
                assert_ne!(used, unused, "`use_up` does not change this value of `{field}`");
            }
        }
        reused.reset();
        assert_eq!(contents(&reused), contents(&new));
    }
}
