//! A peer that writes anything to all memory that it shares (L5). The server must not crash, hang
//! or spin. Its other connections must lose no byte and stay on shared memory.
//!
//! HOSTILE_SEED and HOSTILE_ROUNDS select another sequence of writes, or a longer one.

use shunt_abi::reason::Transport;
use shunt_compat::{Host, Program, under_shunt};
use std::str::FromStr;
use std::time::Duration;

const CONNECTIONS: usize = 8;
const ROUNDS: u64 = 300;
/// The time for all rounds, and for the clients to notice their end.
const LIMIT: Duration = Duration::from_secs(300);
/// The maximum processor time of an idle server in one second.
const AT_REST: Duration = Duration::from_millis(300);

fn variable<T: FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Starts clients that verify every echo until the host has a file with their name.
fn honest(host: &Host, name: &str, port: u16) -> Program {
    let gate = host.path(name);
    host.script("python3", "echo.py")
        .args(["client", "threads", &port.to_string(), &CONNECTIONS.to_string(), "20"])
        .arg(gate)
        .start(name)
}

fn verified(host: &Host, program: Program, name: &str) {
    host.write(name, "");
    let ended = program.wait(LIMIT);
    assert!(ended.success(), "the {name} clients: {}\n{}", ended.stdout, ended.stderr);
}

/// Checks that every connection of the program is on shared memory, and has been for most of its
/// bytes. The program's own report is used, because that of the hostile peer may contain anything.
fn assert_on_shm(host: &Host, program: &Program) {
    let status = host.status().expect("a broker");
    let process =
        status.processes.iter().find(|process| process.pid == program.pid()).expect("it said hello");
    assert_eq!(process.connections.len(), CONNECTIONS, "{process:#?}");
    for connection in &process.connections {
        for one in [connection.send, connection.receive] {
            assert!(one.transport == Transport::Shm && one.shm_bytes > 4 * one.tcp_bytes, "{process:#?}");
        }
    }
}

fn hostile_peer(style: &'static str, seed: u64) {
    under_shunt(LIMIT, move |host| {
        let port = host.port();
        let server =
            host.script("python3", "echo.py").args(["server", style, &port.to_string()]).start("server");
        host.wait_for_port(port);
        let transport = host.watch_transport();
        let clients = honest(host, "honest", port);
        transport.wait_for_shm(port, CONNECTIONS, Duration::from_secs(40));

        let (seed, rounds) = (variable("HOSTILE_SEED", seed), variable("HOSTILE_ROUNDS", ROUNDS));
        eprintln!("HOSTILE_SEED={seed} HOSTILE_ROUNDS={rounds}, a server with {style}");
        let words = [u64::from(port), seed, rounds, shunt_abi::VERSION.into()].map(|word| word.to_string());
        let mut hostile = host.script("python3", "hostile.py").args(words).start("hostile");
        hostile.wait_for_output("spoilt", LIMIT);
        assert!(server.is_running(), "the server has ended");
        let spoilt: u64 = hostile.output().trim().rsplit(' ').next().unwrap_or("").parse().expect("a number");
        assert!(spoilt > rounds / 2, "only {spoilt} of {rounds} rounds had a link to spoil");
        assert_on_shm(host, &clients);
        verified(host, clients, "honest");

        // The hostile peer's connections still exist, in whatever state.
        let before = server.cpu();
        std::thread::sleep(Duration::from_secs(1));
        let used = server.cpu() - before;
        assert!(used < AT_REST, "the server used {used:?} in a second without anything to do");

        let second = host.watch_transport();
        let clients = honest(host, "later", port);
        second.wait_for_shm(port, CONNECTIONS, Duration::from_secs(40));
        verified(host, clients, "later");
        drop((hostile, server));
    });
}

#[test]
fn of_a_server_with_threads() {
    hostile_peer("threads", 1);
}

#[test]
fn of_a_server_with_epoll() {
    hostile_peer("asyncio", 2);
}

#[test]
fn of_a_server_with_poll() {
    hostile_peer("asyncio-poll", 3);
}

/// A thread that touches a page in which a hole is being punched waits for the punch. The wait
/// grows with the number of mappings.
#[test]
fn no_peer_punches_holes_into_what_it_shares() {
    under_shunt(LIMIT, |host| {
        let port = host.port();
        let _server =
            host.script("python3", "echo.py").args(["server", "threads", &port.to_string()]).start("server");
        host.wait_for_port(port);
        let peer = host.script("python3", "punch.py").arg(port.to_string()).run("peer", LIMIT);
        let answers: Vec<&str> = peer.stdout.lines().collect();
        for (name, answer) in [
            ("link", "Operation not permitted"),
            ("page", "Operation not permitted"),
            // It is not mapped for writing.
            ("board", "Permission denied"),
        ] {
            let told = format!("{name}: {answer}");
            let of_it = answers.iter().filter(|line| line.starts_with(name));
            assert!(of_it.clone().count() > 0 && of_it.clone().all(|line| *line == told), "{answers:?}");
        }
    });
}
