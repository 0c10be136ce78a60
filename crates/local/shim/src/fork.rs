//! fork. Every lane falls back to TCP before a fork, and a socket that two processes hold is not
//! offered until only one of them holds it. See `docs/adr/0001-fork-and-exec-go-back-to-tcp.md`,
//! and `crate::socket::sharing` for the record of holders.
//!
//! ```text
//!  before():          lanes fall back ── take all locks (several threads)
//!  fork:              parent                      child
//!  after_in_parent(): release all locks           after_in_child(): restore the table,
//!                                                 release all locks, begin_child()
//! ```
//!
//! A child that was made by a bare system call runs none of these. Its first look-up in the table
//! of descriptors calls [`stray`].

use std::sync::atomic::Ordering::*;

use shunt_abi::reason::Reason;

use crate::base::lock::{AcrossFork, Lock};
use crate::base::rank;
use crate::base::signal::{self, Shield};
use crate::base::{alloc, budget, clib, errno, private, process, table, thread, waiter};
use crate::broker::control;
use crate::epoll;
use crate::life::{attach, census, earlier_calls, returning, unread_timeout};
use crate::ops::{descriptors, ring};
use crate::program::sandbox;
use crate::socket::endpoint::{self, Endpoint, Event};
use crate::socket::{links, sharing};

/// Installs the handlers that run around every fork, also one inside libc. `_Fork` runs no
/// handlers, so its hook calls these functions.
pub(crate) fn install() {
    table::start();
    clib::at_fork(before, after_in_parent, after_in_child);
}

pub(crate) unsafe extern "C" fn before() {
    if process::is_off() {
        return sandbox::pass_beyond();
    }
    let errno = errno::get();
    let shield = Shield::raise();
    // With one thread, no lock is held by another thread. Taking none avoids writes, for each of
    // which the kernel would have to copy a page.
    if clib::is_single_threaded() {
        prepare();
    } else {
        FORKING.hold();
        prepare();
        // Connections that other threads have put on a lane meanwhile fall back as well.
        while !hold_locks() {
            // SAFETY: `hold_locks` has just taken them on this thread.
            unsafe { release_locks() };
            endpoint::all().for_each(|endpoint| attach::go_back(endpoint, Reason::Fork));
        }
        endpoint::expect_child_of_new();
    }
    shield.stay_up();
    errno::set(errno);
}

fn prepare() {
    if process::is_in_use() {
        // Judged here once, so that no child need do it.
        census::settle();
        for endpoint in endpoint::all() {
            attach::take_back_little(endpoint, Reason::Fork);
            attach::go_back(endpoint, Reason::Fork);
            returning::hand_over_before_fork(endpoint);
            endpoint.expect_child();
        }
        epoll::share();
        descriptors::share_unconnected();
    }
}

/// Allows one fork at a time, because each takes all these locks.
static FORKING: Lock<(), { rank::FORK }> = Lock::new(());

/// Takes the shim's locks by rising ranks (`base::rank`), so that the child gets a consistent copy
/// of the data that they guard. Returns whether no connection is on a lane that is not closed.
fn hold_locks() -> bool {
    census::across_fork().hold();
    ring::hold_locks();
    control::across_fork().hold();
    links::across_fork().hold();
    epoll::hold_locks();
    earlier_calls::across_fork().hold();
    let ready = endpoint::hold_locks();
    budget::across_fork().hold();
    process::across_fork().hold();
    signal::across_fork().hold();
    alloc::across_fork().hold();
    ready
}

/// Releases the locks.
///
/// # Safety
/// After [`hold_locks`], on the same thread, or in the child that it has made.
unsafe fn release_locks() {
    // SAFETY: the caller's promise.
    unsafe {
        alloc::across_fork().release();
        signal::across_fork().release();
        process::across_fork().release();
        budget::across_fork().release();
        endpoint::release_locks();
        earlier_calls::across_fork().release();
        epoll::release_locks();
        links::across_fork().release();
        control::across_fork().release();
        ring::release_locks();
        census::across_fork().release();
    }
}

/// Ends a fork, in parent and child.
fn end() {
    // If it is held, this thread holds it: a fork of another thread would have waited for it.
    if FORKING.is_held() {
        // SAFETY: `before` has taken all of them on this thread.
        unsafe {
            release_locks();
            FORKING.release();
        }
    }
    endpoint::all().for_each(Endpoint::end_fork);
}

/// Returns whether `before` has prepared this thread's fork. Another thread may have turned the
/// shim off since.
fn is_under_way() -> bool {
    thread::this().shields.load(Relaxed) > 0
}

/// Undoes the preparation, because the kernel refused the fork.
pub(crate) fn failed() {
    if process::is_off() {
        return;
    }
    let _shield = Shield::raise();
    endpoint::all().for_each(sharing::forget_child);
    epoll::forget_child();
}

pub(crate) unsafe extern "C" fn after_in_parent() {
    if !is_under_way() {
        return;
    }
    let _shield = Shield::take_over();
    end();
}

pub(crate) unsafe extern "C" fn after_in_child() {
    let in_use = process::is_in_use();
    if in_use {
        table::restore();
    }
    if !is_under_way() {
        return;
    }
    let _shield = Shield::take_over();
    end();
    signal::after_fork_in_child();
    process::renew_id();
    if in_use {
        begin_child();
    }
}

fn begin_child() {
    process::forget_page();
    // SAFETY: a child of fork has one thread.
    unsafe {
        private::after_fork_in_child();
        unread_timeout::after_fork_in_child();
    }
    ring::after_fork_in_child();
    endpoint::after_fork_in_child();
    control::after_fork_in_child();
    epoll::after_fork_in_child();
    waiter::after_fork_in_child();
    for endpoint in endpoint::all() {
        returning::forget_returning(endpoint);
        endpoint.set_entry(None);
        endpoint.offer.restart();
        endpoint.change(Event::EndOffer);
        sharing::be_born(endpoint);
    }
    epoll::be_born();
    signal::count_own_calls();
    descriptors::end_all_held();
}

/// Initialises a child that was made by a bare system call, which no hook saw. The child has a copy
/// of all memory except the table of descriptors, which the kernel wiped (see
/// `crate::base::table`). Its first look-up there calls this.
///
/// The parent still uses its lanes and does not know of the child. So the child detaches from them,
/// and every connection that both may hold stays on TCP.
#[cold]
pub(crate) fn stray() {
    if process::is_off() {
        return table::restore();
    }
    let errno = errno::get();
    let _shield = Shield::raise();
    table::restore();
    sharing::add_stray();
    // SAFETY: a child of fork has one thread.
    unsafe {
        alloc::across_fork().reset();
        signal::across_fork().reset();
        process::across_fork().reset();
        budget::across_fork().reset();
        links::across_fork().reset();
        // First: a thread of the parent may have been using a private descriptor, and a close of
        // one would wait for that thread.
        private::after_fork_in_child();
        control::disown();
        endpoint::reset_locks();
        earlier_calls::across_fork().reset();
        epoll::reset_locks();
        FORKING.reset();
        ring::reset_locks();
        census::reset_lock();
    }
    signal::after_fork_in_child();
    process::renew_id();
    process::forget_page();
    for endpoint in endpoint::all() {
        // The row belongs to the parent, and so do bytes that TCP has yet to take.
        endpoint.set_entry(None);
        returning::forget_returning(endpoint);
        attach::go_back(endpoint, Reason::Fork);
        endpoint.bar(Reason::Shared);
    }
    begin_child();
    errno::set(errno);
}
