//! What shunt costs where it brings nothing: for a connection of one exchange, which ends before it is worth offering, for an exchange
//! on a connection that stays on TCP for want of a broker, and for one with a peer that is not under shunt. Counted are the instructions of the program's calls, by callgrind, and the system calls, by strace: both are the same each time, on a machine
//! that others use as well.

use shunt_compat::{Finished, Host, compile, under_shunt};
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);
/// Connections of a run, and of one that says what the program takes besides.
const MANY: usize = 600;
const FEW: usize = 100;

/// So many connections, natively or not, under a program that counts something.
fn run(
    host: &Host,
    counter: &str,
    flags: &[&str],
    connections: usize,
    kind: &str,
    under_shunt: bool,
) -> Finished {
    let tools = host.tools().expect("this is under shunt");
    let mut program = host.program(counter).native().args(flags).arg("env");
    if under_shunt {
        program = program
            .arg(format!("LD_PRELOAD={}", tools.library.display()))
            .arg(format!("SHUNT_BROKER={}", broker(host, kind).display()));
    }
    let count = connections.to_string();
    let program = program.arg("./short").args([&count, kind]);
    if kind != "server" {
        return program.run(counter, LIMIT);
    }
    let port = host.port().to_string();
    let client = host.program("./short").native().args([&count, "client", &port]).start("client");
    let ended = program.arg(port).run(counter, LIMIT);
    assert!(client.wait(LIMIT).success());
    ended
}

/// There is none for a connection that would go to shared memory.
fn broker(host: &Host, kind: &str) -> PathBuf {
    if kind == "stays" { host.path("nobody") } else { host.broker_socket() }
}

/// Instructions for a connection in the functions with these names.
fn instructions(host: &Host, functions: &str, kind: &str, under_shunt: bool) -> usize {
    let toggle = format!("--toggle-collect={functions}");
    let flags = ["--tool=callgrind", "--callgrind-out-file=/dev/null", "--trace-children=yes", &toggle];
    let collected = |connections| {
        let ended = run(host, "valgrind", &flags, connections, kind, under_shunt);
        let collected = ended.stderr.lines().rev().find_map(|line| line.split_once("Collected : "));
        collected.and_then(|(_, count)| count.trim().parse::<usize>().ok()).expect("a count")
    };
    (collected(MANY) - collected(FEW)) / (MANY - FEW)
}

/// System calls for a connection, both ends together.
fn system_calls(host: &Host, kind: &str, under_shunt: bool) -> f64 {
    let made = |connections| {
        run(host, "strace", &["-f", "-c", "-o", "calls"], connections, kind, under_shunt);
        let table = std::fs::read_to_string(host.path("calls")).expect("strace has written it");
        let total = table.lines().find(|line| line.ends_with(" total")).expect("a sum");
        total.split_whitespace().nth(3).and_then(|count| count.parse::<f64>().ok()).expect("a count")
    };
    (made(MANY) - made(FEW)) / (MANY - FEW) as f64
}

#[test]
fn what_gains_nothing_costs_little() {
    under_shunt(LIMIT, |host| {
        compile(host, "short", &[]);
        for (functions, kind, most) in [
            ("measured_client_*", "plain", 1700),
            ("measured_server_*", "plain", 1790),
            // A registration looks for others of its socket, by duplicates.
            ("measured_set_*", "set", 3700),
            ("measured_stay", "stays", 670),
            ("measured_stay", "server", 380),
        ] {
            let [under, native] = [true, false].map(|under| instructions(host, functions, kind, under));
            let more = under - native;
            eprintln!("{functions}: {more} instructions more than natively, {most} at most");
            assert!(more > 100, "{functions}: {more} instructions more: it was not under shunt");
            assert!(more <= most, "{functions}: {more} instructions more, where {most} were enough");
        }
        // Who stays is considered for an offer now and then.
        for (kind, most) in [("plain", 0.0), ("set", 0.0), ("stays", 0.5)] {
            let [under, native] = [true, false].map(|under| system_calls(host, kind, under));
            eprintln!("{kind}: {under} system calls, natively {native}");
            assert!(under - native <= most, "{kind}: {under} system calls, where natively {native} are made");
        }
    });
}
