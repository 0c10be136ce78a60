//! The life of an endpoint on a link: adopted, watched, going back, let go.

use shunt_abi::page::Counter;
use shunt_abi::reason::{Reason, Road};
use std::sync::atomic::Ordering::*;

use crate::endpoint::{Endpoint, EndpointRef, RxSide, Stage, TxSide};
use crate::kernel::Tcp;
use crate::links::{Attachment, Link};
use crate::{control, epoll, process};

/// Puts a paired endpoint on its link. `false` if it is not there any more.
pub(crate) fn adopt(name: EndpointRef, link: &'static Link, conn: usize) -> bool {
    let Some(endpoint) = name.resolve() else { return false };
    {
        let mut tx = endpoint.tx.lock();
        let mut rx = endpoint.rx.lock();
        if endpoint.barred().is_some()
            || tx.at.is_some()
            || name.resolve().is_none()
            || !link.occupy(conn, name)
        {
            return false;
        }
        let at = Attachment { link, conn };
        tx.at = Some(at);
        rx.at = Some(at);
        tx.tx.adopt();
        rx.rx.adopt();
        // L4: from here on nobody enters a kernel call without the lock.
        endpoint.set_stage(Stage::Attached);
        endpoint.report_tx(&tx);
        endpoint.report_rx(&mut rx);
    }
    process::count(Counter::Adopted, 1);
    try_watch(endpoint);
    true
}

/// L4, receiver: says "watching" as soon as no thread is inside the kernel on this socket.
pub(crate) fn try_watch(endpoint: &Endpoint) {
    let watched = {
        let mut rx = endpoint.rx.lock();
        let Some(at) = rx.at else { return };
        rx.rx.try_watch(at.incoming().0, endpoint.is_quiet_for_receive())
    };
    if watched {
        // A sender may begin at once. Whoever sleeps in an epoll set is told to look: attaching rings its doorbell.
        epoll::attach_everywhere(endpoint);
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
    epoll::bury_everywhere(endpoint);
    {
        let mut tx = endpoint.tx.lock();
        if let Some(at) = tx.at {
            tx.tx.close(at.outgoing().0, reason);
            endpoint.report_tx(&tx);
            at.announce_bytes();
        }
    }
    {
        let mut rx = endpoint.rx.lock();
        if let Some(at) = rx.at {
            let (lane, ring) = at.incoming();
            rx.rx.close(lane, reason);
            // An empty lane is left at once.
            rx.rx.available(lane, &ring, &Tcp { endpoint, fd: endpoint.fd.load(Relaxed) });
            endpoint.report_rx(&mut rx);
            at.announce_space();
        }
    }
    epoll::refresh(endpoint);
    let_go_if_done(endpoint);
}

/// The sending direction alone goes back.
pub(crate) fn stop_sending(endpoint: &Endpoint, side: &mut TxSide, reason: Reason) {
    if let Some(at) = side.at {
        process::count_bypass(reason);
        side.tx.close(at.outgoing().0, reason);
        endpoint.report_tx(side);
    }
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
        at.link.vacate(at.conn);
        // Offered again only after ever more operations, so that what keeps going back is left alone.
        let again = endpoint.offer_after.load(Relaxed).saturating_mul(16);
        endpoint.offer_after.store(again, Relaxed);
        endpoint.operations.store(0, Relaxed);
        endpoint.set_stage(Stage::Plain);
        at
    };
    epoll::detach_everywhere(endpoint, at.link);
    control::release(at);
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
                let unread = state.available(lane, &ring, &Tcp { endpoint, fd }) > 0;
                state.close(lane, Reason::ShutDown);
                at.announce_space();
                unread
            }
            None => false,
        }
    };
    let mut tx = endpoint.tx.lock();
    if let Some(at) = tx.at {
        at.outgoing().0.set_end(shunt_ring::lane::End::Closed);
        tx.tx.close(at.outgoing().0, Reason::ShutDown);
    }
    unread
}

/// After the last descriptor was closed.
pub(crate) fn after_close(endpoint: &Endpoint) {
    let at = {
        let mut tx = endpoint.tx.lock();
        let mut rx = endpoint.rx.lock();
        rx.at = None;
        tx.at.take()
    };
    let name = endpoint.reference();
    if endpoint.stage() == Stage::Offered {
        control::withdraw(name);
    }
    epoll::forget_everywhere(endpoint, at.map(|at| at.link));
    if let Some(at) = at {
        at.link.vacate(at.conn);
        control::release(at);
    }
    endpoint.free();
}
