//! The life of an endpoint on a link: adopted, watched, going back, let go.

use shunt_abi::page::Counter;
use shunt_abi::reason::{Reason, Road};
use shunt_ring::lane::End;
use shunt_sys::tcp::Beside;
use std::sync::atomic::Ordering::*;

use crate::endpoint::{Endpoint, EndpointRef, RxSide, Stage, TxSide};
use crate::kernel::Tcp;
use crate::links::{Attachment, Link};
use crate::ops::descriptors;
use crate::private::borrow;
use crate::{control, distance, epoll, errno, family, kernel, process, real, worth};

/// How long the broker's word about a death is waited for. Only a reader of end of file whose own bytes lie unread waits,
/// and only once.
const DEATH_NEWS_NANOS: u64 = 100_000_000;
/// How long the kernel's own reset is waited for. On this host it comes before the call that brings it forth returns.
const RESET_NANOS: u64 = 5_000_000;

/// Puts a paired endpoint on its link, unless it is not there any more or must not be.
pub(crate) fn adopt(name: EndpointRef, link: &'static Link, conn: usize) -> Result<(), Reason> {
    let Some(endpoint) = name.resolve() else { return Err(Reason::Stale) };
    // It may have been offered before a fork.
    if let Some(reason) = sharing(endpoint) {
        return Err(reason);
    }
    {
        let mut tx = endpoint.tx.lock();
        let mut rx = endpoint.rx.lock();
        if let Some(reason) = endpoint.barred() {
            return Err(reason);
        }
        // Another process may have shut it down that held it too when it was offered.
        if endpoint.is_shut() || !shunt_sys::tcp::is_whole(borrow(endpoint.fd.load(Relaxed))) {
            return Err(Reason::ShutDown);
        }
        if descriptors::is_standard_stream(endpoint) {
            return Err(Reason::Stdio);
        }
        if tx.at.is_some() || name.resolve().is_none() || !link.occupy(conn, name) {
            return Err(Reason::Stale);
        }
        endpoint.low_water.reclaim();
        let at = Attachment::new(link, conn);
        tx.at = Some(at);
        rx.at = Some(at);
        tx.backed.set(0);
        tx.tx.adopt();
        rx.rx.adopt();
        // L4: from here on nobody enters a kernel call without the lock.
        endpoint.set_stage(Stage::Attached);
        endpoint.report_tx(&tx);
        endpoint.report_rx(&mut rx);
    }
    process::count(Counter::Adopted, 1);
    distance::paired(endpoint);
    try_watch(endpoint);
    // Whoever barred or shared it since the looks above has seen it unattached.
    let standard = descriptors::is_standard_stream(endpoint).then_some(Reason::Stdio);
    if let Some(reason) = endpoint.barred().or(standard).or_else(|| sharing(endpoint)) {
        give_back(endpoint, reason);
    }
    Ok(())
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
            Some(Reason::Shared) => go_back(endpoint, Reason::Shared),
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
                endpoint.low_water.share();
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
    if reason == Reason::PeerDied {
        epoll::desert(endpoint);
    } else {
        epoll::refresh(endpoint);
    }
    // The receiver may have been first, with a return: that goes before whatever the caller sends next.
    send_again_if_returned(endpoint, fd);
    let_go_if_done(endpoint);
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
            if !rx.rx.give_back(at.incoming().0, reason) {
                process::count_bypass(Reason::LeftBehind);
            }
            // The sender may have nothing to say for a long time: wake it where it waits to receive.
            at.announce_bytes();
        }
    }
}

/// Never offer this endpoint again, because somebody reads from it whom we cannot see.
pub(crate) fn bar_reading(endpoint: &Endpoint, reason: Reason) {
    endpoint.bar(reason);
    give_back(endpoint, reason);
    mark(endpoint, reason);
}

/// Whether the receiver at the other end has given bytes back. Every waiter asks when it looks, because the sender may
/// have nothing to say for a long time.
#[inline]
pub(crate) fn is_returned(endpoint: &Endpoint) -> bool {
    let at = endpoint.rx.lock().at;
    // The flag stays in the lane; that it has been dealt with, only the sending direction knows.
    at.is_some_and(|at| at.outgoing().0.is_returned()) && endpoint.tx.lock().tx.on_lane()
}

/// Sends them again if so. Outside all locks.
#[inline]
pub(crate) fn send_again_if_returned(endpoint: &Endpoint, fd: i32) {
    if is_returned(endpoint) {
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

/// The sending direction alone goes back.
pub(crate) fn stop_sending(endpoint: &Endpoint, side: &mut TxSide, reason: Reason) {
    if let Some(at) = side.at {
        process::count_bypass(reason);
        side.tx.close(at.outgoing().0, reason);
        endpoint.report_tx(side);
    }
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

/// Whether bytes of ours lie in a lane that the peer has not read, and has not given back; and it still matters.
pub(crate) fn has_unread_at_peer(endpoint: &Endpoint) -> bool {
    let mut side = endpoint.tx.lock();
    let Some(at) = side.at else { return false };
    let lane = at.outgoing().0;
    !lane.is_returned() && !lane.is_reset_told() && side.tx.unread(lane) > 0
}

/// For a call that shows what has become of the connection, though it moves no bytes: see [`reset_if_lost`].
pub(crate) fn notice_reset(endpoint: &Endpoint, fd: i32) {
    if may_be_lost(endpoint, fd) {
        reset_if_lost(endpoint, fd);
    }
}

/// Whether the broker says what [`reset_if_lost`] is about. Every waiter asks when it looks, because TCP tells nobody of the
/// death of a peer that had finished before.
pub(crate) fn is_lost(endpoint: &Endpoint, fd: i32) -> bool {
    let at = endpoint.rx.lock().at;
    at.is_some_and(|at| end(&at) == End::Died) && may_be_lost(endpoint, fd)
}

/// How the peer's sending direction ended, as far as that can be told. Its process has died; but if it had shut the connection
/// down before, the kernel tells nothing new, and if it has forked, a child may hold the socket until the broker says otherwise.
fn end(at: &Attachment) -> End {
    let incoming = at.incoming().0;
    match incoming.end() {
        End::Died if incoming.was_shut_down() && incoming.was_shared() && !incoming.was_abandoned() => {
            End::ShutDown
        }
        end => end,
    }
}

fn may_be_lost(endpoint: &Endpoint, fd: i32) -> bool {
    endpoint.is_attached() && has_unread_at_peer(endpoint) && shunt_sys::tcp::hung_up(borrow(fd))
}

/// TCP has ended. If that was the death of the peer's process, with bytes of ours unread in the lane, TCP would have
/// reset the connection: then this makes of the kernel's socket what a reset leaves behind. `true` if it did.
pub(crate) fn reset_if_lost(endpoint: &Endpoint, fd: i32) -> bool {
    let is_lost = reset_in_a_set(endpoint, fd);
    if is_lost {
        // Whether there is room is TCP's to say again.
        epoll::refresh(endpoint);
    }
    is_lost
}

/// The same for one who holds the lock of an epoll instance, and brings the sets up to date later.
pub(crate) fn reset_in_a_set(endpoint: &Endpoint, fd: i32) -> bool {
    let had_finished = abandon_if_lost(endpoint, fd);
    if let Some(had_finished) = had_finished {
        reset(endpoint, fd, had_finished);
    }
    had_finished.is_some()
}

/// The same before another program goes on with the socket that nobody can tell of an error. It is told by the kernel then, if
/// that has no bytes to keep.
pub(crate) fn notice_reset_for_another(endpoint: &Endpoint, fd: i32) {
    if may_be_lost(endpoint, fd) {
        match abandon_if_lost(endpoint, fd) {
            Some(false) if !shunt_sys::tcp::has_unread(borrow(fd)) => dissolve(fd),
            Some(had_finished) => reset(endpoint, fd, had_finished),
            None => {}
        }
    }
}

/// Whether the connection is lost as [`reset_if_lost`] says; its lane is given up then. `Some` says whether the peer had finished
/// before.
fn abandon_if_lost(endpoint: &Endpoint, fd: i32) -> Option<bool> {
    let incoming = || {
        let at = endpoint.tx.lock().at?;
        let lane = at.incoming().0;
        Some((end(&at), lane.was_shut_down(), lane.was_shared()))
    };
    // The kernel has closed the dead process's socket; the broker's word follows at once, if there is a broker.
    let mut deadline = None;
    let mut is_worth_waiting = || {
        if deadline.is_none() {
            let is_over = shunt_sys::tcp::hung_up(borrow(fd));
            let mut side = endpoint.tx.lock();
            let first = is_over && !std::mem::replace(&mut side.awaited_death, true);
            let epoch = side.at.filter(|at| first && !at.link.is_gone()).map(|at| at.link.epoch);
            drop(side);
            let patience = if epoch.is_some_and(control::has_broker) { DEATH_NEWS_NANOS } else { 0 };
            deadline = Some(process::now() + patience);
        }
        deadline.is_some_and(|deadline| process::now() < deadline)
    };
    let had_finished = loop {
        match incoming().filter(|_| has_unread_at_peer(endpoint)) {
            // A child may hold the socket still.
            Some((End::Died, had_finished, _)) if shunt_sys::tcp::hung_up(borrow(fd)) => break had_finished,
            Some((End::Open, ..)) if is_worth_waiting() => nap(),
            // One of those that shared it has closed it, and there is an end without a shutdown: the other has died, since a
            // close by the last of them resets.
            Some((End::Closed, false, true)) if shunt_sys::tcp::hung_up(borrow(fd)) => break false,
            _ => return None,
        }
    };
    let mut side = endpoint.tx.lock();
    let at = side.at?;
    process::count_bypass(Reason::PeerDied);
    side.tx.abandon(at.outgoing().0, Reason::PeerDied);
    endpoint.report_tx(&side);
    Some(had_finished)
}

/// Makes of the kernel's socket what a reset leaves behind.
fn reset(endpoint: &Endpoint, fd: i32, had_finished: bool) {
    if had_finished {
        // Its FIN came long before, so this is no reset of an established connection.
        provoke_reset(endpoint, fd);
        return;
    }
    // What TCP resets has no FIN, which the kernel counts; none has come if it has reset the connection by itself.
    if shunt_sys::tcp::peer_has_finished(borrow(fd)).unwrap_or_else(|| !kernel::has_error(fd)) {
        count_beside(endpoint, Beside { received: LESS, ..Beside::default() });
    }
    if provoke_reset(endpoint, fd) {
        // The kernel has an error of another name, since the FIN came first, or none, since both ends had finished. With
        // none it may also have been told before.
        if kernel::has_error(fd) || has_finished(endpoint) {
            endpoint.owe(fd, libc::ECONNRESET);
        }
    } else {
        dissolve(fd);
    }
}

/// Whether this end has shut its sending direction down, be it by another process that shares the socket.
fn has_finished(endpoint: &Endpoint) -> bool {
    endpoint.has_shut_writing() || endpoint.tx.lock().at.is_some_and(|at| at.outgoing().0.was_shut_down())
}

/// The same by giving up what the kernel has received.
fn dissolve(fd: i32) {
    let before = errno::get();
    kernel::dissolve(fd);
    // SAFETY: a plain call on the program's descriptor. It fails with ENOTCONN and marks both directions as over all the
    // same.
    unsafe { real::shutdown(fd, libc::SHUT_RDWR) };
    errno::set(before);
}

/// The program has been told of a reset, so what the peer has not read will cause no other.
pub(crate) fn reset_is_told(endpoint: &Endpoint) {
    {
        let mut side = endpoint.tx.lock();
        let Some(at) = side.at else { return };
        at.outgoing().0.note_reset_told();
        side.tx.abandon(at.outgoing().0, Reason::PeerDied);
        endpoint.report_tx(&side);
    }
    // Whether there is room is TCP's to say again.
    epoll::refresh(endpoint);
}

/// Has the kernel reset the connection, with all that it has received, and all that it says of it, left as it is: nobody holds
/// the other socket any more, and bytes that reach it bring forth a reset. `false` if none has come.
fn provoke_reset(endpoint: &Endpoint, fd: i32) -> bool {
    let is_over = || shunt_sys::tcp::state(borrow(fd)) == Ok(shunt_sys::tcp::CLOSE);
    // Reset already: a send would take the error, which is the program's to be told.
    if is_over() {
        return true;
    }
    // An urgent one: should somebody hold it after all, whom nobody has seen, the stream has no byte more.
    if !kernel::send_urgent_now(fd) {
        return false;
    }
    count_beside(endpoint, Beside { sent: LESS, ..Beside::default() });
    let deadline = process::now() + RESET_NANOS;
    loop {
        if is_over() {
            return true;
        }
        if process::now() >= deadline {
            return false;
        }
        nap();
    }
}

/// Between two looks at what comes at once, if it comes.
fn nap() {
    let _ = rustix::thread::nanosleep(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 50_000 });
}

/// One byte less.
const LESS: u64 = u64::MAX;

fn count_beside(endpoint: &Endpoint, more: Beside) {
    let mut beside = endpoint.beside_kernel.lock();
    *beside = beside.and(more);
}

/// Leaves the link once neither direction needs it: the fast path is TCP's again, and the endpoint may be offered anew.
pub(crate) fn let_go_if_done(endpoint: &Endpoint) {
    // If the peer dies before it has read the rest, that is to be told.
    if !endpoint.owes() && !has_unread_at_peer(endpoint) {
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
        let at = at.pin();
        at.link.vacate(at.conn);
        // Offered again only after ever more operations, so that what keeps going back is left alone.
        let again = endpoint.offer_after.load(Relaxed).saturating_mul(16);
        endpoint.offer_after.store(again, Relaxed);
        endpoint.operations.store(0, Relaxed);
        endpoint.set_stage(Stage::Plain);
        at
    };
    epoll::detach_everywhere(endpoint, at.link);
    // Whoever sleeps for bytes of its lane would not hear of those of the next.
    if let Some(slot) = endpoint.owner() {
        slot.ring();
    }
    control::release_after(&at, family::heirs(endpoint));
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
    }
    if shut.both {
        at.outgoing().0.set_end(End::Closed);
    }
    stop_sending(endpoint, &mut tx, Reason::ShutDown);
    drop(tx);
    send_again_if_returned(endpoint, endpoint.fd.load(Relaxed));
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
            tx.tx.close(at.outgoing().0, Reason::ShutDown);
        }
    }
    send_again_if_returned(endpoint, fd);
    unread
}

/// After the last descriptor was closed.
pub(crate) fn after_close(endpoint: &Endpoint) {
    let at = {
        let mut tx = endpoint.tx.lock();
        let mut rx = endpoint.rx.lock();
        rx.at = None;
        tx.at.take().map(Attachment::pin)
    };
    worth::note_end(endpoint);
    if endpoint.stage() == Stage::Offered {
        control::withdraw(endpoint);
    }
    epoll::forget_everywhere(endpoint, at.as_ref().map(|at| at.link));
    if let Some(at) = at {
        at.link.vacate(at.conn);
        control::release_after(&at, family::heirs(endpoint));
    }
    endpoint.free();
}
