//! seccomp. A filter ends the program, or fails a call, for every system call that its author did
//! not expect. No author expects the calls of a library that was preloaded. So before the program
//! installs a filter, its connections fall back to TCP for good, and the shim turns itself off:
//! each hook only calls the real function from then on. See
//! `docs/adr/0011-fallback-before-a-seccomp-filter.md`.

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
        epoll::hide();
        signal::give_back();
        table::clear();
        process::turn_off();
    }
    errno::set(before);
}

/// Records, in a sandbox, that another process or program is about to share this one's sockets. It
/// cannot be found out when that one closes them.
pub(crate) fn pass_beyond() {
    endpoint::all().for_each(sharing::pass_beyond);
    epoll::pass_beyond();
}
