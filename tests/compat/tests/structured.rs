//! Trio and AnyIO: event loops of Python in which waits are cancelled.

use shunt_compat::{Expected, both};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(40);

#[test]
fn waits_that_are_cancelled_and_streams_that_are_half_closed() {
    both(2 * LIMIT, |host| {
        let port = host.port();
        let transport = host.watch_transport();
        let program =
            host.script("/usr/bin/python3", "structured.py").arg(port.to_string()).run("structured", LIMIT);
        transport.expect(Expected { port, connections: 10, share: 0.5 });
        program.stdout
    });
}
