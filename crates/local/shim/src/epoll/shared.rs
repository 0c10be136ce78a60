//! Epoll instances that another process has too, since a fork. The kernel has one instance for all
//! of them, and each process may change it. So its list has what the program asked for and nothing
//! of the shim's, and lanes answer only for what they held at the fork. Once no other process has
//! the instance, the shim reads the list from /proc, and lanes answer again.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering::*};

use libc::epoll_event;
use rustix::event::EventfdFlags;
use rustix::io::{Errno, FdFlags};
use shunt_abi::reason::Reason;
use shunt_sys::trace::is_same_file;

use super::freezing::is_frozen;
use super::kernel_list::change;
use super::names::{Name, is_token, new_token};
use super::registration::Passed;
use super::registrations::Registrations;
use super::{EDGE, EXCLUSIVE, Epoll, Inner, ONE_SHOT, Registration, all, listing};
use crate::base::lock::Lock;
use crate::base::names::EndpointRef;
use crate::base::private::{borrow, close_owned};
use crate::base::rank;
use crate::base::table::{self, Entry};
use crate::base::{children, errno, kernel, process, real};
use crate::epoll::{LEAVE, Leaving};
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::incoming;
use crate::socket::sharing::{self, Holders, Shareable};

/// The flags that an event leaves of an EPOLLONESHOT registration (EP_PRIVATE_BITS in the kernel).
pub(super) const PRIVATE: u32 = EDGE | ONE_SHOT | EXCLUSIVE | libc::EPOLLWAKEUP as u32;

impl Shareable for Epoll {
    fn holders(&self) -> &Holders {
        &self.holders
    }

    /// Returns whether the fd of this instance may name it in a process that has become another
    /// program meanwhile. If the kernel does not compare the two files, an instance with the same
    /// list counts.
    fn may_be_held_by(&self, pid: u32) -> bool {
        let Some(fd) = table::name_of(Entry::Epoll(self.name())) else { return true };
        let own_pid = process::pid();
        is_same_file((own_pid, fd), (pid as i32, fd)).unwrap_or_else(|| {
            let own = listing::of(own_pid as u32, fd);
            own.is_none() || own == listing::of(pid, fd)
        })
    }

    /// Returns whether a process, or one that it has started, still has this instance. A program
    /// that inherits the instance without knowing it has no use for it. But the programs that it
    /// starts inherit it too, under the same fd.
    fn is_held_beyond(&self, pid: u32) -> Option<bool> {
        let fd = table::name_of(Entry::Epoll(self.name()))?;
        let own = (process::pid(), fd);
        children::any_of_family(pid, |one| is_same_file(own, (one as i32, fd)).ok_or(Errno::PERM)).ok()
    }
}

pub(super) fn in_use() -> impl Iterator<Item = &'static Epoll> {
    all().filter(|epoll| epoll.inner.lock().is_open())
}

/// Guards against taking in one instance twice.
pub(super) static TAKING_IN: Lock<(), { rank::ADOPTION }> = Lock::new(());

/// Forks that have ended lanes, and how many of them are known to have left no bytes there by now.
static FORKS: AtomicU32 = AtomicU32::new(0);
static DRAINED: AtomicU32 = AtomicU32::new(0);

/// Returns whether another process may add a connection with bytes in a lane to a shared instance.
/// The kernel does not know of the bytes, and wakes no thread.
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

/// Shares every instance, before a fork.
pub(crate) fn share() {
    FORKS.fetch_add(endpoint::any_is_attached().into(), AcqRel);
    for epoll in in_use() {
        sharing::prepare();
        if !sharing::expect_child(epoll) {
            epoll.holders.lose();
        }
        epoll.inner.lock().share(epoll);
    }
}

/// Notes that the fork has made no child.
pub(crate) fn forget_child() {
    in_use().for_each(sharing::forget_child);
}

/// Notes in a child that it holds its parent's instances.
pub(crate) fn be_born() {
    in_use().for_each(sharing::be_born);
}

/// Notes that this process is about to become another program, which will not know the instances
/// that it inherits.
pub(crate) fn change_program() {
    for epoll in in_use() {
        if is_inheritable(epoll) {
            sharing::change_unsaid(epoll);
        } else {
            sharing::change(epoll, false);
        }
    }
}

/// Notes that the exec has failed.
pub(crate) fn stay() {
    in_use().for_each(sharing::stay);
}

/// Notes that a program without the shim is about to hold the instances.
pub(crate) fn pass_beyond() {
    in_use().for_each(sharing::pass_beyond);
}

/// Shares an instance that a message takes to another process, or that an io_uring reads. The shim
/// cannot find out when that holder releases it. The bytes of its lanes come by TCP.
pub(crate) fn hand_on(epoll: &Epoll, reason: Reason) {
    epoll.holders.lose();
    let attached: Vec<_> = {
        let mut inner = epoll.inner.lock();
        inner.share(epoll);
        inner.registrations.values().filter_map(Registration::endpoint).filter(|one| !one.is_back()).collect()
    };
    attached.into_iter().for_each(|endpoint| LEAVE.call((endpoint, Leaving::BarReading, reason)));
}

/// Returns whether `fd` is an epoll instance, whichever call made it. Only an instance reports
/// ENOENT for a file that it does not have.
pub(crate) fn is_instance(fd: RawFd) -> bool {
    let before = errno::get();
    let Ok(stranger) = rustix::event::eventfd(0, EventfdFlags::CLOEXEC) else { return false };
    let number = stranger.as_raw_fd();
    // SAFETY: a plain call; nothing is written.
    let result = unsafe { real::epoll_ctl(fd, libc::EPOLL_CTL_DEL, number, std::ptr::null_mut()) };
    let is_instance = result == -1 && errno::get() == libc::ENOENT;
    close_owned(stranger);
    errno::set(before);
    is_instance
}

/// Tracks an instance that this process got from another, or from the program that it was before.
/// Its other holders cannot be queried. Returns `None` if there are too many instances.
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

/// Tracks an instance of a program that ran before the shim came into it. `waits` are the threads
/// that may wait in it, past the shim. It `may_be_shared` if another descriptor or another process
/// may have it.
pub(crate) fn take_in_of_running(fd: RawFd, may_be_shared: bool, waits: Vec<i32>) {
    let _alone = TAKING_IN.lock();
    if table::look_up(fd) != Entry::None {
        return;
    }
    super::track(fd);
    if let Some(epoll) = super::behind(fd) {
        if may_be_shared {
            epoll.holders.lose();
        }
        let mut inner = epoll.inner.lock();
        inner.native_waits = waits;
        inner.begin_sharing(epoll);
    }
}

/// Learns the registrations of all instances that [`take_in_of_running`] has tracked. Returns
/// `false` if one of a connection cannot be matched with it.
pub(crate) fn learn_of_running() -> bool {
    in_use().all(|epoll| epoll.inner.lock().learn(epoll))
}

/// Returns how many registrations an unknown instance has, and whether one is a connection that
/// this program has made. Such a one was registered by a call past libc, and is waited for in that
/// way too. A connection that was handed to this program may have been registered by another one.
pub(crate) fn list_unknown(fd: RawFd) -> (u32, bool) {
    let listed = listing::of(process::pid() as u32, fd).unwrap_or_default();
    let is_made_here = |fd| endpoint::behind(fd).is_some_and(|endpoint| endpoint.sharing.holders.are_one());
    (listed.len() as u32, listed.iter().any(|one| is_made_here(one.fd)))
}

fn is_inheritable(epoll: &Epoll) -> bool {
    let entry = Entry::Epoll(epoll.name());
    table::known(0, u32::MAX).any(|(fd, other)| {
        other == entry
            && rustix::io::fcntl_getfd(borrow(fd)).is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
    })
}

/// Returns whether the endpoint is in an instance that another process has too.
pub(crate) fn is_shared(endpoint: &Endpoint) -> bool {
    super::instances_of(endpoint).into_iter().any(|epoll| !epoll.inner.lock().unshare(epoll))
}

impl Inner {
    fn is_open(&self) -> bool {
        self.list.is_open()
    }

    /// Prepares the instance for a fork. The connections have fallen back, and each wait checks
    /// what is left in their lanes.
    fn share(&mut self, epoll: &Epoll) {
        self.begin_sharing(epoll);
        let Inner { list, registrations: Registrations { records, names, .. }, .. } = self;
        for (&fd, one) in records.iter_mut() {
            if one.interest.is_disarmed() {
                one.mark_disarmed(list.fd, fd);
            } else if (one.interest.events() != one.events || one.name.is_known() || one.exclusive)
                && one.give_to_kernel(list.fd, fd)
            {
                names.give(&mut one.name, fd, Name::Given);
            }
        }
        if let Some(slot) = self.slot().filter(|_| self.sleeps.has_some()) {
            // A sleeping thread checks once more, and removes the doorbell when it is awake.
            slot.ring();
        }
        self.retire_doorbell(epoll);
    }

    /// Notes that other processes have the kernel's instance too.
    pub(super) fn begin_sharing(&mut self, epoll: &Epoll) {
        if self.exposure.begin_sharing(|| sharing::changes(epoll).unwrap_or(0)) {
            epoll.active.fetch_add(1, AcqRel);
        }
    }

    /// Gives up the waiter of a shared instance when no thread sleeps there. Lanes wake no thread
    /// after that.
    pub(super) fn retire_doorbell(&mut self, epoll: &Epoll) {
        let Some(slot) = self.slot().filter(|_| self.exposure.is_shared() && !self.sleeps.has_some()) else {
            return;
        };
        self.unregister_wakeup(epoll);
        let Registrations { records, answered, .. } = &mut self.registrations;
        for one in records.values_mut() {
            let lost = one.answered.lose_marks(answered);
            if let Some(endpoint) = lost.and_then(EndpointRef::resolve) {
                endpoint.unclaim(slot);
            }
        }
        self.let_slot_go();
    }

    /// Returns whether the instance is this process's alone. If it has become so, sharing ends.
    #[inline(always)]
    pub(super) fn unshare(&mut self, epoll: &Epoll) -> bool {
        !self.exposure.is_shared() || self.unshare_if_alone(epoll)
    }

    #[cold]
    #[inline(never)]
    fn unshare_if_alone(&mut self, epoll: &Epoll) -> bool {
        let begin = process::now();
        if !self.exposure.may_query_holders(begin) {
            return false;
        }
        if self.has_native_waits() || sharing::is_shared(epoll) || !self.learn(epoll) {
            self.exposure.note_holders(begin, process::now());
            return false;
        }
        self.exposure.end_sharing();
        epoll.active.fetch_sub(1, AcqRel);
        // From now on, other descriptors may get the same data without the shim's notice.
        let Registrations { records, names, .. } = &mut self.registrations;
        for (&fd, one) in records.iter_mut() {
            if !one.answered.is_by_lanes() && !one.name.is_token() {
                names.give(&mut one.name, fd, Name::Given);
            }
        }
        let needs_token = |(fd, one): &(&RawFd, &Registration)| {
            (one.answered.is_by_lanes() || one.events & ONE_SHOT != 0)
                && !one.interest.is_disarmed()
                && !is_frozen(**fd)
        };
        let fds: Vec<RawFd> = self.registrations.iter().filter(needs_token).map(|(fd, _)| *fd).collect();
        for fd in fds {
            self.registrations.name(fd, new_token(epoll));
            self.set_kernel_events(fd, endpoint::behind(fd));
        }
        self.unregister_disarmed();
        true
    }

    /// Returns whether a thread may still wait in the instance past the shim. A thread that has
    /// ended does not.
    fn has_native_waits(&mut self) -> bool {
        let own = process::pid();
        self.native_waits.retain(|thread| kernel::has_thread(own, *thread));
        !self.native_waits.is_empty()
    }

    /// Updates the records before a check of a shared instance, since the changes of other
    /// processes affect what lanes answer.
    pub(crate) fn catch_up(&mut self, epoll: &Epoll) {
        if !self.exposure.is_shared() {
            return;
        }
        if !self.native_waits.is_empty() {
            // This thread waits by the shim now.
            let own = rustix::thread::gettid().as_raw_pid();
            self.native_waits.retain(|thread| *thread != own);
        }
        if endpoint::any_is_attached() {
            let changes = sharing::changes(epoll);
            if let Some(changes) = changes.filter(|changes| self.exposure.has_missed_changes(*changes)) {
                self.learn(epoll);
                self.exposure.note_seen(changes);
            }
        }
    }

    /// Notes that this process has changed a shared instance, or got an event that other processes
    /// do not get any more.
    pub(crate) fn note_change(&mut self, epoll: &Epoll) {
        if self.exposure.is_shared()
            && let Some(before) = sharing::note_change(epoll)
        {
            self.exposure.note_own_change(before);
        }
    }

    /// Notes an `epoll_ctl` that the kernel has carried out on a shared instance.
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
            // Another registration has the same data, so an event with it may belong to either.
            if let Some(other) = self.registrations.names.find(wanted.u64).filter(|other| *other != fd) {
                self.registrations.name(other, Name::Given);
            }
            let is_answered = |one: &Registration| one.answered.is_by_lanes();
            if self.registrations.get(&fd).is_some_and(is_answered) {
                self.merge_by_data(&listing::of(process::pid() as u32, self.list.fd).unwrap_or_default());
            }
        }
        self.note_change(epoll);
    }

    /// Makes the records match the kernel's list. Returns `false` if they cannot.
    fn learn(&mut self, epoll: &Epoll) -> bool {
        let Some(listed) = listing::of(process::pid() as u32, self.list.fd) else { return false };
        let is_there =
            |fd: RawFd, inode: u64| rustix::fs::fstat(borrow(fd)).is_ok_and(|file| file.st_ino == inode);
        let is_ours = |fd| matches!(table::look_up(fd), Entry::Endpoint(_) | Entry::Unconnected(_));
        let present: HashMap<RawFd, _> = listed
            .iter()
            .filter(|one| is_ours(one.fd) && is_there(one.fd, one.inode))
            .map(|one| (one.fd, one))
            .collect();
        // A registration with a token may be in the kernel's list under an fd that has been closed,
        // and a frozen one is.
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
                // Lanes have disarmed it, in this process or another. Its data comes when it is
                // armed again.
                if let Some(registration) = self.registrations.get_mut(&fd) {
                    registration.interest.fire_locally();
                    self.registrations.name(fd, Name::of(one.data));
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
                registration.interest.note_kernel_event();
            }
        }
        self.merge_by_data(&listed);
        // A connection that this process has under another fd than the listed one cannot be matched
        // with its registration. Any other file, such as one that only a child has by now, concerns
        // the kernel alone.
        let elsewhere: Vec<u64> =
            listed.iter().filter(|one| !is_there(one.fd, one.inode)).map(|one| one.inode).collect();
        elsewhere.is_empty()
            || !table::known(0, u32::MAX)
                .filter(|(fd, _)| is_ours(*fd))
                .filter_map(|(fd, _)| rustix::fs::fstat(borrow(fd)).ok())
                .any(|file| elsewhere.contains(&file.st_ino))
    }

    /// Disarms a registration for all processes after a lane has reported its one event.
    pub(super) fn disarm(&mut self, epoll: &Epoll, fd: RawFd) {
        let token = new_token(epoll);
        self.registrations.name(fd, token);
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        registration.mark_disarmed(self.list.fd, fd);
    }

    /// Has the events of lanes and of the kernel merged for registrations whose data no other one
    /// has.
    pub(super) fn merge_by_data(&mut self, listed: &[listing::Listed]) {
        let Registrations { records, names, .. } = &mut self.registrations;
        for (&fd, one) in records.iter_mut() {
            if !one.name.is_token() {
                let is_single = || listed.iter().filter(|other| other.data == one.data).count() == 1;
                let is_unique = one.answered.is_by_lanes() && is_single();
                let name = if is_unique { Name::of(one.data) } else { Name::Given };
                names.give(&mut one.name, fd, name);
            }
        }
    }
}

impl Registration {
    /// Disarms a registration in the kernel's list, where otherwise only an event does, and errors
    /// are reported until then. So it keeps a token there, which shows all holders that nothing is
    /// to be reported.
    pub(super) fn mark_disarmed(&mut self, instance: RawFd, fd: RawFd) {
        let events = self.events & PRIVATE;
        if let Name::Token(token) = self.name
            && let Some(operation) = self.interest.operation_for_disarmed()
            && change(instance, operation, fd, events, token)
        {
            self.interest.set_disarmed(events);
        }
    }
}
