//! A broker that is stopped, as by Ctrl-Z, or hangs (L6). No program may wait for it. Established
//! connections go on, new ones use TCP, and ends are noticed. Pairing resumes when the broker
//! continues.

use rustix::process::Signal;
use shunt_abi::reason::Reason;
use shunt_compat::{Expected, Host, Program, under_shunt};
use std::time::Duration;

const CONNECTIONS: usize = 8;
const LIMIT: Duration = Duration::from_secs(40);

fn server(host: &Host) -> (Program, u16) {
    let port = host.port();
    let server =
        host.script("python3", "echo.py").args(["server", "threads", &port.to_string()]).start("server");
    host.wait_for_port(port);
    (server, port)
}

/// Starts clients that verify every echo for at least `seconds`.
fn clients(host: &Host, name: &str, port: u16, seconds: f64) -> Program {
    host.script("python3", "echo.py")
        .args(["client", "threads", &port.to_string(), &CONNECTIONS.to_string(), "20", &seconds.to_string()])
        .start(name)
}

fn verified(program: Program) {
    let ended = program.wait(LIMIT);
    assert!(ended.success(), "{}\n{}", ended.stdout, ended.stderr);
}

#[test]
fn programs_go_on_and_are_paired_afterwards() {
    under_shunt(Duration::from_secs(90), |host| {
        let (server, port) = server(host);
        let established = {
            let transport = host.watch_transport();
            let clients = clients(host, "established", port, 3.0);
            transport.wait_for_shm(port, CONNECTIONS, LIMIT);
            clients
        };
        host.signal_broker(Signal::STOP);
        // A program that starts while the broker is stopped, and a server that is registered with
        // it.
        let meanwhile = clients(host, "meanwhile", port, 5.0);
        verified(established);
        host.signal_broker(Signal::CONT);
        let silent = |counts: &std::collections::BTreeMap<String, u64>| {
            counts.get(Reason::BrokerSilent.label()).is_some_and(|count| *count > 0)
        };
        let status = host.status().expect("it goes on");
        assert!(status.processes.iter().any(|process| silent(&process.totals.bypasses)), "{status:#?}");
        verified(meanwhile);
        let transport = host.watch_transport();
        let again = clients(host, "again", port, 2.0);
        transport.wait_for_shm(port, CONNECTIONS, LIMIT);
        verified(again);
        transport.expect(Expected { port, connections: CONNECTIONS, share: 0.5 });
        drop(server);
    });
}

fn ends(what: &'static str, rounds: usize) {
    under_shunt(Duration::from_secs(90), move |host| {
        let broker = host.broker_pid().expect("it runs");
        let program = host
            .script("python3", "stopped.py")
            .args([what, &broker.to_string(), &rounds.to_string()])
            .start("program");
        let ended = program.wait(Duration::from_secs(80));
        host.signal_broker(Signal::CONT);
        assert!(ended.success() && ended.stdout == "seen\n", "{}\n{}", ended.stdout, ended.stderr);
    });
}

#[test]
fn a_close_is_seen_at_once() {
    ends("closes", 40);
}

#[test]
fn the_end_of_a_process_is_seen_at_once() {
    ends("killed", 5);
}

#[test]
fn a_poll_that_does_not_sleep_finds_bytes_without_a_ring() {
    ends("polled", 10);
}
