//! Programs that have a libc and also make system calls directly. In Go programs with cgo, each
//! connection must be on shared memory, although Go's runtime and C code use the same connections.
//! C programs have the instruction in their own functions. For Rust programs see the package
//! `shunt-runtimes`.

use shunt_compat::{Host, Launch, Way, both, compile, compile_cgo, converse, gate};
use std::path::{Path, PathBuf};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);
const CONNECTIONS: usize = 8;

/// Returns a Go program that is linked with libc.
fn cgo(name: &str) -> PathBuf {
    compile_cgo(Path::new(env!("CARGO_TARGET_TMPDIR")), &[name, "echo_cgo"])
}

/// Runs a server and its clients. `arguments` follow the clients' port and count.
fn with_itself(program: PathBuf, arguments: &'static [&'static str]) {
    both(LIMIT, move |host| {
        let port = host.port();
        let (number, count) = (port.to_string(), CONNECTIONS.to_string());
        let go = || host.program(program.to_string_lossy());
        let client = go().args(["ask", &number, &count]).args(arguments).arg(gate(port));
        converse(host, (port, CONNECTIONS), (go().args(["serve", &number]), client), Way::Shm)
    });
}

/// Returns the command of Python's client.
fn python(host: &Host, port: u16) -> Launch<'_> {
    let (number, count) = (port.to_string(), CONNECTIONS.to_string());
    host.script("python3", "echo.py").args(["client", "threads", &number, &count, "60", &gate(port)])
}

#[test]
fn an_echo_of_gos() {
    with_itself(cgo("echo"), &["200"]);
}

/// Go's garbage collector runs all the time, and preempts goroutines by signals.
#[test]
fn a_server_of_gos_and_its_clients() {
    with_itself(cgo("web"), &["40"]);
}

/// Each child is created by vfork in its parent's memory, and executes another program while
/// connections are in use.
#[test]
fn a_program_of_gos_that_starts_others() {
    with_itself(cgo("spawn"), &[]);
}

#[test]
fn go_and_c_use_the_same_connections() {
    with_itself(compile_cgo(Path::new(env!("CARGO_TARGET_TMPDIR")), &["mingles"]), &[]);
}

#[test]
fn a_server_of_gos_and_python() {
    let program = cgo("echo");
    both(LIMIT, move |host| {
        let port = host.port();
        let server = host.program(program.to_string_lossy()).args(["serve", &port.to_string()]);
        converse(host, (port, CONNECTIONS), (server, python(host, port)), Way::Shm)
    });
}

/// Runs a C server and its clients, compiled with these flags.
fn with_own_calls(flags: &'static [&'static str], way: Way) {
    with_own_calls_under(&[], flags, way);
}

/// Runs a C server and its clients under `shunt run` with the flags `shunt`.
fn with_own_calls_under(shunt: &'static [&'static str], flags: &'static [&'static str], way: Way) {
    both(LIMIT, move |host| {
        let program = compile(host, "own_calls", flags);
        let port = host.port();
        let (number, count) = (port.to_string(), CONNECTIONS.to_string());
        let start = || host.program(program.to_string_lossy()).shunt_args(shunt);
        let client = start().args(["ask", &number, &count, "200", &gate(port)]);
        converse(host, (port, CONNECTIONS), (start().args(["serve", &number]), client), way)
    });
}

#[test]
fn calls_in_a_program_of_cs() {
    with_own_calls(&["-O2"], Way::Shm);
}

#[test]
fn calls_in_a_program_at_a_fixed_place() {
    with_own_calls(&["-no-pie"], Way::Shm);
}

/// The program prints how many executable mappings have no file, so redirected calls would show.
/// But its data next to the functions looks like a function that it could call, so shunt cannot
/// rule out an inline system call.
#[test]
fn what_only_looks_like_a_call_is_left() {
    with_own_calls(&["-DBY_LIBC"], Way::Tcp("own_calls"));
}

#[test]
fn what_an_operator_vouches_for_is_on_shared_memory() {
    with_own_calls_under(&["--own-calls", "trust"], &["-DBY_LIBC"], Way::Shm);
}

#[test]
fn a_program_with_a_call_that_cannot_be_led_elsewhere_is_left() {
    with_own_calls(&["-DSTUCK"], Way::Tcp("own_calls"));
}

#[test]
fn a_program_that_looks_whether_it_is_in_a_call_is_left() {
    with_own_calls(&["-DWATCHED"], Way::Tcp("own_calls"));
}

/// Debian's etcd, and a Go program as its client.
#[test]
fn etcd() {
    let program = cgo("keys");
    both(LIMIT, move |host| {
        let (port, peers) = (host.port(), host.port());
        let url = |port| format!("http://127.0.0.1:{port}");
        let server = host
            .program("etcd")
            .args(["--data-dir", "etcd", "--log-level", "error", "--listen-client-urls", &url(port)])
            .args(["--advertise-client-urls", &url(port), "--listen-peer-urls", &url(peers)]);
        let client = host.program(program.to_string_lossy()).args([&url(port), "3", &gate(port)]);
        converse(host, (port, 3), (server, client), Way::Shm)
    });
}
