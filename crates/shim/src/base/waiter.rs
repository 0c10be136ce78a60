//! The waiters of this process: who sleeps, and by which doorbell it is woken.
//!
//! A waiter owns one of 64 slots and a doorbell. Threads get theirs when they first sleep on a lane,
//! and keep it while there are enough; epoll instances when a registered connection is first watched. A slot's doorbell is made once and used again by the
//! next owner, so that the broker hears of it once. An instance listens to it in its own kernel set, a thread by a
//! descriptor that belongs to the slot.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::*};

use shunt_abi::geometry::WAITERS;

use crate::base::above::Above;
use crate::base::private::PrivateFd;
use crate::base::thread::{self, Thread};

static TAKEN: AtomicU64 = AtomicU64::new(0);
static DOORBELLS: [AtomicI32; WAITERS] = [const { AtomicI32::new(-1) }; WAITERS];
/// What a thread sleeps on: see `shunt_sys::eventfd::listen`. Made when a thread first has the slot.
static LISTENERS: [AtomicI32; WAITERS] = [const { AtomicI32::new(-1) }; WAITERS];
/// Slots whose doorbell the present broker has been told.
static TOLD: AtomicU64 = AtomicU64::new(0);
/// Tells it of one.
pub(crate) static TELL_BROKER: Above<Slot> = Above::new();

/// A slot, owned until given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(pub(crate) usize);

impl Slot {
    /// Takes a free slot. `None` when 64 are taken or there is no descriptor for a doorbell: the waiter then
    /// sleeps in short steps.
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

    /// The [`listener`](Self::listener), also if nobody had one before.
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

    /// The number of the doorbell.
    pub(crate) fn doorbell(self) -> i32 {
        DOORBELLS[self.0].load(Acquire)
    }

    /// The descriptor that is readable once the doorbell has been rung, until that is [heard](Self::hear).
    pub(crate) fn listener(self) -> i32 {
        LISTENERS[self.0].load(Acquire)
    }

    /// Tells the broker, unless it knows. Whoever cannot be told is woken by its own short sleeps.
    pub(crate) fn register(self) {
        if TOLD.load(Acquire) & 1 << self.0 == 0 {
            TELL_BROKER.call(self);
        }
    }

    /// The broker knows it.
    pub(crate) fn note_told(self) {
        TOLD.fetch_or(1 << self.0, AcqRel);
    }

    /// Wakes this waiter: something it must look at has changed.
    pub(crate) fn ring(self) {
        PrivateFd::lend(&DOORBELLS[self.0], |fd| {
            let _ = shunt_sys::eventfd::ring(fd);
        });
    }

    /// Takes note of the rings so far.
    pub(crate) fn hear(self) {
        PrivateFd::lend(&LISTENERS[self.0], |fd| {
            let _ = shunt_sys::eventfd::heard(fd);
        });
    }
}

/// Has a slot's descriptor made, unless an earlier owner had. `false` if there is none left.
fn make(place: &AtomicI32, new: impl FnOnce() -> rustix::io::Result<OwnedFd>) -> bool {
    if place.load(Acquire) < 0 {
        match new().ok().and_then(PrivateFd::adopt) {
            Some(made) => place.store(made.into_raw(), Release),
            None => return false,
        }
    }
    true
}

/// A descriptor has moved to another number; the broker and the peers hold the eventfd itself.
pub(crate) fn renumber(old: i32, new: i32) {
    for place in DOORBELLS.iter().chain(&LISTENERS) {
        let _ = place.compare_exchange(old, new, SeqCst, Relaxed);
    }
}

/// A new broker knows no doorbell yet.
pub(crate) fn forget_told() {
    TOLD.store(0, Release);
}

/// Those that somebody has.
pub(crate) fn in_use() -> impl Iterator<Item = Slot> {
    let taken = TAKEN.load(Acquire);
    (0..WAITERS).filter(move |slot| taken & 1 << slot != 0).map(Slot)
}

/// Wakes every waiter, where it cannot be told which of them it concerns.
pub(crate) fn ring_all() {
    in_use().for_each(Slot::ring);
}

/// A forked child has none of its parent's waiters.
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

/// While fewer slots are free, a thread has one only as long as it waits: of hundreds of threads, few do at a time.
const SCARCE: u32 = 16;

/// What waits in `call`, if anything does, waits by the slot of this thread.
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

/// The slot of this thread, taken at first use.
pub(crate) fn of_this_thread() -> Option<Slot> {
    let thread = thread::this();
    if thread.slot().is_none()
        && let Some(slot) = Slot::take_for_thread()
    {
        thread.set_slot(slot);
    }
    thread.slot()
}
