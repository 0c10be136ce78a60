//! The life of an endpoint on a link: adopted, watched, going back, let go.

use shunt_abi::page::Counter;
use shunt_abi::reason::{Reason, Road};
use shunt_ring::lane::End;
use std::sync::atomic::Ordering::*;

use crate::base::above::Above;
use crate::base::names::EndpointRef;
use crate::base::private::borrow;
use crate::base::table::{self, Entry};
use crate::base::{code, kernel, process};
use crate::epoll::{self, Leaving};
use crate::life::resets::notice_reset;
use crate::socket::endpoint::{self, Endpoint, RxSide, Seen, Stage, TxSide};
use crate::socket::family::{self, Heirs};
use crate::socket::keepalive::{Keepalive, Silence};
use crate::socket::links::{Attachment, Link};
use crate::socket::lost::has_unread_at_peer;
use crate::socket::low_water::LowWater;
use crate::socket::tcp::Tcp;
use crate::socket::{distance, outgoing, worth};

/// Tells the broker that this process has left its place on a link for good; others may still drain the lanes.
pub(crate) static RELEASE: Above<(Attachment, Heirs)> = Above::new();
/// Tells it to forget an offer.
pub(crate) static WITHDRAW: Above<EndpointRef> = Above::new();

/// What a set wants of one that it has.
pub(crate) fn leave_for_a_set((endpoint, how, reason): (&Endpoint, Leaving, Reason)) {
    match how {
        Leaving::GoBack => go_back(endpoint, reason),
        Leaving::GiveBackAtOnce => give_back_at_once(endpoint, reason),
        Leaving::Bar => bar(endpoint, reason),
        Leaving::BarReading => bar_reading(endpoint, reason),
    }
}

/// Puts a paired endpoint on its link, unless it is not there any more or must not be.
pub(crate) fn adopt(
    name: EndpointRef,
    link: &'static Link,
    conn: usize,
    silence: Silence,
) -> Result<(), Reason> {
    let Some(endpoint) = name.resolve() else { return Err(Reason::Stale) };
    // It may have been offered before a fork.
    if let Some(reason) = sharing(endpoint) {
        return Err(reason);
    }
    {
        let mut tx = endpoint.tx.lock();
        let mut rx = endpoint.rx.lock();
        if let Some(reason) = endpoint.barred().or_else(code::objection) {
            return Err(reason);
        }
        // Another process may have shut it down that held it too when it was offered.
        if endpoint.is_shut() || !shunt_sys::tcp::is_whole(borrow(endpoint.fd.load(Relaxed))) {
            return Err(Reason::ShutDown);
        }
        if endpoint::is_standard_stream(endpoint) {
            return Err(Reason::Stdio);
        }
        // What was under way when it was offered may have shown it since.
        if (Tcp { endpoint, fd: endpoint.fd.load(Relaxed) }).is_bypassed() {
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
        // L4: from here on nobody enters a kernel call without the lock.
        endpoint.set_stage(Stage::Attached);
        endpoint.report_tx(&tx);
        endpoint.report_rx(&mut rx);
    }
    process::count(Counter::Adopted, 1);
    endpoint.count_on_shm();
    distance::paired(endpoint);
    change_keepalive(endpoint, |keepalive, fd| keepalive.arm(fd, silence));
    try_watch(endpoint);
    // Whoever barred or shared it since the looks above has seen it unattached.
    let standard = endpoint::is_standard_stream(endpoint).then_some(Reason::Stdio);
    if let Some(reason) =
        endpoint.barred().or_else(code::objection).or(standard).or_else(|| sharing(endpoint))
    {
        give_back(endpoint, reason);
    }
    Ok(())
}

/// Does something to a connection's socket, by its number, unless that is about to be closed: a close takes this lock after the
/// table has forgotten the number. Under the lock of the sending side.
pub(crate) fn at_number(endpoint: &Endpoint, work: impl FnOnce(i32)) {
    let _side = endpoint.tx.lock();
    let fd = endpoint.fd.load(Relaxed);
    if endpoint.is_held() || table::look_up(fd) == Entry::Endpoint(endpoint.reference()) {
        work(fd);
    }
}

/// Changes the probes of a connection.
pub(crate) fn change_keepalive(endpoint: &Endpoint, change: impl FnOnce(&Keepalive, i32)) {
    at_number(endpoint, |fd| change(&endpoint.keepalive, fd));
}

/// Why it must not be put on shared memory now: other processes may hold the socket, or a set that it is in.
pub(crate) fn sharing(endpoint: &Endpoint) -> Option<Reason> {
    family::sharing(endpoint).or_else(|| epoll::is_shared(endpoint).then_some(Reason::Shared))
}

/// L4, receiver: says "watching" as soon as no thread is inside the kernel on this socket.
pub(crate) fn try_watch(endpoint: &Endpoint) {
    let watched = {
        let mut rx = endpoint.rx.lock();
        let Some(at) = rx.at else { return };
        let tcp = Tcp { endpoint, fd: endpoint.fd.load(Relaxed) };
        rx.rx.try_watch(at.incoming().0, &tcp, endpoint.is_quiet_for_receive())
    };
    if watched {
        // A sender may begin at once. Whoever sleeps in an epoll set is told to look: attaching rings its doorbell.
        match epoll::attach_everywhere(endpoint) {
            // Not for good.
            Some(reason @ (Reason::Shared | Reason::NewCode)) => go_back(endpoint, reason),
            Some(reason) => bar(endpoint, reason),
            None => {}
        }
    }
}

/// The road for the sender, under its lock; tells `shunt status` when it changes.
#[inline]
pub(crate) fn sending_road(endpoint: &Endpoint, side: &mut TxSide, fd: i32) -> (Road, bool) {
    let Some(at) = side.at else { return (Road::Tcp, false) };
    if side.tx.on_lane() {
        return (Road::Shm, false);
    }
    let quiet = endpoint.is_quiet_for_send();
    let road = side.tx.road(at.outgoing().0, &Tcp { endpoint, fd }, quiet);
    if road == Road::Shm {
        endpoint.note_lane();
        endpoint.report_tx(side);
    }
    (road, road == Road::Shm)
}

/// L2: both directions go back to TCP, for a named reason. Bytes already in the lanes are read first.
pub(crate) fn go_back(endpoint: &Endpoint, reason: Reason) {
    if !endpoint.is_attached() {
        return;
    }
    process::count_bypass(reason);
    let fd = endpoint.fd.load(Relaxed);
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
    // The receiver may have been first, with a return: that goes before whatever the caller sends next.
    send_again_if_returned(endpoint, fd);
    let_go_if_done(endpoint);
}

/// L9 for a sender that goes back by its own decision: of a lane that it has left nothing can be taken back any more, so what the
/// receiver has not read goes by TCP at once. What must be done before a fork or an exec is [`take_back_little`]; and of who is gone
/// or has stopped reading it is to stay where it is.
fn leaves_nothing(endpoint: &Endpoint, side: &mut TxSide, at: Attachment, reason: Reason) -> bool {
    let may_send = !matches!(reason, Reason::Fork | Reason::Exec | Reason::PeerDied | Reason::Stalled);
    may_send && side.tx.unread(at.outgoing().0) > 0 && could_take_back(endpoint, &at)
}

/// Whether what is taken back would come by TCP: it answers by a reset once the peer has shut down both directions, and sends nothing
/// behind this end's own FIN.
pub(crate) fn could_take_back(endpoint: &Endpoint, at: &Attachment) -> bool {
    !matches!(at.incoming().0.end(), End::Closed | End::Died) && !endpoint.has_shut_writing()
}

/// The same before this process is copied, or becomes another program: what is left then, nobody can take back. Only as much as TCP
/// surely takes now, since afterwards either of two processes would send the rest.
pub(crate) fn take_back_little(endpoint: &Endpoint, reason: Reason) {
    const LITTLE: u64 = 16 * 1024;
    let fd = endpoint.fd.load(Relaxed);
    {
        let mut side = endpoint.tx.lock();
        let Some(at) = side.at else { return };
        let lane = at.outgoing().0;
        let has_little = side.tx.on_lane() && (1..=LITTLE).contains(&side.tx.unread(lane));
        // Three times as much of the kernel's memory is enough for segments of the least size that is usual.
        let has_room = || shunt_sys::tcp::send_room(borrow(fd)).is_ok_and(|room| room >= 3 * LITTLE as u32);
        if !has_little || !could_take_back(endpoint, &at) || !has_room() || !side.tx.take_back(lane, reason) {
            return;
        }
    }
    send_again(endpoint, fd);
}

/// L2 for a reader that will be out of reach (another program, another process, the kernel itself): both directions go
/// back, and what has not been read is given back to the sender, so that it comes by TCP in its place.
pub(crate) fn give_back(endpoint: &Endpoint, reason: Reason) {
    give_back_unread(endpoint, reason);
    go_back(endpoint, reason);
}

/// The first half of that: where both ends are this process's, each must have given back before either goes.
pub(crate) fn give_back_unread(endpoint: &Endpoint, reason: Reason) {
    if endpoint.is_attached() {
        let mut rx = endpoint.rx.lock();
        if let Some(at) = rx.at {
            let (lane, ring) = at.incoming();
            // A sender that has died sends nothing again, and TCP tells of that before the broker does: then it is to be read here.
            // Nor could what is sent again come to a socket that has shut down both directions.
            let cannot_come =
                || endpoint.has_shut_both() || shunt_sys::tcp::hung_up(borrow(endpoint.fd.load(Relaxed)));
            let is_left = rx.rx.unread(lane, &ring) > 0 && cannot_come();
            if is_left || !rx.rx.give_back(lane, reason) {
                process::count_bypass(Reason::LeftBehind);
            }
            // The sender may have nothing to say for a long time: wake it where it waits to receive.
            at.announce_bytes();
        }
    }
}

/// Gives back where nobody may make a call that would send again, if the other end is this process's too.
pub(crate) fn give_back_at_once(endpoint: &Endpoint, reason: Reason) {
    if endpoint.is_attached() {
        give_back(endpoint, reason);
        endpoint::all().for_each(|other| send_again_if_returned(other, other.fd.load(Relaxed)));
    }
}

/// Never offer this endpoint again, because somebody reads from it whom we cannot see.
pub(crate) fn bar_reading(endpoint: &Endpoint, reason: Reason) {
    endpoint.bar(reason);
    give_back(endpoint, reason);
    mark(endpoint, reason);
}

/// Sends them again if so. Outside all locks.
#[inline]
pub(crate) fn send_again_if_returned(endpoint: &Endpoint, fd: i32) {
    if outgoing::is_returned(endpoint) {
        send_again(endpoint, fd);
    }
}

/// Sends by TCP what the receiver has given back. `false` if TCP cannot take it all now.
pub(crate) fn send_again(endpoint: &Endpoint, fd: i32) -> bool {
    let mut side = endpoint.tx.lock();
    let Some(at) = side.at else { return true };
    let (lane, ring) = at.outgoing();
    side.tx.notice_return(lane);
    while let Some(range) = side.tx.returning() {
        let (base, len) = ring.run(range.start, (range.end - range.start) as usize);
        // It is the program's to be told.
        if kernel::has_error(fd) {
            side.tx.returned(len);
            continue;
        }
        // SAFETY: a run of the mapped ring; the kernel copies it, whatever the peer does to it meanwhile.
        match unsafe { kernel::send_now(fd, base, len) } {
            Ok(count) => {
                endpoint.count_sent(count);
                side.tx.returned(count);
            }
            Err(libc::EAGAIN) => return false,
            // The connection is over; nobody will read it.
            Err(_) => side.tx.returned(len),
        }
    }
    endpoint.report_tx(&side);
    drop(side);
    epoll::refresh(endpoint);
    let_go_if_done(endpoint);
    true
}

/// L9: nobody has come for what lies in the lane. It goes by TCP, as does what follows.
pub(crate) fn take_back(endpoint: &Endpoint, reason: Reason) {
    {
        let mut side = endpoint.tx.lock();
        let Some(at) = side.at else { return };
        if !side.tx.take_back(at.outgoing().0, reason) {
            return;
        }
    }
    send_again(endpoint, endpoint.fd.load(Relaxed));
    go_back(endpoint, reason);
}

/// The receiving direction alone goes back. `true` if it is TCP's at once: nothing lies before or in the lane.
pub(crate) fn stop_receiving(endpoint: &Endpoint, side: &mut RxSide, reason: Reason) -> bool {
    let Some(at) = side.at else { return true };
    process::count_bypass(reason);
    close_receiving(endpoint, side, at, reason);
    !side.rx.is_attached()
}

fn close_receiving(endpoint: &Endpoint, side: &mut RxSide, at: Attachment, reason: Reason) {
    let (lane, ring) = at.incoming();
    let tcp = Tcp { endpoint, fd: endpoint.fd.load(Relaxed) };
    side.rx.close(lane, &tcp, reason);
    // An empty lane is left at once.
    side.rx.available(lane, &ring, &tcp);
    endpoint.report_rx(side);
    at.announce_space();
}

/// Never offer this endpoint, and take it back if it was.
pub(crate) fn bar(endpoint: &Endpoint, reason: Reason) {
    endpoint.bar(reason);
    go_back(endpoint, reason);
    mark(endpoint, reason);
}

/// Shows why an endpoint stays on TCP.
pub(crate) fn mark(endpoint: &Endpoint, reason: Reason) {
    let mut tx = endpoint.tx.lock();
    tx.tx.set_reason(reason);
    endpoint.report_tx(&tx);
    drop(tx);
    let mut rx = endpoint.rx.lock();
    rx.rx.set_reason(reason);
    endpoint.report_rx(&mut rx);
}

/// Leaves the link once neither direction needs it: the fast path is TCP's again, and the endpoint may be offered anew.
pub(crate) fn let_go_if_done(endpoint: &Endpoint) {
    // If the peer dies before it has read the rest, that is to be told; and so is an end that TCP may not bring.
    if !endpoint.owes() && !endpoint.awaits_end() && !has_unread_at_peer(endpoint) {
        let_go(endpoint);
    }
}

/// The same also where the peer has not read everything: what becomes of that is nobody's affair any more.
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
        endpoint.offer_after.store(worth::again(endpoint), Relaxed);
        endpoint.operations.store(0, Relaxed);
        endpoint.set_stage(Stage::Plain);
        at
    };
    change_keepalive(endpoint, Keepalive::disarm);
    epoll::detach_everywhere(endpoint);
    // Whoever sleeps for bytes of its lane would not hear of those of the next.
    if let Some(slot) = endpoint.owner() {
        slot.ring();
    }
    RELEASE.call((*at, family::heirs(endpoint)));
}

/// What the peer is told before a direction is shut down by a call.
pub(crate) fn before_shutdown(endpoint: &Endpoint, how: i32) {
    let reads = matches!(how, libc::SHUT_RD | libc::SHUT_RDWR);
    let writes = matches!(how, libc::SHUT_WR | libc::SHUT_RDWR);
    let shut = endpoint.add_shut(reads, writes);
    let mut tx = endpoint.tx.lock();
    let Some(at) = tx.at.filter(|_| writes || shut.both) else { return };
    // Published before the FIN, so that whoever sees the FIN sees every byte and this too. Once both directions are
    // shut TCP answers what still comes by a reset, so the peer must not go on with its lane.
    if writes {
        at.outgoing().0.set_end(End::ShutDown);
        endpoint.keepalive.half_close(endpoint.fd.load(Relaxed));
    }
    if shut.both {
        at.outgoing().0.set_end(End::Closed);
    }
    finish_sending(endpoint, &mut tx, at, writes);
    drop(tx);
    send_again_if_returned(endpoint, endpoint.fd.load(Relaxed));
}

/// The sending direction goes back. If it `ends` its stream and all of that is in the lane, the receiver is told.
fn finish_sending(endpoint: &Endpoint, side: &mut TxSide, at: Attachment, ends: bool) {
    let fd = endpoint.fd.load(Relaxed);
    let says_end = ends && endpoint.keepalive.is_needed();
    if says_end {
        // One that has not begun begins with nothing.
        sending_road(endpoint, side, fd);
        // Before the lane ends: a receiver that finds it ended without this goes into the kernel to wait.
        at.outgoing().0.note_complete(true);
    }
    process::count_bypass(Reason::ShutDown);
    if !side.tx.finish(at.outgoing().0, Reason::ShutDown) && says_end {
        at.outgoing().0.note_complete(false);
    }
    endpoint.report_tx(side);
}

/// After a shutdown. The FIN may never come to the peer, which then must look at the lane.
pub(crate) fn after_shutdown(endpoint: &Endpoint) {
    if endpoint.keepalive.is_needed()
        && let Some(at) = endpoint.tx.lock().at
    {
        at.announce_bytes();
    }
}

/// What the peer is told, and the kernel asked, before the last descriptor of an endpoint is closed. `true` if
/// unread bytes demand a reset.
pub(crate) fn before_close(endpoint: &Endpoint, fd: i32) -> bool {
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
    send_again_if_returned(endpoint, fd);
    unread
}

/// Whether the kernel answers a close of this socket by a reset. Asked only where a FIN may be lost.
fn resets_on_close(endpoint: &Endpoint, fd: i32) -> bool {
    endpoint.keepalive.is_needed()
        && (shunt_sys::tcp::has_unread(borrow(fd))
            || rustix::net::sockopt::socket_linger(borrow(fd))
                .is_ok_and(|linger| linger.is_some_and(|time| time.is_zero())))
}

/// After the last descriptor was closed.
pub(crate) fn after_close(endpoint: &Endpoint) {
    if endpoint.is_young() && !endpoint.is_in_a_set() {
        return endpoint.free();
    }
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
    worth::note_end(endpoint);
    if endpoint.stage() == Stage::Offered {
        WITHDRAW.call(endpoint.reference());
    }
    epoll::forget_everywhere(endpoint);
    if let Some(at) = at {
        if endpoint.keepalive.is_needed() {
            at.announce_bytes();
        }
        at.link.vacate(at.conn);
        RELEASE.call((*at, family::heirs(endpoint)));
    }
    endpoint.free();
}
