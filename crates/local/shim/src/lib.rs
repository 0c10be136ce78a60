//! libshunt.so. It is loaded before libc, moves the TCP connections of an unmodified program onto
//! shared memory, and falls back to TCP whenever in doubt.
//!
//! The library has layers. A layer calls a higher one only by [`base::upcall`], which
//! `tests/floors.rs` checks. From the highest to the lowest:
//!
//! - `intercept`: the system calls that some programs make by themselves
//! - `running`: the entry into a program that runs already
//! - `hooks`: the C functions that programs call
//! - `fork`: the functions that libc calls around a fork
//! - `ops`: decides what each call does
//! - `program`: the handover to the next program at exec, and the start of other programs
//! - `broker`: the conversation with the broker
//! - `life`: attaching connections to lanes, and detaching them
//! - `epoll`: the registrations of epoll instances, and the events that they have pending
//! - `socket`: a connection, and the link that it may be on
//! - `base`: memory, locks, threads, signals and descriptors
//!
//! CONTRIBUTING.md lists where to look for what. The state machines are in `shunt_transport`, the
//! shared memory is in `shunt_ring`, and the protocol is in `docs/local-path.md`.
//!
//! Inside a hook, no libc function may be called that has a hook. The shim makes its own system
//! calls by rustix, and the program's by `real`.

mod base;
mod broker;
mod epoll;
mod fork;
mod hooks;
#[cfg(target_arch = "x86_64")]
mod intercept;
mod life;
mod ops;
mod program;
#[cfg(target_arch = "x86_64")]
mod running;
mod socket;

use base::{budget, clib, panic, process, spin, table, thread, thread_end, waiter};
use broker::control;
use life::{attach, returning, unread_timeout};
use ops::descriptors;
use program::{handover, sanitizer};
use socket::{endpoint, finished, links};

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Runs when the library is loaded, before the program's main.
extern "C" fn start() {
    #[cfg(target_arch = "x86_64")]
    if running::is_late() {
        return;
    }
    panic::install();
    connect_floors();
    clib::start();
    thread::start();
    process::start();
    #[cfg(target_arch = "x86_64")]
    life::census::start(&hooks::raw::intercept::ANSWERED);
    budget::start(process::ring_memory());
    spin::start();
    hooks::memory::prepare();
    if !process::is_off() {
        fork::install();
    }
    sanitizer::start();
    handover::receive();
    #[cfg(target_arch = "x86_64")]
    running::note_started();
    #[cfg(target_arch = "x86_64")]
    intercept::open();
}

/// Sets all upcalls: functions of a higher layer that a lower one calls.
fn connect_floors() {
    thread::ENDS.set(|()| thread_end::ends());
    table::STRAY.set(|()| fork::stray());
    waiter::TELL_BROKER.set(control::announce_doorbell);
    links::RETIRE.set(control::retire);
    endpoint::END_HELD.set(|name| name.resolve().into_iter().for_each(descriptors::end_held));
    epoll::LEAVE.set(attach::leave_for_a_set);
    attach::RELEASE.set(control::release_after);
    returning::PASS_ON.set(control::remainder::pass_on);
    finished::AWAIT.set(|name| name.resolve().into_iter().for_each(unread_timeout::look_again_at));
    attach::WITHDRAW.set(|name| name.resolve().into_iter().for_each(control::withdraw));
}
