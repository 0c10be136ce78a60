//! In which order an epoll instance tells of connections: of those on shared memory in the order in which their peer has spoken, and of
//! none before what the peer had said by TCP before.

use shunt_compat::{Expected, both, compile};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
/// Connections of `order.c` that last.
const OLD: usize = 6;

fn order(kind: &'static str) {
    both(LIMIT, move |host| {
        compile(host, "order", &[]);
        let port = host.port();
        let road = host.watch_road();
        let ended = host.program("./order").args([&port.to_string(), kind]).start("order").wait(LIMIT);
        assert_eq!(ended.stdout, "old ones in their order, new ones not overtaken\n", "{}", ended.stderr);
        road.expect(Expected { port, connections: OLD, share: 0.0 });
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
