//! Tests of C and C++ programs, compiled with the headers as they are installed, and linked with the
//! library.

use std::path::Path;
use std::process::Command;

/// Compiles a program, runs it with a socket path that does not exist yet, and returns its output.
fn run(source: &Path) -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("program");
    // In the directory of this test, `deps`.
    let libraries = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let is_cpp = source.extension().is_some_and(|extension| extension == "cpp");
    let (compiler, version) = if is_cpp { ("g++", "-std=c++17") } else { ("gcc", "-std=c11") };
    let compiled = Command::new(compiler)
        .args([
            version,
            "-D_GNU_SOURCE",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-O1",
            "-pthread",
            "-o",
        ])
        .arg(&program)
        .arg(format!("-I{}", root.join("include").display()))
        .arg(source)
        .arg(format!("-L{}", libraries.display()))
        .arg("-lshunt_channel_c")
        .output()
        .expect("the compiler is there");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program)
        .arg(directory.path().join("socket"))
        .env("LD_LIBRARY_PATH", &libraries)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    ran.stdout
}

#[test]
fn a_c_program_sends_and_receives() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/exchange.c");
    assert_eq!(run(&source), b"whole\n");
}

#[test]
fn a_c_program_lends_and_borrows() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/lent.c");
    assert_eq!(run(&source), b"lent\n");
}

#[test]
fn a_cpp_program_lends_and_borrows() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/lent.cpp");
    assert_eq!(run(&source), b"lent\n");
}

#[test]
fn c_and_cpp_programs_call_and_publish() {
    for name in ["many.c", "many.cpp"] {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name);
        assert_eq!(run(&source), b"many\n");
    }
}

#[test]
fn each_example_does_what_it_says() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../examples/channel");
    for name in ["hello.c", "hello.cpp", "event-loop.c"] {
        assert_eq!(run(&examples.join(name)), b"hello", "{name}");
    }
}
