//! The events of lanes in one call of poll, and how they are combined with the kernel's.

use std::ffi::c_short;

use libc::pollfd;

use super::watch::{Watch, Watched};
use super::{IN, OUT};
use crate::base::waiter::Slot;
use crate::base::{errno, kernel};
use crate::epoll;
use crate::life::resets;
use crate::ops::sleep;
use crate::socket::outgoing::{self, Room};
use crate::socket::{incoming, lost};

/// Fills in the events of lanes, and clears all others. Returns how many entries are ready.
pub(super) fn answer(fds: &mut [pollfd], watch: &Watch) -> i32 {
    fds.iter_mut().for_each(|entry| entry.revents = 0);
    let mut ready = 0;
    for one in watch.watched.iter().filter(|one| !watch.is_closed(one.index)) {
        let entry = &mut fds[one.index];
        if entry.events & IN != 0 && incoming::is_readable(one.endpoint, one.fd) {
            entry.revents |= entry.events & IN;
        }
        if entry.events & OUT != 0 && has_room(one) {
            entry.revents |= entry.events & OUT;
        }
        ready += i32::from(entry.revents != 0);
    }
    ready + answer_sets(fds, watch)
}

/// Adds the events of epoll instances that only the shim knows. Returns how many entries are ready
/// by these.
fn answer_sets(fds: &mut [pollfd], watch: &Watch) -> i32 {
    let mut ready = 0;
    for &(index, epoll) in &watch.sets {
        let entry = &mut fds[index];
        if entry.events & IN != 0 && epoll.would_tell_of_hidden() {
            entry.revents |= entry.events & IN;
            ready += 1;
        }
    }
    ready
}

/// Returns whether lanes have one of `events`.
pub(super) fn finds(one: &Watched, events: c_short) -> bool {
    events & IN != 0 && incoming::is_readable(one.endpoint, one.fd) || events & OUT != 0 && has_room(one)
}

fn has_room(one: &Watched) -> bool {
    outgoing::room(one.endpoint, None).0 == Room::Some
}

/// Returns whether something must be done before the call can wait.
pub(super) fn has_chores(one: &Watched, events: c_short) -> bool {
    outgoing::has_unseen_return(one.endpoint)
        || lost::is_lost(one.endpoint, one.fd)
        || events & OUT != 0 && outgoing::room(one.endpoint, None).0 == Room::Ended
}

/// Makes this thread the one that lanes wake, where that is possible. Returns how long a step of
/// the sleep may be.
pub(super) fn announce(fds: &[pollfd], watch: &mut Watch, slot: Option<Slot>) -> Option<u64> {
    watch.slot = slot;
    let mut step: Option<u64> = None;
    let mut at_most = |nanos: Option<u64>| {
        step = match (step, nanos) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    };
    for one in &mut watch.watched {
        let events = fds[one.index].events;
        epoll::make_way(one.endpoint, slot);
        {
            let side = one.endpoint.rx.lock();
            if !one.is_at(&side) {
                at_most(Some(0));
                continue;
            }
            one.owns = slot.is_some_and(|slot| one.endpoint.wait_on(&side, slot));
        }
        if events & IN != 0 {
            at_most(sleep::step_for(&one.at, slot, one.owns));
        }
        if let Some(slot) = slot {
            one.at.link.view().waiter(one.at.link.side, slot.0).announce_sleep();
        }
        if events & OUT != 0 && matches!(outgoing::room(one.endpoint, slot).0, Room::None | Room::Returning) {
            at_most(Some(outgoing::longest_sleep(one.endpoint)));
        }
    }
    step
}

/// Fills in the array for the kernel, whose last entry is the doorbell.
pub(super) fn prepare(fds: &[pollfd], shadow: &mut Vec<pollfd>, watch: &Watch) {
    shadow.clear();
    shadow.reserve_exact(fds.len() + 1);
    shadow.extend_from_slice(fds);
    for entry in shadow.iter_mut() {
        entry.revents = 0;
    }
    for one in &watch.closed {
        let entry = &mut shadow[one.index];
        entry.fd = if one.told.is_some() { -1 } else { one.fd };
        entry.events = woken_by(entry.events);
    }
    for one in &watch.watched {
        let entry = &mut shadow[one.index];
        if one.endpoint.tx.lock().tx.on_lane() {
            entry.events &= !OUT;
        }
        // The death of the peer is an error that need not be requested, and that first shows as
        // POLLRDHUP.
        if !one.ended.get() {
            entry.events |= libc::POLLRDHUP;
        }
    }
    shadow.push(pollfd { fd: watch.slot.map_or(-1, Slot::listener), events: libc::POLLIN, revents: 0 });
}

/// Returns the events by which the kernel wakes a call that asks for `events`, whether it then
/// finds them or not. Any bytes may be urgent or not, and an end may be of any kind.
pub(super) fn woken_by(events: c_short) -> c_short {
    const BYTES: c_short = IN | libc::POLLPRI;
    events | libc::POLLRDHUP | if events & BYTES != 0 { BYTES } else { 0 }
}

/// Checks the lanes once more, and adds the kernel's events to theirs. Returns `true` if a socket
/// has changed meanwhile, and the round must be repeated.
pub(super) fn merge(fds: &mut [pollfd], shadow: &[pollfd], watch: &Watch) -> bool {
    let before = errno::get();
    answer(fds, watch);
    for (index, (entry, kernel)) in fds.iter_mut().zip(shadow).enumerate() {
        if !watch.is_closed(index) {
            entry.revents |= kernel.revents;
        }
    }
    let told_by_kernel = |one: &&Watched| shadow[one.index].revents != 0 && !watch.is_closed(one.index);
    for one in watch.watched.iter().filter(told_by_kernel) {
        let entry = &mut fds[one.index];
        if entry.revents & !entry.events & libc::POLLRDHUP != 0 {
            entry.revents &= !libc::POLLRDHUP;
            one.ended.set(true);
        }
        one.endpoint.rx.lock().rx.note_tcp_news();
        if resets::reset_if_lost(one.endpoint, one.fd) {
            return true;
        }
        if one.endpoint.owes_alone() {
            fds[one.index].revents |= libc::POLLERR;
        }
    }
    if epoll::show_lanes() {
        for entry in fds.iter_mut().filter(|entry| entry.revents != 0 && epoll::behind(entry.fd).is_some()) {
            let mut again = [*entry];
            kernel::poll_now(&mut again);
            entry.revents = again[0].revents;
        }
        answer_sets(fds, watch);
    }
    errno::set(before);
    false
}
