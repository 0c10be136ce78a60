//! Attaching an endpoint to a link, falling back to TCP, and detaching.
//!
//! ```text
//!  adopt        on the link; each direction is still on TCP
//!    |
//!  try_watch    receiver: "watching", once no thread is inside a kernel receive (L4)
//!    |          sender: `sending_transport` switches to the lane at its next send
//!    |
//!  go_back      both directions fall back; the lanes are drained first
//!    |          give_back: the receiver returns its unread bytes, and the sender sends them by TCP
//!    |          take_back: the sender reclaims bytes that the receiver has not read (L9)
//!    |
//!  let_go       detached, once neither direction needs its lane
//! ```
//!
//! Example: a program passes an attached socket to another process. `give_back` marks the unread
//! bytes of the lane as returned, and both directions fall back. The sender sends the returned
//! bytes by TCP (`returning::send_again`), and then whatever follows. When both lanes are done with,
//! `let_go_if_done` detaches the endpoint, and the broker may reuse the lanes.

use shunt_abi::page::Counter;
use shunt_abi::reason::{Reason, Transport};
use shunt_ring::lane::End;

use crate::base::names::EndpointRef;
use crate::base::private::borrow;
use crate::base::table::{self, Entry};
use crate::base::upcall::Upcall;
use crate::base::{code, process};
use crate::epoll::{self, Leaving};
use crate::life::resets::notice_reset;
use crate::life::returning::{self, Rest};
use crate::socket::endpoint::{self, Endpoint, Event, Phase, RxSide, Seen, TxSide};
use crate::socket::keepalive::{Keepalive, Silence};
use crate::socket::links::{Attachment, Link};
use crate::socket::lost::has_unread_at_peer;
use crate::socket::low_water::LowWater;
use crate::socket::outgoing::could_take_back;
use crate::socket::sharing::{self, Heirs};
use crate::socket::tcp::Tcp;
use crate::socket::{offer_policy, peer_locality};

/// Reports to the broker that this process has detached from a connection of a link. Other
/// processes may still drain the lanes.
pub(crate) static RELEASE: Upcall<(Attachment, Heirs)> = Upcall::new();
/// Asks the broker to forget an offer.
pub(crate) static WITHDRAW: Upcall<EndpointRef> = Upcall::new();

/// How a close ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// As the kernel does.
    Plain,
    /// By a reset: bytes are unread, or TCP has not taken all bytes.
    Reset,
    /// The broker ends it.
    ByBroker,
}

/// Makes an endpoint fall back in the way that an epoll instance with it requires.
pub(crate) fn leave_for_a_set((endpoint, how, reason): (&Endpoint, Leaving, Reason)) {
    match how {
        Leaving::GoBack => go_back(endpoint, reason),
        Leaving::GiveBackAtOnce => give_back_at_once(endpoint, reason),
        Leaving::Bar => bar(endpoint, reason),
        Leaving::BarReading => bar_reading(endpoint, reason),
    }
}

/// Attaches a paired endpoint to its link. Fails if the endpoint has ended, or must stay on TCP.
pub(crate) fn adopt(
    name: EndpointRef,
    link: &'static Link,
    conn: usize,
    silence: Silence,
) -> Result<(), Reason> {
    let Some(endpoint) = name.resolve() else { return Err(Reason::Stale) };
    // The process may have forked since the offer.
    if let Some(reason) = sharing(endpoint) {
        return Err(reason);
    }
    {
        let mut tx = endpoint.tx.lock();
        let mut rx = endpoint.rx.lock();
        if let Some(reason) = endpoint.barred().or_else(code::objection) {
            return Err(reason);
        }
        // Another process that held the socket at the time of the offer may have shut it down.
        if endpoint.is_shut() || !shunt_sys::tcp::is_whole(borrow(endpoint.fd())) {
            return Err(Reason::ShutDown);
        }
        if endpoint::is_standard_stream(endpoint) {
            return Err(Reason::Stdio);
        }
        // A call that was in progress at the time of the offer may have moved bytes past the shim
        // since.
        if (Tcp { endpoint, fd: endpoint.fd() }).is_bypassed() {
            return Err(Reason::OffsetUnclear);
        }
        if tx.at.is_some() || name.resolve().is_none() || !link.occupy(conn, name) {
            return Err(Reason::Stale);
        }
        endpoint.change_low_water(LowWater::reclaim);
        let at = Attachment::new(link, conn);
        tx.at = Some(at);
        rx.at = Some(at);
        tx.seen = Seen::take_over(link, conn);
        tx.tx.adopt();
        rx.rx.adopt();
        // L4: from here on, no thread enters a kernel call without the lock.
        endpoint.change(Event::Attach);
        endpoint.report_tx(&tx);
        endpoint.report_rx(&mut rx);
    }
    process::count(Counter::Adopted, 1);
    endpoint.count_on_shm();
    peer_locality::paired(endpoint);
    change_keepalive(endpoint, |keepalive, fd| keepalive.arm(fd, silence));
    try_watch(endpoint);
    // A thread that barred or shared the endpoint after the checks above found it detached, and did
    // not make it fall back.
    let standard = endpoint::is_standard_stream(endpoint).then_some(Reason::Stdio);
    if let Some(reason) =
        endpoint.barred().or_else(code::objection).or(standard).or_else(|| sharing(endpoint))
    {
        give_back(endpoint, reason);
    }
    Ok(())
}

/// Calls `work` with the descriptor of a connection, unless the program is closing it. A close
/// takes the lock of the sending side after it has removed the descriptor from the table, so the
/// descriptor stays valid meanwhile.
pub(crate) fn at_number(endpoint: &Endpoint, work: impl FnOnce(i32)) {
    let _side = endpoint.tx.lock();
    let fd = endpoint.fd();
    if endpoint.is_held() || table::look_up(fd) == Entry::Endpoint(endpoint.reference()) {
        work(fd);
    }
}

/// Changes the keepalive probes of a connection.
pub(crate) fn change_keepalive(endpoint: &Endpoint, change: impl FnOnce(&Keepalive, i32)) {
    at_number(endpoint, |fd| change(&endpoint.corrections.keepalive, fd));
}

/// Returns why the endpoint must not be attached now: other processes may hold the socket, or an
/// epoll instance with which it is registered.
pub(crate) fn sharing(endpoint: &Endpoint) -> Option<Reason> {
    sharing::sharing(endpoint).or_else(|| epoll::is_shared(endpoint).then_some(Reason::Shared))
}

/// Announces "watching" in the receiving lane as soon as no thread is inside a kernel receive (L4).
pub(crate) fn try_watch(endpoint: &Endpoint) {
    let watched = {
        let mut rx = endpoint.rx.lock();
        let Some(at) = rx.at else { return };
        let tcp = Tcp { endpoint, fd: endpoint.fd() };
        rx.rx.try_watch(at.incoming().0, &tcp, endpoint.is_quiet_for_receive())
    };
    if watched {
        // A sender may start now. A thread that sleeps in an epoll instance must check the lane:
        // attaching the instance rings its doorbell.
        match epoll::attach_everywhere(endpoint) {
            // These reasons may pass.
            Some(reason @ (Reason::Shared | Reason::NewCode)) => go_back(endpoint, reason),
            Some(reason) => bar(endpoint, reason),
            None => {}
        }
    }
}

/// Returns the transport for the next send, and whether it has just changed to shared memory. It
/// reports the change for `shunt status`. The caller holds the sender's lock.
#[inline]
pub(crate) fn sending_transport(endpoint: &Endpoint, side: &mut TxSide, fd: i32) -> (Transport, bool) {
    let Some(at) = side.at else { return (Transport::Tcp, false) };
    if side.tx.on_lane() {
        return (Transport::Shm, false);
    }
    let quiet = endpoint.is_quiet_for_send();
    let transport = side.tx.transport(at.outgoing().0, &Tcp { endpoint, fd }, quiet);
    if transport == Transport::Shm {
        endpoint.note_lane();
        endpoint.report_tx(side);
    }
    (transport, transport == Transport::Shm)
}

/// Makes both directions fall back to TCP, for a named reason (L2). Bytes that are already in the
/// lanes are read first.
pub(crate) fn go_back(endpoint: &Endpoint, reason: Reason) {
    if !endpoint.is_attached() {
        return;
    }
    process::count_bypass(reason);
    let fd = endpoint.fd();
    if reason != Reason::PeerDied {
        notice_reset(endpoint, fd);
    }
    epoll::bury_everywhere(endpoint);
    {
        let mut tx = endpoint.tx.lock();
        if let Some(at) = tx.at {
            if reason == Reason::Fork {
                at.outgoing().0.note_shared();
                endpoint.change_low_water(LowWater::share);
            }
            if leaves_nothing(endpoint, &mut tx, at, reason) {
                tx.tx.take_back(at.outgoing().0, reason);
            }
            tx.tx.close(at.outgoing().0, reason);
            endpoint.report_tx(&tx);
            at.announce_bytes();
        }
    }
    {
        let mut rx = endpoint.rx.lock();
        if let Some(at) = rx.at {
            close_receiving(endpoint, &mut rx, at, reason);
        }
    }
    change_keepalive(endpoint, Keepalive::disarm);
    epoll::refresh(endpoint);
    // The peer may have returned bytes just before. These must precede whatever the caller sends
    // next.
    returning::send_again_if_returned(endpoint, fd);
    let_go_if_done(endpoint);
}

/// Returns whether a sender that falls back by its own decision must reclaim the unread bytes of
/// its lane (L9). It cannot reclaim them once it has left the lane, so TCP has to carry them.
/// Before a fork or an exec, [`take_back_little`] does this. If the peer has died or has stopped
/// reading, the bytes stay in the lane.
fn leaves_nothing(endpoint: &Endpoint, side: &mut TxSide, at: Attachment, reason: Reason) -> bool {
    let may_send = !matches!(reason, Reason::Fork | Reason::Exec | Reason::PeerDied | Reason::Stalled);
    may_send && side.tx.unread(at.outgoing().0) > 0 && could_take_back(endpoint, &at)
}

/// Reclaims the unread bytes of the lane before a fork or an exec, because no process can reclaim
/// them afterwards. It does so only if TCP surely has room for all of them now. Otherwise the rest
/// would remain for two processes to send.
pub(crate) fn take_back_little(endpoint: &Endpoint, reason: Reason) {
    const LITTLE: u64 = 16 * 1024;
    let fd = endpoint.fd();
    {
        let mut side = endpoint.tx.lock();
        let Some(at) = side.at else { return };
        let lane = at.outgoing().0;
        let has_little = side.tx.on_lane() && (1..=LITTLE).contains(&side.tx.unread(lane));
        // The kernel's memory for segments of the smallest usual size is less than three times
        // their bytes.
        let has_room = || shunt_sys::tcp::send_room(borrow(fd)).is_ok_and(|room| room >= 3 * LITTLE as u32);
        if !has_little || !could_take_back(endpoint, &at) || !has_room() || !side.tx.take_back(lane, reason) {
            return;
        }
    }
    returning::send_again(endpoint, fd);
}

/// Makes both directions fall back for a reader that the shim cannot reach: another program,
/// another process, or the kernel itself (L2). The unread bytes are returned to the sender, so that
/// they arrive by TCP in their place.
pub(crate) fn give_back(endpoint: &Endpoint, reason: Reason) {
    give_back_unread(endpoint, reason);
    go_back(endpoint, reason);
}

/// Returns the unread bytes to the sender, as the first half of [`give_back`]. If both ends belong
/// to this process, both must have done this before either falls back.
pub(crate) fn give_back_unread(endpoint: &Endpoint, reason: Reason) {
    if endpoint.is_attached() {
        let mut rx = endpoint.rx.lock();
        if let Some(at) = rx.at {
            let (lane, ring) = at.incoming();
            // A sender that has died sends nothing again, and TCP reports its death before the
            // broker does. Then the bytes must be read from the lane. Nor can TCP deliver to a
            // socket that has shut down both directions.
            let cannot_come = || endpoint.has_shut_both() || shunt_sys::tcp::hung_up(borrow(endpoint.fd()));
            let is_left = rx.rx.unread(lane, &ring) > 0 && cannot_come();
            if is_left || !rx.rx.give_back(lane, reason) {
                process::count_bypass(Reason::LeftBehind);
            }
            // The sender may not send for a long time, so it is notified where it waits to receive.
            at.announce_bytes();
        }
    }
}

/// Returns the unread bytes to the sender. If the other end is in this process too, this also sends
/// them again, because no later call on that end may do so.
pub(crate) fn give_back_at_once(endpoint: &Endpoint, reason: Reason) {
    if endpoint.is_attached() {
        give_back(endpoint, reason);
        endpoint::all().for_each(|other| returning::send_again_if_returned(other, other.fd()));
    }
}

/// Bars an endpoint for good, because a reader that the shim cannot see may take its bytes.
pub(crate) fn bar_reading(endpoint: &Endpoint, reason: Reason) {
    endpoint.bar(reason);
    give_back(endpoint, reason);
    mark(endpoint, reason);
}

/// Reclaims bytes of the lane that the receiver has not read in time (L9). They are sent by TCP, as
/// is every later byte.
pub(crate) fn take_back(endpoint: &Endpoint, reason: Reason) {
    {
        let mut side = endpoint.tx.lock();
        let Some(at) = side.at else { return };
        if !side.tx.take_back(at.outgoing().0, reason) {
            return;
        }
    }
    returning::send_again(endpoint, endpoint.fd());
    go_back(endpoint, reason);
}

/// Makes the receiving direction alone fall back. Returns `true` if it is on TCP already, because
/// there are no bytes before or in the lane.
pub(crate) fn stop_receiving(endpoint: &Endpoint, side: &mut RxSide, reason: Reason) -> bool {
    let Some(at) = side.at else { return true };
    process::count_bypass(reason);
    close_receiving(endpoint, side, at, reason);
    !side.rx.is_attached()
}

fn close_receiving(endpoint: &Endpoint, side: &mut RxSide, at: Attachment, reason: Reason) {
    let (lane, ring) = at.incoming();
    let tcp = Tcp { endpoint, fd: endpoint.fd() };
    side.rx.close(lane, &tcp, reason);
    // The direction leaves an empty lane immediately.
    side.rx.available(lane, &ring, &tcp);
    endpoint.report_rx(side);
    at.announce_space();
}

/// Bars an endpoint from offers, and makes it fall back if it is attached.
pub(crate) fn bar(endpoint: &Endpoint, reason: Reason) {
    endpoint.bar(reason);
    go_back(endpoint, reason);
    mark(endpoint, reason);
}

/// Shows in `shunt status` why an endpoint stays on TCP.
pub(crate) fn mark(endpoint: &Endpoint, reason: Reason) {
    let mut tx = endpoint.tx.lock();
    tx.tx.set_reason(reason);
    endpoint.report_tx(&tx);
    drop(tx);
    let mut rx = endpoint.rx.lock();
    rx.rx.set_reason(reason);
    endpoint.report_rx(&mut rx);
}

/// Detaches the endpoint once neither direction needs the link. Calls then use the kernel directly
/// again, and the endpoint may be offered anew.
pub(crate) fn let_go_if_done(endpoint: &Endpoint) {
    // The endpoint stays attached if the peer may die before it has read the rest, because the
    // program must get that error. It also stays if TCP may not deliver the end of the peer's
    // stream.
    if !endpoint.owes() && !endpoint.awaits_end() && !has_unread_at_peer(endpoint) {
        let_go(endpoint);
    }
}

/// Detaches the endpoint, even if the peer has not read everything. No error about the unread bytes
/// will be reported.
pub(crate) fn let_go(endpoint: &Endpoint) {
    let at = {
        let mut tx = endpoint.tx.lock();
        let mut rx = endpoint.rx.lock();
        let Some(at) = tx.at else { return };
        if tx.tx.is_adopted() && at.outgoing().0.is_closed() {
            tx.tx.close(at.outgoing().0, Reason::PeerWentBack);
        }
        if tx.tx.on_lane() || tx.tx.is_adopted() || rx.rx.is_attached() {
            return;
        }
        tx.at = None;
        rx.at = None;
        tx.seen.leave_memory(&at);
        let at = at.pin();
        at.link.vacate(at.conn);
        endpoint.offer.restart_with(offer_policy::again(endpoint));
        endpoint.change(Event::Detach);
        at
    };
    change_keepalive(endpoint, Keepalive::disarm);
    epoll::detach_everywhere(endpoint);
    // A thread that sleeps for bytes of this lane would not be notified of those of the next.
    if let Some(slot) = endpoint.owner() {
        slot.ring();
    }
    RELEASE.call((*at, sharing::heirs(endpoint)));
}

/// Publishes a shutdown to the peer, before a call shuts a direction down. Returns the state of
/// bytes that TCP had yet to take. If they are handed to the broker, it shuts the sending direction
/// down.
pub(crate) fn before_shutdown(endpoint: &Endpoint, how: i32) -> Rest {
    let reads = matches!(how, libc::SHUT_RD | libc::SHUT_RDWR);
    let writes = matches!(how, libc::SHUT_WR | libc::SHUT_RDWR);
    let shut = endpoint.add_shut(reads, writes);
    let mut tx = endpoint.tx.lock();
    let Some(at) = tx.at.filter(|_| writes || shut.both) else { return Rest::Sent };
    // The end is published before the FIN, so that a peer that finds the FIN also finds every byte
    // and this end. Once both directions are shut down, TCP answers any data by a reset. So the
    // peer must stop using its lane.
    if writes {
        at.outgoing().0.set_end(End::ShutDown);
        endpoint.corrections.keepalive.half_close(endpoint.fd());
    }
    if shut.both {
        at.outgoing().0.set_end(End::Closed);
    }
    finish_sending(endpoint, &mut tx, at, writes);
    drop(tx);
    let fd = endpoint.fd();
    if returning::has_rest(endpoint, fd) { returning::leave_rest(endpoint, fd, writes) } else { Rest::Sent }
}

/// Makes the sending direction fall back. If the stream `ends` here and all the rest of it is in
/// the lane, the lane says so.
fn finish_sending(endpoint: &Endpoint, side: &mut TxSide, at: Attachment, ends: bool) {
    let fd = endpoint.fd();
    let says_end = ends && endpoint.corrections.keepalive.is_needed();
    if says_end {
        // A direction that has not switched to its lane switches now, with no bytes.
        sending_transport(endpoint, side, fd);
        // Written before the lane ends. A receiver that finds the lane ended without it waits in
        // the kernel.
        at.outgoing().0.note_complete(true);
    }
    process::count_bypass(Reason::ShutDown);
    if !side.tx.finish(at.outgoing().0, Reason::ShutDown) && says_end {
        at.outgoing().0.note_complete(false);
    }
    endpoint.report_tx(side);
}

/// Notifies the peer after a shutdown. The FIN may never reach it, so it must check the lane.
pub(crate) fn after_shutdown(endpoint: &Endpoint) {
    if endpoint.corrections.keepalive.is_needed()
        && let Some(at) = endpoint.tx.lock().at
    {
        at.announce_bytes();
    }
}

/// Publishes the end to the peer before the last descriptor of an endpoint is closed.
pub(crate) fn before_close(endpoint: &Endpoint, fd: i32) -> Ending {
    epoll::bury_everywhere(endpoint);
    let unread = {
        let mut rx = endpoint.rx.lock();
        let RxSide { rx: state, at, .. } = &mut *rx;
        match at {
            Some(at) => {
                let (lane, ring) = at.incoming();
                let tcp = Tcp { endpoint, fd };
                let unread = state.available(lane, &ring, &tcp) > 0;
                state.close(lane, &tcp, Reason::ShutDown);
                at.announce_space();
                unread
            }
            None => false,
        }
    };
    {
        let mut tx = endpoint.tx.lock();
        if let Some(at) = tx.at {
            at.outgoing().0.set_end(End::Closed);
            finish_sending(endpoint, &mut tx, at, !unread && !resets_on_close(endpoint, fd));
        }
    }
    if returning::has_rest(endpoint, fd) {
        if unread || resets(fd) {
            // TCP would drop these bytes too.
            returning::abandon_rest(endpoint, fd);
            return Ending::Reset;
        }
        match returning::leave_rest(endpoint, fd, false) {
            Rest::Sent => {}
            Rest::Handed => return Ending::ByBroker,
            // A stream that ends early must not look complete.
            Rest::Lost => return Ending::Reset,
        }
    }
    if unread { Ending::Reset } else { Ending::Plain }
}

/// Returns whether the kernel answers a close of this socket by a reset. The kernel is queried only
/// where a FIN may be lost.
fn resets_on_close(endpoint: &Endpoint, fd: i32) -> bool {
    endpoint.corrections.keepalive.is_needed() && resets(fd)
}

/// Returns whether the kernel answers a close of the last descriptor by a reset, and drops what TCP
/// has not sent.
pub(crate) fn resets(fd: i32) -> bool {
    let linger = rustix::net::sockopt::socket_linger(borrow(fd));
    shunt_sys::tcp::has_unread(borrow(fd))
        || linger.is_ok_and(|linger| linger.is_some_and(|time| time.is_zero()))
}

/// Detaches and frees an endpoint after its last descriptor was closed.
#[inline]
pub(crate) fn after_close(endpoint: &Endpoint) {
    if endpoint.is_young() && !endpoint.is_in_a_set() {
        endpoint.free();
    } else {
        detach_closed(endpoint);
    }
}

/// Detaches and frees a closed endpoint that others may know of: the broker, the peer, or an epoll
/// instance.
#[inline(never)]
fn detach_closed(endpoint: &Endpoint) {
    let at = {
        let mut tx = endpoint.tx.lock();
        let mut rx = endpoint.rx.lock();
        rx.at = None;
        let at = tx.at.take();
        if let Some(at) = &at {
            tx.seen.leave_memory(at);
        }
        at.map(Attachment::pin)
    };
    offer_policy::note_end(endpoint);
    if endpoint.phase() == Phase::Offered || endpoint.barred() == Some(Reason::PeerNotOffered) {
        WITHDRAW.call(endpoint.reference());
    }
    epoll::forget_everywhere(endpoint);
    if let Some(at) = at {
        if endpoint.corrections.keepalive.is_needed() {
            at.announce_bytes();
        }
        at.link.vacate(at.conn);
        RELEASE.call((*at, sharing::heirs(endpoint)));
    }
    endpoint.free();
}
