//! seccomp. A filter ends the program, or fails a call, for every system call that its author did
//! not expect. No author expects the calls of a library that was preloaded. So before the program
//! installs a filter, its connections fall back to TCP for good, and the shim turns itself off:
//! each hook only calls the real function from then on. See
//! `docs/adr/0011-fallback-before-a-seccomp-filter.md`.
//!
//! Other threads may be inside a hook meanwhile, with an event of an epoll instance that only the
//! shim's records explain. So the end has an order:
//!
//! ```text
//! end          every hook that begins now passes its call on, and the table takes no new entry
//! epoll        instance by instance, under its lock: the kernel's list becomes the program's own,
//!              and the records are dropped. A wait that returns later drops the doorbell's events
//!              and those with a token, which the kernel reports again, and passes on all others.
//!              A change that has waited for the lock is the kernel's alone
//! signals      handlers become the program's own
//! table        descriptors become unknown
//! ```
//!
//! Example: a thread has got an EPOLLONESHOT event with a token, and waits for the lock. The kernel
//! has disarmed the registration, and the end arms it again with the program's data. The thread
//! drops the event, waits again, and gets it from the kernel.

use shunt_abi::reason::Reason;

use crate::base::signal::{self, Shield};
use crate::base::{errno, process, real, table};
use crate::broker::control;
use crate::epoll;
use crate::life::{attach, untracked};
use crate::socket::endpoint::{self, Event, Phase};
use crate::socket::sharing;

/// Turns the shim off, because the program is about to install a filter.
#[cold]
pub(crate) fn before_filter() {
    if process::is_off() || !process::is_home() {
        return;
    }
    let before = errno::get();
    // Later, the dynamic linker may not make all the system calls of a look-up.
    real::find_all();
    untracked::leave(Reason::Sandboxed);
    let _shield = Shield::raise();
    process::count_bypass(Reason::Sandboxed);
    for endpoint in endpoint::all().filter(|endpoint| endpoint.phase() == Phase::Offered) {
        control::withdraw(endpoint);
        endpoint.change(Event::EndOffer);
    }
    endpoint::all().for_each(attach::let_go);
    // A lane that the peer has ended before may have unread bytes, which cannot be reclaimed: only
    // this process can read them. Then the shim stays on.
    if !endpoint::all().any(|endpoint| endpoint.is_attached()) {
        process::end();
        epoll::end();
        signal::give_back();
        table::clear();
    }
    errno::set(before);
}

/// Records, in a sandbox, that another process or program is about to share this one's sockets. It
/// cannot be found out when that one closes them.
pub(crate) fn pass_beyond() {
    endpoint::all().for_each(sharing::pass_beyond);
    epoll::pass_beyond();
}
