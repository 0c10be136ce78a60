//! Signals, sleepers, closes by other threads and the ends of threads, in calls on shared memory: our own programs ask one question a line, and the answers
//! must be those of TCP.

use shunt_compat::{ask, both, both_at_once};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);

#[test]
fn which_calls_go_on_after_a_handler() {
    both_at_once(LIMIT, |host| ask(host, "interrupts", 1));
}

#[test]
fn what_handlers_see() {
    both(LIMIT, |host| ask(host, "handlers", 1));
}

#[test]
fn threads_that_are_cancelled() {
    both_at_once(LIMIT, |host| ask(host, "cancels", 1));
}

/// Handlers use sockets while the code that they interrupt does, thousands of times. The longer variant: `storm PORT GATE
/// 100000`.
#[test]
fn a_storm_of_handlers() {
    both(LIMIT, |host| ask(host, "storm", 3));
}

/// The longer variant: `threads PORT GATE 2000`.
#[test]
fn more_threads_than_waiters() {
    both(LIMIT, |host| ask(host, "threads", 100));
}

/// The calls go on, with what they were given, and the peer is told of nothing before they are over.
#[test]
fn numbers_that_are_closed_under_calls() {
    both_at_once(LIMIT, |host| ask(host, "closes", 47));
}

#[test]
fn sleepers_on_a_connection_that_switches() {
    both_at_once(LIMIT, |host| ask(host, "switches", 1));
}
