//! Connections that are lost: the peer has died, and bytes of this end are unread in its lane.
//!
//! With TCP, the death would have reset the connection. But the kernel does not know of the bytes
//! in the lane, so the shim provokes the reset. See *Ends* in docs/local-path.md.
//!
//! ```text
//! TCP has ended, and bytes are unread in the lane
//!   |
//!   +-- the broker reports the peer's death ---+
//!   +-- no process holds the peer's socket ----+--> abandon the lane, then `reset`:
//!   |                                                 a byte to the closed socket provokes an RST;
//!   +-- otherwise: not lost, or not yet known         if none comes, `dissolve` the socket
//! ```
//!
//! Example: a server writes a response to a lane, and the client is killed before it reads it. The
//! server's next read finds the end of the TCP stream. The broker has marked the lane as `Died`, so
//! the read fails with ECONNRESET, as it would with TCP.

use shunt_abi::reason::Reason;
use shunt_ring::lane::End;
use shunt_sys::peer;
use shunt_sys::tcp::LaneBytes;

use crate::base::private::{borrow, close_owned};
use crate::base::{errno, kernel, process, real};
use crate::socket::endpoint::Endpoint;
use crate::socket::links::Attachment;

/// How long a call waits for the broker to report a death that the kernel does not show. Only a
/// read that finds end of file waits, if it may block and bytes of this end are unread. It waits
/// once.
const DEATH_NEWS_NANOS: u64 = 100_000_000;
/// How long a call that must not wait polls for an event that is due immediately. A socket that is
/// being closed sends its FIN before its last holder has released it. The reset that a byte
/// provokes arrives before the call that sends the byte returns.
const AT_ONCE_NANOS: u64 = 50_000;

/// Returns whether the lane has bytes that the peer has neither read nor returned, so that the
/// peer's death would reset the connection.
pub(crate) fn has_unread_at_peer(endpoint: &Endpoint) -> bool {
    let mut side = endpoint.tx.lock();
    let Some(at) = side.at else { return false };
    let lane = at.outgoing().0;
    !lane.is_returned() && !lane.is_reset_told() && side.tx.unread(lane) > 0
}

/// Returns whether the broker reports the death that [`reset_in_a_set`] handles. Each waiter checks
/// this, because TCP does not report the death of a peer that had sent its FIN before.
pub(crate) fn is_lost(endpoint: &Endpoint, fd: i32) -> bool {
    let at = endpoint.rx.lock().at;
    at.is_some_and(|at| end(&at) == End::Died) && may_be_lost(endpoint, fd)
}

/// Returns how the peer's sending direction ended, as far as this process knows. The peer's process
/// has died, but that is no end of the connection in one case. If the peer had shut the connection
/// down and had forked, a child may hold the socket until the broker reports otherwise.
fn end(at: &Attachment) -> End {
    let incoming = at.incoming().0;
    match incoming.end() {
        End::Died if incoming.was_shut_down() && incoming.was_shared() && !incoming.was_abandoned() => {
            End::ShutDown
        }
        end => end,
    }
}

/// Returns whether TCP may have ended with bytes of this end unread in the lane.
pub(crate) fn may_be_lost(endpoint: &Endpoint, fd: i32) -> bool {
    endpoint.is_attached() && has_unread_at_peer(endpoint) && is_over(endpoint, fd)
}

/// Returns whether the peer's end of the connection has been reported. TCP reports it, or the
/// broker does while TCP's end waits behind bytes that this end does not read.
fn is_over(endpoint: &Endpoint, fd: i32) -> bool {
    let at = endpoint.tx.lock().at;
    at.is_some_and(|at| at.incoming().0.was_abandoned()) || shunt_sys::tcp::hung_up(borrow(fd))
}

/// Checks whether the connection is lost, and then gives the kernel's socket the state that a reset
/// leaves. TCP has ended when this is called. Returns `None` if the connection is not lost.
/// Otherwise the result is whether the socket is in that state now; the caller must then refresh
/// the epoll instances. If it is not yet, the kernel will report the reset, because the end of a
/// process closes one socket after the other.
pub(crate) fn reset_in_a_set(endpoint: &Endpoint, fd: i32) -> Option<bool> {
    let had_finished = abandon_if_lost(endpoint, fd)?;
    Some(reset(endpoint, fd, had_finished))
}

/// Handles a lost connection before code goes on with the socket to which the shim cannot report a
/// pending error: another program, or calls that no hook sees. So the kernel must report it, unless
/// the socket has bytes to keep.
pub(crate) fn notice_reset_for_another(endpoint: &Endpoint, fd: i32) {
    if may_be_lost(endpoint, fd) {
        match abandon_if_lost(endpoint, fd) {
            Some(false) if !shunt_sys::tcp::has_unread(borrow(fd)) => {
                discount_fin(endpoint, fd);
                dissolve(endpoint, fd);
            }
            Some(had_finished) => {
                reset(endpoint, fd, had_finished);
            }
            None => {}
        }
    }
}

/// Waits for the broker to report a death that the kernel does not show. Called by a call that may
/// wait and has found the end of the stream.
pub(crate) fn await_news(endpoint: &Endpoint, fd: i32, has_broker: impl Fn(u32) -> bool) {
    let epoch = {
        let mut side = endpoint.tx.lock();
        let first = !std::mem::replace(&mut side.awaited_death, true);
        side.at.filter(|at| first && !at.link.is_gone()).map(|at| at.link.epoch)
    };
    if !has_unread_at_peer(endpoint) || holder(fd) != Holder::Unknown || !epoch.is_some_and(has_broker) {
        return;
    }
    let deadline = process::now() + DEATH_NEWS_NANOS;
    let is_open = || endpoint.tx.lock().at.is_some_and(|at| end(&at) == End::Open);
    while is_open() && process::now() < deadline {
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 50_000 });
    }
}

/// Whether another process holds the peer's socket.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holder {
    AnotherProcess,
    NoProcess,
    /// The socket is in another namespace, or the kernel does not report it.
    Unknown,
}

fn holder(fd: i32) -> Holder {
    let Ok(asker) = peer::open() else { return Holder::Unknown };
    let answer = peer::is_held(&asker, borrow(fd));
    close_owned(asker);
    match answer {
        Ok(Some(true)) => Holder::AnotherProcess,
        Ok(Some(false)) => Holder::NoProcess,
        Ok(None) | Err(_) => Holder::Unknown,
    }
}

/// Abandons the lane if the connection is lost, as [`reset_in_a_set`] describes. Returns whether
/// the peer had sent its FIN before, or `None` if the connection is not lost.
fn abandon_if_lost(endpoint: &Endpoint, fd: i32) -> Option<bool> {
    let incoming = || {
        let at = endpoint.tx.lock().at?;
        let lane = at.incoming().0;
        Some((end(&at), lane.was_shut_down(), lane.was_shared()))
    };
    // The kernel has closed the dead process's socket, or will in a moment. The broker reports the
    // death soon, if there is a broker.
    let mut deadline = None;
    let had_finished = loop {
        match incoming().filter(|_| has_unread_at_peer(endpoint)) {
            // A child may still hold the socket.
            Some((End::Died, had_finished, _)) if is_over(endpoint, fd) => break had_finished,
            // One of the processes that shared the socket has closed it, and TCP has ended without
            // a shutdown. So the other process has died: a close by the last holder would have
            // reset the connection.
            Some((End::Closed, false, true)) if shunt_sys::tcp::hung_up(borrow(fd)) => break false,
            // No process holds the peer's socket any more, perhaps after a close that no hook saw.
            // TCP would have reset the connection.
            Some((End::Open, had_finished, _)) if shunt_sys::tcp::hung_up(borrow(fd)) => {
                if holder(fd) == Holder::NoProcess {
                    break had_finished;
                }
                if !is_within(&mut deadline) || endpoint.tx.lock().looked_for_holder {
                    endpoint.tx.lock().looked_for_holder = true;
                    return None;
                }
                rustix::thread::sched_yield();
            }
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

/// Returns whether less than [`AT_ONCE_NANOS`] have passed since the first call with this deadline.
fn is_within(deadline: &mut Option<u64>) -> bool {
    let now = process::now();
    now < *deadline.get_or_insert(now + AT_ONCE_NANOS)
}

/// Gives the kernel's socket the state that a reset leaves. Returns `false` if the kernel has yet
/// to reset it.
fn reset(endpoint: &Endpoint, fd: i32, had_finished: bool) -> bool {
    if had_finished {
        // The peer's FIN came long before, so this is no reset of an established connection.
        return provoke_reset(endpoint, fd);
    }
    discount_fin(endpoint, fd);
    if provoke_reset(endpoint, fd) {
        // The kernel has no error if both ends had sent a FIN, or if the error was taken already.
        // Otherwise its error has another number than ECONNRESET, because the FIN came first.
        if kernel::has_error(fd) || has_finished(endpoint) {
            endpoint.owe(fd, libc::ECONNRESET);
        }
    } else {
        dissolve(endpoint, fd);
    }
    true
}

/// Records that the kernel has counted a FIN, if it has. A connection that TCP resets has none. If
/// the kernel has reset the connection by itself, no FIN has come.
fn discount_fin(endpoint: &Endpoint, fd: i32) {
    if shunt_sys::tcp::peer_has_finished(borrow(fd)).unwrap_or_else(|| !kernel::has_error(fd)) {
        count_beside(endpoint, LaneBytes { received: LESS, ..LaneBytes::default() });
        endpoint.note_fin_discounted();
    }
}

/// Returns whether the sending direction was shut down, by this process or by another that shares
/// the socket.
fn has_finished(endpoint: &Endpoint) -> bool {
    endpoint.has_shut_writing() || endpoint.tx.lock().at.is_some_and(|at| at.outgoing().0.was_shut_down())
}

/// Brings the kernel's socket into the state after a reset by discarding what it has received. The
/// kernel then forgets its counts of the connection, so the shim goes on with them.
pub(crate) fn dissolve(endpoint: &Endpoint, fd: i32) {
    let before = errno::get();
    let counted = shunt_sys::tcp::counts(borrow(fd));
    kernel::dissolve(fd);
    // A socket that a reset has closed already gets no error.
    if !kernel::has_error(fd) {
        kernel::dissolve_connecting(borrow(fd));
    }
    // SAFETY: a plain call on the program's descriptor. It fails with ENOTCONN, and still marks
    // both directions as shut down.
    unsafe { real::shutdown(fd, libc::SHUT_RDWR) };
    if let (Ok(counted), Ok(counts)) = (counted, shunt_sys::tcp::counts(borrow(fd))) {
        count_beside(endpoint, LaneBytes::between(counts, counted));
    }
    errno::set(before);
}

/// Provokes a reset by sending a byte to the peer's socket, which no process holds. The received
/// bytes and the kernel's state stay as they are. Returns `false` if no reset has come.
fn provoke_reset(endpoint: &Endpoint, fd: i32) -> bool {
    let is_over = || shunt_sys::tcp::state(borrow(fd)) == Ok(shunt_sys::tcp::CLOSE);
    // The connection is reset already. A send would take the error, which the program has to get.
    if is_over() {
        return true;
    }
    // The byte is urgent data. If an unseen process holds the socket after all, the stream has no
    // additional byte.
    if !kernel::send_urgent_now(fd) {
        return false;
    }
    count_beside(endpoint, LaneBytes { sent: LESS, ..LaneBytes::default() });
    let mut deadline = None;
    loop {
        if is_over() {
            return true;
        }
        if !is_within(&mut deadline) {
            return false;
        }
        rustix::thread::sched_yield();
    }
}

/// The difference of one byte less.
const LESS: u64 = u64::MAX;

fn count_beside(endpoint: &Endpoint, more: LaneBytes) {
    let mut beside = endpoint.corrections.counts.lock();
    *beside = beside.and(more);
}
