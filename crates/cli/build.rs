//! Compiles the program that `shunt doctor --live` starts as both ends of a connection: once with a
//! dynamic linker, and once static. The command contains both.
//!
//! The static program is for x86-64, the only processor on which static programs can be under
//! shunt. On others its file is empty.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = "src/doctor/live/end.c";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={SOURCE}");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    compile(&out.join("end"), &["-fPIE", "-pie"]);
    let alone = out.join("end-alone");
    match env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|processor| processor == "x86_64") {
        true => compile(&alone, &["-DALONE", "-static", "-nostdlib", "-fno-pie", "-no-pie"]),
        false => std::fs::write(&alone, []).expect("OUT_DIR can be written"),
    }
}

fn compile(to: &Path, flags: &[&str]) {
    // Only the compiler: flags of a package's other programs may need a C library.
    let mut command = Command::new(cc::Build::new().get_compiler().path());
    command.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fno-builtin"]);
    command.args(["-fno-stack-protector", "-fno-strict-aliasing", "-nostartfiles", "-s"]);
    command.args(flags).arg("-o").arg(to).arg(SOURCE);
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
