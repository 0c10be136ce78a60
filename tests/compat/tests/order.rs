//! The order in which an epoll instance returns connections. Those on shared memory come in the
//! order in which their peers sent. No connection comes before bytes that its peer had sent over
//! TCP.

use shunt_compat::{Expected, both, compile};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
/// The number of long-lived connections of `order.c`.
const OLD: usize = 6;

fn order(kind: &'static str) {
    both(LIMIT, move |host| {
        compile(host, "order", &[]);
        let port = host.port();
        let transport = host.watch_transport();
        let ended = host.program("./order").args([&port.to_string(), kind]).start("order").wait(LIMIT);
        assert_eq!(ended.stdout, "old ones in their order, new ones not overtaken\n", "{}", ended.stderr);
        transport.expect(Expected { port, connections: OLD, share: 0.0 });
    });
}

#[test]
fn of_levels() {
    order("level");
}

#[test]
fn of_edges() {
    order("edge");
}
