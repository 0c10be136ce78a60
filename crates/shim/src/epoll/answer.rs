//! epoll_wait: what the lanes answer, and how it goes together with what the kernel answers.

use libc::epoll_event;

use super::{ALWAYS, DEGRADED_NANOS, EDGE, IN, Inner, ONE_SHOT, OUT, Registration};
use crate::endpoint::{Endpoint, EndpointRef};
use crate::links::Link;
use crate::ops::{receive, send};
use crate::waiter::Slot;
use crate::{attach, kernel};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

impl Inner {
    /// Whether a look is worth while: cheap, for spinning and before a sleep.
    pub(crate) fn has_marks(&self) -> bool {
        let Some(slot) = self.slot else { return false };
        self.links.have_marks(slot)
    }

    /// The lanes' answer: fills `events` with what is ready and returns how many.
    pub(crate) fn collect(&mut self, events: &mut [epoll_event]) -> usize {
        self.behind = false;
        if let Some(slot) = self.slot {
            let Inner { links, registrations, pending, .. } = self;
            let mut each = |link: &'static Link, mut marks: u64| {
                while marks != 0 {
                    let conn = marks.trailing_zeros() as usize;
                    marks &= marks - 1;
                    if let Some(endpoint) = link.endpoint(conn).and_then(EndpointRef::resolve) {
                        let fd = endpoint.fd.load(Relaxed);
                        if let Some(registration) = registrations.get_mut(&fd) {
                            registration.queue(pending, fd);
                        }
                    }
                }
            };
            links.take_marks(slot, &mut each);
            if std::mem::take(&mut self.rung) {
                links.take_rung(slot, self.sleepers > 0, &mut each);
            }
        }
        if self.secondary > 0 {
            // Marks of these go to another waiter.
            let unmarked = |(fd, one): (&RawFd, &mut Registration)| {
                let endpoint = one.attached.and_then(EndpointRef::resolve).filter(|_| !one.primary)?;
                let arrived = receive::arrived(endpoint);
                let is_new = std::mem::replace(&mut one.arrived, arrived) != arrived;
                (one.events & EDGE == 0 || is_new).then_some(*fd)
            };
            let due: Vec<RawFd> = self.registrations.iter_mut().filter_map(unmarked).collect();
            due.into_iter().for_each(|fd| self.mark_pending(fd));
        }
        self.look_at_pending(events)
    }

    /// Looks at everything attached, marked or not: for instances that nobody can wake.
    pub(crate) fn mark_all(&mut self) {
        let attached: Vec<RawFd> = self.by_data.values().copied().collect();
        attached.into_iter().for_each(|fd| self.mark_pending(fd));
        self.rung = true;
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
            let Answer { mut reported, full, behind } = judge(endpoint, fd, registration.events, slot);
            if behind {
                // Whoever reads TCP up to there may be another thread, and then nothing tells this one.
                registration.queue(&mut self.pending, fd);
                self.behind = true;
            }
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
                    registration.queue(&mut self.pending, fd);
                }
            }
            if full {
                self.note_full(fd);
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
                self.rung = true;
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
        self.rung |= self.links.learn_known(slot);
        if !self.links.all_known() {
            return Some(DEGRADED_NANOS);
        }
        self.forget_room();
        (!self.full.is_empty()).then_some(send::STALL_NANOS)
    }

    /// The same once more, after the last look before the sleep.
    pub(crate) fn last_patience(&self, before: Option<u64>) -> Option<u64> {
        if self.behind { Some(DEGRADED_NANOS) } else { before }
    }

    /// Takes those off the list of full lanes that do not wait for room any more.
    fn forget_room(&mut self) {
        let registrations = &mut self.registrations;
        self.full.retain(|fd| {
            let Some(registration) = registrations.get_mut(fd) else { return false };
            let wanted = registration.events & OUT != 0 && !registration.disarmed;
            let endpoint = registration.attached.and_then(EndpointRef::resolve);
            registration.full =
                wanted && endpoint.is_some_and(|endpoint| endpoint.tx.lock().full_since.is_some());
            registration.full
        });
    }

    /// Announces a sleep; the caller looks once more afterwards, and then [rests](Self::rest) or not.
    pub(crate) fn announce_sleep(&mut self) {
        self.sleepers += 1;
        if let Some(slot) = self.slot {
            self.links.announce_sleep(slot);
        }
    }

    /// Nothing was found: until the doorbell is rung, nobody need look at the links.
    pub(crate) fn rest(&mut self) {
        self.links.rest();
    }

    /// Something was found: there is no sleep. Others that do sleep must be woken for what comes.
    pub(crate) fn stay_awake(&mut self) {
        self.sleepers -= 1;
        let Some(slot) = self.slot else { return };
        if self.sleepers == 0 {
            self.links.stay_awake(slot);
        } else {
            self.links.announce_sleep(slot);
        }
    }

    /// The sleep is over.
    pub(crate) fn awake(&mut self) {
        // An instance that was closed meanwhile counts from zero.
        self.sleepers = self.sleepers.saturating_sub(1);
    }

    /// This thread was told of a ring, and returns to the program without having looked: a sleeping one does.
    pub(crate) fn pass_ring_on(&self) {
        if let Some(slot) = self.slot.filter(|_| self.rung && self.sleepers > 0) {
            slot.ring();
        }
    }

    /// Endpoints whose receivers have given bytes back: to be sent again outside the lock.
    pub(crate) fn take_returned(&mut self) -> Vec<&'static Endpoint> {
        std::mem::take(&mut self.returned)
    }

    /// Senders whose receiver does not read go back to TCP.
    pub(crate) fn stalled(&mut self) -> Vec<&'static Endpoint> {
        let full = self.full.iter().filter_map(|fd| self.registrations.get(fd)?.attached?.resolve());
        full.filter(|endpoint| send::has_stalled(endpoint)).collect()
    }
}

/// What the lanes of a registration say.
struct Answer {
    reported: u32,
    /// There is no room, and some is wanted.
    full: bool,
    /// There are bytes, but behind those of TCP that have not come yet: an edge, but nothing to read.
    behind: bool,
}

fn judge(endpoint: &Endpoint, fd: RawFd, wanted: u32, slot: Option<Slot>) -> Answer {
    let mut events = 0;
    let mut behind = false;
    if wanted & IN != 0 && receive::has_arrived(endpoint, fd) {
        behind = wanted & EDGE == 0 && !receive::is_readable(endpoint, fd);
        events |= if behind { 0 } else { IN };
    }
    let room = if wanted & OUT != 0 { send::writability(endpoint, slot) } else { None };
    if room == Some(true) {
        events |= OUT;
    }
    Answer { reported: events & wanted, full: room == Some(false), behind }
}

/// What the kernel says of the socket now. The bits of poll and epoll are the same.
fn asked_of_kernel(fd: RawFd, wanted: u32) -> u32 {
    let mut entry = libc::pollfd { fd, events: wanted as u16 as i16, revents: 0 };
    kernel::poll_now(std::slice::from_mut(&mut entry));
    u32::from(entry.revents as u16) & (wanted | ALWAYS)
}

/// The kernel's events for an attached socket, with EPOLLOUT as the lane has it.
fn translate(endpoint: &Endpoint, events: u32) -> u32 {
    if events & OUT != 0 && endpoint.tx.lock().tx.on_lane() { events & !OUT } else { events }
}
