//! What the shim keeps for each thread, in zeroed memory that even a signal handler finds at once: `thread_local!` may
//! have to allocate, or to wait for the dynamic linker's lock, which the interrupted code may hold.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::*};

use rustix::mm::munmap;
use shunt_abi::door::BLOCK;

use crate::base::above::Above;
use crate::base::arch;
use crate::base::journal::Journal;
use crate::base::kept::Kept;

/// One thread's. Only its own thread and the handlers that interrupt it use it, so relaxed atomics are plain moves here;
/// [`Shield`](crate::base::signal::Shield) says where the compiler must keep their order.
#[repr(C, align(64))]
pub(crate) struct Thread {
    /// How many shields are up; see [`Shield`](crate::base::signal::Shield).
    pub(crate) shields: AtomicU32,
    /// The signal that waits until they are down, or 0.
    pub(crate) deferred: AtomicI32,
    /// What is known of the handlers that have run since the present call began; see [`crate::base::signal::Ran`].
    pub(crate) ran: AtomicU32,
    /// 1 + the waiter whose doorbell ends the sleep of this thread, where there is one.
    pub(crate) bell: AtomicU32,
    /// Whether pthread_cancel may act at any instruction.
    pub(crate) cancelled_anywhere: Cell<bool>,
    /// Whether [`ENDS`] will be called.
    pub(crate) end_is_awaited: Cell<bool>,
    /// 1 + the slot of the waiter that this thread has, or 0.
    pub(crate) slot: Cell<u32>,
    /// Whether a child of vfork may be running in the thread's place.
    pub(crate) is_lent: Cell<bool>,
    pub(crate) apart: Apart,
    /// Sleeps of this thread in a row that were short for want of a ring, and ended by themselves.
    pub(crate) slept_unrung: Cell<u32>,
    /// Calls of this thread that wait, or were left by a handler while they did: what one has announced names the slot.
    waits: Cell<u32>,
    pub(crate) spinner: Spinner,
    /// The same of calls that do not wait.
    pub(crate) lingerer: Spinner,
    /// Which of what they ask had nothing last.
    pub(crate) asked: Cell<usize>,
    pub(crate) journal: Journal,
    pub(crate) kept: Kept,
    pub(crate) deferral: UnsafeCell<Deferred>,
}

/// A signal that waits for the shield, and the mask of the code that it interrupted.
pub(crate) struct Deferred {
    pub(crate) info: libc::siginfo_t,
    pub(crate) mask: u64,
}

/// What a thread has learned of spinning: see `base::spin`.
pub(crate) struct Spinner {
    /// Sleeps to go without spinning.
    pub(crate) pause: Cell<u32>,
    /// Misses since the last quick hit; the pause doubles with each.
    pub(crate) misses: Cell<u32>,
    /// How long the last spin took, if it hit; else 0.
    pub(crate) hit: Cell<u64>,
}

/// A stack for system calls of the program's own, made where it has little: see `crate::door::linked`.
#[repr(C)]
pub(crate) struct Apart {
    /// Its end, or 0.
    pub(crate) end: Cell<usize>,
    /// Whether a call is being answered there: 0 or 1.
    pub(crate) is_in_use: Cell<u32>,
    /// The program's stack meanwhile.
    pub(crate) programs: Cell<usize>,
}

impl Apart {
    pub(crate) fn has(&self, at: usize) -> bool {
        let end = self.end.get();
        (end.saturating_sub(BLOCK)..end).contains(&at)
    }

    /// Unless a call is being answered there.
    pub(crate) fn give_back(&self) {
        if self.is_in_use.get() != 0 {
            return;
        }
        let end = self.end.replace(0);
        if end != 0 {
            // SAFETY: mapped for this thread alone, which does not run there.
            let _ = unsafe { munmap((end - BLOCK) as *mut c_void, BLOCK) };
        }
    }
}

// Each thread has one, in its thread-local storage: `arch::this_thread` finds it.
std::arch::global_asm!(
    ".pushsection .tbss.shunt_thread, \"awT\", @nobits",
    ".balign 64",
    ".globl shunt_thread",
    ".hidden shunt_thread",
    ".type shunt_thread, @object",
    ".size shunt_thread, {size}",
    "shunt_thread: .zero {size}",
    ".popsection",
    size = const size_of::<Thread>(),
);

/// This thread's.
#[inline(always)]
pub(crate) fn this() -> &'static Thread {
    // SAFETY: zeroes are valid for every field, and the block lives as long as the thread.
    unsafe { &*arch::this_thread().cast() }
}

/// Gives back what the thread has that is over, also by cancellation.
pub(crate) static ENDS: Above<()> = Above::new();
static KEY: AtomicU32 = AtomicU32::new(NO_KEY);
const NO_KEY: u32 = u32::MAX;

/// Has [`ENDS`] called at the end of each thread that asks for it. Without threads in the program there may be no keys yet
/// (`base::split`).
pub(crate) fn start() {
    let mut key = 0;
    // SAFETY: the key is ours; the destructor lives as long as the program.
    let made = unsafe { libc::pthread_key_create(&mut key, Some(ends)) } == 0;
    if made && KEY.compare_exchange(NO_KEY, key, Relaxed, Relaxed).is_err() {
        // SAFETY: another thread has made one at the same time, and nobody knows of this one.
        unsafe { libc::pthread_key_delete(key) };
    }
}

unsafe extern "C" fn ends(_: *mut c_void) {
    ENDS.call(());
}

impl Thread {
    /// Has what this thread holds given back at its end.
    pub(crate) fn await_end(&self) {
        if !self.end_is_awaited.get() {
            if KEY.load(Relaxed) == NO_KEY {
                start();
            }
            let key = KEY.load(Relaxed);
            // SAFETY: the first keys of a process have their room in the thread's own block, so this allocates nothing.
            let set: c_int = unsafe { libc::pthread_setspecific(key, std::ptr::from_ref(self).cast()) };
            // The first thread of a program without keys asks once: it ends with the program.
            self.end_is_awaited.set(set == 0 || key == NO_KEY);
        }
    }

    /// A sleep in poll or a receive is over: one that was to be `short` has found something or not.
    pub(crate) fn note_sleep(&self, short: bool, found: bool) {
        let in_a_row = if short && !found { self.slept_unrung.get().saturating_add(1) } else { 0 };
        self.slept_unrung.set(in_a_row);
    }

    /// A call begins to wait.
    pub(crate) fn begin_wait(&self) {
        self.waits.set(self.waits.get() + 1);
    }

    /// It has waited. `true` if none waits any more.
    pub(crate) fn end_wait(&self) -> bool {
        self.waits.set(self.waits.get() - 1);
        self.waits.get() == 0
    }
}
