//! The entry into a program that runs already (`shunt attach`), and the way out of it again
//! (`shunt detach`). `crates/local/attach` stops the program's threads and calls the functions here
//! on one of them. See `docs/adr/0040-a-running-program-is-entered-by-ptrace.md`.
//!
//! ```text
//! shunt attach                              this library
//!   dlopen, on a thread that waits ───────> is_late(): nothing begins
//!   shunt_prepare ────────────────────────> lists what to redirect; stays off
//!   stops all threads, redirects the calls
//!   shunt_commit ─────────────────────────> takes over signal handlers, epoll instances, connections
//!   writes 1 to the switch, and `On` ─────> on
//! ```
//!
//! Until the switch is on, each hook passes its call on. So nothing is lost if `shunt attach` ends
//! at any point.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicBool, Ordering::*};

use rustix::thread::{Timespec, nanosleep};
use shunt_abi::plan::{NO_MORE, Plan, Refusal, State};
use shunt_abi::reason::Reason;

use crate::base::library::{each_library, linkers_record, note_late};
use crate::base::plan::shunt_plan;
use crate::base::signal::{self, Shield};
use crate::base::{budget, clib, errno, panic, process, real, spin, split, thread};
use crate::life::census;
use crate::life::census::bindings::{self, Unfit};
use crate::life::{attach, untracked};
use crate::ops::descriptors;
use crate::program::{earlier_connections, handover, sanitizer};
use crate::socket::endpoint;
use crate::{epoll, fork, hooks};

/// The room for descriptions of epoll instances and sockets, in words.
const ROOM: usize = 64 * 1024;

/// Returns whether this library has been loaded after libc, hence not by LD_PRELOAD. Then nothing
/// begins before `shunt attach` says so.
pub(crate) fn is_late() -> bool {
    let (mut has_libc, mut is_late) = (false, false);
    each_library(&mut |library| {
        let is_ours = bindings::is_ours(library);
        is_late = is_ours && has_libc;
        has_libc |= library.has(libc::__errno_location as *const () as usize);
        is_ours
    });
    if is_late {
        note_late();
        process::turn_off();
    }
    is_late
}

/// Notes that the library has begun its work before main.
pub(crate) fn note_started() {
    shunt_plan.state.store(State::On as u64, Release);
}

fn show(place: &[std::sync::atomic::AtomicU64; 2], list: Vec<[usize; 2]>) {
    let list = list.leak();
    place[0].store(list.as_ptr().addr() as u64, Relaxed);
    place[1].store(list.len() as u64, Relaxed);
}

/// Prepares the library, which stays off. Other threads of the program run meanwhile.
///
/// # Safety
/// `settings` is a list of strings that ends in an empty one.
#[unsafe(no_mangle)]
#[expect(unreachable_pub, reason = "found by its name in the file")]
pub unsafe extern "C" fn shunt_prepare(settings: *const c_char) {
    /// Set while a thread prepares the library.
    static IS_BUSY: AtomicBool = AtomicBool::new(false);
    let before = errno::get();
    let plan = &shunt_plan;
    // Another `shunt attach` may be at work on another thread.
    if IS_BUSY.swap(true, AcqRel) {
        plan.refusal.store(Refusal::Loading as u64, Relaxed);
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { prepare(plan, settings) };
    IS_BUSY.store(false, Release);
    errno::set(before);
}

/// # Safety
/// As of [`shunt_prepare`].
unsafe fn prepare(plan: &Plan, settings: *const c_char) {
    if !matches!(plan.state(), Some(State::Inert | State::Prepared)) {
        return;
    }
    plan.refusal.store(0, Relaxed);
    if plan.switch.load(Relaxed) == 0 {
        panic::install();
        crate::connect_floors();
        // SAFETY: the caller's promise.
        unsafe { process::read_settings_from(settings) };
        clib::start();
        thread::start();
        process::start();
        census::start(&hooks::raw::intercept::ANSWERED);
        budget::start(process::ring_memory());
        spin::start();
        hooks::memory::prepare();
        real::find_all();
        handover::find_library();
        census::expect_all_deep();
        plan.linker.store(linkers_record() as u64, Relaxed);
        plan.switch.store(process::switch().addr() as u64, Relaxed);
        let words = vec![NO_MORE; ROOM].leak();
        plan.room[0].store(words.as_ptr().addr() as u64, Relaxed);
        plan.room[1].store(ROOM as u64, Relaxed);
        fork::install();
    }
    let refuse = |refusal: Refusal| plan.refusal.store(refusal as u64, Relaxed);
    if sanitizer::has_runtime() {
        refuse(Refusal::Sanitizer);
    } else {
        match bindings::redirections() {
            Ok(found) => {
                show(&plan.redirects, found.functions);
                show(&plan.slots, found.slots);
                show(&plan.untouched, found.untouched);
                plan.state.store(State::Prepared as u64, Release);
            }
            Err(Unfit::Loading) => refuse(Refusal::Loading),
            Err(Unfit::Interposed(name)) => {
                plan.about[0].store(name.as_ptr().addr() as u64, Relaxed);
                plan.about[1].store(name.count_bytes() as u64, Relaxed);
                refuse(Refusal::Interposed);
            }
        }
    }
}

/// Takes over what the program has already. All other threads are stopped, so no lock may be
/// needed that one of them holds.
#[unsafe(no_mangle)]
#[expect(unreachable_pub, reason = "found by its name in the file")]
pub extern "C" fn shunt_commit() {
    let plan = &shunt_plan;
    if plan.state() != Some(State::Prepared) {
        return;
    }
    let before = errno::get();
    {
        let _shield = Shield::raise();
        // An attachment that was killed here has left descriptors, which may name other files now.
        descriptors::forget_all();
        let words = plan.room[0].load(Relaxed) as *const u64;
        // SAFETY: `shunt attach` has written to the buffer of `shunt_prepare`, and ended both lists.
        let mut words = (0..ROOM).map(|index| unsafe { words.add(index).read() });
        while let Some(fd) = words.next().filter(|fd| *fd != NO_MORE) {
            let may_be_shared = words.next() != Some(0);
            let count = words.next().unwrap_or(0) as usize;
            let waits = words.by_ref().take(count).map(|thread| thread as i32).collect();
            epoll::take_in_of_running(fd as i32, may_be_shared, waits);
        }
        signal::adopt_handlers();
        let mut sockets = Vec::new();
        while let Some(count) = words.next().filter(|count| *count != NO_MORE) {
            sockets.push(words.by_ref().take(count as usize).map(|fd| fd as i32).collect());
        }
        plan.connections.store(earlier_connections::take_in(&sockets) as u64, Relaxed);
    }
    errno::set(before);
}

/// Ends the work of the library. A new thread runs this.
///
/// # Safety
/// As a thread's function.
#[unsafe(no_mangle)]
#[expect(unreachable_pub, reason = "found by its name in the file")]
pub unsafe extern "C" fn shunt_leave(_: *mut c_void) -> *mut c_void {
    /// How often the thread waits for the program to read what its lanes hold.
    const TRIES: u32 = 3000;
    let pause = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    let on = (State::On as u64, State::Leaving as u64);
    detach_thread();
    if shunt_plan.state.compare_exchange(on.0, on.1, AcqRel, Acquire).is_ok() {
        // The hooks stay: other threads may have an event from an epoll instance that only they
        // understand.
        untracked::leave(Reason::Policy);
        process::count_bypass(Reason::Policy);
        for _ in 0..TRIES {
            let is_over = {
                let _shield = Shield::raise();
                endpoint::all().for_each(attach::let_go);
                !endpoint::all().any(|endpoint| endpoint.is_attached())
            };
            if is_over {
                shunt_plan.state.store(State::Left as u64, Release);
                break;
            }
            let _ = nanosleep(&pause);
        }
    }
    std::ptr::null_mut()
}

/// Makes libc free the resources of this thread at its end. Before glibc 2.34, the function is in
/// another library.
fn detach_thread() {
    // SAFETY: look-ups of constant names, and functions of these prototypes.
    unsafe {
        let find = |name: &CStr| split::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
        let (own, detach) = (find(c"pthread_self"), find(c"pthread_detach"));
        if !own.is_null() && !detach.is_null() {
            type Own = unsafe extern "C" fn() -> libc::pthread_t;
            type Detach = unsafe extern "C" fn(libc::pthread_t) -> i32;
            let own = std::mem::transmute::<*mut c_void, Own>(own);
            let detach = std::mem::transmute::<*mut c_void, Detach>(detach);
            detach(own());
        }
    }
}
