//! The waiters of this process: what sleeps, and which doorbell wakes it.
//!
//! A waiter has one of 64 slots and a doorbell. A thread gets a slot when it first sleeps on a
//! lane, and keeps it while enough slots are free. An epoll instance gets one when a registered
//! connection is first watched.
//!
//! A slot's doorbell is made once, and the slot's next owner uses it again, so the broker needs to
//! get it only once. An epoll instance has the doorbell in its own kernel set. A thread sleeps on a
//! second descriptor of the slot, the *listener*.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::*};

use shunt_abi::geometry::WAITERS;

use crate::base::private::PrivateFd;
use crate::base::thread::{self, Thread};
use crate::base::upcall::Upcall;

static TAKEN: AtomicU64 = AtomicU64::new(0);
static DOORBELLS: [AtomicI32; WAITERS] = [const { AtomicI32::new(-1) }; WAITERS];
/// The descriptors that threads sleep on, see `shunt_sys::eventfd::listen`. Each is made when it is
/// first needed.
static LISTENERS: [AtomicI32; WAITERS] = [const { AtomicI32::new(-1) }; WAITERS];
/// Slots whose doorbell the current broker has.
static TOLD: AtomicU64 = AtomicU64::new(0);
/// Sends a slot's doorbell to the broker.
pub(crate) static TELL_BROKER: Upcall<Slot> = Upcall::new();

/// A slot, owned until `give_back`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(pub(crate) usize);

impl Slot {
    /// Takes a free slot. Returns `None` if all 64 are taken or there is no descriptor for a
    /// doorbell. The waiter then sleeps in short steps.
    pub(crate) fn take() -> Option<Slot> {
        let mut taken = TAKEN.load(Acquire);
        let index = loop {
            let index = (!taken).trailing_zeros() as usize;
            if index == WAITERS {
                return None;
            }
            match TAKEN.compare_exchange(taken, taken | 1 << index, AcqRel, Acquire) {
                Ok(_) => break index,
                Err(now) => taken = now,
            }
        };
        let slot = Slot(index);
        if !make(&DOORBELLS[index], shunt_sys::eventfd::create) {
            slot.give_back();
            return None;
        }
        Some(slot)
    }

    /// Takes a free slot for a thread, which can then sleep on its [`listener`](Self::listener).
    fn take_for_thread() -> Option<Slot> {
        let slot = Slot::take()?;
        if slot.make_listener().is_none() {
            slot.give_back();
            return None;
        }
        Some(slot)
    }

    /// Returns the [`listener`](Self::listener), and makes it if the slot has none yet.
    pub(crate) fn make_listener(self) -> Option<i32> {
        let listen = || {
            let made = PrivateFd::lend(&DOORBELLS[self.0], |fd| shunt_sys::eventfd::listen(fd));
            made.unwrap_or(Err(rustix::io::Errno::BADF))
        };
        make(&LISTENERS[self.0], listen).then(|| self.listener())
    }

    pub(crate) fn give_back(self) {
        TAKEN.fetch_and(!(1 << self.0), AcqRel);
    }

    /// Returns the doorbell's file descriptor.
    pub(crate) fn doorbell(self) -> i32 {
        DOORBELLS[self.0].load(Acquire)
    }

    /// Returns the descriptor that is readable after the doorbell was rung, until
    /// [`hear`](Self::hear).
    pub(crate) fn listener(self) -> i32 {
        LISTENERS[self.0].load(Acquire)
    }

    /// Sends the doorbell to the broker, unless the broker has it. If that fails, the waiter
    /// depends on short sleeps.
    pub(crate) fn register(self) {
        if TOLD.load(Acquire) & 1 << self.0 == 0 {
            TELL_BROKER.call(self);
        }
    }

    /// Records that the broker has the doorbell.
    pub(crate) fn note_told(self) {
        TOLD.fetch_or(1 << self.0, AcqRel);
    }

    /// Wakes this waiter, because something that it must check has changed.
    pub(crate) fn ring(self) {
        PrivateFd::lend(&DOORBELLS[self.0], |fd| {
            let _ = shunt_sys::eventfd::ring(fd);
        });
    }

    /// Acknowledges the rings so far.
    pub(crate) fn hear(self) {
        PrivateFd::lend(&LISTENERS[self.0], |fd| {
            let _ = shunt_sys::eventfd::heard(fd);
        });
    }
}

/// Makes a descriptor of a slot, unless an earlier owner has. Returns `false` if no descriptor is
/// left.
fn make(place: &AtomicI32, new: impl FnOnce() -> rustix::io::Result<OwnedFd>) -> bool {
    if place.load(Acquire) < 0 {
        match new().ok().and_then(PrivateFd::adopt) {
            Some(made) => place.store(made.into_raw(), Release),
            None => return false,
        }
    }
    true
}

/// Replaces the number of a descriptor that has moved. Broker and peers need no change: they have
/// the eventfd itself.
pub(crate) fn renumber(old: i32, new: i32) {
    for place in DOORBELLS.iter().chain(&LISTENERS) {
        let _ = place.compare_exchange(old, new, SeqCst, Relaxed);
    }
}

/// Forgets which doorbells the broker has, because there is a new broker.
pub(crate) fn forget_told() {
    TOLD.store(0, Release);
}

/// Returns the slots that are taken.
pub(crate) fn in_use() -> impl Iterator<Item = Slot> {
    let taken = TAKEN.load(Acquire);
    (0..WAITERS).filter(move |slot| taken & 1 << slot != 0).map(Slot)
}

/// Wakes every waiter, where it is not known which one is concerned.
pub(crate) fn ring_all() {
    in_use().for_each(Slot::ring);
}

/// Closes the doorbells in a forked child, which has none of its parent's waiters.
pub(crate) fn after_fork_in_child() {
    for place in DOORBELLS.iter().chain(&LISTENERS) {
        PrivateFd::close_raw(place.swap(-1, AcqRel));
    }
    TAKEN.store(0, Release);
    TOLD.store(0, Release);
    thread::this().take_slot();
}

impl Thread {
    pub(crate) fn slot(&self) -> Option<Slot> {
        self.slot.get().checked_sub(1).map(|slot| Slot(slot as usize))
    }

    pub(crate) fn take_slot(&self) -> Option<Slot> {
        let slot = self.slot();
        self.slot.set(0);
        slot
    }

    fn set_slot(&self, slot: Slot) {
        self.slot.set(slot.0 as u32 + 1);
        self.await_end();
    }
}

/// While fewer slots than this are free, a thread keeps its slot only while it waits: of hundreds
/// of threads, few wait at a time.
const SCARCE: u32 = 16;

/// Runs a call that may wait by this thread's slot, and afterwards gives the slot back if slots are
/// scarce.
pub(crate) fn waiting<T>(call: impl FnOnce() -> T) -> T {
    let thread = thread::this();
    thread.begin_wait();
    let result = call();
    if thread.end_wait()
        && thread.slot().is_some()
        && TAKEN.load(Relaxed).count_zeros() < SCARCE
        && let Some(slot) = thread.take_slot()
    {
        slot.give_back();
    }
    result
}

/// Returns the slot of this thread, and takes one at first use.
pub(crate) fn of_this_thread() -> Option<Slot> {
    let thread = thread::this();
    if thread.slot().is_none()
        && let Some(slot) = Slot::take_for_thread()
    {
        thread.set_slot(slot);
    }
    thread.slot()
}
