//! Objects, by the names of their files, about which the shim knows more than their code shows.

/// Libraries with direct system calls that never concern a connection of the program.
const COVERED: &[(&str, &str)] = &[
    // Their functions have hooks (`crate::hooks::ring`).
    ("liburing", ".so"),
    ("liburing-ffi", ".so"),
    // GCC's run-time libraries wait by futex(2), whose number they keep in a register over a loop.
    ("libgomp", ".so"),
    ("libitm", ".so"),
    // The sanitizers' run-time libraries read /proc and write reports. They pass the program's
    // calls on to libc.
    ("libasan", ".so"),
    ("libhwasan", ".so"),
    ("liblsan", ".so"),
    ("libtsan", ".so"),
    ("libubsan", ".so"),
    // Clang's names of these libraries, such as libclang_rt.asan-x86_64.so.
    ("libclang_rt.asan", ".so"),
    ("libclang_rt.hwasan", ".so"),
    ("libclang_rt.tsan", ".so"),
    ("libclang_rt.ubsan_standalone", ".so"),
    // Before glibc 2.34 these were parts of libc. The shim intercepts all of their functions.
    ("libpthread", ".so"),
    ("librt", ".so"),
];

/// Programs and libraries that generate code while they run. Only they write to the memory that
/// they make executable.
const GENERATORS: &[&str] = &[
    // Java: HotSpot, OpenJ9.
    "libjvm.so",
    "libj9jit",
    // V8 and JavaScriptCore, as programs and as libraries.
    "node",
    "nodejs",
    "deno",
    "bun",
    "workerd",
    "libnode.so",
    "libv8",
    "libjavascriptcoregtk",
    // PCRE2's and PCRE's compiler of regular expressions (sljit).
    "libpcre2-",
    "libpcre.so",
    // Closures of foreign functions.
    "libffi",
    // Erlang.
    "beam.smp",
    "beam.asmjit",
    // PHP's opcache.
    "opcache.so",
    // Lua, Ruby, Python, .NET, Mono, Julia, PyPy.
    "luajit",
    "libluajit",
    "ruby",
    "libruby",
    "pypy",
    "libpypy",
    "libcoreclr.so",
    "dotnet",
    "libmono",
    "libjulia",
    // PostgreSQL's expressions, and other code compiled by LLVM or GCC at run time.
    "libLLVM",
    "libgccjit",
    // Common Lisp: its compiler writes to the memory that its image is mapped to.
    "sbcl",
    // WebAssembly.
    "libwasmtime",
    "libwasmer",
];

/// Libraries other than libc whose functions have hooks.
const BEHIND: &[(&str, &str)] = &[
    ("liburing", ".so"),
    ("liburing-ffi", ".so"),
    // Before glibc 2.34.
    ("libpthread", ".so"),
    ("librt", ".so"),
    ("libdl", ".so"),
];

/// Returns whether the census need not judge the object at this path.
pub(super) fn is_covered(path: &[u8]) -> bool {
    is_kernels(path) || is_valgrind(file(path)) || is_among(COVERED, path)
}

/// Returns whether functions of the object at this path have hooks.
pub(super) fn is_behind(path: &[u8]) -> bool {
    is_among(BEHIND, path)
}

fn is_among(libraries: &[(&str, &str)], path: &[u8]) -> bool {
    libraries.iter().any(|(name, kind)| {
        // Python wheels add a digest to the name, and old versions of glibc their version.
        let rest = file(path).strip_prefix(name.as_bytes());
        rest.is_some_and(|rest| {
            rest.starts_with(kind.as_bytes())
                || rest.starts_with(b"-") && rest.windows(kind.len()).any(|part| part == kind.as_bytes())
        })
    })
}

/// Returns whether the file is a tool of valgrind, which translates the program to generated code
/// and makes the program's system calls.
fn is_valgrind(file: &[u8]) -> bool {
    file.ends_with(b"-amd64-linux")
}

/// Returns whether the mapping belongs to the kernel.
fn is_kernels(path: &[u8]) -> bool {
    matches!(path, b"[vdso]" | b"[vsyscall]" | b"[uprobes]")
}

/// Returns whether the object at this path generates code.
pub(super) fn is_generator(path: &[u8]) -> bool {
    let file = file(path);
    is_valgrind(file)
        || GENERATORS.iter().any(|name| {
            file.strip_prefix(name.as_bytes()).is_some_and(|rest| {
                // A program's whole name, perhaps with a version, or the start of a library's name.
                name.starts_with("lib") || !rest.first().is_some_and(u8::is_ascii_lowercase)
            })
        })
}

fn file(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_known_by_the_names_of_their_files() {
        assert!(is_covered(b"[vdso]") && is_covered(b"/usr/lib/liburing.so.2.3"));
        assert!(is_covered(b"/x/libgomp-a34b3233.so.1.0.0") && is_covered(b"/lib/libpthread-2.31.so"));
        assert!(is_covered(b"/x/libclang_rt.asan-x86_64.so") && is_covered(b"/usr/lib/libtsan.so.2.0.0"));
        assert!(!is_covered(b"/usr/lib/libgomplex.so") && !is_covered(b"") && !is_covered(b"/x/liburing"));
        assert!(is_generator(b"/usr/lib/jvm/lib/server/libjvm.so") && is_generator(b"/usr/bin/node"));
        assert!(is_generator(b"/usr/bin/ruby3.1") && is_generator(b"/usr/lib/libpcre2-8.so.0"));
        assert!(
            !is_generator(b"/usr/bin/nodetool") && !is_generator(b"/usr/lib/libnode_x") && !is_generator(b"")
        );
    }
}
