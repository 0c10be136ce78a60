//! What calls announce for the time of a sleep, and how it is undone if they never return from
//! that: see [`crate::base::signal`].

use crate::base::signal;
use crate::base::undo_log::{Held, Kind, Words};
use crate::base::waiter::Slot;
use crate::epoll::Epoll;
use crate::ops::poll::Watch;
use crate::socket::endpoint::Endpoint;
use crate::socket::links::{Attachment, Link};

/// A call that waits, or has waited and is not over: see [`crate::ops::socket_reference`].
static CALL: Kind = Kind { undo: undo_call, calls_on: counted_once, count_again: count_call_again };

static RECEIVE: Kind = Kind { undo: undo_receive, calls_on: counted_once, count_again: count_receive_again };

static SEND: Kind = Kind { undo: undo_send, calls_on: counted_once, count_again: count_send_again };

static SLEEP: Kind = Kind { undo: end_sleep, ..Kind::NOTHING };

static POLL: Kind = Kind { undo: undo_poll, calls_on: calls_of_poll, count_again: count_poll_again };

static EPOLL: Kind = Kind { undo: undo_epoll, ..Kind::NOTHING };

// Functions and not closures: tests/stack knows them by their names.

fn undo_call(held: Words) {
    endpoint(held).end_call();
}

fn count_call_again(held: Words) {
    endpoint(held).begin_call();
}

fn undo_receive(held: Words) {
    endpoint(held).leave_receive();
}

fn count_receive_again(held: Words) {
    endpoint(held).enter_receive_locked();
}

fn undo_send(held: Words) {
    endpoint(held).leave_send();
}

fn count_send_again(held: Words) {
    endpoint(held).enter_send_locked();
}

fn undo_poll(held: Words) {
    // SAFETY: the call that would have freed it has been left.
    drop(unsafe { Box::from_raw(held[0] as *mut Watch) });
}

fn calls_of_poll(held: Words, endpoint: usize) -> u32 {
    watch(held).calls_on(endpoint)
}

fn count_poll_again(held: Words) {
    watch(held).count_again();
}

fn undo_epoll(held: Words) {
    // SAFETY: `epoll` put it there, and instances are never freed.
    let epoll = unsafe { &*(held[0] as *const Epoll) };
    epoll.lock().awake(epoll);
}

fn endpoint(held: Words) -> &'static Endpoint {
    // SAFETY: the first word is the endpoint's address in every entry of one, and endpoints are
    // never freed.
    unsafe { &*(held[0] as *const Endpoint) }
}

fn watch(held: Words) -> &'static Watch {
    // SAFETY: `poll` put it there, and only this thread would free it.
    unsafe { &*(held[0] as *const Watch) }
}

fn counted_once(held: Words, endpoint: usize) -> u32 {
    (held[0] == endpoint).into()
}

fn end_sleep(held: Words) {
    // SAFETY: `sleep` put it there, and links are never freed.
    let link = unsafe { &*(held[1] as *const Link) };
    let at = Attachment::new(link, held[2]);
    if let Some(slot) = held[3].checked_sub(1).map(Slot) {
        at.link.view().waiter(at.link.side, slot.0).awake();
        endpoint(held).unclaim(slot);
    }
    at.unpin();
}

fn address<T>(of: &T) -> usize {
    std::ptr::from_ref(of).addr()
}

/// Returns the entry of a thread inside a kernel receive (L4).
pub(crate) fn receive(endpoint: &'static Endpoint) -> Held {
    Held::new(&RECEIVE, [address(endpoint), 0, 0, 0])
}

/// Returns the entry of a thread inside a kernel send (L4).
pub(crate) fn send(endpoint: &'static Endpoint) -> Held {
    Held::new(&SEND, [address(endpoint), 0, 0, 0])
}

/// Returns the entry of a thread that sleeps for one endpoint on a pinned link, as the waiter
/// `slot`.
pub(crate) fn sleep(endpoint: &'static Endpoint, at: Attachment, slot: Option<Slot>) -> Held {
    let slot = slot.map_or(0, |slot| slot.0 + 1);
    Held::new(&SLEEP, [address(endpoint), address(at.link), at.conn, slot])
}

/// Returns the entry of a thread that sleeps in poll.
pub(crate) fn poll(watch: *mut Watch) -> Held {
    Held::new(&POLL, [watch as usize, 0, 0, 0])
}

/// Returns the entry of a thread that sleeps on an epoll instance.
pub(crate) fn epoll(epoll: &'static Epoll) -> Held {
    Held::new(&EPOLL, [address(epoll), 0, 0, 0])
}

/// Announces that a call of this thread begins to wait, and holds its socket until [`end_call`].
/// `here` is an address in its frame. The shield must be raised.
pub(crate) fn begin_call(endpoint: &'static Endpoint, here: usize) -> usize {
    signal::announce(Held::new(&CALL, [address(endpoint), 0, 0, 0]), here)
}

/// Withdraws the announcement when the call is over. The caller releases the socket.
pub(crate) fn end_call(place: usize) {
    signal::withdraw(place);
}

/// Returns how many of the calls in progress on `endpoint` are this thread's: a handler has
/// interrupted them, or left them.
pub(crate) fn own_calls(endpoint: &Endpoint) -> u32 {
    signal::calls_on(address(endpoint))
}
