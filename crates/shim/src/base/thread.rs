//! What the shim keeps for each thread, in zeroed memory that even a signal handler finds at once: `thread_local!` may
//! have to allocate, or to wait for the dynamic linker's lock, which the interrupted code may hold.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::*};

use rustix::mm::munmap;
use shunt_abi::door::BLOCK;

use crate::base::alloc::Kept;
use crate::base::arch;
use crate::base::signal::{Deferred, Journal, Shield};
use crate::base::waiter::{Slot, Spinner};

/// One thread's. Only its own thread and the handlers that interrupt it use it, so relaxed atomics are plain moves here;
/// [`Shield`] says where the compiler must keep their order.
#[repr(C, align(64))]
pub(crate) struct Thread {
    /// How many shields are up; see [`Shield`].
    pub(crate) shields: AtomicU32,
    /// The signal that waits until they are down, or 0.
    pub(crate) deferred: AtomicI32,
    /// What is known of the handlers that have run since the present call began; see [`crate::base::signal::Ran`].
    pub(crate) ran: AtomicU32,
    /// 1 + the waiter whose doorbell ends the sleep of this thread, where there is one.
    pub(crate) bell: AtomicU32,
    /// Whether pthread_cancel may act at any instruction.
    pub(crate) cancelled_anywhere: Cell<bool>,
    /// Whether [`exit`] will be called.
    exit_is_awaited: Cell<bool>,
    /// 1 + the slot of the waiter that this thread has, or 0.
    slot: Cell<u32>,
    /// Whether a child of vfork may be running in the thread's place.
    pub(crate) is_lent: Cell<bool>,
    pub(crate) apart: Apart,
    /// Calls of this thread that wait, or were left by a handler while they did: what one has announced names the slot.
    waits: Cell<u32>,
    pub(crate) spinner: Spinner,
    pub(crate) journal: Journal,
    pub(crate) kept: Kept,
    pub(crate) deferral: UnsafeCell<Deferred>,
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

    fn give_back(&self) {
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
    unsafe { &*arch::this_thread() }
}

static EXIT_KEY: AtomicU32 = AtomicU32::new(NO_KEY);
const NO_KEY: u32 = u32::MAX;

/// Has [`exit`] called at the end of each thread that asks for it. Without threads in the program there may be no keys yet
/// (`base::split`).
pub(crate) fn start() {
    let mut key = 0;
    // SAFETY: the key is ours; the destructor lives as long as the program.
    let made = unsafe { libc::pthread_key_create(&mut key, Some(exit)) } == 0;
    if made && EXIT_KEY.compare_exchange(NO_KEY, key, Relaxed, Relaxed).is_err() {
        // SAFETY: another thread has made one at the same time, and nobody knows of this one.
        unsafe { libc::pthread_key_delete(key) };
    }
}

/// A thread is over, also by cancellation: whatever it has left comes back.
unsafe extern "C" fn exit(_: *mut c_void) {
    over();
    let apart = &this().apart;
    if apart.is_in_use.get() == 0 {
        apart.give_back();
    }
}

/// What [`exit`] does, also where nobody calls that.
pub(crate) fn over() {
    let thread = this();
    let _shield = Shield::raise();
    thread.exit_is_awaited.set(false);
    thread.is_lent.set(false);
    thread.journal.undo_all();
    if let Some(slot) = thread.take_slot() {
        slot.give_back();
    }
    thread.kept.give_back();
}

impl Thread {
    /// Has what this thread holds given back at its end.
    pub(crate) fn await_exit(&self) {
        if !self.exit_is_awaited.get() {
            if EXIT_KEY.load(Relaxed) == NO_KEY {
                start();
            }
            let key = EXIT_KEY.load(Relaxed);
            // SAFETY: the first keys of a process have their room in the thread's own block, so this allocates nothing.
            let set: c_int = unsafe { libc::pthread_setspecific(key, std::ptr::from_ref(self).cast()) };
            // The first thread of a program without keys asks once: it ends with the program.
            self.exit_is_awaited.set(set == 0 || key == NO_KEY);
        }
    }

    pub(crate) fn slot(&self) -> Option<Slot> {
        self.slot.get().checked_sub(1).map(|slot| Slot(slot as usize))
    }

    pub(crate) fn take_slot(&self) -> Option<Slot> {
        let slot = self.slot();
        self.slot.set(0);
        slot
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

    pub(crate) fn set_slot(&self, slot: Slot) {
        self.slot.set(slot.0 as u32 + 1);
        self.await_exit();
    }
}
