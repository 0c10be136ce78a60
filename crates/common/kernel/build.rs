//! Compiles `bpf/*.bpf.c` with clang. Without clang the crate contains no programs, and loading one
//! fails with an error that says so. Everything else works. With `SHUNT_BPF=required`, as for
//! packages, the build fails instead.

use std::env;
use std::path::PathBuf;
use std::process::Command;

/// The programs, each with one job.
const PROGRAMS: [&str; 10] =
    ["calls", "delay", "hint", "lsm", "names", "redirect", "secure", "sequence", "shape", "window"];

fn main() {
    println!("cargo::rerun-if-changed=bpf");
    println!("cargo::rerun-if-env-changed=CLANG");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    for program in PROGRAMS {
        let object = out.join(format!("{program}.bpf.o"));
        if let Err(why) = compile(program, &object) {
            // This script runs again after a failure, so a change of the variable need not cause that.
            if env::var_os("SHUNT_BPF").is_some_and(|value| value == "required") {
                println!("cargo::error={program}.bpf.c cannot be compiled, and packages need it: {why}");
                continue;
            }
            println!("cargo::warning=without {program}.bpf.c, and so without what it is for: {why}");
            std::fs::write(&object, []).expect("OUT_DIR can be written");
            // A file that never exists makes cargo run this script again at the next build, when
            // clang may be installed.
            println!("cargo::rerun-if-changed={}", out.join("missing").display());
        }
    }
}

fn compile(program: &str, object: &PathBuf) -> Result<(), String> {
    let clang = env::var_os("CLANG").unwrap_or_else(|| "clang".into());
    let source = PathBuf::from("bpf").join(format!("{program}.bpf.c"));
    let mut command = Command::new(&clang);
    // -g for the type information (BTF) that CO-RE relocations need on other kernels.
    command.args(["-target", "bpf", "-O2", "-g", "-Wall", "-Werror"]);
    // Debian has a separate <asm/types.h> for each architecture. A cross compiler's package has the
    // one of another architecture.
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").expect("set by cargo");
    command.arg(format!("-I/usr/include/{architecture}-linux-gnu"));
    command.args(["-idirafter", &format!("/usr/{architecture}-linux-gnu/include")]);
    let output = command.arg("-c").arg(source).arg("-o").arg(object).output();
    match output {
        Err(error) => Err(format!("{} cannot be run ({error}); install clang", clang.display())),
        Ok(output) if !output.status.success() => {
            let complaint = String::from_utf8_lossy(&output.stderr);
            let first = complaint.lines().next().unwrap_or("clang failed without a word");
            Err(format!("{first}; are clang and libbpf-dev installed?"))
        }
        Ok(_) => Ok(()),
    }
}
