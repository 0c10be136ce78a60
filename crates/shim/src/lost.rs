//! A peer that has died with bytes of ours unread in a lane: TCP would have reset the connection, and the kernel knows of no
//! reason to. So it is given one. See *Ends* in docs/local-path.md.

use shunt_abi::reason::Reason;
use shunt_ring::lane::End;
use shunt_sys::tcp::Beside;

use crate::endpoint::Endpoint;
use crate::links::Attachment;
use crate::private::borrow;
use crate::{control, epoll, errno, kernel, process, real};

/// How long the broker's word about a death is waited for. Only a reader of end of file whose own bytes lie unread waits,
/// and only once.
const DEATH_NEWS_NANOS: u64 = 100_000_000;
/// How long the kernel's own reset is waited for. On this host it comes before the call that brings it forth returns.
const RESET_NANOS: u64 = 5_000_000;

/// Whether bytes of ours lie in a lane that the peer has not read, and has not given back; and it still matters.
pub(crate) fn has_unread_at_peer(endpoint: &Endpoint) -> bool {
    let mut side = endpoint.tx.lock();
    let Some(at) = side.at else { return false };
    let lane = at.outgoing().0;
    !lane.is_returned() && !lane.is_reset_told() && side.tx.unread(lane) > 0
}

/// For a call that shows what has become of the connection, though it moves no bytes: see [`reset_if_lost`].
pub(crate) fn notice_reset(endpoint: &Endpoint, fd: i32) -> bool {
    may_be_lost(endpoint, fd) && reset_if_lost(endpoint, fd)
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
    endpoint.is_attached() && has_unread_at_peer(endpoint) && is_over(endpoint, fd)
}

/// Whether the peer's end of the connection has come: by TCP, or by the broker's word while TCP's waits behind bytes that this
/// end does not read.
fn is_over(endpoint: &Endpoint, fd: i32) -> bool {
    let at = endpoint.tx.lock().at;
    at.is_some_and(|at| at.incoming().0.was_abandoned()) || shunt_sys::tcp::hung_up(borrow(fd))
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
            Some((End::Died, had_finished, _)) if is_over(endpoint, fd) => break had_finished,
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
