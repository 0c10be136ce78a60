//! Several epoll instances or threads wait for one connection in turn, as in Varnish and HAProxy.
//! Each waiter must be woken by its doorbell. None may have to poll every millisecond because
//! another has waited before.

use shunt_compat::{Expected, Host, both};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
/// The maximum number of sleeps without a doorbell. A peer may not hold a doorbell yet when a
/// thread first sleeps on it.
const FEW: u64 = 25;

fn degraded_sleeps(host: &Host, pid: u32) -> u64 {
    let status = host.status().unwrap_or_default();
    let process = status.processes.iter().find(|process| process.pid == pid);
    process.map_or(0, |process| process.totals.counters["degraded_sleeps"])
}

/// Runs a program that waits for one connection in these ways, in turn.
fn take_turns(waits: &'static str) {
    both(LIMIT, move |host| {
        let port = host.port();
        let transport = host.watch_transport();
        let program = || host.script("python3", "taking_turns.py").env("SHUNT_SPIN", "off");
        let mut server =
            program().words(&format!("server {port}")).arg(host.dir()).words(waits).start("server");
        server.wait_for_output("listening", LIMIT);
        let client = program().words(&format!("client {port}")).start("client");
        server.wait_for_output("used", LIMIT);
        let before = degraded_sleeps(host, server.pid());
        host.write("go", "");
        server.wait_for_output("done", LIMIT);
        let more = degraded_sleeps(host, server.pid()) - before;
        assert!(more < FEW, "{more} sleeps of a millisecond at most");
        host.write("end", "");
        let ended = server.wait(LIMIT);
        assert!(ended.success(), "{}", ended.stderr);
        // On a busy machine many of the few messages may be exchanged before the broker's message
        // arrives.
        transport.expect(Expected { port, connections: 1, share: 0.3 });
        drop(client);
    });
}

#[test]
fn one_set_after_the_other() {
    take_turns("a b");
}

#[test]
fn a_thread_after_a_set() {
    take_turns("a poll a recv");
}

#[test]
fn a_set_that_it_is_in_when_another_is_left() {
    take_turns("left");
}

#[test]
fn a_set_that_it_came_into_while_a_thread_waited() {
    take_turns("aside");
}
