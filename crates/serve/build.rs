//! Compiles `services/*.c` twice: natively for the user-space engine, and with clang for BPF.
//! Without clang the crate has no BPF halves, and loading a builtin service into the kernel fails
//! with an error that says so. With `SHUNT_BPF=required`, as for packages, the build fails instead.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The builtin services, each a C file of that name. src/service/builtin.rs has the same list, and the
/// cache, whose half for user space is src/cache.
const SERVICES: [&str; 11] = [
    CACHE,
    "echo",
    "length-echo",
    "length-router",
    "line-cache",
    "line-counter",
    "line-echo",
    "line-hub",
    "memcached-router",
    "redis-router",
    "thrift-forwarder",
];

const CACHE: &str = "cache";

fn main() {
    println!("cargo::rerun-if-changed=services");
    println!("cargo::rerun-if-changed=include");
    println!("cargo::rerun-if-env-changed=CLANG");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    list_headers(&out);
    for service in SERVICES {
        let source = PathBuf::from("services").join(format!("{service}.c"));
        if service != CACHE {
            compile_natively(service, &source);
        }
        let object = out.join(format!("{service}.bpf.o"));
        if let Err(why) = compile_for_bpf(&source, &object) {
            if env::var_os("SHUNT_BPF").is_some_and(|value| value == "required") {
                println!("cargo::error={service}.c cannot be compiled for the kernel: {why}");
                continue;
            }
            println!("cargo::warning=without {service} in the kernel: {why}");
            std::fs::write(&object, []).expect("OUT_DIR can be written");
            // A file that never exists makes cargo run this script again at the next build, when
            // clang may be installed.
            println!("cargo::rerun-if-changed={}", out.join("missing").display());
        }
    }
}

/// Lists the headers, which `shunt serve build` embeds.
fn list_headers(out: &Path) {
    let folder = std::path::absolute("include/shunt").expect("the directory of this crate");
    let mut headers: Vec<PathBuf> = std::fs::read_dir(&folder)
        .expect("part of the source")
        .map(|header| header.expect("it can be listed").path())
        .collect();
    headers.sort();
    let rows = headers.iter().map(|path| {
        let name = path.file_name().expect("a file").to_string_lossy();
        format!("({name:?}, include_str!({path:?})),\n")
    });
    std::fs::write(out.join("headers.rs"), format!("&[\n{}]\n", rows.collect::<String>()))
        .expect("OUT_DIR can be written");
}

/// Compiles a service natively. All are linked into one executable, so each has its own symbol.
fn compile_natively(service: &str, source: &Path) {
    let symbol = format!("shunt_builtin_{}", service.replace('-', "_"));
    cc::Build::new()
        .file(source)
        .include("include")
        .define("SHUNT_NATIVE", symbol.as_str())
        .opt_level(2)
        .flag("-fno-strict-aliasing")
        .warnings(true)
        .extra_warnings(false)
        .warnings_into_errors(true)
        .compile(&symbol);
}

fn compile_for_bpf(source: &Path, object: &Path) -> Result<(), String> {
    let clang = env::var_os("CLANG").unwrap_or_else(|| "clang".into());
    let mut command = Command::new(&clang);
    // -g for the type information (BTF), and for the lines that the verifier's complaints name.
    command.args(["-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Werror", "-Iinclude"]);
    // Debian has a separate <asm/types.h> for each architecture. A cross compiler's package has the
    // one of another architecture.
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").expect("set by cargo");
    command.arg(format!("-I/usr/include/{architecture}-linux-gnu"));
    command.args(["-idirafter", &format!("/usr/{architecture}-linux-gnu/include")]);
    match command.arg("-c").arg(source).arg("-o").arg(object).output() {
        Err(error) => Err(format!("{} cannot be run ({error}); install clang", clang.display())),
        Ok(output) if !output.status.success() => {
            let complaint = String::from_utf8_lossy(&output.stderr);
            let first = complaint.lines().next().unwrap_or("clang failed without a word");
            Err(format!("{first}; are clang and libbpf-dev installed?"))
        }
        Ok(_) => Ok(()),
    }
}
