//! seccomp. A filter ends the program, or fails a call, for whatever its author has not thought of, and nobody thinks of
//! the system calls of a library that he does not know. So before the program installs one, its connections go back to
//! TCP for good, and the shim steps aside: each hook is the function behind it from then on, and no more. See
//! `docs/adr/0011`.

use shunt_abi::reason::Reason;

use crate::base::signal::{self, Shield};
use crate::base::{errno, process, real, table};
use crate::broker::control;
use crate::epoll;
use crate::life::{attach, unseen};
use crate::socket::endpoint::{self, Stage};
use crate::socket::family;

/// The program is about to install a filter.
#[cold]
pub(crate) fn before_filter() {
    if process::is_off() || !process::is_home() {
        return;
    }
    let before = errno::get();
    // The dynamic linker is asked for nothing later.
    real::find_all();
    unseen::leave(Reason::Sandboxed);
    let _shield = Shield::raise();
    process::count_bypass(Reason::Sandboxed);
    for endpoint in endpoint::all().filter(|endpoint| endpoint.stage() == Stage::Offered) {
        control::withdraw(endpoint);
        endpoint.set_stage(Stage::Plain);
    }
    endpoint::all().for_each(attach::let_go);
    // The bytes of a lane that the peer has ended before cannot be given back: only we can read them.
    if !endpoint::all().any(|endpoint| endpoint.is_attached()) {
        epoll::hide();
        signal::give_back();
        table::clear();
        process::turn_off();
    }
    errno::set(before);
}

/// In a sandbox: another process, or another program, is about to hold what this one does, and nobody can be asked who
/// lets go of it.
pub(crate) fn pass_beyond() {
    endpoint::all().for_each(family::pass_beyond);
    epoll::pass_beyond();
}
