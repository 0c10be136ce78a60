//! Compiles the test programs in C, C++ and Go.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use shunt_built::{copy_executable, kept};

use crate::host::Host;
use crate::programs::find;

/// Compiles a C test program, and copies it into the host's directory, where it can be started as
/// `./NAME`.
pub fn compile(host: &Host, name: &str, flags: &[&str]) -> PathBuf {
    compile_by("gcc", host, name, flags)
}

/// Compiles a test program in C++ as [`compile`] does. Its source is also `NAME.c`.
pub fn compile_cpp(host: &Host, name: &str, flags: &[&str]) -> PathBuf {
    compile_by("g++", host, name, flags)
}

/// Compiles a test program as [`compile`] does, with musl.
pub fn compile_for_musl(host: &Host, name: &str, flags: &[&str]) -> PathBuf {
    compile_by("musl-gcc", host, name, flags)
}

fn compile_by(compiler: &str, host: &Host, name: &str, flags: &[&str]) -> PathBuf {
    let program = host.path(name);
    copy_executable(&compiled(compiler, name, flags), &program);
    program
}

/// Returns a compiled program. The tests of a file mostly use the same one, each of them natively and
/// under shunt.
fn compiled(compiler: &str, name: &str, flags: &[&str]) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
    let source = sources.join(format!("{name}.c"));
    let version = version(compiler, &sources, &source, flags).expect("the sources are there");
    kept("programs", &format!("{name}-{version:016x}"), |half| {
        let status = Command::new(find(compiler))
            .args(["-O1", "-Wall", "-Werror", "-pthread", "-o"])
            .args([half, &source])
            .args(flags)
            .status()
            .expect("the compiler can be started");
        assert!(status.success(), "{compiler} did not accept {name}.c");
    })
}

/// Returns a number that is another one if the source, any header, the compiler or the flags are.
fn version(compiler: &str, sources: &Path, source: &Path, flags: &[&str]) -> io::Result<u64> {
    let mut hasher = DefaultHasher::new();
    (compiler, flags, fs::read(source)?).hash(&mut hasher);
    let mut headers = fs::read_dir(sources)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<Vec<PathBuf>>>()?;
    headers.retain(|file| file.extension().is_some_and(|extension| extension == "h"));
    headers.sort();
    for header in headers {
        (fs::read(&header)?, header).hash(&mut hasher);
    }
    Ok(hasher.finish())
}

/// Compiles a Go test program without cgo into a directory that is kept between tests.
pub fn compile_go(kept: &Path, name: &str) -> PathBuf {
    compile_go_as(kept, &format!("static-{name}"), &[name], "0")
}

/// Compiles a Go test program of several sources with cgo, so that it is linked with libc.
pub fn compile_cgo(kept: &Path, names: &[&str]) -> PathBuf {
    compile_go_as(kept, &format!("linked-{}", names[0]), names, "1")
}

fn compile_go_as(kept: &Path, program: &str, names: &[&str], cgo: &str) -> PathBuf {
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
    let program = kept.join(program);
    let built = Command::new(find("go"))
        .args(["build", "-o"])
        .arg(&program)
        .args(names.iter().map(|name| programs.join(format!("{name}.go"))))
        .envs([
            ("CGO_ENABLED", cgo),
            ("GOFLAGS", "-mod=mod"),
            ("GO111MODULE", "off"),
            ("GOTOOLCHAIN", "local"),
        ])
        .env("GOCACHE", kept.join("go"))
        .status();
    assert!(built.expect("go can be started").success(), "go did not accept {names:?}");
    program
}
