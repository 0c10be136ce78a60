//! An epoll set that a child has inherited which is another program by now: a call on it costs what it did before, and its
//! connections take shared memory again, also where the set is not closed by exec.

use shunt_compat::{Expected, Host, both};
use std::time::Duration;

fn observe(host: &Host, how: &str) -> String {
    let port = host.port();
    let road = host.watch_road();
    let ended = host
        .script("python3", "sets_after_a_fork.py")
        .args([&port.to_string(), how])
        .run(how, Duration::from_secs(60));
    road.expect(Expected { port, connections: 1, share: 0.5 });
    ended.stdout
}

#[test]
fn closed_by_exec() {
    both(Duration::from_secs(60), |host| observe(host, "not-inherited"));
}

#[test]
fn inherited_by_a_program_that_has_closed_it() {
    both(Duration::from_secs(60), |host| observe(host, "inherited"));
}
