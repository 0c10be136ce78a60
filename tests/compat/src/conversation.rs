//! Runs a server with a client that repeats its requests until a gate file exists. The test creates
//! the file after it has seen the connections on the expected transport.

use crate::host::Host;
use crate::launch::{Launch, Program};
use crate::road::{Expected, Road};
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
    let road = host.watch_road();
    let client = client.start("client");
    match way {
        Way::Shm => {
            end_on_the_road(host, &road, (client, &gate(port)), &[Expected { port, connections, share: 0.9 }])
        }
        Way::Tcp(reason) => {
            wait_for_reason(host, &road, port, server.pid(), reason);
            let printed = end(host, &road, (client, &gate(port)), port);
            assert_eq!(road.on_shm(port), 0, "{}", road.report(port));
            printed
        }
    }
}

/// Waits until connections have used the expected transports, then ends the client by its gate
/// file. Returns the client's output.
pub fn end_on_the_road(
    host: &Host,
    road: &Road,
    (client, gate): (Program, &str),
    expected: &[Expected],
) -> String {
    expected.iter().for_each(|one| road.wait_for(*one, LIMIT));
    let printed = end(host, road, (client, gate), expected[0].port);
    expected.iter().for_each(|one| road.expect(*one));
    printed
}

/// Ends a client by its gate file, and returns its output.
fn end(host: &Host, road: &Road, (client, gate): (Program, &str), port: u16) -> String {
    host.write(gate, "");
    let ended = client.wait(LIMIT);
    assert!(ended.success(), "{}\n{}", ended.stderr, road.report(port));
    ended.stdout
}

/// Waits until `shunt` reports this reason for a connection to `port` or for the process. Returns
/// immediately on a native host.
pub fn wait_for_reason(host: &Host, road: &Road, port: u16, server: u32, reason: &str) {
    let deadline = Instant::now() + LIMIT;
    while let Some(explained) = host.explain(server) {
        let told = road.report(port) + &explained;
        if told.contains(&format!(" {reason}: ")) {
            return;
        }
        assert!(Instant::now() < deadline, "{reason} is not named\n{told}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
