//! Messaging libraries: ZeroMQ and gRPC, both from Python, with threads of the library that wait.

use shunt_compat::{Way, both, converse, gate};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(90);
const CLIENTS: usize = 4;

/// Debian's Python, which has Debian's libraries.
const PYTHON: &str = "/usr/bin/python3";

#[test]
fn zeromq_through_a_broker_of_its_own() {
    both(LIMIT, |host| {
        // It uses three consecutive ports.
        let (port, _, _) = (host.port(), host.port(), host.port());
        let zero = |role: &str| host.script(PYTHON, "zero.py").args([role, &port.to_string()]);
        let _workers = [0, 1].map(|number| zero("worker").start(&format!("worker{number}")));
        let client = zero("client").args([&CLIENTS.to_string(), "100", &gate(port)]);
        converse(host, (port, CLIENTS), (zero("server"), client), Way::Shm)
    });
}

/// gRPC's core asks with each receive how many bytes remain (TCP_INQ).
#[test]
fn grpc_with_single_calls_and_streams() {
    both(LIMIT, |host| {
        let port = host.port();
        let calls = |role: &str| host.script(PYTHON, "calls_grpc.py").args([role, &port.to_string()]);
        let client = calls("client").args([&CLIENTS.to_string(), "100", &gate(port)]);
        converse(host, (port, CLIENTS), (calls("server"), client), Way::Shm)
    });
}
