//! fork: every lane goes back to TCP first, and a socket that two processes hold is not offered until one holds it
//! alone. See `docs/adr/0001`, and `crate::family` for who holds what.

use std::sync::atomic::{AtomicBool, Ordering::*};

use shunt_abi::reason::Reason;

use crate::endpoint::{self, Stage};
use crate::ops::descriptors;
use crate::signal::Shield;
use crate::{
    alloc, attach, control, epoll, errno, family, links, overdue, private, process, sandbox, signal, table,
    thread, waiter,
};

/// Whether this process, or one that it was forked from, has ever tracked a descriptor. Until then there is nothing to do
/// around a fork, and nothing is written: the kernel would have to copy every page of memory that is.
static IN_USE: AtomicBool = AtomicBool::new(false);

/// Before anything is tracked, and before a lock that belongs to it is taken.
#[inline]
pub(crate) fn note_use() {
    if !IN_USE.load(Relaxed) {
        IN_USE.store(true, SeqCst);
    }
}

/// Installs the handlers that run around every fork, also one made inside libc. `_Fork` runs none: its hook does.
pub(crate) fn install() {
    table::start();
    // SAFETY: three functions that live as long as the program.
    unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
}

pub(crate) unsafe extern "C" fn before() {
    if process::is_off() {
        return sandbox::pass_beyond();
    }
    let errno = errno::get();
    let shield = Shield::raise();
    if IN_USE.load(SeqCst) {
        for endpoint in endpoint::all() {
            attach::go_back(endpoint, Reason::Fork);
            if !family::expect_child(endpoint) {
                endpoint.bar(Reason::Shared);
            }
        }
        epoll::share();
        descriptors::share_unconnected();
    }
    alloc::before_fork();
    shield.stay_up();
    errno::set(errno);
}

/// Whether `before` has prepared this thread's fork. Another thread may have turned the shim off since.
fn is_under_way() -> bool {
    thread::this().shields.load(Relaxed) > 0
}

/// There is no child: the kernel refused.
pub(crate) fn failed() {
    if process::is_off() {
        return;
    }
    let _shield = Shield::raise();
    endpoint::all().for_each(family::forget_child);
    epoll::forget_child();
}

pub(crate) unsafe extern "C" fn after_in_parent() {
    if !is_under_way() {
        return;
    }
    let _shield = Shield::take_over();
    // SAFETY: `before` has run.
    unsafe { alloc::after_fork() };
}

pub(crate) unsafe extern "C" fn after_in_child() {
    let in_use = IN_USE.load(SeqCst);
    if in_use {
        table::restore();
    }
    if !is_under_way() {
        return;
    }
    let _shield = Shield::take_over();
    // SAFETY: `before` has run, and a child of fork has one thread.
    unsafe {
        alloc::after_fork();
        signal::after_fork_in_child();
    }
    process::renew_id();
    if in_use {
        // SAFETY: as above.
        unsafe { begin_child() };
    }
}

/// # Safety
/// In a child of fork, which has one thread.
unsafe fn begin_child() {
    process::forget_page();
    // SAFETY: the caller's promise.
    unsafe {
        links::reset_locks();
        private::after_fork_in_child();
        endpoint::reset_locks();
        control::after_fork_in_child();
        overdue::after_fork_in_child();
        epoll::after_fork_in_child();
    }
    waiter::after_fork_in_child();
    for endpoint in endpoint::all() {
        endpoint.set_entry(None);
        endpoint.operations.store(0, Relaxed);
        if endpoint.stage() == Stage::Offered {
            endpoint.set_stage(Stage::Plain);
        }
        family::be_born(endpoint);
    }
    epoll::be_born();
    signal::count_own_calls();
    descriptors::end_all_held();
}

/// In a child that was made behind our back, by a system call of the program's own: it has a copy of everything, but its
/// table has been wiped (see `crate::table`), which brings it here at its first call that matters. Its parent goes on with
/// the lanes, unaware, so the child ends them; and what both may hold stays on TCP.
#[cold]
pub(crate) fn stray() {
    if process::is_off() {
        return table::restore();
    }
    let errno = errno::get();
    let _shield = Shield::raise();
    table::restore();
    family::add_stray();
    // SAFETY: a child of fork has one thread.
    unsafe {
        alloc::reset_lock();
        signal::after_fork_in_child();
        process::renew_id();
        process::forget_page();
        links::reset_locks();
        private::after_fork_in_child();
        control::disown();
        endpoint::reset_locks();
        epoll::reset_locks();
    }
    for endpoint in endpoint::all() {
        // The row is the parent's.
        endpoint.set_entry(None);
        attach::go_back(endpoint, Reason::Fork);
        endpoint.bar(Reason::Shared);
    }
    // SAFETY: as above.
    unsafe { begin_child() };
    errno::set(errno);
}
