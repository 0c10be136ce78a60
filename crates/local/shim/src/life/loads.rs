//! dlopen and dlmopen. The loaded code may make system calls that no hook sees. So nothing is on
//! shared memory during a load, nor before a census has judged the new code (L11).
//!
//! ```text
//!            begin                     the real dlopen                 end
//!   before ─────────> nothing shared ─────────────────> loaded, bound ─────> a census may begin
//! ```
//!
//! The dynamic linker uses its caller's address to choose the namespace. For a name without a path,
//! it also uses it to choose the directories of the search. The shim is in the program's own
//! namespace, and makes the call itself where that makes no difference. Otherwise it passes the
//! caller's call on, and does not see the end of the load.

use std::ffi::{CStr, c_char, c_int, c_void};

use shunt_abi::reason::Reason;

use crate::base::clib::is_single_threaded;
use crate::base::code::{self, Code};
use crate::base::library::each_library;
use crate::base::signal::Shield;
use crate::base::split;
use crate::base::{errno, process};
use crate::epoll;
use crate::life::{attach, census, resets, returning, untracked};
use crate::socket::endpoint;

/// A call of dlopen.
pub(crate) struct Load {
    pub(crate) path: *const c_char,
    pub(crate) flags: c_int,
    pub(crate) caller: *const c_void,
    /// Whether the library is loaded into the caller's namespace.
    pub(crate) is_at_home: bool,
}

/// How the call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By the caller itself: it loads nothing, or nothing can be on shared memory any more.
    Pass,
    /// By the shim, after [`begin`].
    Here,
}

/// Ensures that the loaded code is judged before it can meet any state of the shim. Returns how the
/// call has to be made.
///
/// # Safety
/// The path is null or a C string.
pub(crate) unsafe fn prepare(load: &Load) -> Way {
    if load.path.is_null() || process::is_off() || !process::is_home() {
        return Way::Pass;
    }
    // SAFETY: the caller's promise.
    let path = unsafe { CStr::from_ptr(load.path) };
    let brings_nothing = path.is_empty() || load.flags & libc::RTLD_NOLOAD != 0;
    if brings_nothing || code::state() == Code::MayBypass {
        return Way::Pass;
    }
    let before = errno::get();
    let way = if code::is_clean() && load.is_at_home && is_loaded(path) {
        Way::Pass
    } else {
        if load.flags & libc::RTLD_DEEPBIND != 0 {
            census::expect_deep();
        }
        choose(path, load.caller)
    };
    errno::set(before);
    way
}

fn choose(path: &CStr, caller: *const c_void) -> Way {
    if !depends_on_caller(path.to_bytes(), || searches_by_itself(caller as usize)) {
        return Way::Here;
    }
    withdraw();
    // This thread calls the shim again only when the library is loaded, or from the library's own
    // code. Meanwhile another thread could run a census.
    if !is_single_threaded() && !process::trusts_own_calls() {
        code::give_up(caller as usize);
        untracked::leave(Reason::OwnCalls);
    }
    Way::Pass
}

/// Returns whether the dynamic linker would search for the library in directories that depend on
/// the caller.
fn depends_on_caller(path: &[u8], searches: impl FnOnce() -> bool) -> bool {
    // $ORIGIN and the like.
    path.contains(&b'$') || !path.contains(&b'/') && searches()
}

/// Returns whether the object with this code has search directories, or any object has some that it
/// passes on (DT_RPATH).
fn searches_by_itself(code: usize) -> bool {
    const DT_RPATH: usize = 15;
    const DT_RUNPATH: usize = 29;
    let mut does = false;
    each_library(&mut |library| {
        does =
            library.number(DT_RPATH).is_some() || library.has(code) && library.number(DT_RUNPATH).is_some();
        does
    });
    does
}

/// Returns whether a load by this name would load nothing, whichever code calls it.
fn is_loaded(path: &CStr) -> bool {
    if path.to_bytes().contains(&b'$') {
        return false;
    }
    if !path.to_bytes().contains(&b'/') {
        return is_loaded_by_name(path);
    }
    // SAFETY: loads nothing, and closes the handle that it gets.
    unsafe {
        let found = split::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if !found.is_null() {
            split::dlclose(found);
        }
        !found.is_null()
    }
}

/// Returns whether a loaded library has this name. The dynamic linker compares a name without a
/// path with these first.
fn is_loaded_by_name(name: &CStr) -> bool {
    let mut is_there = false;
    each_library(&mut |library| {
        is_there = library.own_name().is_some_and(|own| own == name);
        is_there
    });
    is_there
}

/// A load by the shim, which ends when the value is dropped.
pub(crate) struct UnderWay(());

/// Begins a load, before the shim makes the call.
pub(crate) fn begin() -> UnderWay {
    code::begin_load();
    fall_back();
    UnderWay(())
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let before = errno::get();
        census::lead_calls();
        errno::set(before);
        code::end_load();
    }
}

/// Takes everything off shared memory until a census has found all code clean.
pub(crate) fn withdraw() {
    code::disturb();
    fall_back();
}

/// Makes every connection fall back to TCP, with the unread bytes, and leaves every epoll instance
/// to the kernel alone.
fn fall_back() {
    let before = errno::get();
    let _shield = Shield::raise();
    resets::leave_to_kernel();
    // If both ends of a connection are in this process, both must return their unread bytes before
    // either falls back.
    for endpoint in endpoint::all() {
        attach::give_back_unread(endpoint, Reason::NewCode);
    }
    for endpoint in endpoint::all() {
        attach::go_back(endpoint, Reason::NewCode);
        endpoint.keep_for_calls();
    }
    for endpoint in endpoint::all() {
        returning::send_again_if_returned(endpoint, endpoint.fd());
    }
    epoll::surrender();
    errno::set(before);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_name_that_is_searched_for_depends_on_its_caller() {
        assert!(!depends_on_caller(b"/usr/lib/libz.so.1", || true));
        assert!(!depends_on_caller(b"./plugin.so", || true));
        assert!(depends_on_caller(b"$ORIGIN/plugin.so", || false));
        assert!(depends_on_caller(b"libz.so.1", || true));
        assert!(!depends_on_caller(b"libz.so.1", || false));
    }

    #[test]
    fn what_is_loaded_is_found_by_its_own_name() {
        assert!(is_loaded_by_name(c"libc.so.6"));
        assert!(!is_loaded_by_name(c"libc.so") && !is_loaded_by_name(c""));
    }
}
