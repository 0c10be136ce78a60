//! Operations on a socket before it is connected: registration in epoll instances, duplication,
//! passing to another process, options. Afterwards they must have the same effect as on TCP.
//!
//! Other tests watch epoll instances, by poll or other instances, and register sockets that have
//! bytes on shared memory. The bytes in lanes must be visible from outside the instance, and
//! nothing else.

use shunt_compat::{Expected, Host, both};
use std::time::Duration;

/// Runs the scenarios of a group, which print a line each. With `on_shm`, each must have a
/// connection on shared memory.
fn observe(host: &Host, group: &str, on_shm: bool) -> Vec<String> {
    let first = host.port() + 1000;
    let transport = host.watch_transport();
    let ended = host
        .script("python3", "sockets_and_sets.py")
        .args([&first.to_string(), group])
        .run(group, Duration::from_secs(60));
    let lines: Vec<_> = ended.stdout.lines().map(str::to_owned).collect();
    for port in (first..).take(if on_shm { lines.len() } else { 0 }) {
        transport.expect(Expected { port, connections: 1, share: 0.0 });
    }
    lines
}

#[test]
fn a_number_that_another_socket_gets_is_in_no_set() {
    both(Duration::from_secs(60), |host| observe(host, "used-again", true));
}

#[test]
fn a_duplicate_is_the_same_connection() {
    both(Duration::from_secs(60), |host| observe(host, "duplicated", false));
}

#[test]
fn sets_and_other_processes_have_the_connection_too() {
    both(Duration::from_secs(60), |host| observe(host, "others", false));
}

#[test]
fn a_connection_that_sets_have_exclusively_is_on_shared_memory() {
    both(Duration::from_secs(60), |host| {
        let transport = host.watch_transport();
        let port = host.port() + 1000;
        let ended = host.script("python3", "sockets_and_sets.py").args([&port.to_string(), "exclusive"]);
        let ended = ended.run("exclusive", Duration::from_secs(60));
        transport.expect(Expected { port, connections: 1, share: 0.9 });
        ended.stdout
    });
}

#[test]
fn a_socket_and_its_duplicate_in_one_set_are_two_registrations() {
    both(Duration::from_secs(60), |host| observe(host, "twins", true));
}

#[test]
fn a_registration_outlives_its_number_while_a_duplicate_is_open() {
    both(Duration::from_secs(60), |host| observe(host, "closed-twins", true));
}

#[test]
fn a_connection_that_a_set_has_twice_is_on_shared_memory() {
    both(Duration::from_secs(60), |host| {
        let transport = host.watch_transport();
        let port = host.port() + 1000;
        let ended = host.script("python3", "sockets_and_sets.py").args([&port.to_string(), "waiting-twin"]);
        let ended = ended.run("waiting-twin", Duration::from_secs(60));
        transport.expect(Expected { port, connections: 1, share: 0.9 });
        ended.stdout
    });
}

#[test]
fn an_array_with_few_places_is_filled_in_turn_and_with_whole_events() {
    both(Duration::from_secs(60), |host| observe(host, "few-places", true));
}

#[test]
fn options_hold_afterwards() {
    both(Duration::from_secs(60), |host| observe(host, "options", false));
}

#[test]
fn bytes_on_shared_memory_are_seen_through_a_set() {
    both(Duration::from_secs(60), |host| observe(host, "watched", true));
}
