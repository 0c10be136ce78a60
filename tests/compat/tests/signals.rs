//! Signals, sleepers, closes by other threads and the ends of threads, in calls on shared memory: our own programs ask one question a line, and the answers
//! must be those of TCP.

use shunt_compat::{Host, both};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);

/// One line for each question. A difference is shown as the lines that differ.
#[derive(PartialEq)]
struct Answers(Vec<String>);

impl std::fmt::Debug for Answers {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(formatter)?;
        self.0.iter().try_for_each(|line| writeln!(formatter, "{line}"))
    }
}

/// Builds a program of ours and runs it. It begins once its connections are on shared memory.
fn ask(host: &Host, name: &str, connections: usize) -> Answers {
    let source = host.write(&format!("{name}.c"), program(&format!("{name}.c")));
    host.write("lane.h", program("lane.h"));
    let gcc = host.program("gcc").native().args(["-O1", "-pthread", "-o"]).arg(host.path(name)).arg(source);
    gcc.run("gcc", LIMIT);
    let port = host.port();
    let road = host.watch_road();
    let executable = host.path(name);
    let running = host.program(executable.to_string_lossy()).args([&port.to_string(), "gate"]).start(name);
    road.wait_for_shm(port, connections, Duration::from_secs(30));
    host.write("gate", "");
    let ended = running.wait(LIMIT);
    assert!(ended.success(), "{name} ended with {}\n{}\n{}", ended.status, ended.stdout, ended.stderr);
    Answers(ended.stdout.lines().map(str::to_owned).collect())
}

fn program(name: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("reading {}: {error}", path.display()))
}

#[test]
fn which_calls_go_on_after_a_handler() {
    both(LIMIT, |host| ask(host, "interrupts", 1));
}

#[test]
fn what_handlers_see() {
    both(LIMIT, |host| ask(host, "handlers", 1));
}

#[test]
fn threads_that_are_cancelled() {
    both(LIMIT, |host| ask(host, "cancels", 1));
}

/// Handlers use sockets while the code that they interrupt does, thousands of times. The longer variant: `storm PORT GATE
/// 100000`.
#[test]
fn a_storm_of_handlers() {
    both(LIMIT, |host| ask(host, "storm", 3));
}

/// The longer variant: `threads PORT GATE 2000`.
#[test]
fn more_threads_than_waiters() {
    both(LIMIT, |host| ask(host, "threads", 100));
}

/// The calls go on, with what they were given, and the peer is told of nothing before they are over.
#[test]
fn numbers_that_are_closed_under_calls() {
    both(LIMIT, |host| ask(host, "closes", 44));
}

#[test]
fn sleepers_on_a_connection_that_switches() {
    both(LIMIT, |host| ask(host, "switches", 1));
}
