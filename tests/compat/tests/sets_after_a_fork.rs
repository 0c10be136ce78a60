//! An epoll instance inherited by a child that has executed another program. A call on it must cost
//! no more than before. Its connections must use shared memory again, even if exec does not close
//! the instance.

use shunt_compat::{Expected, Host, both};
use std::time::Duration;

fn observe(host: &Host, how: &str) -> String {
    let port = host.port();
    let transport = host.watch_transport();
    let ended = host
        .script("python3", "sets_after_a_fork.py")
        .args([&port.to_string(), how])
        .run(how, Duration::from_secs(60));
    transport.expect(Expected { port, connections: 1, share: 0.5 });
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
