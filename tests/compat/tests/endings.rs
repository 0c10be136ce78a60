//! The end of a peer, in every way in which a process or connection can end. Under shunt a program
//! must see exactly what TCP shows. After each half, no process, descriptor or file may be left.

use shunt_compat::{Host, both_at_once};
use std::time::{Duration, Instant};

/// The maximum number of scenarios in a group. Each uses one port.
const SCENARIOS: u16 = 64;

/// Runs the scenarios of a group. Each waits, through the file `gate`, until its connection is on
/// shared memory.
fn observe(host: &Host, group: &str) -> Vec<String> {
    let first = host.port() + 1000;
    let transport = host.watch_transport();
    let program = host
        .script("python3", "endings.py")
        .arg("observe")
        .arg(host.dir())
        .args([&first.to_string(), group])
        .args(transport.is_watched().then_some("gated"))
        .start(group);
    let deadline = Instant::now() + Duration::from_secs(100);
    while program.is_running() {
        assert!(Instant::now() < deadline, "the group {group} hangs");
        let open = (first..first + SCENARIOS).filter(|port| transport.on_shm(*port) > 0);
        let open: Vec<_> = open.map(|port| port.to_string()).collect();
        host.replace("gate", open.join(" "));
        std::thread::sleep(Duration::from_millis(25));
    }
    let ended = program.wait(Duration::from_secs(1));
    assert!(ended.success(), "{}", ended.stderr);
    ended.stdout.lines().map(str::to_owned).collect()
}

fn group(name: &'static str) {
    both_at_once(Duration::from_secs(120), move |host| Scenarios(observe(host, name)));
}

/// One line for each scenario. `Debug` prints them as lines, so that a failure shows the lines that
/// differ.
#[derive(PartialEq)]
struct Scenarios(Vec<String>);

impl std::fmt::Debug for Scenarios {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(formatter)?;
        self.0.iter().try_for_each(|line| writeln!(formatter, "{line}"))
    }
}

#[test]
fn a_process_that_dies() {
    group("deaths");
}

#[test]
fn a_peer_that_watches() {
    group("watchers");
}

#[test]
fn a_connection_that_is_closed() {
    group("closes");
}

/// Ends made by system calls that the shim does not see. The peer gets TCP's result for the bytes
/// that were read, not for those that the shim saw.
#[test]
fn a_connection_that_is_ended_by_a_hidden_call() {
    for call in ["close", "shutdown"] {
        both_at_once(Duration::from_secs(60), move |host| {
            let (port, directory, patience) = (host.port(), host.path(""), Duration::from_secs(30));
            let transport = host.watch_transport();
            let program = |role: &str, rest: &[&str]| {
                host.script("python3", "raw_end.py")
                    .args([role, &port.to_string()])
                    .arg(&directory)
                    .args(rest)
                    .start(role)
            };
            let mut server = program("server", &[]);
            server.wait_for_output("listening", patience);
            let mut client = program("client", &[call]);
            server.wait_for_output("used", patience);
            if transport.is_watched() {
                transport.wait_for_shm(port, 20, patience);
            }
            host.replace("send", "");
            server.wait_for_output("sent", patience);
            host.replace("end", "");
            let told = server.wait(patience);
            assert!(told.success(), "{}", told.stderr);
            host.replace("over", "");
            client.wait_for_output("done", patience);
            told.stdout
        });
    }
}
