//! Runs a server with a client that repeats its requests until a gate file exists. The test creates
//! the file after it has seen the connections on the expected transport.

use crate::host::Host;
use crate::launch::{Launch, Program};
use crate::transport::{Expected, TransportWatch};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(40);

/// The transport that the connections of a conversation must be seen on.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// Shared memory.
    Shm,
    /// TCP for all connections. The reason must appear at one of them, or in `shunt explain` for
    /// the server's process.
    Tcp(&'static str),
}

/// Returns the name of the gate file that ends the client on this port.
pub fn gate(port: u16) -> String {
    format!("gate.{port}")
}

/// Starts both programs, and returns the client's output.
pub fn converse(
    host: &Host,
    (port, connections): (u16, usize),
    (server, client): (Launch<'_>, Launch<'_>),
    way: Way,
) -> String {
    let server = server.start("server");
    host.wait_for_port(port);
    let transport = host.watch_transport();
    let client = client.start("client");
    match way {
        Way::Shm => end_on_transport(
            host,
            &transport,
            (client, &gate(port)),
            &[Expected { port, connections, share: 0.9 }],
        ),
        Way::Tcp(reason) => {
            wait_for_reason(host, &transport, port, server.pid(), reason);
            let printed = end(host, &transport, (client, &gate(port)), port);
            assert_eq!(transport.on_shm(port), 0, "{}", transport.report(port));
            printed
        }
    }
}

/// Waits until connections have used the expected transports, then ends the client by its gate
/// file. Returns the client's output.
pub fn end_on_transport(
    host: &Host,
    transport: &TransportWatch,
    (client, gate): (Program, &str),
    expected: &[Expected],
) -> String {
    expected.iter().for_each(|one| transport.wait_for(*one, LIMIT));
    let printed = end(host, transport, (client, gate), expected[0].port);
    expected.iter().for_each(|one| transport.expect(*one));
    printed
}

/// Ends a client by its gate file, and returns its output.
fn end(host: &Host, transport: &TransportWatch, (client, gate): (Program, &str), port: u16) -> String {
    host.write(gate, "");
    let ended = client.wait(LIMIT);
    assert!(ended.success(), "{}\n{}", ended.stderr, transport.report(port));
    ended.stdout
}

/// Waits until `shunt` reports this reason for a connection to `port` or for the process. Returns
/// immediately on a native host.
pub fn wait_for_reason(host: &Host, transport: &TransportWatch, port: u16, server: u32, reason: &str) {
    let deadline = Instant::now() + LIMIT;
    while let Some(explained) = host.explain(server) {
        let told = transport.report(port) + &explained;
        if told.contains(&format!(" {reason}: ")) {
            return;
        }
        assert!(Instant::now() < deadline, "{reason} is not named\n{told}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
