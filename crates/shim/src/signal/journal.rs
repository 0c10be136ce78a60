//! What a thread has announced for the time of a sleep, in case it never comes back from it: a handler may leave a call
//! by longjmp, and a cancelled thread's frames are gone.
//!
//! Entries of calls that were left are found by the stack pointer: their frames lie below the present one. That says
//! nothing across two stacks, so an alternate signal stack is left out; then, or with more entries than there is room
//! for, what was announced stays so until the thread ends. That costs a connection its lane, but never a byte.

use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;

use crate::endpoint::Endpoint;
use crate::epoll::Epoll;
use crate::links::Attachment;
use crate::ops::poll::Watch;
use crate::thread::{self, Thread};
use crate::waiter::Slot;

/// Room for blocking calls of one thread that interrupt each other; each may have two.
const ENTRIES: usize = 12;

/// What has been announced.
#[derive(Clone, Copy)]
pub(crate) enum Held {
    Nothing,
    /// A call that waits, or has waited and is not over: see [`crate::ops::hold`].
    Call(&'static Endpoint),
    /// Inside a kernel receive (L4).
    Receive(&'static Endpoint),
    /// Inside a kernel send (L4).
    Send(&'static Endpoint),
    /// Asleep for one endpoint on a pinned link, as the waiter `slot`.
    Sleep(&'static Endpoint, Attachment, Option<Slot>),
    /// Asleep in poll.
    Poll(*mut Watch),
    /// Asleep on an epoll instance.
    Epoll(&'static Epoll),
}

impl Held {
    fn undo(self) {
        match self {
            Held::Nothing => {}
            Held::Call(endpoint) => endpoint.end_call(),
            Held::Receive(endpoint) => endpoint.leave_receive(),
            Held::Send(endpoint) => endpoint.leave_send(),
            Held::Sleep(endpoint, at, slot) => {
                if let Some(slot) = slot {
                    at.link.view().waiter(at.link.side, slot.0).awake();
                    endpoint.unclaim(slot);
                }
                at.unpin();
            }
            // SAFETY: whoever would have freed it has gone.
            Held::Poll(watch) => drop(unsafe { Box::from_raw(watch) }),
            Held::Epoll(epoll) => epoll.lock().awake(epoll),
        }
    }

    /// How often `endpoint` counts it among the calls in progress.
    fn calls_on(self, endpoint: &Endpoint) -> u32 {
        match self {
            Held::Call(held) | Held::Receive(held) | Held::Send(held) => std::ptr::eq(held, endpoint).into(),
            // SAFETY: whoever would free it is this thread.
            Held::Poll(watch) => unsafe { &*watch }.calls_on(endpoint),
            Held::Nothing | Held::Sleep(..) | Held::Epoll(_) => 0,
        }
    }

    /// Counts it again, where all counts have been forgotten.
    fn count_again(self) {
        match self {
            Held::Call(endpoint) => endpoint.begin_call(),
            Held::Receive(endpoint) => endpoint.enter_receive_locked(),
            Held::Send(endpoint) => endpoint.enter_send_locked(),
            // SAFETY: as above.
            Held::Poll(watch) => unsafe { &*watch }.count_again(),
            Held::Nothing | Held::Sleep(..) | Held::Epoll(_) => {}
        }
    }
}

/// A call of this thread begins to wait, and holds its socket until [`end_call`]. Its frame is at `here`. Under the shield.
pub(crate) fn begin_call(endpoint: &'static Endpoint, here: usize) -> usize {
    let thread = thread::this();
    thread.journal.enter_at(thread, Held::Call(endpoint), here)
}

/// It is over, and what it held is the caller's to let go of.
pub(crate) fn end_call(place: usize) {
    thread::this().journal.leave(place);
}

/// How many of the calls in progress on `endpoint` are this thread's: a handler has interrupted them, or left them.
pub(crate) fn own_calls(endpoint: &Endpoint) -> u32 {
    thread::this().journal.all().map(|held| held.calls_on(endpoint)).sum()
}

/// In a forked child, which has this thread alone, and whose endpoints have forgotten what was counted.
pub(crate) fn count_own_calls() {
    thread::this().journal.all().for_each(Held::count_again);
}

/// The entries of one thread, the innermost last.
pub(crate) struct Journal {
    len: Cell<usize>,
    entries: UnsafeCell<[MaybeUninit<(usize, Held)>; ENTRIES]>,
    /// Where the alternate signal stack is, as of the last handler.
    pub(super) alternate: Cell<(usize, usize)>,
}

impl Journal {
    /// Enters `held`, and undoes what calls that were left have held. Under the shield.
    #[inline]
    pub(super) fn enter(&self, thread: &Thread, held: Held) -> usize {
        let mark = 0u8;
        self.enter_at(thread, held, std::ptr::from_ref(&mark).addr())
    }

    /// The same for what is held by a frame further up, at `here`.
    #[inline]
    pub(super) fn enter_at(&self, thread: &Thread, held: Held, here: usize) -> usize {
        if self.len.get() > 0 {
            self.clear(here);
        }
        let place = self.len.get();
        if place < ENTRIES {
            thread.await_exit();
            // SAFETY: within the array. Handlers enter theirs in the call to come, and leave before it does.
            unsafe { (*self.entries.get())[place].write((here, held)) };
            self.len.set(place + 1);
        }
        place
    }

    /// The call has come back. What is above its entry was left by a handler within it.
    #[inline]
    pub(super) fn leave(&self, place: usize) {
        while self.len.get() > place + 1 {
            self.pop();
        }
        self.len.set(place);
    }

    #[cold]
    fn clear(&self, here: usize) {
        let (low, high) = self.alternate.get();
        let on_alternate = |at: usize| (low..high).contains(&at);
        while let Some((at, _)) = self.last()
            && at <= here
            && !on_alternate(at)
            && !on_alternate(here)
        {
            self.pop();
        }
    }

    /// Undoes everything: the thread is over.
    pub(crate) fn undo_all(&self) {
        while self.last().is_some() {
            self.pop();
        }
    }

    fn last(&self) -> Option<(usize, Held)> {
        let index = self.len.get().checked_sub(1)?;
        // SAFETY: entries below `len` have been written.
        Some(unsafe { (*self.entries.get())[index].assume_init() })
    }

    fn all(&self) -> impl Iterator<Item = Held> {
        // SAFETY: as above.
        (0..self.len.get()).map(|index| unsafe { (*self.entries.get())[index].assume_init() }.1)
    }

    fn pop(&self) {
        if let Some((_, held)) = self.last() {
            self.len.set(self.len.get() - 1);
            held.undo();
        }
    }
}
