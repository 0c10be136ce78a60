//! A mutex for use inside hooks: it touches neither errno nor libc, and can be reset in a forked child.
//!
//! Critical sections are short and never sleep in the kernel, so it spins a little before it asks the kernel. They lie
//! behind the shield (`crate::base::signal`), so that no handler interrupts one.
//!
//! A process with one thread takes its locks by plain moves, as glibc does with its own: a locked instruction costs as much as all else that
//! a short send does. Nobody comes to be a second thread in between, since nothing in a critical section makes one. And any process gives
//! them back by plain moves, unless somebody is seen to wait. Who begins to wait just then is not woken, and looks again by itself.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering::*};

use rustix::thread::futex::{self, Timespec};

use crate::base::clib::is_single_threaded;

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;
const SPINS: u32 = 100;
/// How long a waiter sleeps that nobody wakes.
const SLEEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// A value behind a lock.
#[derive(Default)]
pub(crate) struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives one thread at a time access to the value.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Access to the value, until dropped.
pub(crate) struct Guard<'a, T>(&'a Lock<T>);

/// The same without a destructor, which takes instructions also where nothing unwinds.
pub(crate) struct Brief<'a, T>(&'a Lock<T>);

impl<T> Brief<'_, T> {
    #[inline(always)]
    pub(crate) fn value(&mut self) -> &mut T {
        // SAFETY: this thread holds it, or is the only one.
        unsafe { &mut *self.0.value.get() }
    }

    #[inline(always)]
    pub(crate) fn end(self) {
        // SAFETY: it has been taken for this, or is free and no other thread is there to take it.
        unsafe { self.0.release() };
    }

    /// The same unless somebody is to be woken.
    #[inline(always)]
    pub(crate) fn end_at_once(self) -> Result<(), Self> {
        if self.0.release_at_once() { Ok(()) } else { Err(self) }
    }
}

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Lock<T> {
        Lock { word: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        debug_assert!(is_shielded(), "a handler could ask for the lock that its own thread holds");
        if is_single_threaded() && !self.is_held() {
            self.word.store(HELD, Relaxed);
        } else if self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).is_err() {
            self.lock_slowly();
        }
        Guard(self)
    }

    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        debug_assert!(is_shielded());
        self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).ok().map(|_| Guard(self))
    }

    #[cold]
    fn lock_slowly(&self) {
        for _ in 0..SPINS {
            if self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok() {
                return;
            }
            std::hint::spin_loop();
        }
        while self.word.swap(CONTENDED, Acquire) != FREE {
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, CONTENDED, Some(&SLEEP));
        }
    }

    /// The value, for something that ends by returning and does not ask for this lock, until [`Brief::end`]. Where there is one thread the
    /// lock need not even be taken for that.
    #[inline(always)]
    pub(crate) fn briefly(&self) -> Brief<'_, T> {
        debug_assert!(is_shielded(), "a handler could ask for the lock that its own thread holds");
        if !self.try_hold_briefly() {
            self.hold();
        }
        Brief(self)
    }

    /// The same unless somebody holds it. `true`: it is to be [taken over](Self::take_over).
    #[inline(always)]
    pub(crate) fn try_hold_briefly(&self) -> bool {
        debug_assert!(is_shielded());
        if is_single_threaded() {
            return !self.is_held();
        }
        self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok()
    }

    /// What whoever took it [briefly](Self::briefly) has left to others to end.
    ///
    /// # Safety
    /// This thread must have done so.
    #[inline(always)]
    pub(crate) unsafe fn take_over(&self) -> Brief<'_, T> {
        Brief(self)
    }

    /// Puts another value in the place of what is there.
    pub(crate) fn set(&self, value: T) {
        let mut brief = self.briefly();
        *brief.value() = value;
        brief.end();
    }

    /// Takes it for a time that no guard spans: until [`release`](Self::release).
    pub(crate) fn hold(&self) {
        std::mem::forget(self.lock());
    }

    /// The value, for whoever [holds](Self::hold) it.
    ///
    /// # Safety
    /// This thread must hold it.
    pub(crate) unsafe fn value(&self) -> &T {
        // SAFETY: the caller's promise.
        unsafe { &*self.value.get() }
    }

    /// Whether anybody holds it.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.word.load(Relaxed) != FREE
    }

    /// Frees a lock that is [held](Self::hold).
    ///
    /// # Safety
    /// This thread must hold it.
    #[inline]
    pub(crate) unsafe fn release(&self) {
        if !self.release_at_once() {
            self.wake_next();
        }
    }

    /// The same unless somebody is to be woken. `false`: it is still held.
    #[inline(always)]
    fn release_at_once(&self) -> bool {
        let is_alone = self.word.load(Relaxed) != CONTENDED;
        if is_alone {
            self.word.store(FREE, Release);
        }
        is_alone
    }

    #[cold]
    #[inline(never)]
    fn wake_next(&self) {
        self.word.store(FREE, Release);
        let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
    }

    /// Frees a lock whose holder did not come along into a child that nobody announced.
    ///
    /// # Safety
    /// This must be the only thread of the process.
    pub(crate) unsafe fn reset(&self) {
        // Not written without need: the kernel would have to copy the page.
        if self.is_held() {
            self.word.store(FREE, Relaxed);
        }
    }
}

fn is_shielded() -> bool {
    crate::base::thread::this().shields.load(Relaxed) > 0
}

impl<T> Drop for Guard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the guard is the proof.
        unsafe { self.0.release() };
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard is the proof of exclusive access.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.0.value.get() }
    }
}
