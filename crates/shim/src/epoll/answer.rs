//! epoll_wait: what the lanes answer, and how it goes together with what the kernel answers.

use libc::epoll_event;

use super::{ALWAYS, DEGRADED_NANOS, EDGE, IN, Inner, ONE_SHOT, OUT, Registration};
use crate::endpoint::{Endpoint, EndpointRef};
use crate::ops::{receive, send};
use crate::waiter::Slot;
use crate::{attach, errno, real};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

impl Inner {
    /// Whether a look is worth while: cheap, for spinning and before a sleep.
    pub(crate) fn has_marks(&self) -> bool {
        let Some(slot) = self.slot else { return false };
        self.links.iter().any(|(link, _)| link.view().waiter(link.side, slot.0).peek_ready() != 0)
    }

    /// The lanes' answer: fills `events` with what is ready and returns how many.
    pub(crate) fn collect(&mut self, events: &mut [epoll_event]) -> usize {
        if let Some(slot) = self.slot {
            for index in 0..self.links.len() {
                let link = self.links[index].0;
                let mut marks = link.view().waiter(link.side, slot.0).take_ready();
                while marks != 0 {
                    let conn = marks.trailing_zeros() as usize;
                    marks &= marks - 1;
                    if let Some(endpoint) = link.endpoint(conn).and_then(EndpointRef::resolve) {
                        self.mark_pending(endpoint.fd.load(Relaxed));
                    }
                }
            }
        }
        if self.secondary > 0 {
            // Marks of these go to another waiter.
            let unmarked = |(fd, one): (&RawFd, &Registration)| {
                (one.attached.is_some() && !one.primary && one.events & EDGE == 0).then_some(*fd)
            };
            let level: Vec<RawFd> = self.registrations.iter().filter_map(unmarked).collect();
            level.into_iter().for_each(|fd| self.mark_pending(fd));
        }
        self.look_at_pending(events)
    }

    /// Looks at everything attached, marked or not: for instances that nobody can wake.
    pub(crate) fn mark_all(&mut self) {
        let attached: Vec<RawFd> = self.by_data.values().copied().collect();
        attached.into_iter().for_each(|fd| self.mark_pending(fd));
    }

    fn look_at_pending(&mut self, events: &mut [epoll_event]) -> usize {
        let mut found = 0;
        for _ in 0..self.pending.len() {
            if found == events.len() {
                break;
            }
            let Some(fd) = self.pending.pop_front() else { break };
            let slot = self.slot;
            let Some(registration) = self.registrations.get_mut(&fd) else { continue };
            registration.pending = false;
            let Some(endpoint) = registration.attached.and_then(EndpointRef::resolve) else { continue };
            if registration.disarmed || registration.deleted {
                continue;
            }
            if attach::is_returned(endpoint) {
                self.returned.push(endpoint);
            }
            let mut reported = judge(endpoint, fd, registration.events, slot);
            if reported != 0 && registration.events & ONE_SHOT != 0 {
                // It is the only report until it is armed again, so what TCP would add belongs into it.
                reported |= translate(endpoint, asked_of_kernel(fd, registration.events));
            }
            if reported != 0 {
                events[found] = epoll_event { events: reported, u64: registration.data };
                found += 1;
                if registration.events & ONE_SHOT != 0 {
                    registration.disarmed = true;
                } else if registration.events & EDGE == 0 {
                    registration.pending = true;
                    self.pending.push_back(fd);
                }
            }
        }
        found
    }

    /// Takes the kernel's events in `events[..count]` over: drops the doorbell's, adds what lanes say to a socket's, and
    /// merges them with the `before` events that are in the array already. Returns the new number in all.
    pub(crate) fn take_over(&mut self, events: &mut [epoll_event], before: usize, count: usize) -> usize {
        let mut kept = before;
        for index in before..before + count {
            let mut event = events[index];
            let data = event.u64;
            if data == self.marker {
                continue;
            }
            let ours = self.by_data.get(&data).copied();
            if let Some(fd) = ours {
                // TCP may end here and the lane begin: the next look must not wait for another mark.
                self.mark_pending(fd);
            }
            if let Some(fd) = ours
                && let Some(registration) = self.registrations.get_mut(&fd)
                && let Some(endpoint) = registration.attached.and_then(EndpointRef::resolve)
            {
                if registration.disarmed {
                    continue;
                }
                if registration.deleted {
                    registration.kernel_events = 0;
                    self.change_kernel(libc::EPOLL_CTL_DEL, fd, 0, 0);
                    continue;
                }
                endpoint.rx.lock().rx.note_tcp_news();
                let mut reported = translate(endpoint, event.events);
                if attach::reset_if_lost(endpoint, fd) {
                    reported |= IN | OUT | ALWAYS | libc::EPOLLRDHUP as u32;
                }
                event.events = reported & (registration.events | ALWAYS);
                if event.events == 0 {
                    // The kernel's set holds more than is wanted, and would report it for ever.
                    self.set_kernel_events(fd, endpoint);
                    continue;
                }
                if let Some(same) = events[..before].iter_mut().find(|earlier| { earlier.u64 } == data) {
                    same.events |= event.events;
                    continue;
                }
                if registration.events & ONE_SHOT != 0 {
                    registration.disarmed = true;
                }
            }
            events[kept] = event;
            kept += 1;
        }
        kept
    }

    /// How long a sleep may last at most, beside what the program wants, and whether that is for want of a doorbell.
    pub(crate) fn patience(&mut self) -> Option<u64> {
        if self.by_data.is_empty() {
            return None;
        }
        let Some(slot) = self.slot.filter(|_| self.secondary == 0) else { return Some(DEGRADED_NANOS) };
        slot.register();
        let known = self.links.iter().all(|(link, _)| link.view().is_known(link.side.other(), slot.0));
        if !known {
            return Some(DEGRADED_NANOS);
        }
        let waits_for_space = self.by_data.values().any(|fd| {
            self.registrations.get(fd).is_some_and(|registration| {
                registration.events & OUT != 0
                    && !registration.disarmed
                    && registration
                        .attached
                        .and_then(EndpointRef::resolve)
                        .is_some_and(|endpoint| endpoint.tx.lock().full_since.is_some())
            })
        });
        waits_for_space.then_some(send::STALL_NANOS)
    }

    /// Announces a sleep on every link; the caller looks once more afterwards.
    pub(crate) fn announce_sleep(&mut self) {
        self.sleepers += 1;
        self.each_waiter(|waiter| waiter.announce_sleep());
    }

    /// The sleep is over. Others that still sleep must be woken for what comes.
    pub(crate) fn awake(&mut self) {
        self.sleepers -= 1;
        if self.sleepers == 0 {
            self.each_waiter(|waiter| waiter.awake());
        } else {
            self.each_waiter(|waiter| waiter.announce_sleep());
        }
    }

    fn each_waiter(&self, act: impl Fn(&shunt_ring::WaiterLine)) {
        if let Some(slot) = self.slot {
            for (link, _) in &self.links {
                act(link.view().waiter(link.side, slot.0));
            }
        }
    }

    /// Endpoints whose receivers have given bytes back: to be sent again outside the lock.
    pub(crate) fn take_returned(&mut self) -> Vec<&'static Endpoint> {
        std::mem::take(&mut self.returned)
    }

    /// Senders whose receiver does not read go back to TCP.
    pub(crate) fn stalled(&mut self) -> Vec<&'static Endpoint> {
        let attached = self.by_data.values().filter_map(|fd| self.registrations.get(fd)?.attached?.resolve());
        attached.filter(|endpoint| send::has_stalled(endpoint)).collect()
    }
}

/// Which events the lanes of a registration answer with.
fn judge(endpoint: &Endpoint, fd: RawFd, wanted: u32, slot: Option<Slot>) -> u32 {
    let mut events = 0;
    if wanted & IN != 0 && receive::has_arrived(endpoint, fd) {
        events |= IN;
    }
    if wanted & OUT != 0 && send::writability(endpoint, slot) == Some(true) {
        events |= OUT;
    }
    events & wanted
}

/// What the kernel says of the socket now. The bits of poll and epoll are the same.
fn asked_of_kernel(fd: RawFd, wanted: u32) -> u32 {
    let mut entry = libc::pollfd { fd, events: wanted as u16 as i16, revents: 0 };
    let before = errno::get();
    // SAFETY: one entry of our own.
    unsafe { real::poll(&mut entry, 1, 0) };
    errno::set(before);
    u32::from(entry.revents as u16) & (wanted | ALWAYS)
}

/// The kernel's events for an attached socket, with EPOLLOUT as the lane has it.
fn translate(endpoint: &Endpoint, events: u32) -> u32 {
    if events & OUT != 0 && endpoint.tx.lock().tx.on_lane() { events & !OUT } else { events }
}
