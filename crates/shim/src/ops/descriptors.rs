//! The life of descriptors: made, duplicated, closed.

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use shunt_abi::reason::Reason;
use shunt_sys::tcp::Opener;
use shunt_transport::Kernel;

use crate::base::journal::Held;
use crate::base::private::{self, PrivateFd};
use crate::base::signal::{self, Shield};
use crate::base::table::{self, Entry};
use crate::base::{children, errno, kernel, order, process, real, waiter};
use crate::broker::control;
use crate::epoll::{self, Epoll};
use crate::life::attach;
use crate::ops::{exec, held, ring};
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::tcp::Tcp;
use crate::socket::{family, links, worth};

/// A new TCP socket, not connected.
pub(crate) fn made(fd: RawFd) {
    let _shield = Shield::raise();
    if is_made_here(fd) {
        forget(table::replace(fd, Entry::Unconnected(Reason::None)), fd);
    }
}

/// Whether it is this process that has made `fd`.
fn is_made_here(fd: RawFd) -> bool {
    match table::look_up(fd) {
        Entry::None | Entry::Unconnected(_) => table::is_home(),
        // What was behind it may be so still.
        _ => process::is_home(),
    }
}

/// `fd`, if not negative, was accepted by what `listener` named when the call began.
pub(crate) fn accepted(was: Entry, listener: RawFd, fd: RawFd, nonblocking: bool) {
    if fd < 0 || process::is_off() {
        return;
    }
    let _shield = Shield::raise();
    match was {
        Entry::Unconnected(_) => {}
        // A listener that this program has inherited, or been sent, was not seen being made. What it accepts is new.
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
    let Some(name) = endpoint::allocate(fd, nonblocking, worth::operations()) else { return };
    let Some(endpoint) = name.resolve() else { return };
    endpoint.set_opener(Opener::Peer);
    forget(table::replace(fd, Entry::Endpoint(name)), fd);
    endpoint.remember(fd);
}

fn is_tcp(fd: RawFd) -> bool {
    use rustix::net::{ipproto, sockopt::socket_protocol};
    socket_protocol(crate::base::private::borrow(fd)) == Ok(Some(ipproto::TCP))
}

/// A socket that has connected, or is about to. It may be in an epoll set already.
pub(crate) fn connected(fd: RawFd, is_connected: bool) {
    let _shield = Shield::raise();
    order::note_by_tcp();
    let Some(name) = endpoint::allocate(fd, false, worth::operations()) else { return };
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
}

/// At a fork: whichever process connects such a socket, the other may have it too.
pub(crate) fn share_unconnected() {
    for (fd, _) in table::known(0, u32::MAX) {
        table::hold_back(fd, Reason::Shared);
    }
}

/// A message takes `fd` to another process.
pub(crate) fn pass_on(fd: RawFd) {
    match epoll::behind(fd) {
        Some(epoll) => epoll::hand_on(epoll, Reason::PassedOn),
        None => hand_on(fd, Reason::PassedOn),
    }
}

/// Another process gets the socket, if `fd` is one: it goes on by TCP, or stays there once it is connected.
pub(crate) fn hand_on(fd: RawFd, reason: Reason) {
    // It may be connected at this moment, by another thread.
    if !table::hold_back(fd, reason)
        && let Some(endpoint) = endpoint::behind(fd)
    {
        attach::bar_reading(endpoint, reason);
    }
}

/// A socket that is not connected is none of ours from now on: what becomes of it, nobody will tell us.
pub(crate) fn forget_unconnected(fd: RawFd) {
    epoll::release(fd);
    table::replace(fd, Entry::None);
}

/// A new epoll instance.
pub(crate) fn made_epoll(fd: RawFd) {
    let _shield = Shield::raise();
    forget(table::replace(fd, Entry::None), fd);
    epoll::track(fd);
}

/// A new ring, by its place among those that are looked into.
pub(crate) fn made_ring(fd: RawFd, place: u8) {
    forget(table::replace(fd, Entry::Ring(place)), fd);
}

/// The number of a ring is about to be closed where no hook sees it.
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
            // A child of vfork runs in our memory: its descriptors are its own, our table is not.
            if !is_closed_here(entry) {
                drop(shield);
                // SAFETY: the program's own call.
                return unsafe { real::close(fd) };
            }
            let entry = begin_close(fd);
            // It may linger.
            // SAFETY: the program's own call.
            let close = || signal::without(|| unsafe { real::close(fd) });
            let result = signal::open(Held::NOTHING, close);
            end_close(entry);
            result
        }
    }
}

/// Whether it is this process that closes what a number is to it.
fn is_closed_here(entry: Entry) -> bool {
    match entry {
        Entry::Endpoint(name) if name.resolve().is_some_and(may_be_forgotten) => table::is_home(),
        _ => process::is_home(),
    }
}

/// Whether all that is known of a connection is the kernel's too, so that it does no harm if that is forgotten.
fn may_be_forgotten(endpoint: &Endpoint) -> bool {
    let is_translated =
        || endpoint.epolls.lock().iter().filter_map(|name| name.resolve()).any(Epoll::must_translate);
    endpoint.is_young() && endpoint.holders.are_one() && !(endpoint.is_in_a_set() && is_translated())
}

/// What happens before the kernel closes `fd`; [`end_close`] happens after. In between the number may be used again
/// by another thread, so the table has forgotten it.
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

/// What happens before the last descriptor of a socket is closed, which is `fd`.
fn begin_end(endpoint: &Endpoint, fd: RawFd) {
    let may_live_on = || endpoint.has_unlisted_holders() || family::is_shared(endpoint);
    if endpoint.is_in_a_set() && may_live_on() {
        epoll::leave_everywhere(endpoint);
    }
    if endpoint.is_attached() && attach::before_close(endpoint, fd) && !is_held_elsewhere(endpoint, fd) {
        reset_on_close(fd);
    }
    if control::may_be_held_by_broker(endpoint, fd) && !is_held_elsewhere(endpoint, fd) {
        finish_for_broker(endpoint, fd);
    }
}

/// The program's last number of a socket is being closed. If calls of other threads wait on it, they hold it, by a descriptor of
/// ours: the number goes, as if there were a duplicate. `false`: there are none. Without a descriptor to be had for it
/// the calls end with the close.
fn leave_to_calls(endpoint: &Endpoint, fd: RawFd) -> bool {
    // A call that this thread has left by a handler, or is about to come back to, holds nothing in the kernel either.
    let by_others = || match endpoint.calls_in_progress() {
        0 => false,
        calls => calls > held::own_calls(endpoint),
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
        // They end.
        waiter::ring_all();
    }
    if is_left && !by_others() && endpoint.let_go_of_held() {
        end_held(endpoint);
    }
    errno::set(before);
    is_left
}

/// The last call that held a socket after the program had closed it is over: this is where it ends. No lock is held.
pub(crate) fn end_held(endpoint: &Endpoint) {
    let before = errno::get();
    let fd = endpoint.fd.load(Relaxed);
    begin_end(endpoint, fd);
    PrivateFd::close_raw(fd);
    finish_end(endpoint);
    errno::set(before);
}

/// In a forked child, where the calls that hold such sockets are not.
pub(crate) fn end_all_held() {
    endpoint::all().for_each(Endpoint::end_if_held_by_nobody);
}

/// A descriptor of an epoll instance or a ring goes, or of a socket that is not connected. Before its number can be another's: whoever
/// attaches a connection at this time, in another thread, must not reach for that.
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

/// A duplicate lives on, `other`: the endpoint goes by its number from now on.
fn rename(endpoint: &Endpoint, closed: RawFd, other: Option<RawFd>) {
    if epoll::has_by_number(endpoint, closed) {
        // The kernel's set goes on knowing the socket by the closed number, and nobody can change that.
        attach::bar(endpoint, Reason::ClosedInEpoll);
    }
    if endpoint.fd.load(Relaxed) == closed
        && let Some(other) = other
    {
        epoll::renumber_everywhere(endpoint);
        endpoint.fd.store(other, Relaxed);
    }
    epoll::freeze_everywhere(endpoint, closed);
    // Those who sleep look by which number they go on, before this one is another's.
    if endpoint.calls_in_progress() > held::own_calls(endpoint) {
        waiter::ring_all();
    }
}

/// TCP answers a close with unread bytes by RST. The bytes are in a lane, so the kernel must be told.
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

/// Whether other processes may hold the socket, made seen or unseen: what ends the connection is then not this close.
fn is_held_elsewhere(endpoint: &Endpoint, fd: RawFd) -> bool {
    let before = errno::get();
    let held = family::is_shared(endpoint) || children::may_hold(fd);
    errno::set(before);
    held
}

/// A broker that has not looked at the offer yet, or has not got round to closing what came with it, still holds the socket, so closing
/// alone would end nothing.
fn finish_for_broker(endpoint: &Endpoint, fd: RawFd) {
    let before = errno::get();
    // An urgent byte, which is in no count, is unread too.
    let has_unread =
        || shunt_sys::tcp::has_unread(crate::base::private::borrow(fd)) || Tcp { endpoint, fd }.at_mark();
    // The program's sets see nothing of it: with the close the kernel forgets the socket there.
    epoll::remove_everywhere(endpoint);
    let resets = rustix::net::sockopt::socket_linger(crate::base::private::borrow(fd))
        .is_ok_and(|linger| linger.is_some_and(|time| time.is_zero()));
    if resets || has_unread() {
        kernel::dissolve(fd);
    } else {
        // SAFETY: a plain call on the program's descriptor.
        unsafe { real::shutdown(fd, libc::SHUT_RDWR) };
    }
    errno::set(before);
}

/// See [`begin_close`].
pub(crate) fn end_close(entry: Entry) {
    if let Entry::Endpoint(name) = entry
        && let Some(endpoint) = name.resolve()
    {
        order::note_by_tcp();
        finish_end(endpoint);
    }
}

/// After the last descriptor was closed.
fn finish_end(endpoint: &Endpoint) {
    family::let_go(endpoint);
    attach::after_close(endpoint);
}

/// The kernel has replaced what was behind `fd` without our seeing a close: it was closed by a call we do not hook.
fn forget(old: Entry, fd: RawFd) {
    if let Entry::Endpoint(name) = old
        && let Some(endpoint) = name.resolve()
        && endpoint.drop_name()
    {
        // Calls hold it still, as the kernel's calls hold the open file.
        if endpoint.calls_in_progress() > held::own_calls(endpoint) {
            endpoint.hold(endpoint.take_kept());
            endpoint.end_if_held_by_nobody();
        } else {
            attach::before_close(endpoint, fd);
            end_close(old);
        }
    }
    forget_in_sets(old, fd);
}

/// `new` names what `old` does. In a child of vfork that is a number of its own, for the program that it becomes.
pub(crate) fn duplicated(old: RawFd, new: RawFd) {
    if process::is_off() {
        return;
    }
    if !process::is_home() {
        return exec::hand_out(old);
    }
    let _shield = Shield::raise();
    // Which of two names connects a socket, and when, the table would not know of the other.
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
        // A second number of a ring is a stranger's.
        Entry::None | Entry::Private | Entry::Ring(_) => forget(table::replace(new, Entry::None), new),
    }
}

/// dup2 and dup3: `new` is closed by the kernel on the way.
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
        // The program wants the number of one of our descriptors, which it cannot know to be taken.
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
    // Nothing is forgotten before the kernel has agreed that `old` is open.
    if rustix::io::fcntl_getfd(crate::base::private::borrow(old)).is_err() {
        return real();
    }
    // What nobody has told us of may be the number of an open stream, which from now on reads and writes the socket.
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

/// Closes everything from `first` to `last`, but not what is ours.
pub(crate) fn close_range(first: u32, last: u32, real: impl Fn(u32, u32) -> c_int) -> c_int {
    if process::is_off() || !process::is_home() {
        return real(first, last);
    }
    // The kernel may refuse the call: for its flags, or by a seccomp filter. Then nothing closes. No process has this fd.
    if real(u32::MAX, u32::MAX) != 0 {
        return real(first, last);
    }
    let _shield = Shield::raise();
    let known: Vec<_> = table::known(first, last).collect();
    let programs = known.into_iter().filter(|(_, entry)| *entry != Entry::Private);
    let closed: Vec<_> = programs.map(|(fd, _)| begin_close(fd)).collect();
    let mut from = first;
    // Also those that have been made just now, for calls that go on.
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

/// One of the shim's own descriptors has a number that the program wants.
fn surrender(raw: RawFd) {
    private::surrender(raw, |new| {
        waiter::renumber(raw, new);
        links::renumber(raw, new);
        control::renumber(raw, new);
        family::renumber(raw, new);
        endpoint::renumber(raw, new);
    });
}
