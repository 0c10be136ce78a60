//! Programs with the runtime of a sanitizer: AddressSanitizer, ThreadSanitizer and their like.
//!
//! Such a runtime has hooks too. They check the buffers of read, send and the rest once libc's
//! function has returned. The order in which the dynamic linker finds functions decides what the
//! runtime checks:
//!
//! ```text
//! program → runtime → shim → libc    every call, also one that a lane has answered
//! program → shim → runtime → libc    only the calls that the shim makes in libc, for TCP
//! ```
//!
//! A runtime that is linked in statically is in the program, and so comes first. A runtime in a
//! library comes first if `shunt run` has put it before the shim in LD_PRELOAD
//! ([`FIRST`](shunt_abi::env::FIRST)). Programs that this one starts must not get it, so
//! [`start`] takes its name out. Where the shim is first all the same (/etc/ld.so.preload, a
//! program that a shell has started), the program stays on TCP.
//!
//! AddressSanitizer in a library refuses to run unless it is the first library of the program, or
//! an option says that this does not matter. The runtime asks the program for its options by a
//! function, which the shim has where the program has none (`hooks::sanitizer`).

use std::ffi::{CStr, c_char};

use shunt_abi::reason::Reason;

use crate::base::split::find_behind;
use crate::life::untracked;

/// Functions of the runtimes whose hooks must see every call.
const RUNTIMES: [&CStr; 3] = [c"__asan_init", c"__tsan_init", c"__hwasan_init"];

/// Removes the runtime from LD_PRELOAD, and keeps the process on TCP if the runtime comes second.
/// Runs once, before main.
pub(crate) fn start() {
    // SAFETY: before main, only this thread uses the environment.
    unsafe { tidy(libc::getenv(c"SHUNT_FIRST".as_ptr()), libc::getenv(c"LD_PRELOAD".as_ptr())) };
    // dlsym is not used, because the program's dlerror would return its failure.
    if has_runtime() {
        untracked::leave(Reason::Sanitizer);
    }
}

/// Returns whether the program has a runtime behind this library.
pub(crate) fn has_runtime() -> bool {
    RUNTIMES.iter().any(|name| !find_behind(name).is_null())
}

/// Removes the text in `first` from the beginning of `list`, and makes `first` empty.
///
/// # Safety
/// Both are strings of the environment, or null, and no other thread reads them.
unsafe fn tidy(first: *mut c_char, list: *mut c_char) {
    if first.is_null() || list.is_null() {
        return;
    }
    // SAFETY: the caller's promise. The rest of the list moves to its beginning, with the
    // terminating zero.
    unsafe {
        let len = libc::strlen(first);
        let text = CStr::from_ptr(list).to_bytes();
        if is_before(CStr::from_ptr(first).to_bytes(), text) {
            let left = text.len() - (len + 1);
            std::ptr::copy(list.add(len + 1), list, left + 1);
        }
        first.write(0);
    }
}

/// Returns whether a list of libraries begins with `first` and has more.
fn is_before(first: &[u8], list: &[u8]) -> bool {
    !first.is_empty() && list.strip_prefix(first).is_some_and(|rest| rest.starts_with(b":"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tidied(first: &CStr, list: &CStr) -> (Vec<u8>, Vec<u8>) {
        let [mut first, mut list] = [first, list].map(|text| text.to_bytes_with_nul().to_vec());
        // SAFETY: local strings.
        unsafe { tidy(first.as_mut_ptr().cast(), list.as_mut_ptr().cast()) };
        let text = |bytes: Vec<u8>| bytes.split(|byte| *byte == 0).next().unwrap().to_vec();
        (text(first), text(list))
    }

    #[test]
    fn what_stands_first_for_one_program_is_not_handed_on() {
        for (first, list, left) in [
            (c"libasan.so.8", c"libasan.so.8:/a/libshunt.so", &b"/a/libshunt.so"[..]),
            (c"a:b", c"a:b:c:d", b"c:d"),
            (c"a", c"ab:c", b"ab:c"),
            (c"a", c"a", b"a"),
            (c"", c":a", b":a"),
        ] {
            assert_eq!(tidied(first, list), (vec![], left.to_vec()), "{first:?} {list:?}");
        }
        // SAFETY: null pointers are allowed.
        unsafe { tidy(std::ptr::null_mut(), std::ptr::null_mut()) };
    }
}
