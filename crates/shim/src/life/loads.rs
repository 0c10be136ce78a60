//! dlopen and dlmopen: what they bring may make system calls that no hook sees, so nothing is on shared memory while it comes, nor before
//! a census has judged it (L11).
//!
//! ```text
//!            begin                     the real dlopen                 end
//!   before ─────────> nothing shared ─────────────────> loaded, bound ─────> a census may begin
//! ```
//!
//! The dynamic linker looks at who calls it: for the namespace, and, where the name has no path, for where to search. The shim is in the
//! program's own namespace, and calls in the caller's place where that makes no difference. Otherwise the caller's call is passed on,
//! and nobody sees it end.

use std::ffi::{CStr, c_char, c_int, c_void};

use shunt_abi::reason::Reason;

use crate::base::clib::is_single_threaded;
use crate::base::code::{self, Code};
use crate::base::library::each_library;
use crate::base::signal::Shield;
use crate::base::split;
use crate::base::{errno, process};
use crate::epoll;
use crate::life::{attach, census, unseen};
use crate::socket::endpoint;

/// A call of dlopen.
pub(crate) struct Load {
    pub(crate) path: *const c_char,
    pub(crate) flags: c_int,
    pub(crate) caller: *const c_void,
    /// Whether it goes to the namespace of its caller.
    pub(crate) is_at_home: bool,
}

/// How it is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By its caller: it brings nothing, or nothing can be on shared memory any more.
    Pass,
    /// By the shim, after [`begin`].
    Here,
}

/// Makes sure that what the call brings is judged before it meets anything, and says how the call is to be made.
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
    // This thread comes back here only when the library is there, or runs it already. Another could hold a census meanwhile.
    if !is_single_threaded() && !process::trusts_own_calls() {
        code::give_up();
        unseen::leave(Reason::OwnCalls);
    }
    Way::Pass
}

/// Whether the dynamic linker would look for the library in places of its caller's own.
fn depends_on_caller(path: &[u8], searches: impl FnOnce() -> bool) -> bool {
    // $ORIGIN and the like.
    path.contains(&b'$') || !path.contains(&b'/') && searches()
}

/// Whether the object with that code has directories of its own in which its libraries are searched, or another has that passes them on.
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

/// Whether nothing would be loaded under that name, whoever asks for it.
fn is_loaded(path: &CStr) -> bool {
    if path.to_bytes().contains(&b'$') {
        return false;
    }
    if !path.to_bytes().contains(&b'/') {
        return is_loaded_by_name(path);
    }
    // SAFETY: loads nothing; what it has found is given back.
    unsafe {
        let found = split::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if !found.is_null() {
            split::dlclose(found);
        }
        !found.is_null()
    }
}

/// A name without a path is first compared with what the libraries that are loaded call themselves.
fn is_loaded_by_name(name: &CStr) -> bool {
    let mut is_there = false;
    each_library(&mut |library| {
        is_there = library.own_name().is_some_and(|own| own == name);
        is_there
    });
    is_there
}

/// A load that the shim makes. Its end is the end of the value.
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

/// Nothing is on shared memory from now on, until a census has found all code clean.
pub(crate) fn withdraw() {
    code::disturb();
    fall_back();
}

/// Every connection goes back to TCP, with what has not been read, and every epoll instance is the kernel's alone.
fn fall_back() {
    let before = errno::get();
    let _shield = Shield::raise();
    // Where both ends are here, each must have given back before either goes.
    for endpoint in endpoint::all() {
        attach::give_back_unread(endpoint, Reason::NewCode);
    }
    for endpoint in endpoint::all() {
        attach::go_back(endpoint, Reason::NewCode);
        endpoint.keep_for_calls();
    }
    for endpoint in endpoint::all() {
        attach::send_again_if_returned(endpoint, endpoint.fd.load(std::sync::atomic::Ordering::Relaxed));
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
