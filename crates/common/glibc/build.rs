//! Builds stub libraries that the linker finds before libc. They contain only names and versions:
//! those that glibc had in libpthread and libdl until 2.33.
//!
//! A program that is linked with them records that it needs these two libraries, like a program
//! that was built then. Later glibcs have the functions in libc and ship both libraries empty. Such
//! programs then find the functions in libc.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Versions of glibc on x86-64 with the functions that appeared in them. On aarch64 all of them
/// have the first version.
type Versions = &'static [(&'static str, &'static [&'static str])];

/// The libraries by file name.
const LIBRARIES: [(&str, Versions); 2] = [
    ("libdl.so.2", &[("GLIBC_2.2.5", &["dladdr", "dlclose", "dlerror", "dlopen", "dlsym"])]),
    (
        "libpthread.so.0",
        &[
            (
                "GLIBC_2.2.5",
                &[
                    "pthread_attr_getguardsize",
                    "pthread_attr_getstack",
                    "pthread_attr_setstacksize",
                    "pthread_create",
                    "pthread_detach",
                    "pthread_getattr_np",
                    "pthread_getspecific",
                    "pthread_join",
                    "pthread_key_create",
                    "pthread_key_delete",
                    "pthread_kill",
                    "pthread_mutex_trylock",
                    "pthread_mutexattr_destroy",
                    "pthread_mutexattr_init",
                    "pthread_mutexattr_settype",
                    "pthread_once",
                    "pthread_rwlock_destroy",
                    "pthread_rwlock_init",
                    "pthread_rwlock_rdlock",
                    "pthread_rwlock_unlock",
                    "pthread_rwlock_wrlock",
                    "pthread_setspecific",
                    "pthread_sigmask",
                ],
            ),
            ("GLIBC_2.12", &["pthread_setname_np"]),
        ],
    ),
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if variable("CARGO_CFG_TARGET_ENV") != "gnu" {
        return;
    }
    let out = variable("OUT_DIR");
    for (library, versions) in LIBRARIES {
        if let Err(why) = make(Path::new(&out), library, versions) {
            println!(
                "cargo::warning=shunt will need glibc 2.34, or what it is built with: no stand-in for {library}: {why}"
            );
            return;
        }
    }
    println!("cargo::rustc-link-search=native={out}");
}

/// Builds one library, under the name that the linker searches for.
fn make(out: &Path, library: &str, versions: Versions) -> Result<(), String> {
    let name = library.split_inclusive(".so").next().unwrap_or(library);
    let (source, script) = (out.join(format!("{name}.s")), out.join(format!("{name}.map")));
    let names = || versions.iter().flat_map(|(_, names)| *names);
    let one = |name| format!(".globl {name}\n.type {name}, %function\n{name}: .long 0\n.size {name}, 4\n");
    write(&source, &(".text\n".to_owned() + &names().map(one).collect::<String>()));
    write(&script, &script_of(versions));
    let linker = env::var("RUSTC_LINKER").unwrap_or_else(|_| "cc".to_owned());
    let output = Command::new(&linker)
        .args(["-shared", "-nostdlib", &format!("-Wl,-soname,{library}")])
        .arg(format!("-Wl,--version-script={}", script.display()))
        .arg("-o")
        .args([out.join(name), source])
        .output();
    match output {
        Err(error) => Err(format!("{linker} cannot be run ({error})")),
        Ok(output) if !output.status.success() => Err(String::from_utf8_lossy(&output.stderr)
            .lines()
            .next()
            .unwrap_or("no reason given")
            .to_owned()),
        Ok(_) => Ok(()),
    }
}

/// Returns the linker's version script.
fn script_of(versions: Versions) -> String {
    if variable("CARGO_CFG_TARGET_ARCH") == "x86_64" {
        let one = |(version, names): &(&str, &[&str])| format!("{version} {{ {}; }};\n", names.join("; "));
        return versions.iter().map(one).collect();
    }
    let names: Vec<&str> = versions.iter().flat_map(|(_, names)| names.iter().copied()).collect();
    format!("GLIBC_2.17 {{ {}; }};\n", names.join("; "))
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).expect("OUT_DIR can be written");
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_default()
}
