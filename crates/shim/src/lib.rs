//! libshunt.so: loaded before libc, it moves the TCP connections of an unmodified program onto shared memory, and back
//! whenever in doubt.
//!
//! From the outside in: `hooks` are the C functions that programs call; `ops` decides what each of them does; `attach`
//! is the life of an endpoint on a link; `epoll`, `waiter` and `links` are what a sleeper needs; `control` talks to the
//! broker; `signal` keeps handlers and cancellation out of all of it. The state machines are in `shunt_transport`, the
//! shared memory in `shunt_ring`, and the protocol in `docs/local-path.md`.
//!
//! Inside a hook nothing may call libc functions that we hook ourselves: our own system calls go through rustix, the
//! program's own through `real`.

mod above;
mod alloc;
mod attach;
mod children;
mod clib;
mod control;
mod distance;
mod door;
mod endpoint;
mod epoll;
mod errno;
mod family;
mod fork;
mod handover;
mod hooks;
mod idle;
mod incoming;
mod kernel;
mod links;
mod lock;
mod lost;
mod low_water;
mod names;
mod ops;
mod order;
mod outgoing;
mod overdue;
mod own_table;
mod pace;
mod panic;
mod private;
mod process;
mod pulse;
mod real;
mod resets;
mod sandbox;
mod settings;
mod signal;
mod table;
mod tcp;
mod thread;
mod unseen;
mod unwind;
mod waiter;
mod worth;

use ops::descriptors;

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Runs when the library is loaded, before the program's main.
extern "C" fn start() {
    panic::install();
    table::STRAY.set(|()| fork::stray());
    waiter::TELL_BROKER.set(control::tell_doorbell);
    links::RETIRE.set(control::retire);
    endpoint::END_HELD.set(|name| name.resolve().into_iter().for_each(descriptors::end_held));
    epoll::LEAVE.set(attach::leave_for_a_set);
    attach::RELEASE.set(control::release_after);
    attach::WITHDRAW.set(|name| name.resolve().into_iter().for_each(control::withdraw));
    clib::start();
    thread::start();
    process::start();
    hooks::memory::prepare();
    if !process::is_off() {
        fork::install();
    }
    handover::receive();
}
