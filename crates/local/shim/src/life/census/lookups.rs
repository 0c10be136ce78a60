//! Look-ups that lead past the shim (L11). dlsym and dlvsym return libc's own function in four
//! cases: for a handle, for a version, for a caller that was loaded with RTLD_DEEPBIND, and for
//! RTLD_NEXT in a library that was loaded later. The shim returns its hook instead.
//!
//! ```text
//! handle         caller                   answer
//! of a library   any                      the dynamic linker's; the hook in place of libc's
//! RTLD_DEFAULT   bound as usual           the dynamic linker's
//! RTLD_DEFAULT   perhaps bound deep       the hook, if no other library has the name
//! RTLD_NEXT      before the shim          the dynamic linker's, which is the hook
//! RTLD_NEXT      behind it                the hook, if no other library has the name
//! any            an interposer behind it  the dynamic linker's: the hooks call that library
//! ```
//!
//! The dynamic linker identifies its caller by the return address. So the hook of dlsym jumps to
//! the real dlsym where the answer stays. It makes the call itself only where the caller does not
//! matter.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, Ordering::*};

use super::bindings::{Object, for_good, is_behind, is_judged, is_ours};
use crate::base::code;
use crate::base::library::{Library, each_library, is_late};
use crate::base::split::find_behind;
use crate::base::{errno, process};
use crate::life::untracked;
use shunt_abi::reason::Reason;

/// Set once a library may have been bound deep.
static DEEP: AtomicBool = AtomicBool::new(false);

/// A call of dlsym or dlvsym.
pub(crate) struct Lookup<'a> {
    pub(crate) handle: *mut c_void,
    pub(crate) name: &'a CStr,
    pub(crate) caller: *const c_void,
    /// Whether the call names a version. The hooks have no versions, so the dynamic linker would
    /// skip them.
    pub(crate) is_versioned: bool,
}

/// How a look-up is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lead {
    /// By the caller itself: the answer is the right one.
    Pass,
    /// By the shim, with this handle. The hook is the answer if the function found is libc's.
    Here { handle: *mut c_void, hook: *mut c_void },
}

/// The place of a caller, in relation to the shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the shim, in libc, or in another library whose calls are not judged.
    Trusted,
    /// In no library.
    Nowhere,
    Before,
    Behind {
        /// Whether some hooks call functions of this library in place of libc's.
        interposes: bool,
    },
}

/// Notes that a library was loaded that may be bound deep.
pub(super) fn expect_deep() {
    DEEP.store(true, Release);
}

/// Returns whether any library may be bound deep.
pub(super) fn may_be_deep() -> bool {
    DEEP.load(Acquire)
}

/// Returns how the look-up has to be made.
pub(crate) fn lead(lookup: &Lookup<'_>) -> Lead {
    let before = errno::get();
    // A load may have ended without the shim seeing its end.
    super::lead_calls();
    let lead = choose(lookup).unwrap_or(Lead::Pass);
    errno::set(before);
    lead
}

/// Returns whether `found` lies in libc, or in another library whose functions have hooks.
pub(crate) fn leads_behind(found: *mut c_void) -> bool {
    let mut does = false;
    each_library(&mut |library| {
        does = library.has(found as usize) && is_behind(library);
        does
    });
    !found.is_null() && does
}

fn choose(lookup: &Lookup<'_>) -> Option<Lead> {
    let hook = hook_of(lookup.name)?;
    let place = place_of(lookup.caller as usize);
    if place == Place::Trusted || place == (Place::Behind { interposes: true }) {
        return None;
    }
    let here = |handle| Some(Lead::Here { handle, hook });
    if ![libc::RTLD_DEFAULT, libc::RTLD_NEXT].contains(&lookup.handle) {
        return here(lookup.handle);
    }
    // Otherwise the name is a function of another library, which only some callers can find.
    if find_in_libc(lookup.name).is_null() {
        return None;
    }
    let is_next = lookup.handle == libc::RTLD_NEXT;
    let is_usual = match place {
        Place::Before => !is_late(),
        _ => !(is_next || may_be_deep() && is_deep(lookup.caller as usize)),
    };
    match () {
        () if place == Place::Nowhere && is_next => None,
        () if is_usual && !lookup.is_versioned => None,
        // The function of another library might be the answer.
        () if others_define(lookup.name, lookup.caller as usize) => {
            if !is_usual && !process::is_off() && process::is_home() && !process::trusts_own_calls() {
                code::give_up(lookup.caller as usize);
                untracked::leave(Reason::OwnCalls);
            }
            None
        }
        () => here(libc::RTLD_DEFAULT),
    }
}

/// Returns the hook of that name.
fn hook_of(name: &CStr) -> Option<*mut c_void> {
    ours()?.look_up(name)
}

fn ours() -> Option<Library<'static>> {
    let mut ours = None;
    each_library(&mut |library| {
        if is_ours(library) {
            // SAFETY: this library is not unloaded while it runs.
            ours = Some(unsafe { for_good(library) });
        }
        ours.is_some()
    });
    ours
}

fn place_of(caller: usize) -> Place {
    let (mut theirs, mut is_behind_us) = (None, false);
    each_library(&mut |library| {
        is_behind_us |= is_ours(library);
        if library.has(caller) {
            // SAFETY: the call returns there.
            theirs = Some((unsafe { for_good(library) }, is_behind_us));
        }
        theirs.is_some()
    });
    match theirs {
        None => Place::Nowhere,
        Some((library, _)) if !is_judged(&library) => Place::Trusted,
        Some((_, false)) => Place::Before,
        Some((library, true)) => Place::Behind { interposes: interposes(&library) },
    }
}

/// Returns whether a hook calls a function of this library, and not libc's.
fn interposes(library: &Library<'_>) -> bool {
    let ours = ours();
    let mut names = ours.iter().flat_map(Library::exports);
    names.any(|name| library.look_up(name).is_some() && library.has(find_behind(name) as usize))
}

fn find_in_libc(name: &CStr) -> *mut c_void {
    let mut found = std::ptr::null_mut();
    each_library(&mut |library| {
        if is_behind(library) {
            found = library.address_of(name);
        }
        !found.is_null()
    });
    found
}

/// Returns whether the library with this code is perhaps bound deep.
fn is_deep(code: usize) -> bool {
    let mut object = None;
    each_library(&mut |library| {
        if library.has(code) {
            object = Some(Object::of(library));
        }
        object.is_some()
    });
    object.is_some_and(super::is_perhaps_deep)
}

fn others_define(name: &CStr, caller: usize) -> bool {
    let mut do_they = false;
    each_library(&mut |library| {
        do_they = is_judged(library) && !library.has(caller) && library.look_up(name).is_some();
        do_they
    });
    do_they
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lead_of(handle: *mut c_void, name: &CStr, caller: *const c_void, is_versioned: bool) -> Lead {
        lead(&Lookup { handle, name, caller, is_versioned })
    }

    #[test]
    fn only_names_of_hooks_are_led() {
        let nowhere = std::ptr::dangling();
        assert_eq!(lead_of(std::ptr::dangling_mut(), c"getpid", nowhere, false), Lead::Pass);
        assert_eq!(lead_of(libc::RTLD_DEFAULT, c"getpid", nowhere, true), Lead::Pass);
    }

    #[test]
    fn libc_and_the_shim_look_up_as_they_like() {
        for caller in [libc::getpid as *const c_void, lead_of as *const c_void] {
            assert_eq!(place_of(caller as usize), Place::Trusted);
        }
        assert_eq!(place_of(8), Place::Nowhere);
    }

    #[test]
    fn libcs_functions_are_behind() {
        assert!(leads_behind(libc::getpid as *mut c_void));
        assert!(!leads_behind(lead_of as *mut c_void) && !leads_behind(std::ptr::null_mut()));
    }
}
