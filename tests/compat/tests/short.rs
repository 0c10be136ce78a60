//! The cost of shunt for connections that gain nothing: connections of one exchange, which end
//! before they are worth offering; an exchange on a connection that stays on TCP because there is
//! no broker; one with a peer that is not under shunt; and select and poll on many connections, one
//! of which is readable.
//!
//! callgrind counts the instructions of the program's calls, and strace the system calls. Unlike
//! times, both counts do not depend on the load of the machine. But what the compiler inlines across
//! crates depends on their other code: the same source takes up to 25 instructions more or fewer.

use shunt_compat::{Finished, Host, compile, under_shunt};
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);
/// The number of connections of a run, and of a shorter run whose count is subtracted.
const MANY: usize = 600;
const FEW: usize = 100;

/// Makes `connections` connections, natively or under shunt, while `counter` counts.
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

/// Returns the broker's socket. A connection that would attach gets a path without a broker.
fn broker(host: &Host, kind: &str) -> PathBuf {
    if kind == "stays" { host.path("nobody") } else { host.broker_socket() }
}

/// Returns the instructions for one connection in the functions with these names.
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

/// Returns the system calls for one connection, both ends together.
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
            // Each entry in the table is checked against the shim's end (ADR 11).
            ("measured_client_*", "plain", 1775),
            // A closed socket forgets the state of its spill (ADR 5).
            ("measured_server_*", "plain", 1900),
            // A registration looks for duplicates of its socket.
            ("measured_set_*", "set", 3830),
            ("measured_stay", "stays", 670),
            ("measured_stay", "server", 380),
            // The kernel answers. The shim looks at words of bitmaps, or at a bit for each descriptor.
            ("measured_select", "select", 1100),
            ("measured_poll", "poll", 2700),
        ] {
            let [under, native] = [true, false].map(|under| instructions(host, functions, kind, under));
            let more = under - native;
            eprintln!("{functions}: {more} instructions more than natively, {most} at most");
            assert!(more > 100, "{functions}: {more} instructions more: it was not under shunt");
            assert!(more <= most, "{functions}: {more} instructions more, where {most} were enough");
        }
        // A connection that stays on TCP is considered for an offer from time to time.
        for (kind, most) in [("plain", 0.0), ("set", 0.0), ("stays", 0.5), ("select", 0.0), ("poll", 0.0)] {
            let [under, native] = [true, false].map(|under| system_calls(host, kind, under));
            eprintln!("{kind}: {under} system calls, natively {native}");
            assert!(under - native <= most, "{kind}: {under} system calls, where natively {native} are made");
        }
    });
}
