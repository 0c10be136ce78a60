//! A mutex for use inside hooks: it touches neither errno nor libc, and can be reset in a forked
//! child.
//!
//! Critical sections are short and never sleep in the kernel, so a waiter spins a little before it
//! waits on a futex. The shield (`crate::base::signal`) is up in a critical section, so that no
//! signal handler interrupts it.
//!
//! A process of one thread takes the lock by plain loads and stores, as glibc does with its locks.
//! An atomic read-modify-write costs as much as all other work of a short send. No second thread
//! can appear meanwhile, since nothing in a critical section makes one.
//!
//! Every process also releases by a plain store, unless the word shows a waiter. A waiter that
//! marks the word just before that store is not woken. So a waiter sleeps for [`SLEEP`] at most,
//! and then tries again.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering::*};

use rustix::thread::futex::{self, Timespec};

use crate::base::clib::is_single_threaded;
use crate::base::rank::Rank;
use crate::base::thread;

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;
const SPINS: u32 = 100;
/// The longest sleep of a waiter, in case its mark was overwritten.
const SLEEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// A value behind a lock.
#[derive(Default)]
pub(crate) struct Lock<T, const RANK: Rank> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives one thread at a time access to the value.
unsafe impl<T: Send, const RANK: Rank> Sync for Lock<T, RANK> {}

/// Access to the value, until dropped.
pub(crate) struct Guard<'a, T, const RANK: Rank>(&'a Lock<T, RANK>);

/// Access to the value without a destructor: a destructor costs instructions even where nothing
/// unwinds. [`end`](Brief::end) ends the access.
pub(crate) struct Brief<'a, T, const RANK: Rank>(&'a Lock<T, RANK>);

impl<T, const RANK: Rank> Brief<'_, T, RANK> {
    #[inline(always)]
    pub(crate) fn value(&mut self) -> &mut T {
        // SAFETY: this thread holds the lock, or is the only thread.
        unsafe { &mut *self.0.value.get() }
    }

    #[inline(always)]
    pub(crate) fn end(self) {
        // SAFETY: `briefly` took the lock, or it is free and the process has no other thread that
        // could take it.
        unsafe { self.0.release() };
    }

    /// Ends the access, unless a waiter must be woken. Then returns `Err`, and the lock is still
    /// held.
    #[inline(always)]
    pub(crate) fn end_at_once(self) -> Result<(), Self> {
        if self.0.release_at_once() { Ok(()) } else { Err(self) }
    }
}

impl<T, const RANK: Rank> Lock<T, RANK> {
    pub(crate) const fn new(value: T) -> Lock<T, RANK> {
        Lock { word: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T, RANK> {
        debug_assert!(is_shielded(), "a handler could ask for the lock that its own thread holds");
        #[cfg(debug_assertions)]
        thread::this().ranks.check(RANK);
        if is_single_threaded() && !self.is_held() {
            self.word.store(HELD, Relaxed);
        } else if self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).is_err() {
            self.lock_slowly();
        }
        self.note_taken();
        Guard(self)
    }

    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T, RANK>> {
        debug_assert!(is_shielded());
        self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).ok().map(|_| {
            self.note_taken();
            Guard(self)
        })
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

    /// Returns the value, until [`Brief::end`], for code that returns without unwinding and does
    /// not take this lock again. In a process of one thread, the lock is not even taken.
    #[inline(always)]
    pub(crate) fn briefly(&self) -> Brief<'_, T, RANK> {
        debug_assert!(is_shielded(), "a handler could ask for the lock that its own thread holds");
        if !self.try_hold_briefly() {
            self.hold();
        }
        Brief(self)
    }

    /// Takes the lock for [`take_over`](Self::take_over), unless it is held. Returns whether that
    /// worked.
    #[inline(always)]
    pub(crate) fn try_hold_briefly(&self) -> bool {
        debug_assert!(is_shielded());
        let is_taken = if is_single_threaded() {
            !self.is_held()
        } else {
            self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok()
        };
        if is_taken {
            self.note_taken();
        }
        is_taken
    }

    /// Returns the access that [`try_hold_briefly`](Self::try_hold_briefly) has taken.
    ///
    /// # Safety
    /// This thread must have taken it, and not ended it.
    #[inline(always)]
    pub(crate) unsafe fn take_over(&self) -> Brief<'_, T, RANK> {
        Brief(self)
    }

    /// Replaces the value.
    pub(crate) fn set(&self, value: T) {
        let mut brief = self.briefly();
        *brief.value() = value;
        brief.end();
    }

    /// Takes the lock for a time that no guard spans, until [`release`](Self::release).
    pub(crate) fn hold(&self) {
        std::mem::forget(self.lock());
    }

    /// Returns the value to the thread that [holds](Self::hold) the lock.
    ///
    /// # Safety
    /// This thread must hold the lock.
    pub(crate) unsafe fn value(&self) -> &T {
        // SAFETY: the caller's promise.
        unsafe { &*self.value.get() }
    }

    /// Returns whether a thread holds the lock.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.word.load(Relaxed) != FREE
    }

    /// Releases a lock that is [held](Self::hold).
    ///
    /// # Safety
    /// This thread must hold the lock.
    #[inline]
    pub(crate) unsafe fn release(&self) {
        if !self.release_at_once() {
            self.wake_next();
        }
    }

    /// Releases the lock, unless a waiter must be woken. Returns `false` if the lock is still held.
    #[inline(always)]
    fn release_at_once(&self) -> bool {
        let is_alone = self.word.load(Relaxed) != CONTENDED;
        if is_alone {
            self.note_released();
            self.word.store(FREE, Release);
        }
        is_alone
    }

    #[cold]
    #[inline(never)]
    fn wake_next(&self) {
        self.note_released();
        self.word.store(FREE, Release);
        let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
    }

    /// Notes in a debug build that this thread has the lock, see [`rank`](crate::base::rank).
    #[inline(always)]
    fn note_taken(&self) {
        #[cfg(debug_assertions)]
        thread::this().ranks.note_taken(RANK);
    }

    #[inline(always)]
    fn note_released(&self) {
        #[cfg(debug_assertions)]
        thread::this().ranks.note_released(RANK);
    }

    /// Frees the lock in the child of a fork that no hook saw, where its holder does not exist.
    ///
    /// # Safety
    /// This must be the only thread of the process.
    pub(crate) unsafe fn reset(&self) {
        self.note_released();
        // Writes only if needed: a write makes the kernel copy the page.
        if self.is_held() {
            self.word.store(FREE, Relaxed);
        }
    }
}

/// What a fork does with a lock: it holds the lock, so that the child gets a consistent copy of the
/// value (`crate::fork`).
pub(crate) trait AcrossFork {
    /// Takes the lock before a fork.
    fn hold(&self);

    /// Releases the lock after the fork, in the parent and in the child.
    ///
    /// # Safety
    /// This thread, or the one that has made this child, must hold the lock.
    unsafe fn release(&self);

    /// Frees the lock in a child of a fork that the shim did not see. A thread of the parent may
    /// have held it.
    ///
    /// # Safety
    /// This must be the only thread of the process.
    unsafe fn reset(&self);
}

impl<T, const RANK: Rank> AcrossFork for Lock<T, RANK> {
    fn hold(&self) {
        Lock::hold(self);
    }

    unsafe fn release(&self) {
        // SAFETY: the caller's promise.
        unsafe { Lock::release(self) };
    }

    unsafe fn reset(&self) {
        // SAFETY: the caller's promise.
        unsafe { Lock::reset(self) };
    }
}

fn is_shielded() -> bool {
    thread::this().shields.load(Relaxed) > 0
}

impl<T, const RANK: Rank> Drop for Guard<'_, T, RANK> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the guard exists only while this thread holds the lock.
        unsafe { self.0.release() };
    }
}

impl<T, const RANK: Rank> Deref for Guard<'_, T, RANK> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard is the proof of exclusive access.
        unsafe { &*self.0.value.get() }
    }
}

impl<T, const RANK: Rank> DerefMut for Guard<'_, T, RANK> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.0.value.get() }
    }
}
