//! A listener in a process that has no room for another descriptor. accept fails, and the connection
//! stays in the accept queue, so that every call that polls must go on to report it.

use shunt_compat::{Expected, both, compile};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn a_queued_connection_is_reported_after_accept_has_failed_for_want_of_a_descriptor() {
    both(LIMIT, |host| {
        compile(host, "full_table", &["-pthread"]);
        let port = host.port();
        let transport = host.watch_transport();
        let ended = host.program("./full_table").arg(port.to_string()).start("full_table").wait(LIMIT);
        assert!(ended.success(), "{}\n{}", ended.stdout, ended.stderr);
        transport.expect(Expected { port, connections: 1, share: 0.0 });
        ended.stdout
    });
}
