//! Tests that keys map to the servers that libmemcached chooses, in user space and in the kernel.
//! Needs root and libmemcached-dev.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use shunt_serve::hash::{Placement, Scheme, ketama, one_at_a_time};
use shunt_serve::service::{Key, builtin, trial::Trial};

/// Returns keys of words, and keys of all byte values and lengths.
fn keys() -> Vec<Vec<u8>> {
    let words = (0..400).map(|number| format!("user:{number}:name").into_bytes());
    let bytes = (1..250_usize).map(|length| (0..length).map(|at| (at * 7 + length * 13) as u8).collect());
    words.chain(bytes).collect()
}

/// Returns the servers that libmemcached chooses for the keys.
fn libmemcached(how: &str, servers: &[(&str, u32)]) -> Vec<usize> {
    let directory = tempfile::tempdir().expect("a directory");
    let program = directory.path().join("libmemcached");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/libmemcached.c");
    let compiled =
        Command::new("gcc").arg(source).arg("-o").arg(&program).args(["-lmemcached", "-lhashkit"]).status();
    assert!(compiled.expect("gcc runs").success(), "is libmemcached-dev installed?");

    let servers = servers.iter().map(|(address, weight)| format!("{address}:{weight}"));
    let mut child = Command::new(program)
        .arg(how)
        .args(servers)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut lines = String::new();
    for key in keys() {
        key.iter().for_each(|byte| write!(lines, "{byte:02x}").expect("a string"));
        lines.push('\n');
    }
    let mut stdin = child.stdin.take().expect("piped");
    let writer = std::thread::spawn(move || stdin.write_all(lines.as_bytes()));
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("no panic").expect("it reads");
    String::from_utf8(output.stdout)
        .expect("numbers")
        .lines()
        .map(|line| line.parse().expect("a number"))
        .collect()
}

fn same_as_libmemcached(how: &str, scheme: Scheme, servers: &[(&str, u32)]) {
    let placement = Placement::new(scheme, servers.iter().copied());
    for (key, theirs) in keys().iter().zip(libmemcached(how, servers)) {
        let ours = placement.backend(key, &Key::Bytes(0..key.len()));
        assert_eq!(ours, Some(theirs), "{how} {servers:?} {}", String::from_utf8_lossy(key));
    }
}

#[test]
fn keys_go_where_libmemcached_puts_them() {
    let alike = [("10.0.1.1:11211", 1), ("10.0.1.2:11212", 1), ("10.0.1.3:11213", 1)];
    let weighed = [
        ("10.0.1.1:1", 600),
        ("10.0.1.2:2", 300),
        ("10.0.1.3:3", 200),
        ("10.0.1.4:4", 350),
        ("10.0.1.5:5", 7),
    ];
    same_as_libmemcached("modulo", Scheme::Modulo, &alike);
    same_as_libmemcached("ketama", Scheme::Ketama, &alike);
    same_as_libmemcached("ketama", Scheme::Ketama, &weighed);
}

#[test]
fn the_kernels_hashes_are_the_same() {
    let mut trial = Trial::load(builtin::named("echo").expect("a builtin").object).expect("root");
    for key in keys().iter().map(Vec::as_slice).chain([b"".as_slice(), &[0xff; 1000]]) {
        assert_eq!(trial.hash(key, Scheme::Modulo).unwrap(), one_at_a_time(key), "{key:x?}");
        assert_eq!(trial.hash(key, Scheme::Ketama).unwrap(), ketama(key), "{key:x?}");
    }
}
