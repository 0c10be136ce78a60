//! Checks that the command and the shim import nothing that is newer than glibc 2.28, whatever they
//! were built with.

use std::path::Path;
use std::process::Command;

use shunt_compat::Tools;

/// The oldest glibc that they run with, see docs/support.md.
const OLDEST: (u32, u32) = (2, 28);

fn readelf(flag: &str, file: &Path) -> String {
    let output =
        Command::new("readelf").args([flag, "--wide"]).arg(file).output().expect("readelf (binutils) runs");
    assert!(output.status.success(), "{}: {}", file.display(), String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Returns the functions that `file` imports, with the versions of glibc.
fn asked(file: &Path) -> Vec<(String, (u32, u32))> {
    let parse = |line: &str| {
        let symbol = line.split_whitespace().find(|word| word.contains("@GLIBC_"))?;
        let (name, version) = symbol.split_once("@GLIBC_")?;
        let mut numbers = version.split('.').map(|number| number.parse().expect("a number"));
        Some((name.to_owned(), (numbers.next()?, numbers.next()?)))
    };
    readelf("--dyn-syms", file).lines().filter(|line| line.contains(" UND ")).filter_map(parse).collect()
}

/// Returns the libraries that `file` needs.
fn needed(file: &Path) -> Vec<String> {
    let name = |line: &str| line.split_once("(NEEDED)")?.1.split(['[', ']']).nth(1).map(str::to_owned);
    readelf("--dynamic", file).lines().filter_map(name).collect()
}

#[test]
fn nothing_newer_than_glibc_2_28_is_asked_for() {
    let tools = Tools::locate();
    for file in [&tools.library, &tools.shunt] {
        let asked = asked(file);
        assert!(asked.len() > 10, "{} asks for {} functions", file.display(), asked.len());
        let newer: Vec<_> = asked.iter().filter(|(_, version)| *version > OLDEST).collect();
        assert!(newer.is_empty(), "{} asks for {newer:?}", file.display());
    }
}

/// The dynamic linker loads these libraries into every program. With libpthread, older glibcs treat
/// a program as one with threads.
#[test]
fn the_shim_brings_no_other_library_with_it() {
    assert_eq!(needed(&Tools::locate().library), ["libc.so.6"]);
}

/// glibc before 2.30 looks a function up in the library that is recorded with it, unless it has
/// found it earlier in another.
#[test]
fn what_has_moved_is_asked_of_the_library_that_had_it() {
    let needed = needed(&Tools::locate().shunt);
    let place = |name| needed.iter().position(|other| other == name);
    assert!(
        place("libpthread.so.0").is_some() && place("libpthread.so.0") < place("libc.so.6"),
        "{needed:?}"
    );
    assert!(place("libdl.so.2").is_some() && place("libdl.so.2") < place("libc.so.6"), "{needed:?}");
}
