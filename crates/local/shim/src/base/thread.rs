//! State of each thread, in zeroed memory that even a signal handler can reach. `thread_local!` may
//! have to allocate, or to wait for the dynamic linker's lock, which the interrupted code may hold.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::*};

use rustix::mm::munmap;
use shunt_abi::intercept::BLOCK;

use crate::base::arch;
use crate::base::attempts::Attempts;
use crate::base::thread_cache::ThreadCache;
use crate::base::undo_log::UndoLog;
use crate::base::upcall::Upcall;

/// The state of one thread. Only the thread and the signal handlers that interrupt it use it, so
/// relaxed atomics are plain loads and stores here. [`Shield`](crate::base::signal::Shield) has
/// compiler fences where the order matters.
#[repr(C, align(64))]
pub(crate) struct Thread {
    /// How many shields are up; see [`Shield`](crate::base::signal::Shield).
    pub(crate) shields: AtomicU32,
    /// The signal that is deferred until the shield is down, or 0.
    pub(crate) deferred: AtomicI32,
    /// The kind of handler that has run since the current call began, see
    /// [`crate::base::signal::Ran`].
    pub(crate) ran: AtomicU32,
    /// 1 + the waiter whose doorbell a signal handler rings to end the thread's sleep, or 0.
    pub(crate) bell: AtomicU32,
    /// Whether the thread has asynchronous cancellation (PTHREAD_CANCEL_ASYNCHRONOUS).
    pub(crate) cancelled_anywhere: Cell<bool>,
    /// Whether [`ENDS`] will be called.
    pub(crate) end_is_awaited: Cell<bool>,
    /// 1 + the slot of this thread's waiter, or 0.
    pub(crate) slot: Cell<u32>,
    /// Whether a vfork child may be running in the thread's place.
    pub(crate) is_lent: Cell<bool>,
    pub(crate) apart: Apart,
    /// Number of sleeps in a row that were short because a peer lacks the doorbell, and that found
    /// nothing.
    pub(crate) slept_unrung: Cell<u32>,
    /// Number of this thread's calls that wait, or that a handler abandoned while they did. The
    /// undo log of an abandoned call may refer to the slot.
    waits: Cell<u32>,
    pub(crate) spinner: Spinner,
    /// Spinning before non-blocking calls that would find nothing.
    pub(crate) lingerer: Spinner,
    /// The object that such a call last found empty.
    pub(crate) asked: Cell<usize>,
    /// Attempts of poll and select to find something before they prepare a wait.
    pub(crate) attempts: Attempts,
    /// The ranks of the locks that the thread holds.
    #[cfg(debug_assertions)]
    pub(crate) ranks: crate::base::rank::Ranks,
    pub(crate) journal: UndoLog,
    pub(crate) kept: ThreadCache,
    pub(crate) deferral: UnsafeCell<Deferred>,
}

/// A deferred signal, and the signal mask of the code that it interrupted.
pub(crate) struct Deferred {
    pub(crate) info: libc::siginfo_t,
    pub(crate) mask: u64,
}

/// What a thread has learned about spinning, see `base::spin`.
pub(crate) struct Spinner {
    /// Number of sleeps before the next spin.
    pub(crate) pause: Cell<u32>,
    /// Misses since the last fast hit. Each doubles the pause.
    pub(crate) misses: Cell<u32>,
    /// Duration of the last spin if it was a hit, else 0.
    pub(crate) hit: Cell<u64>,
}

/// A separate stack for answering system calls where the program's own stack is small. See
/// `crate::intercept::linked`.
#[repr(C)]
pub(crate) struct Apart {
    /// Address of the end of the stack, or 0.
    pub(crate) end: Cell<usize>,
    /// 1 while a call is being answered on the stack, else 0.
    pub(crate) is_in_use: Cell<u32>,
    /// The program's stack pointer meanwhile.
    pub(crate) programs: Cell<usize>,
}

impl Apart {
    pub(crate) fn has(&self, at: usize) -> bool {
        let end = self.end.get();
        (end.saturating_sub(BLOCK)..end).contains(&at)
    }

    /// Unmaps the stack, unless a call is being answered on it.
    pub(crate) fn give_back(&self) {
        if self.is_in_use.get() != 0 {
            return;
        }
        let end = self.end.replace(0);
        if end != 0 {
            // SAFETY: mapped for this thread alone, which is not running on it.
            let _ = unsafe { munmap((end - BLOCK) as *mut c_void, BLOCK) };
        }
    }
}

// Each thread has one block in its thread-local storage. `arch::this_thread` returns its address.
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

/// Returns the state of the current thread.
#[inline(always)]
pub(crate) fn this() -> &'static Thread {
    // SAFETY: zeroes are valid for every field, and the block lives as long as the thread.
    unsafe { &*arch::this_thread().cast() }
}

/// Returns the resources of a thread that ends, also by cancellation.
pub(crate) static ENDS: Upcall<()> = Upcall::new();
static KEY: AtomicU32 = AtomicU32::new(NO_KEY);
const NO_KEY: u32 = u32::MAX;

/// Creates the key whose destructor calls [`ENDS`] at the end of each thread that asks for it. In a
/// program without threads, libc may have no keys yet (`base::split`).
pub(crate) fn start() {
    let mut key = 0;
    // SAFETY: the key is local. The destructor lives as long as the program.
    let made = unsafe { libc::pthread_key_create(&mut key, Some(ends)) } == 0;
    if made && KEY.compare_exchange(NO_KEY, key, Relaxed, Relaxed).is_err() {
        // SAFETY: another thread has created one meanwhile, and no code uses this one.
        unsafe { libc::pthread_key_delete(key) };
    }
}

unsafe extern "C" fn ends(_: *mut c_void) {
    ENDS.call(());
}

impl Thread {
    /// Registers this thread for [`ENDS`].
    pub(crate) fn await_end(&self) {
        if !self.end_is_awaited.get() {
            if KEY.load(Relaxed) == NO_KEY {
                start();
            }
            let key = KEY.load(Relaxed);
            // SAFETY: the values of a process's first keys are in the thread's own block, so this
            // allocates nothing.
            let set: c_int = unsafe { libc::pthread_setspecific(key, std::ptr::from_ref(self).cast()) };
            // Without a key the program has only its first thread, which ends with the program. So
            // this is not tried again.
            self.end_is_awaited.set(set == 0 || key == NO_KEY);
        }
    }

    /// Records a sleep in poll or a receive. A sleep is `short` if a peer may lack the doorbell,
    /// and `found` if it found something.
    pub(crate) fn note_sleep(&self, short: bool, found: bool) {
        let in_a_row = if short && !found { self.slept_unrung.get().saturating_add(1) } else { 0 };
        self.slept_unrung.set(in_a_row);
    }

    /// Records that a call begins to wait.
    pub(crate) fn begin_wait(&self) {
        self.waits.set(self.waits.get() + 1);
    }

    /// Records that a call has waited. Returns `true` if no other call of this thread waits.
    pub(crate) fn end_wait(&self) -> bool {
        self.waits.set(self.waits.get() - 1);
        self.waits.get() == 0
    }
}
