//! Functions that the shim calls and that have not always been in libc. Until 2.33, glibc had the
//! functions of the dynamic linker, of threads and of POSIX AIO in separate libraries, and lacked a
//! few functions of files.
//!
//! If the shim depended on those libraries, every program would load them, and behave differently:
//! libc does more in a program with threads. If it depended on newer symbol versions, it could not
//! be loaded with an older libc, and LD_PRELOAD would keep the program from starting.
//!
//! So the shim's symbol table names none of these functions. This file finds dlsym, which finds the
//! others. Where libc has no dlsym, it looks the others up itself too. Such a glibc's dlsym
//! allocates, and the program's allocator may be the caller that needs the function.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use crate::base::hidden::{c_name, hidden};
use crate::base::library::{each_library, is_late};

std::arch::global_asm!(
    ".weak shunt_dlsym",
    ".pushsection .data.rel.ro.shunt_stand_in, \"aw\", @progbits",
    ".balign 8",
    ".globl shunt_stand_in",
    ".hidden shunt_stand_in",
    ".type shunt_stand_in, @object",
    ".size shunt_stand_in, 8",
    "shunt_stand_in: .quad shunt_dlsym",
    ".popsection",
);

type Symbol = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

unsafe extern "C" {
    /// The substitute for dlsym in a program without a dynamic linker (`intercept::libc`).
    static shunt_stand_in: Option<Symbol>;
}

/// See dlsym(3).
///
/// # Safety
/// As in C.
pub(crate) unsafe extern "C" fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let mut found = FOUND.load(Relaxed);
    if found.is_null() {
        // SAFETY: relocated before any code of this library runs.
        let stand_in = unsafe { shunt_stand_in };
        found = stand_in.map_or_else(symbol_of_libc, |stand_in| stand_in as *mut c_void);
        FOUND.store(found, Relaxed);
    }
    // SAFETY: the caller's promise.
    let name_in_c = unsafe { CStr::from_ptr(name) };
    if found.is_null() {
        if [libc::RTLD_NEXT, libc::RTLD_DEFAULT].contains(&library) {
            return find_behind(name_in_c);
        }
        found = find_behind(c"dlsym");
    }
    // SAFETY: it has this prototype, or is null, which is `None`. The rest is the caller's promise.
    unsafe {
        let symbol = std::mem::transmute::<*mut c_void, Option<Symbol>>(found);
        symbol.map_or(std::ptr::null_mut(), |symbol| symbol(library, name))
    }
}

/// Returns libc's dlsym, or null if libc has none.
fn symbol_of_libc() -> *mut c_void {
    let mut found = std::ptr::null_mut();
    each_library(&mut |library| {
        let is_libc = library.has(libc::__errno_location as *const () as usize);
        if is_libc {
            found = library.address_of(c"dlsym");
        }
        is_libc
    });
    found
}

/// Returns the definition of `name` in the first library behind this one, or null. Goes through the
/// libraries in the order in which they were loaded, which is the order of the program's look-ups.
/// Unlike RTLD_NEXT, it also finds a library that was loaded after the program's start. If this
/// library was loaded late, all others are behind it.
pub(crate) fn find_behind(name: &CStr) -> *mut c_void {
    let (mut is_behind, mut found) = (is_late(), std::ptr::null_mut());
    each_library(&mut |library| {
        let is_ours = library.has(find_behind as *const () as usize);
        if is_behind && !is_ours {
            found = library.address_of(name);
        }
        is_behind |= is_ours;
        !found.is_null()
    });
    found
}

/// Substitute for dladdr, which fills in only the library that contains an address.
unsafe fn library_of(address: *const c_void, info: *mut libc::Dl_info) -> c_int {
    let mut is_found = 0;
    each_library(&mut |library| {
        if library.has(address as usize) {
            // SAFETY: the caller's structure. The name stays as long as the library does.
            unsafe {
                (*info).dli_fname = library.name.as_ptr();
                (*info).dli_fbase = library.base as *mut c_void;
            }
            is_found = 1;
        }
        is_found != 0
    });
    is_found
}

/// Returns the function `name` of any library, or null.
#[inline(never)]
fn find(cell: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let mut found = cell.load(Relaxed);
    if found.is_null() {
        // SAFETY: a look-up of a constant name.
        found = unsafe { dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        if found.is_null() {
            found = find_behind(name);
        }
        cell.store(found, Relaxed);
    }
    found
}

/// Defines functions that may be in another library, each with its result if no library has it.
macro_rules! elsewhere {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $without:expr;)*) => { $(
        /// Calls the function of that name in whichever library has it.
        ///
        /// # Safety
        /// As in C.
        pub(crate) unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
            static CELL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            let found = find(&CELL, const { c_name(concat!(stringify!($name), "\0")) });
            // SAFETY: it has this prototype, or is null, which is `None`.
            let found = unsafe {
                std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($ty),*) -> $ret>>(found)
            };
            match found {
                // SAFETY: the caller's promise.
                Some(function) => unsafe { function($($arg),*) },
                None => $without,
            }
        }

    )* };
}

type AtEnd = unsafe extern "C" fn(*mut c_void);

elsewhere! {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void = std::ptr::null_mut();
    fn dlclose(library: *mut c_void) -> c_int = -1;
    fn dladdr(address: *const c_void, info: *mut libc::Dl_info) -> c_int =
        // SAFETY: the caller's promise.
        unsafe { library_of(address, info) };
    fn pthread_key_create(key: *mut c_uint, at_end: Option<AtEnd>) -> c_int = libc::EAGAIN;
    fn pthread_key_delete(key: c_uint) -> c_int = libc::EINVAL;
    fn pthread_setspecific(key: c_uint, value: *const c_void) -> c_int = libc::EINVAL;
}

// dlopen and dlsym are missing here, because this library exports hooks of these names.
hidden!(dlclose, dlclose);
hidden!(dladdr, dladdr);
hidden!(pthread_key_create, pthread_key_create);
hidden!(pthread_key_delete, pthread_key_delete);
hidden!(pthread_setspecific, pthread_setspecific);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_looked_for_here_is_what_the_dynamic_linker_has() {
        // Some of these have several versions.
        for name in [c"dlsym", c"getpid", c"posix_spawn", c"pthread_cond_wait", c"fcntl64", c"aio_read"] {
            // SAFETY: a look-up of a constant name.
            let expected = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
            assert!(!expected.is_null(), "{name:?}");
            assert_eq!(find_behind(name), expected, "{name:?}");
        }
        assert!(find_behind(c"shunt_has_no_such_function").is_null());
    }

    #[test]
    fn an_address_is_told_as_by_dladdr() {
        let address = libc::getpid as *const c_void;
        // SAFETY: zeroes are valid structures.
        unsafe {
            let (mut ours, mut theirs) =
                (std::mem::zeroed::<libc::Dl_info>(), std::mem::zeroed::<libc::Dl_info>());
            assert!(library_of(address, &mut ours) != 0 && libc::dladdr(address, &mut theirs) != 0);
            assert_eq!(ours.dli_fbase, theirs.dli_fbase);
            assert_eq!(CStr::from_ptr(ours.dli_fname), CStr::from_ptr(theirs.dli_fname));
            assert_eq!(library_of(std::ptr::null(), &mut ours), 0);
        }
    }

    #[test]
    fn a_name_that_nobody_has_is_not_found() {
        let mut cell = AtomicPtr::new(std::ptr::null_mut());
        assert!(find(&cell, c"shunt_has_no_such_function").is_null() && cell.get_mut().is_null());
        assert!(!find(&cell, c"dladdr").is_null() && !cell.get_mut().is_null());
    }
}
