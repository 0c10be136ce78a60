//! Node: a net server and client, streams with backpressure.

use shunt_compat::{Expected, both};
use std::time::Duration;

const CONNECTIONS: usize = 12;
/// The amount that each connection sends. The client writes as fast as it can from the start.
/// Before the pairing, the kernel's buffers take 2 to 4 MB in each direction, and the rest must be
/// much more than that.
const MEGABYTES: usize = 64;

#[test]
fn streams_with_backpressure() {
    both(Duration::from_secs(60), |host| {
        let port = host.port();
        let server = host.script("node", "echo.js").args(["server", &port.to_string()]).start("server");
        host.wait_for_port(port);
        let transport = host.watch_transport();
        let client = host
            .script("node", "echo.js")
            .args(["client", &port.to_string(), &CONNECTIONS.to_string(), &MEGABYTES.to_string()])
            .run("client", Duration::from_secs(40));
        transport.expect(Expected { port, connections: CONNECTIONS, share: 0.9 });
        drop(server);
        client.stdout
    });
}
