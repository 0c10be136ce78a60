//! Finds the sanitizer's runtime that a program is linked with. The dynamic linker must load it
//! before the shim, so that it sees every call.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use crate::elf;

/// The prefixes of the runtimes, of GCC and of Clang, whose hooks must see every read and write.
const RUNTIMES: [&[u8]; 6] = [
    b"libasan.so",
    b"libtsan.so",
    b"libhwasan.so",
    b"libclang_rt.asan",
    b"libclang_rt.tsan",
    b"libclang_rt.hwasan",
];

/// Returns the runtime that the program at `path` is linked with, by the name that the dynamic
/// linker finds it by. A runtime that is linked in statically comes first anyway.
pub(crate) fn runtime_of(path: &Path) -> Option<OsString> {
    let libraries = elf::libraries(&File::open(path).ok()?);
    libraries.into_iter().find(|name| is_runtime(name)).map(OsString::from_vec)
}

fn is_runtime(name: &[u8]) -> bool {
    RUNTIMES.iter().any(|runtime| name.starts_with(runtime)) && !name.contains(&b'/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_are_known_by_their_names() {
        for name in
            ["libasan.so.8", "libtsan.so.2", "libclang_rt.asan-x86_64.so", "libclang_rt.hwasan-aarch64.so"]
        {
            assert!(is_runtime(name.as_bytes()), "{name}");
        }
        for name in ["libc.so.6", "libubsan.so.1", "liblsan.so.0", "libasan", "/lib/libasan.so.8"] {
            assert!(!is_runtime(name.as_bytes()), "{name}");
        }
        assert_eq!(runtime_of(Path::new("/proc/self/exe")), None);
    }
}
