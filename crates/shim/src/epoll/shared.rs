//! Sets that another process has too, since a fork. There is one set in the kernel for all of them, and each may change it, so
//! it holds what the program has asked for and nothing of ours, and lanes answer only for what was in them at the fork. Once no
//! other process has it any more, it is asked what it holds, and everything is as before.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering::*};

use libc::epoll_event;
use rustix::event::EventfdFlags;
use rustix::io::{Errno, FdFlags};
use shunt_abi::reason::Reason;

use super::names::{Name, is_token, new_token};
use super::registration::{Passed, change, is_frozen};
use super::{EDGE, EXCLUSIVE, Epoll, Inner, ONE_SHOT, Registration, all, listing};
use crate::base::lock::Lock;
use crate::base::names::EndpointRef;
use crate::base::private::{borrow, close_owned};
use crate::base::table::{self, Entry};
use crate::base::{children, errno, kernel, process, real};
use crate::epoll::{LEAVE, Leaving};
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::family::{self, Holders, Shareable};
use crate::socket::incoming;

/// How much longer than a look for the holders of a set the pause after it is.
const PAUSES: u64 = 64;
/// Somebody else may have had the processor meanwhile.
const LONGEST_PAUSE_NANOS: u64 = 20_000_000;

/// What an event leaves of a registration for one event.
pub(super) const PRIVATE: u32 = EDGE | ONE_SHOT | EXCLUSIVE | libc::EPOLLWAKEUP as u32;

impl Shareable for Epoll {
    fn holders(&self) -> &Holders {
        &self.holders
    }

    /// Of one that has become another program meanwhile: whether its descriptor of that number is this set. Where the kernel
    /// does not compare the two, a set with the same in it counts.
    fn may_be_held_by(&self, pid: u32) -> bool {
        let Some(fd) = table::name_of(Entry::Epoll(self.name())) else { return true };
        let own_pid = process::pid() as u32;
        kernel::is_same_file(own_pid, pid, fd).unwrap_or_else(|| {
            let own = listing::of(own_pid, fd);
            own.is_none() || own == listing::of(pid, fd)
        })
    }

    /// A program that is not told of a set that it inherits has no use for it, but those that it starts inherit it too, under
    /// the same number.
    fn is_held_beyond(&self, pid: u32) -> Option<bool> {
        let fd = table::name_of(Entry::Epoll(self.name()))?;
        let own = process::pid() as u32;
        children::any_of_family(pid, |one| kernel::is_same_file(own, one, fd).ok_or(Errno::PERM)).ok()
    }
}

pub(super) fn in_use() -> impl Iterator<Item = &'static Epoll> {
    all().filter(|epoll| epoll.inner.lock().is_open())
}

/// One set is taken in at a time, so that none is twice.
pub(super) static TAKING_IN: Lock<()> = Lock::new(());

/// Forks that have ended lanes, and how many of them are known to have left no bytes there by now.
static FORKS: AtomicU32 = AtomicU32::new(0);
static DRAINED: AtomicU32 = AtomicU32::new(0);

/// Whether another process may add a connection to a shared set that has bytes in a lane: the kernel knows nothing of them, and
/// wakes nobody.
pub(super) fn may_be_added() -> bool {
    let forks = FORKS.load(Acquire);
    if DRAINED.load(Relaxed) == forks {
        return false;
    }
    let has_some = |endpoint: &Endpoint| endpoint.is_attached() && incoming::unread(endpoint) > 0;
    let any_has = endpoint::all().any(has_some);
    if !any_has {
        DRAINED.store(forks, Relaxed);
    }
    any_has
}

/// Before a fork.
pub(crate) fn share() {
    FORKS.fetch_add(endpoint::any_is_attached().into(), AcqRel);
    for epoll in in_use() {
        family::prepare();
        if !family::expect_child(epoll) {
            epoll.holders.lose();
        }
        epoll.inner.lock().share(epoll);
    }
}

/// There is no child after all.
pub(crate) fn forget_child() {
    in_use().for_each(family::forget_child);
}

/// In a child.
pub(crate) fn be_born() {
    in_use().for_each(family::be_born);
}

/// This process is about to become another program. Which of them it inherits, no program of ours will know.
pub(crate) fn change_program() {
    for epoll in in_use() {
        if is_inheritable(epoll) {
            family::change_unsaid(epoll);
        } else {
            family::change(epoll, false);
        }
    }
}

/// It has not.
pub(crate) fn stay() {
    in_use().for_each(family::stay);
}

/// A program that cannot be followed is about to hold them.
pub(crate) fn pass_beyond() {
    in_use().for_each(family::pass_beyond);
}

/// A message takes the set to another process, or the kernel reads it by a ring, and nobody can be asked when that lets go of it.
/// What lanes hold for it comes by TCP.
pub(crate) fn hand_on(epoll: &Epoll, reason: Reason) {
    epoll.holders.lose();
    let attached: Vec<_> = {
        let mut inner = epoll.inner.lock();
        inner.share(epoll);
        inner.registrations.values().filter_map(Registration::endpoint).filter(|one| !one.is_back()).collect()
    };
    attached.into_iter().for_each(|endpoint| LEAVE.call((endpoint, Leaving::BarReading, reason)));
}

/// Whether `fd` is a set, whoever has made it: only a set knows what it does not have.
pub(crate) fn is_set(fd: RawFd) -> bool {
    let before = errno::get();
    let Ok(stranger) = rustix::event::eventfd(0, EventfdFlags::CLOEXEC) else { return false };
    let number = stranger.as_raw_fd();
    // SAFETY: a plain call; nothing is written.
    let result = unsafe { real::epoll_ctl(fd, libc::EPOLL_CTL_DEL, number, std::ptr::null_mut()) };
    let is_set = result == -1 && errno::get() == libc::ENOENT;
    close_owned(stranger);
    errno::set(before);
    is_set
}

/// `fd` is a set that this process has been handed by another, or by the program that it was before. Who has it too, nobody can be
/// asked. `None`: there are too many.
pub(crate) fn take_in(fd: RawFd) -> Option<&'static Epoll> {
    let _alone = TAKING_IN.lock();
    if table::look_up(fd) == Entry::None {
        super::track(fd);
        if let Some(epoll) = super::behind(fd) {
            epoll.holders.lose();
            epoll.inner.lock().begin_sharing(epoll);
        }
    }
    super::behind(fd)
}

/// Of a set that is not known: how many are in it, and whether one of them is a connection that this program has made. Whoever has
/// put it there did so by no call of libc's, and waits for it in the same way. What was handed to this program, another may have
/// put there.
pub(crate) fn list_unknown(fd: RawFd) -> (u32, bool) {
    let listed = listing::of(process::pid() as u32, fd).unwrap_or_default();
    let is_made_here = |fd| endpoint::behind(fd).is_some_and(|endpoint| endpoint.holders.are_one());
    (listed.len() as u32, listed.iter().any(|one| is_made_here(one.fd)))
}

fn is_inheritable(epoll: &Epoll) -> bool {
    let entry = Entry::Epoll(epoll.name());
    table::known(0, u32::MAX).any(|(fd, other)| {
        other == entry
            && rustix::io::fcntl_getfd(borrow(fd)).is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
    })
}

/// Whether the endpoint is in a set that another process has too.
pub(crate) fn is_shared(endpoint: &Endpoint) -> bool {
    super::sets_of(endpoint).into_iter().any(|epoll| !epoll.inner.lock().unshare(epoll))
}

impl Inner {
    fn is_open(&self) -> bool {
        self.marker != 0 && self.fd >= 0
    }

    /// Before a fork. The connections have gone back; what is left in their lanes is looked for by every wait.
    fn share(&mut self, epoll: &Epoll) {
        self.begin_sharing(epoll);
        let Inner { fd: set, registrations, names, .. } = self;
        for (&fd, one) in registrations.iter_mut() {
            if one.held.is_disarmed() {
                one.mark_disarmed(*set, fd);
            } else if (one.held.events() != one.events || one.name.is_known() || one.exclusive)
                && one.give_to_kernel(*set, fd)
            {
                names.give(&mut one.name, fd, Name::Given);
            }
        }
        if let Some(slot) = self.slot().filter(|_| self.sleepers > 0) {
            // Whoever sleeps looks once more, and takes the doorbell out when it is awake.
            slot.ring();
        }
        self.retire_doorbell(epoll);
    }

    /// The kernel's set is not this process's alone.
    pub(super) fn begin_sharing(&mut self, epoll: &Epoll) {
        if !std::mem::replace(&mut self.shared, true) {
            epoll.active.fetch_add(1, AcqRel);
            self.seen_changes = family::changes(epoll).unwrap_or(0);
        }
        self.ask_holders_at = 0;
    }

    /// In a shared set, nobody can be woken by lanes once nobody sleeps.
    pub(super) fn retire_doorbell(&mut self, epoll: &Epoll) {
        let Some(slot) = self.slot().filter(|_| self.shared && self.sleepers == 0) else { return };
        self.take_bell_out(epoll);
        for one in self.registrations.values_mut() {
            let lost = one.answered.lose_marks(&mut self.answered);
            if let Some(endpoint) = lost.and_then(EndpointRef::resolve) {
                endpoint.unclaim(slot);
            }
        }
        self.let_slot_go();
    }

    /// Whether the set is this process's alone, from now on if not before. That is looked into for a small part of the time
    /// only, however long a look takes and however often somebody asks.
    pub(super) fn unshare(&mut self, epoll: &Epoll) -> bool {
        if !self.shared {
            return true;
        }
        let begin = process::now();
        if begin < self.ask_holders_at {
            return false;
        }
        if family::is_shared(epoll) || !self.learn(epoll) {
            let end = process::now();
            self.ask_holders_at = end + ((end - begin) * PAUSES).min(LONGEST_PAUSE_NANOS);
            return false;
        }
        self.shared = false;
        epoll.active.fetch_sub(1, AcqRel);
        // From now on others may get the same data without a word to us.
        for (&fd, one) in self.registrations.iter_mut() {
            if !one.answered.is_by_lanes() && !one.name.is_token() {
                self.names.give(&mut one.name, fd, Name::Given);
            }
        }
        let needs_token = |(fd, one): &(&RawFd, &Registration)| {
            (one.answered.is_by_lanes() || one.events & ONE_SHOT != 0)
                && !one.held.is_disarmed()
                && !is_frozen(**fd)
        };
        let fds: Vec<RawFd> = self.registrations.iter().filter(needs_token).map(|(fd, _)| *fd).collect();
        for fd in fds {
            self.name(fd, new_token(epoll));
            self.set_kernel_events(fd, endpoint::behind(fd));
        }
        self.withdraw_disarmed();
        true
    }

    /// Before a look at a shared set: what others have changed in it matters to what lanes answer.
    pub(crate) fn catch_up(&mut self, epoll: &Epoll) {
        if self.shared && endpoint::any_is_attached() {
            let changes = family::changes(epoll);
            if changes.is_some_and(|changes| changes != self.seen_changes) {
                self.learn(epoll);
                self.seen_changes = changes.unwrap_or(0);
            }
        }
    }

    /// This process has changed a shared set, or been told what others are not told any more.
    pub(crate) fn note_change(&mut self, epoll: &Epoll) {
        if self.shared && family::note_change(epoll) == Some(self.seen_changes) {
            self.seen_changes = self.seen_changes.wrapping_add(1);
        }
    }

    /// The kernel has done what `epoll_ctl` on a shared set asked for.
    ///
    /// # Safety
    /// `event` must be what the program passed to epoll_ctl.
    pub(super) unsafe fn note_control(
        &mut self,
        epoll: &Epoll,
        operation: i32,
        fd: RawFd,
        endpoint: Option<&Endpoint>,
        event: *mut epoll_event,
    ) {
        if operation != libc::EPOLL_CTL_MOD && self.registrations.contains_key(&fd) {
            self.remove(epoll, fd);
        }
        if operation != libc::EPOLL_CTL_DEL {
            // SAFETY: the kernel has read it.
            let wanted = unsafe { std::ptr::read_unaligned(event) };
            self.put(
                epoll,
                operation,
                fd,
                endpoint,
                wanted,
                Passed { events: wanted.events, name: Name::Given },
            );
            // Another with the same data: an event of that may be of either.
            if let Some(other) = self.names.find(wanted.u64).filter(|other| *other != fd) {
                self.name(other, Name::Given);
            }
            let is_answered = |one: &Registration| one.answered.is_by_lanes();
            if self.registrations.get(&fd).is_some_and(is_answered) {
                self.merge_by_data(&listing::of(process::pid() as u32, self.fd).unwrap_or_default());
            }
        }
        self.note_change(epoll);
    }

    /// Has the records say what the kernel's set does. `false`: they cannot.
    fn learn(&mut self, epoll: &Epoll) -> bool {
        let Some(listed) = listing::of(process::pid() as u32, self.fd) else { return false };
        let is_there =
            |fd: RawFd, inode: u64| rustix::fs::fstat(borrow(fd)).is_ok_and(|file| file.st_ino == inode);
        let is_ours = |fd| matches!(table::look_up(fd), Entry::Endpoint(_) | Entry::Unconnected(_));
        let present: HashMap<RawFd, _> = listed
            .iter()
            .filter(|one| is_ours(one.fd) && is_there(one.fd, one.inode))
            .map(|one| (one.fd, one))
            .collect();
        // What a token stands for is in the kernel's set under a number that has been closed, as is what is frozen.
        let is_frozen_there = |fd, one: &Registration| {
            is_frozen(fd) && listed.iter().any(|other| (other.fd, other.data) == (one.number, one.data))
        };
        let is_gone = |(fd, one): (&RawFd, &Registration)| {
            let stays = present.contains_key(fd) || one.name.is_token();
            (!stays && !is_frozen_there(*fd, one)).then_some(*fd)
        };
        let gone: Vec<RawFd> = self.registrations.iter().filter_map(is_gone).collect();
        for fd in gone {
            self.remove(epoll, fd);
        }
        for (&fd, one) in &present {
            let is_known = self.registrations.contains_key(&fd);
            let disarmed = one.events & ONE_SHOT != 0 && one.events & !PRIVATE == 0;
            let wanted = epoll_event { events: one.events, u64: one.data };
            if is_token(one.data) {
                // One that lanes have disarmed, here or elsewhere: its data comes when it is armed again.
                if let Some(registration) = self.registrations.get_mut(&fd) {
                    registration.held.spend();
                    self.names.give(&mut registration.name, fd, Name::of(one.data));
                }
                continue;
            }
            let operation = if is_known { libc::EPOLL_CTL_MOD } else { libc::EPOLL_CTL_ADD };
            self.put(
                epoll,
                operation,
                fd,
                endpoint::behind(fd),
                wanted,
                Passed { events: one.events, name: Name::Given },
            );
            if let Some(registration) = self.registrations.get_mut(&fd)
                && disarmed
            {
                registration.held.fall_silent();
            }
        }
        self.merge_by_data(&listed);
        // A socket of ours that goes by another number here cannot be told from others. Any other file, such as one that only
        // a child has by now, is the kernel's affair.
        let elsewhere: Vec<u64> =
            listed.iter().filter(|one| !is_there(one.fd, one.inode)).map(|one| one.inode).collect();
        elsewhere.is_empty()
            || !table::known(0, u32::MAX)
                .filter(|(fd, _)| is_ours(*fd))
                .filter_map(|(fd, _)| rustix::fs::fstat(borrow(fd)).ok())
                .any(|file| elsewhere.contains(&file.st_ino))
    }

    /// A lane has reported what others may wait for too, and so has disarmed it for all of them.
    pub(super) fn disarm(&mut self, epoll: &Epoll, fd: RawFd) {
        let token = new_token(epoll);
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        self.names.give(&mut registration.name, fd, token);
        registration.mark_disarmed(self.fd, fd);
    }

    /// Has what lanes and the kernel say of a registration become one event, if no other has the same data.
    pub(super) fn merge_by_data(&mut self, listed: &[listing::Listed]) {
        for (&fd, one) in self.registrations.iter_mut() {
            if !one.name.is_token() {
                let is_single = || listed.iter().filter(|other| other.data == one.data).count() == 1;
                let is_unique = one.answered.is_by_lanes() && is_single();
                let name = if is_unique { Name::of(one.data) } else { Name::Given };
                self.names.give(&mut one.name, fd, name);
            }
        }
    }
}

impl Registration {
    /// In the kernel's set only an event disarms it, and until then errors are reported whatever was asked for. So it keeps
    /// a token there, which says to all who share the set that nothing is to be told.
    pub(super) fn mark_disarmed(&mut self, set: RawFd, fd: RawFd) {
        let events = self.events & PRIVATE;
        if let Name::Token(token) = self.name
            && let Some(operation) = self.held.operation_for_spent()
            && change(set, operation, fd, events, token)
        {
            self.held.hold_spent(events);
        }
    }
}
