//! memcached, with libmemcached's load generators and its protocol test.

use shunt_compat::{Expected, Host, Program, both, end_on_transport};
use std::time::Duration;

const CONNECTIONS: usize = 50;

fn memcached(host: &Host, threads: usize) -> (Program, u16) {
    let port = host.port();
    let server = host
        .program("memcached")
        .words(&format!("-u root -l 127.0.0.1 -p {port} -U 0 -t {threads} -m 256 -I 4m"))
        .start("memcached");
    host.wait_for_port(port);
    (server, port)
}

/// Returns the value of a line `name: value` in memcaslap's output.
fn figure(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    line.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("no {name} in\n{text}"))
}

#[test]
fn memcaslap_verifies_every_value() {
    both(Duration::from_secs(40), |host| {
        let (server, port) = memcached(host, 1);
        let transport = host.watch_transport();
        let load = host
            .program("memcaslap")
            .words(&format!("-s 127.0.0.1:{port} -c {CONNECTIONS} -T 1 -t 3s -v 1.0 -X 1024"))
            .run("memcaslap", Duration::from_secs(20));
        transport.expect(Expected { port, connections: CONNECTIONS, share: 0.9 });
        drop(server);
        assert!(figure(&load.stdout, "cmd_get") > 1000, "{}", load.stdout);
        assert!(figure(&load.stdout, "cmd_set") > 100, "{}", load.stdout);
        figure(&load.stdout, "verify_failed")
    });
}

#[test]
fn memcslap_with_fifty_threads() {
    both(Duration::from_secs(60), |host| {
        let (server, port) = memcached(host, 2);
        let mut tests = Vec::new();
        for test in ["get", "set"] {
            let transport = host.watch_transport();
            let load = host
                .program("memcslap")
                .words(&format!("-s 127.0.0.1:{port} -c {CONNECTIONS} -t {test} -e 6000"))
                .run("memcslap", Duration::from_secs(25));
            transport.expect(Expected { port, connections: CONNECTIONS, share: 0.9 });
            tests.push(load.stdout.contains(&format!("Time to {test}          300000 keys by   50 threads")));
        }
        drop(server);
        tests
    });
}

#[test]
fn memccapable_passes_every_protocol_test() {
    both(Duration::from_secs(60), |host| {
        let (server, port) = memcached(host, 1);
        let capable = host
            .program("memccapable")
            .words(&format!("-h 127.0.0.1 -p {port}"))
            .run("memccapable", Duration::from_secs(40));
        drop(server);
        capable.stdout
    });
}

#[test]
fn values_come_back_as_they_were_stored() {
    both(Duration::from_secs(60), |host| {
        let (server, port) = memcached(host, 4);
        let transport = host.watch_transport();
        let client = host
            .script("python3", "memcache_values.py")
            .args([&port.to_string(), &CONNECTIONS.to_string(), "60", "gate"])
            .start("client");
        let expected = Expected { port, connections: CONNECTIONS, share: 0.9 };
        let printed = end_on_transport(host, &transport, (client, "gate"), &[expected]);
        drop(server);
        printed
    });
}
