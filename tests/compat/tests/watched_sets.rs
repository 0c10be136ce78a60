//! Epoll sets that are watched, by poll or by other sets, and registrations of sockets that have bytes on shared memory: what
//! lanes hold must be seen from outside the set, and nothing else.

use shunt_compat::{Expected, both};
use std::time::Duration;

#[test]
fn bytes_on_shared_memory_are_seen_through_a_set() {
    both(Duration::from_secs(60), |host| {
        let first = host.port() + 1000;
        let road = host.watch_road();
        let ended = host
            .script("python3", "sockets_and_sets.py")
            .args([&first.to_string(), "watched"])
            .run("watched", Duration::from_secs(60));
        let lines: Vec<_> = ended.stdout.lines().map(str::to_owned).collect();
        for port in (first..).take(lines.len()) {
            road.expect(Expected { port, connections: 1, share: 0.0 });
        }
        lines
    });
}
