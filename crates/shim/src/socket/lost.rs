//! A peer that has died with bytes of ours unread in a lane: TCP would have reset the connection, and the kernel knows of no
//! reason to. So it is given one. See *Ends* in docs/local-path.md.

use shunt_abi::reason::Reason;
use shunt_ring::lane::End;
use shunt_sys::peer;
use shunt_sys::tcp::Beside;

use crate::base::private::{borrow, close_owned};
use crate::base::{errno, kernel, process, real};
use crate::socket::endpoint::Endpoint;
use crate::socket::links::Attachment;

/// How long the broker's word about a death is waited for, where the kernel does not know. Only a reader of end of file waits
/// who may be made to, whose own bytes lie unread, and only once.
const DEATH_NEWS_NANOS: u64 = 100_000_000;
/// How long somebody who may not be made to wait looks again at what comes at once, if it comes: a socket that is being closed
/// sends its FIN before it is nobody's, and the reset that a byte brings forth comes before the call that sends it returns.
const AT_ONCE_NANOS: u64 = 50_000;

/// Whether bytes of ours lie in a lane that the peer has not read, and has not given back; and it still matters.
pub(crate) fn has_unread_at_peer(endpoint: &Endpoint) -> bool {
    let mut side = endpoint.tx.lock();
    let Some(at) = side.at else { return false };
    let lane = at.outgoing().0;
    !lane.is_returned() && !lane.is_reset_told() && side.tx.unread(lane) > 0
}

/// Whether the broker says what [`reset_in_a_set`] is about. Every waiter asks when it looks, because TCP tells nobody of the
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

/// Whether TCP may have ended with bytes of ours unread in the lane.
pub(crate) fn may_be_lost(endpoint: &Endpoint, fd: i32) -> bool {
    endpoint.is_attached() && has_unread_at_peer(endpoint) && is_over(endpoint, fd)
}

/// Whether the peer's end of the connection has come: by TCP, or by the broker's word while TCP's waits behind bytes that this
/// end does not read.
fn is_over(endpoint: &Endpoint, fd: i32) -> bool {
    let at = endpoint.tx.lock().at;
    at.is_some_and(|at| at.incoming().0.was_abandoned()) || shunt_sys::tcp::hung_up(borrow(fd))
}

/// TCP has ended. If that was the death of the peer's process, with bytes of ours unread in the lane, TCP would have
/// reset the connection: then this makes of the kernel's socket what a reset leaves behind, and the sets are to be brought up to date.
/// `Some` says whether that is so now. Else the kernel will tell of it: the end of a process closes one socket after the other.
pub(crate) fn reset_in_a_set(endpoint: &Endpoint, fd: i32) -> Option<bool> {
    let had_finished = abandon_if_lost(endpoint, fd)?;
    Some(reset(endpoint, fd, had_finished))
}

/// The same before another program goes on with the socket that nobody can tell of an error. It is told by the kernel then, if
/// that has no bytes to keep.
pub(crate) fn notice_reset_for_another(endpoint: &Endpoint, fd: i32) {
    if may_be_lost(endpoint, fd) {
        match abandon_if_lost(endpoint, fd) {
            Some(false) if !shunt_sys::tcp::has_unread(borrow(fd)) => dissolve(fd),
            Some(had_finished) => {
                reset(endpoint, fd, had_finished);
            }
            None => {}
        }
    }
}

/// For a call that may wait, and has found the end: gives the broker time to say what has become of a peer of which the kernel does not
/// know.
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

/// Who has the other socket.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holder {
    Somebody,
    Nobody,
    /// It is in another namespace, or the kernel does not say.
    Unknown,
}

fn holder(fd: i32) -> Holder {
    let Ok(asker) = peer::open() else { return Holder::Unknown };
    let answer = peer::is_held(&asker, borrow(fd));
    close_owned(asker);
    match answer {
        Ok(Some(true)) => Holder::Somebody,
        Ok(Some(false)) => Holder::Nobody,
        Ok(None) | Err(_) => Holder::Unknown,
    }
}

/// Whether the connection is lost as [`reset_in_a_set`] says; its lane is given up then. `Some` says whether the peer had finished
/// before.
fn abandon_if_lost(endpoint: &Endpoint, fd: i32) -> Option<bool> {
    let incoming = || {
        let at = endpoint.tx.lock().at?;
        let lane = at.incoming().0;
        Some((end(&at), lane.was_shut_down(), lane.was_shared()))
    };
    // The kernel has closed the dead process's socket, or will in a moment; the broker's word follows at once, if there is a broker.
    let mut deadline = None;
    let had_finished = loop {
        match incoming().filter(|_| has_unread_at_peer(endpoint)) {
            // A child may hold the socket still.
            Some((End::Died, had_finished, _)) if is_over(endpoint, fd) => break had_finished,
            // One of those that shared it has closed it, and there is an end without a shutdown: the other has died, since a
            // close by the last of them resets.
            Some((End::Closed, false, true)) if shunt_sys::tcp::hung_up(borrow(fd)) => break false,
            // Whoever had it has let it go, be it by a call that nobody has seen: TCP would have reset it.
            Some((End::Open, had_finished, _)) if shunt_sys::tcp::hung_up(borrow(fd)) => {
                if holder(fd) == Holder::Nobody {
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

/// Whether it is not [`AT_ONCE_NANOS`] yet since the first of these questions.
fn is_within(deadline: &mut Option<u64>) -> bool {
    let now = process::now();
    now < *deadline.get_or_insert(now + AT_ONCE_NANOS)
}

/// Makes of the kernel's socket what a reset leaves behind. `false`: the kernel has yet to do so.
fn reset(endpoint: &Endpoint, fd: i32, had_finished: bool) -> bool {
    if had_finished {
        // Its FIN came long before, so this is no reset of an established connection.
        return provoke_reset(endpoint, fd);
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
    true
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

/// One byte less.
const LESS: u64 = u64::MAX;

fn count_beside(endpoint: &Endpoint, more: Beside) {
    let mut beside = endpoint.beside_kernel.lock();
    *beside = beside.and(more);
}
