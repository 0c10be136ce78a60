//! Connections between containers of one host under the overlay's policy, and under what else says that they must not go on: all of these
//! are on shared memory and in use when it is said.

use shunt_abi::reason::{Reason, Road};
use shunt_abi::status::Connection;
use shunt_compat::{Host, Launch, Program, under_shunt};
use shunt_netns::Net;
use std::fs;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(120);
const PORT: u16 = 7000;

/// A container with that address, at the end of a cable.
fn container() -> Net {
    let net = Net::new();
    Net::connect((&Net::current(), "cable", "192.0.2.1/24"), (&net, "cable", "192.0.2.2/24"));
    net
}

fn far<'h>(host: &'h Host, net: &Net, words: &str) -> Launch<'h> {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/far.py");
    let program = host.write("far.py", fs::read(program).expect("it is in the tree"));
    let namespace = format!("--net={}", net.path().display());
    host.program("nsenter").args([namespace.as_str(), "--", "python3"]).arg(program).words(words)
}

/// Has the overlay's router have said whether connections to the container may take shared memory.
fn publish(host: &Host, shared: bool) {
    let rule =
        format!(r#"{{"from":null,"to":["192.0.2.2/32"],"ports":[[{PORT},{PORT}]],"shared":{shared}}}"#);
    let text =
        format!(r#"{{"version":1,"prefixes":["192.0.2.0/24"],"rules":[{rule}],"shared-by-default":true}}"#);
    host.replace("overlay.policy", text);
}

/// A server in a container, and a client of it that never ends, on shared memory.
fn shared(host: &Host, net: &Net) -> (Program, Program) {
    let road = host.watch_road();
    let mut server = far(host, net, &format!("serve 192.0.2.2 {PORT}")).start("server");
    server.wait_for_output("serving", LIMIT);
    let client = host
        .script("python3", "far.py")
        .words(&format!("load 192.0.2.2 {PORT} 1 1000000000"))
        .start("client");
    road.wait_for_shm(PORT, 1, LIMIT);
    (server, client)
}

/// Waits until a program's connection is so.
fn wait_until(host: &Host, program: &Program, what: &str, is_so: impl Fn(&Connection) -> bool) -> Connection {
    let deadline = Instant::now() + LIMIT;
    loop {
        let status = host.status().expect("a broker");
        let process = status.processes.into_iter().find(|process| process.pid == program.pid());
        let seen = process.map(|process| process.connections).unwrap_or_default();
        if let Some(found) = seen.iter().find(|connection| is_so(connection)) {
            return found.clone();
        }
        assert!(Instant::now() < deadline, "not {what}: {seen:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_connection_falls_back_when_the_overlays_policy_changes_and_carries_on() {
    under_shunt(2 * LIMIT, |host| {
        publish(host, true);
        let net = container();
        let (server, client) = shared(host, &net);
        publish(host, false);
        let fell_back = |connection: &Connection| {
            let directions = [&connection.send, &connection.receive];
            directions.iter().all(|it| it.road == Road::Tcp)
                && directions.iter().any(|it| it.reason == Reason::OverlayPolicy)
        };
        let before = wait_until(host, &client, "back on TCP, for its reason", fell_back);
        // Whatever comes from now on is TCP's, and none is lost: the client compares each answer.
        let after =
            wait_until(host, &client, "in use", |it| it.send.tcp_bytes > before.send.tcp_bytes + 10_000);
        assert_eq!(after.send.shm_bytes, before.send.shm_bytes);
        assert!(client.is_running() && server.is_running());
    });
}

/// As for what a firewall forbids by now, or a network that a container has left: docs/containers.md.
#[test]
fn a_connection_that_is_destroyed_ends_on_shared_memory_too() {
    under_shunt(2 * LIMIT, |host| {
        let net = container();
        let (server, client) = shared(host, &net);
        let kill = format!("-K dst 192.0.2.2 dport = {PORT}");
        assert!(host.program("ss").native().words(&kill).run("ss", LIMIT).success());
        let ended = client.wait(LIMIT);
        assert!(!ended.success() && ended.stderr.contains("Error"), "{}", ended.stderr);
        assert!(server.is_running());
    });
}
