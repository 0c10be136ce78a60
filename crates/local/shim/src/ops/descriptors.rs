//! The life of descriptors: made, duplicated, closed.
//!
//! A close of a socket's last descriptor has two halves, with the kernel's close between them:
//!
//! ```text
//! begin_close    forgets the fd, ends the lanes, leaves the socket to calls that still wait on it
//! close(2)
//! end_close      releases the connection
//! ```

use std::ffi::c_int;
use std::os::fd::RawFd;

use shunt_abi::reason::Reason;
use shunt_sys::tcp::Opener;
use shunt_transport::Kernel;

use crate::base::private::{self, PrivateFd};
use crate::base::signal::{self, Shield};
use crate::base::table::{self, Entry};
use crate::base::undo_log::Held;
use crate::base::{children, errno, kernel, order, process, real, waiter};
use crate::broker::control;
use crate::epoll::{self, Epoll};
use crate::life::attach::{self, Ending};
use crate::ops::{exec, ring, undo};
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::tcp::Tcp;
use crate::socket::{links, offer_policy, sharing};

/// Tracks a new TCP socket, which is not connected.
pub(crate) fn made(fd: RawFd) {
    let _shield = Shield::raise();
    if is_made_here(fd) {
        forget(table::replace(fd, Entry::Unconnected(Reason::None)), fd);
    }
}

/// Returns whether this process has made `fd`, and not a child that runs in its memory.
fn is_made_here(fd: RawFd) -> bool {
    match table::look_up(fd) {
        Entry::None | Entry::Unconnected(_) => table::is_home(),
        // The parent of such a child may still have the file that the table knows.
        _ => process::is_home(),
    }
}

/// Tracks `fd`, if not negative. It was accepted by what `listener` named when the call began,
/// which is `was`.
pub(crate) fn accepted(was: Entry, listener: RawFd, fd: RawFd, nonblocking: bool) {
    if fd < 0 || process::is_off() {
        return;
    }
    let _shield = Shield::raise();
    match was {
        Entry::Unconnected(_) => {}
        // No hook has seen the making of a listener that this program has inherited or been sent.
        // What it accepts is new.
        Entry::None if is_tcp(fd) => {
            // Another thread may have closed it meanwhile.
            if table::look_up(listener) == Entry::None && is_tcp(listener) {
                table::replace(listener, Entry::Unconnected(Reason::Shared));
            }
        }
        _ => return,
    }
    if !is_made_here(fd) {
        return;
    }
    let Some(name) = endpoint::allocate(fd, nonblocking, offer_policy::operations()) else { return };
    let Some(endpoint) = name.resolve() else { return };
    endpoint.set_opener(Opener::Peer);
    forget(table::replace(fd, Entry::Endpoint(name)), fd);
    endpoint.remember(fd);
    control::introduce();
}

fn is_tcp(fd: RawFd) -> bool {
    use rustix::net::{ipproto, sockopt::socket_protocol};
    socket_protocol(crate::base::private::borrow(fd)) == Ok(Some(ipproto::TCP))
}

/// Tracks a socket that has connected, or is about to. It may be registered with an epoll instance
/// already.
pub(crate) fn connected(fd: RawFd, is_connected: bool) {
    let _shield = Shield::raise();
    order::note_by_tcp();
    let Some(name) = endpoint::allocate(fd, false, offer_policy::operations()) else { return };
    let Some(endpoint) = name.resolve() else { return };
    endpoint.set_opener(Opener::Us);
    endpoint.set_begun(!is_connected);
    let (before, is_registered) = table::connect(fd, name);
    endpoint.remember(fd);
    let against = if is_registered { epoll::adopt_registrations(endpoint, fd) } else { None };
    let held_back = match before {
        Entry::Unconnected(reason) if reason != Reason::None => Some(reason),
        _ => None,
    };
    if let Some(reason) = held_back.or(against) {
        attach::bar(endpoint, reason);
    }
    control::introduce();
}

/// Keeps all unconnected sockets on TCP, at a fork: whichever process connects one, the other may
/// have it too.
pub(crate) fn share_unconnected() {
    for (fd, _) in table::known(0, u32::MAX) {
        table::hold_back(fd, Reason::Shared);
    }
}

/// Handles an fd that a message takes to another process.
pub(crate) fn pass_on(fd: RawFd) {
    match epoll::behind(fd) {
        Some(epoll) => epoll::hand_on(epoll, Reason::PassedOn),
        None => hand_on(fd, Reason::PassedOn),
    }
}

/// Keeps a socket on TCP that another process gets, if `fd` is one. If it is not connected, that is
/// done when it connects.
pub(crate) fn hand_on(fd: RawFd, reason: Reason) {
    // Another thread may be connecting it at this moment.
    if !table::hold_back(fd, reason)
        && let Some(endpoint) = endpoint::behind(fd)
    {
        attach::bar_reading(endpoint, reason);
    }
}

/// Forgets a socket that is not connected, because no hook will see what becomes of it.
pub(crate) fn forget_unconnected(fd: RawFd) {
    epoll::release(fd);
    table::replace(fd, Entry::None);
}

/// Tracks a new epoll instance.
pub(crate) fn made_epoll(fd: RawFd) {
    let _shield = Shield::raise();
    forget(table::replace(fd, Entry::None), fd);
    epoll::track(fd);
}

/// Tracks a new io_uring, by its place among the known ones.
pub(crate) fn made_ring(fd: RawFd, place: u8) {
    forget(table::replace(fd, Entry::Ring(place)), fd);
}

/// Forgets an io_uring whose fd is about to be closed where no hook sees it.
pub(crate) fn forget_ring(fd: RawFd) {
    if process::is_home() && matches!(table::look_up(fd), Entry::Ring(_)) {
        let _shield = Shield::raise();
        forget(table::replace(fd, Entry::None), fd);
    }
}

/// Closes `fd`, as the program asked.
pub(crate) fn close(fd: RawFd) -> c_int {
    match table::look_up(fd) {
        // SAFETY: the program's own call.
        Entry::None => unsafe { real::close(fd) },
        Entry::Private => {
            errno::set(libc::EBADF);
            -1
        }
        entry => {
            signal::point();
            let shield = Shield::raise();
            // A child of vfork runs in this memory: its descriptors are its own, but the table is
            // not.
            if !is_closed_here(entry) {
                drop(shield);
                // SAFETY: the program's own call.
                return unsafe { real::close(fd) };
            }
            let entry = begin_close(fd);
            // If the socket lingers, this may wait.
            // SAFETY: the program's own call.
            let close = || signal::without(|| unsafe { real::close(fd) });
            let result = signal::open(Held::NOTHING, close);
            end_close(entry);
            result
        }
    }
}

/// Returns whether this process closes the fd, and not a child that runs in its memory.
fn is_closed_here(entry: Entry) -> bool {
    match entry {
        Entry::Endpoint(name) if name.resolve().is_some_and(may_be_forgotten) => table::is_home(),
        _ => process::is_home(),
    }
}

/// Returns whether the kernel has everything that is known of a connection, so that it does no harm
/// to forget that.
fn may_be_forgotten(endpoint: &Endpoint) -> bool {
    let is_translated =
        || endpoint.epolls.lock().iter().filter_map(|name| name.resolve()).any(Epoll::must_translate);
    endpoint.is_young() && endpoint.sharing.holders.are_one() && !(endpoint.is_in_a_set() && is_translated())
}

/// Does the work before the kernel closes `fd`; [`end_close`] does that after it. In between,
/// another thread may reuse the fd, so the table has forgotten it.
pub(crate) fn begin_close(fd: RawFd) -> Entry {
    let entry = table::replace(fd, Entry::None);
    if let Entry::Endpoint(name) = entry
        && let Some(endpoint) = name.resolve()
    {
        if !endpoint.drop_name() {
            rename(endpoint, fd, table::name_of(entry));
            return Entry::None;
        }
        if leave_to_calls(endpoint, fd) {
            return Entry::None;
        }
        begin_end(endpoint, fd);
    }
    forget_in_sets(entry, fd);
    entry
}

/// Does the work before the last descriptor of a socket is closed, which is `fd`.
fn begin_end(endpoint: &Endpoint, fd: RawFd) {
    let may_live_on = || endpoint.has_unlisted_holders() || sharing::is_shared(endpoint);
    if endpoint.is_in_a_set() && may_live_on() {
        epoll::leave_everywhere(endpoint);
    }
    let ending = if endpoint.is_attached() { attach::before_close(endpoint, fd) } else { Ending::Plain };
    match ending {
        Ending::Plain => {}
        Ending::Reset if is_held_elsewhere(endpoint, fd) => {}
        Ending::Reset => reset_on_close(fd),
        Ending::ByBroker => {
            if !is_held_elsewhere(endpoint, fd) {
                forget_in_kernel_sets(endpoint, fd);
            }
            return;
        }
    }
    if control::may_be_held_by_broker(endpoint, fd) && !is_held_elsewhere(endpoint, fd) {
        finish_for_broker(endpoint, fd);
    }
}

/// Leaves a socket, whose last fd the program closes, to calls of other threads that wait on it.
/// They hold it by a descriptor of the shim's, and the fd goes as if there were a duplicate.
/// Returns `false` if there are no such calls. If no descriptor is to be had, it does so too, and
/// the calls end with the close.
fn leave_to_calls(endpoint: &Endpoint, fd: RawFd) -> bool {
    // A call that a handler of this thread has left, or will return to, holds nothing in the kernel
    // either.
    let by_others = || match endpoint.calls_in_progress() {
        0 => false,
        calls => calls > undo::own_calls(endpoint),
    };
    if !by_others() {
        return false;
    }
    let before = errno::get();
    let kept = PrivateFd::duplicate(fd);
    let is_left = kept.is_some();
    if let Some(kept) = kept {
        rename(endpoint, fd, Some(kept.raw()));
        endpoint.hold(kept.into_raw());
    } else {
        // The calls end.
        waiter::ring_all();
    }
    if is_left && !by_others() && endpoint.let_go_of_held() {
        end_held(endpoint);
    }
    errno::set(before);
    is_left
}

/// Ends a connection when the last call is over that held it after the program's close. The caller
/// must hold no lock.
pub(crate) fn end_held(endpoint: &Endpoint) {
    let before = errno::get();
    let fd = endpoint.fd();
    begin_end(endpoint, fd);
    PrivateFd::close_raw(fd);
    finish_end(endpoint);
    errno::set(before);
}

/// Ends all such connections in a forked child, which does not have the calls that hold them.
pub(crate) fn end_all_held() {
    endpoint::all().for_each(Endpoint::end_if_held_by_nobody);
}

/// Forgets a descriptor of an epoll instance, an io_uring or an unconnected socket, before its fd
/// can name another file. A thread that attaches a connection meanwhile must not reach that file.
fn forget_in_sets(entry: Entry, fd: RawFd) {
    match entry {
        Entry::Unconnected(_) => epoll::release(fd),
        Entry::Epoll(name) => {
            if let Some(epoll) = name.resolve() {
                match table::name_of(entry) {
                    Some(other) => epoll.renumber(other),
                    None => epoll.close(),
                }
            }
        }
        Entry::Ring(place) => ring::closed(place, fd),
        _ => {}
    }
}

/// Has an endpoint go on by the fd `other` of a duplicate, since `closed` is being closed.
fn rename(endpoint: &Endpoint, closed: RawFd, other: Option<RawFd>) {
    if epoll::has_by_number(endpoint, closed) {
        // The kernel's list has the socket under the closed fd, and no call can change that.
        endpoint.note_closed_in_epoll();
        attach::bar(endpoint, Reason::ClosedInEpoll);
    }
    if endpoint.fd() == closed
        && let Some(other) = other
    {
        epoll::renumber_everywhere(endpoint);
        endpoint.set_fd(other);
    }
    epoll::freeze_everywhere(endpoint, closed);
    // Sleeping calls check by which fd they go on, before this one names another file.
    if endpoint.calls_in_progress() > undo::own_calls(endpoint) {
        waiter::ring_all();
    }
}

/// Has the kernel reset the connection at the close, as TCP does for unread bytes. These are in a
/// lane, where it does not see them.
fn reset_on_close(fd: RawFd) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let value: *const libc::linger = &linger;
    let before = errno::get();
    // SAFETY: a structure of ours.
    unsafe {
        real::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            value.cast(),
            size_of::<libc::linger>() as libc::socklen_t,
        )
    };
    errno::set(before);
}

/// Returns whether other processes may hold the socket, whether hooks have seen them being made or
/// not. This close does not end the connection then.
fn is_held_elsewhere(endpoint: &Endpoint, fd: RawFd) -> bool {
    let before = errno::get();
    let held = sharing::is_shared(endpoint) || children::may_hold(fd);
    errno::set(before);
    held
}

/// Ends a connection whose socket the broker may still hold. It does if it has not processed the
/// offer yet, or not closed the descriptors that came with it. Then the close alone would end
/// nothing.
fn finish_for_broker(endpoint: &Endpoint, fd: RawFd) {
    let before = errno::get();
    if !forget_in_kernel_sets(endpoint, fd) {
        // They would report the end of a socket that the program has closed. So the end comes once
        // the broker has closed its descriptor.
        errno::set(before);
        return;
    }
    // An urgent byte, which is in no count, is unread too.
    if attach::resets(fd) || (Tcp { endpoint, fd }).at_mark() {
        kernel::dissolve(fd);
    } else {
        // SAFETY: a plain call on the program's descriptor.
        unsafe { real::shutdown(fd, libc::SHUT_RDWR) };
    }
    errno::set(before);
}

/// Removes a socket from the program's epoll instances, where the kernel forgets it at the close if
/// no other process holds it. Returns `false` if that cannot be done.
fn forget_in_kernel_sets(endpoint: &Endpoint, fd: RawFd) -> bool {
    let before = errno::get();
    epoll::remove_everywhere(endpoint);
    let is_forgotten = !endpoint.was_closed_in_epoll() || epoll::remove_closed(fd);
    errno::set(before);
    is_forgotten
}

/// Does the work after the kernel's close: see [`begin_close`].
pub(crate) fn end_close(entry: Entry) {
    if let Entry::Endpoint(name) = entry
        && let Some(endpoint) = name.resolve()
    {
        order::note_by_tcp();
        finish_end(endpoint);
    }
}

/// Releases a socket whose last descriptor has been closed.
fn finish_end(endpoint: &Endpoint) {
    sharing::let_go(endpoint);
    attach::after_close(endpoint);
}

/// Forgets what `fd` named before the kernel replaced it without a close that a hook saw.
fn forget(old: Entry, fd: RawFd) {
    if let Entry::Endpoint(name) = old
        && let Some(endpoint) = name.resolve()
        && endpoint.drop_name()
    {
        // Calls still hold it, as the kernel's calls hold the open file.
        if endpoint.calls_in_progress() > undo::own_calls(endpoint) {
            endpoint.hold(endpoint.take_kept());
            endpoint.end_if_held_by_nobody();
        } else {
            attach::before_close(endpoint, fd);
            end_close(old);
        }
    }
    forget_in_sets(old, fd);
}

/// Forgets all descriptors. No connection has been offered, and no instance changed.
pub(crate) fn forget_all() {
    for (fd, _) in table::known(0, u32::MAX) {
        forget(table::replace(fd, Entry::None), fd);
    }
}

/// Notes that `new` names what `old` does. In a child of vfork, `new` is the child's own, for the
/// program that it becomes.
pub(crate) fn duplicated(old: RawFd, new: RawFd) {
    if process::is_off() {
        return;
    }
    if !process::is_home() {
        return exec::hand_out(old);
    }
    let _shield = Shield::raise();
    // When one of two fds connects a socket, the table would not learn that for the other.
    table::hold_back(old, Reason::Duplicated);
    let entry = table::look_up(old);
    match entry {
        Entry::Endpoint(name) => {
            let Some(endpoint) = name.resolve() else { return };
            endpoint.add_name();
            forget(table::replace(new, entry), new);
            epoll::thaw_everywhere(endpoint, new);
            if endpoint::STANDARD_STREAMS.contains(&new) {
                attach::give_back(endpoint, Reason::Stdio);
            }
        }
        Entry::Epoll(_) | Entry::Unconnected(_) => forget(table::replace(new, entry), new),
        // A second fd of an io_uring is treated as unknown.
        Entry::None | Entry::Private | Entry::Ring(_) => forget(table::replace(new, Entry::None), new),
    }
}

/// Makes a dup2 or dup3, in which the kernel closes `new`.
pub(crate) fn duplicate_onto(old: RawFd, new: RawFd, real: impl FnOnce() -> c_int) -> c_int {
    if old == new || process::is_off() {
        return real();
    }
    if !process::is_home() {
        exec::hand_out(old);
        return real();
    }
    let _shield = Shield::raise();
    let replaced = table::look_up(new);
    if replaced == Entry::Private {
        // The program wants the fd of one of the shim's descriptors, and cannot know that it is
        // taken.
        surrender(new);
        let result = real();
        if result >= 0 {
            duplicated(old, new);
        }
        return result;
    }
    if table::look_up(old) == Entry::None && replaced == Entry::None {
        return real();
    }
    // Nothing is forgotten before it is certain that `old` is open.
    if rustix::io::fcntl_getfd(crate::base::private::borrow(old)).is_err() {
        return real();
    }
    // An fd that no hook knows may be that of an open stream of stdio, which from now on reads and
    // writes the socket.
    let may_be_stream =
        replaced == Entry::None && rustix::io::fcntl_getfd(crate::base::private::borrow(new)).is_ok();
    let closed = begin_close(new);
    let result = real();
    end_close(closed);
    if result >= 0 {
        duplicated(old, new);
        if may_be_stream
            && !endpoint::STANDARD_STREAMS.contains(&new)
            && let Some(endpoint) = endpoint::behind(new)
        {
            attach::bar_reading(endpoint, Reason::Stdio);
        }
    }
    result
}

/// Closes everything from `first` to `last`, except for the shim's own descriptors.
pub(crate) fn close_range(first: u32, last: u32, real: impl Fn(u32, u32) -> c_int) -> c_int {
    if process::is_off() || !process::is_home() {
        return real(first, last);
    }
    // The kernel may refuse the call: for its flags, or by a seccomp filter. Then nothing closes.
    // No process has this fd.
    if real(u32::MAX, u32::MAX) != 0 {
        return real(first, last);
    }
    let _shield = Shield::raise();
    let known: Vec<_> = table::known(first, last).collect();
    let programs = known.into_iter().filter(|(_, entry)| *entry != Entry::Private);
    let closed: Vec<_> = programs.map(|(fd, _)| begin_close(fd)).collect();
    let mut from = first;
    // Including those that have just been made for calls that go on.
    for (fd, _) in table::known(first, last).filter(|(_, entry)| *entry == Entry::Private) {
        if fd as u32 > from {
            real(from, fd as u32 - 1);
        }
        from = fd as u32 + 1;
    }
    let result = if from <= last { real(from, last) } else { 0 };
    closed.into_iter().for_each(end_close);
    result
}

/// Gives up the fd of one of the shim's own descriptors, which the program wants.
fn surrender(raw: RawFd) {
    private::surrender(raw, |new| {
        waiter::renumber(raw, new);
        links::renumber(raw, new);
        control::renumber(raw, new);
        sharing::renumber(raw, new);
        endpoint::renumber(raw, new);
    });
}
