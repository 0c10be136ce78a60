//! libshunt.so: loaded before libc, it moves the TCP connections of an unmodified program onto shared memory, and back
//! whenever in doubt.
//!
//! It is built in floors, and a call runs upwards only by [`base::above`]; a test holds that (`tests/floors.rs`). From the outside in:
//! `hooks` are the C functions that programs call, and `door` the system calls that some make by themselves; `fork` is what libc calls around
//! one; `ops` decides what each call does; `program` is what goes with a program into another; `broker` talks to the broker; `life` has
//! a connection come onto a link and leave it; `epoll` is what sets know and owe; `socket` is a connection, and the link that it may be
//! on; `base` is memory, locks, threads, signals and descriptors. CONTRIBUTING.md says in which room what is to be looked for. The state
//! machines are in `shunt_transport`, the shared memory in `shunt_ring`, and the protocol in `docs/local-path.md`.
//!
//! Inside a hook nothing may call libc functions that we hook ourselves: our own system calls go through rustix, the
//! program's own through `real`.

mod base;
mod broker;
#[cfg(target_arch = "x86_64")]
mod door;
mod epoll;
mod fork;
mod hooks;
mod life;
mod ops;
mod program;
mod socket;

use base::{budget, clib, end, panic, process, spin, table, thread, waiter};
use broker::control;
use life::{attach, overdue};
use ops::descriptors;
use program::{handover, sanitizer};
use socket::{endpoint, finished, links};

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Runs when the library is loaded, before the program's main.
extern "C" fn start() {
    panic::install();
    connect_floors();
    clib::start();
    thread::start();
    process::start();
    #[cfg(target_arch = "x86_64")]
    life::census::start(&hooks::raw::door::ANSWERED);
    budget::start(process::ring_memory());
    spin::start();
    hooks::memory::prepare();
    if !process::is_off() {
        fork::install();
    }
    sanitizer::start();
    handover::receive();
    #[cfg(target_arch = "x86_64")]
    door::open();
}

/// All that a floor has done by one above it.
fn connect_floors() {
    thread::ENDS.set(|()| end::ends());
    table::STRAY.set(|()| fork::stray());
    waiter::TELL_BROKER.set(control::tell_doorbell);
    links::RETIRE.set(control::retire);
    endpoint::END_HELD.set(|name| name.resolve().into_iter().for_each(descriptors::end_held));
    epoll::LEAVE.set(attach::leave_for_a_set);
    attach::RELEASE.set(control::release_after);
    finished::AWAIT.set(|name| name.resolve().into_iter().for_each(overdue::look_again_at));
    attach::WITHDRAW.set(|name| name.resolve().into_iter().for_each(control::withdraw));
}
