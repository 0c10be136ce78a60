//! Tests in phases. A test program serves one connection, and changes its process between two
//! phases. Under shunt each phase lasts until the connection is on the transport that the test
//! expects.

use crate::compiled::compile;
use crate::host::Host;
use crate::launch::{Launch, Program};
use shunt_abi::reason::{Reason, Transport as Taken};
use shunt_abi::status::{Connection, Direction};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(30);

/// The transport that the connection must use in a phase.
#[derive(Clone, Copy, Debug)]
pub enum Phase {
    /// Shared memory in both directions.
    Shm,
    /// TCP, with this reason at the server's end.
    Tcp(Reason),
    /// Any transport: the status does not show the connection.
    Unseen,
}

/// Runs a compiled program that has both ends of its connections, and returns its output. Under
/// shunt at least one of them must have been on shared memory.
pub fn run_with_itself(host: &Host, name: &str, arguments: &[&str], limit: Duration) -> String {
    let on_shm = || host.status().map(|status| status.totals.share.on_shm);
    let before = on_shm();
    let printed = host.program(format!("./{name}")).args(arguments).run(name, limit).stdout;
    assert!(before.is_none() || on_shm() > before, "nothing was on shared memory");
    printed
}

/// Serves the phases with `server`, which prints "ready" when it listens on `port`. Returns the
/// output of the server and its client.
pub fn run_phases(host: &Host, server: Launch<'_>, port: u16, phases: &[Phase]) -> String {
    compile(host, "peer", &[]);
    let mut server = server.start("server");
    server.wait_for_output("ready", LIMIT);
    let client = host
        .program("./peer")
        .arg(port.to_string())
        .arg(host.dir())
        .arg(phases.len().to_string())
        .start("client");
    for (number, phase) in phases.iter().enumerate() {
        await_transport(host, port, *phase, number, &[&server, &client]);
        host.write(&format!("gate.{number}"), "");
        await_end_of_phase(&client, number);
    }
    let client = client.wait(LIMIT);
    // Processes that have outlived their program may end now.
    host.write("over", "");
    let server = server.wait(LIMIT);
    assert!(client.success(), "the client: {}", client.stderr);
    format!("{}{}{}{:?}", client.stdout, server.stdout, server.stderr, server.status)
}

fn await_end_of_phase(client: &Program, number: usize) {
    let deadline = Instant::now() + LIMIT;
    while !client.output().contains(&format!("phase {number}:")) {
        assert!(Instant::now() < deadline, "phase {number} did not end\n{}", client.output());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until the status shows the connection to `port` on the transport that the phase expects.
fn await_transport(host: &Host, port: u16, phase: Phase, number: usize, programs: &[&Program]) {
    let deadline = Instant::now() + LIMIT;
    while let Some(status) = host.status() {
        let ends = || status.processes.iter().flat_map(|process| &process.connections);
        let server = || ends().filter(|end| end.local.port() == port);
        let client = || ends().filter(|end| end.remote.port() == port);
        let arrived = match phase {
            Phase::Shm => server().any(is_on_shm) && client().any(is_on_shm),
            Phase::Tcp(reason) => server().any(|end| is_on_tcp_for(end, reason)),
            Phase::Unseen => true,
        };
        if arrived {
            return;
        }
        let seen: Vec<_> = programs.iter().map(|program| program.output()).collect();
        assert!(Instant::now() < deadline, "phase {number} did not come to {phase:?}\n{seen:?}\n{status:#?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns `true` if both directions are attached. A direction without a byte since the pairing is
/// idle: its next byte is on the lane.
fn is_on_shm(end: &Connection) -> bool {
    let ready = |one: &Direction| one.transport == Taken::Shm || one.reason == Reason::Idle;
    ready(&end.send) && ready(&end.receive)
}

fn is_on_tcp_for(end: &Connection, reason: Reason) -> bool {
    let directions = [end.send, end.receive];
    directions.iter().all(|one| one.transport == Taken::Tcp)
        && directions.iter().any(|one| one.reason == reason)
}
