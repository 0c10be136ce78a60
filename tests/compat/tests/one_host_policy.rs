//! Connections between containers of one host that are forbidden while they are in use on shared
//! memory: by the overlay's policy and by other means.

use shunt_abi::reason::{Reason, Transport};
use shunt_abi::status::Connection;
use shunt_compat::{Host, Launch, Program, under_shunt};
use shunt_netns::Net;
use std::fs;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(120);
const PORT: u16 = 7000;

/// Creates a container with this address, at the end of a cable.
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

/// Writes the policy file of the overlay's router, which allows shared memory for connections to
/// the container or not.
fn publish(host: &Host, shared: bool) {
    let rule = format!(
        r#"{{"to":{{"prefixes":["192.0.2.2/32"]}},"ports":{{"numbers":[[{PORT},{PORT}]]}},"shared":{shared}}}"#
    );
    let text = format!(
        r#"{{"version":3,"prefixes":["192.0.2.0/24"],"hosts":[],"known":{{}},"rules":[{rule}],"egress":[],"ingress":[],"shared-by-default":true}}"#
    );
    host.replace("overlay.policy", text);
}

/// Starts a server in a container, and a client that never ends, and waits for shared memory.
fn shared(host: &Host, net: &Net) -> (Program, Program) {
    let transport = host.watch_transport();
    let mut server = far(host, net, &format!("serve 192.0.2.2 {PORT}")).start("server");
    server.wait_for_output("serving", LIMIT);
    let client = host
        .script("python3", "far.py")
        .words(&format!("load 192.0.2.2 {PORT} 1 1000000000"))
        .start("client");
    transport.wait_for_shm(PORT, 1, LIMIT);
    (server, client)
}

/// Waits until a program's connection meets a condition.
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
            directions.iter().all(|it| it.transport == Transport::Tcp)
                && directions.iter().any(|it| it.reason == Reason::OverlayPolicy)
        };
        let before = wait_until(host, &client, "back on TCP, for its reason", fell_back);
        // All later bytes use TCP, and none is lost: the client compares each answer.
        let after =
            wait_until(host, &client, "in use", |it| it.send.tcp_bytes > before.send.tcp_bytes + 10_000);
        assert_eq!(after.send.shm_bytes, before.send.shm_bytes);
        assert!(client.is_running() && server.is_running());
    });
}

/// This is for connections that a firewall forbids later, or whose container has left a network:
/// docs/containers.md.
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
