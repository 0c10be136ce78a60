//! Signals, sleepers, closes by other threads and ends of threads, during calls on shared memory.
//! The test programs print one answer a line, and the answers must be those of TCP.

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

/// Handlers use sockets while the code that they interrupt does, thousands of times. For a longer
/// test, run `storm PORT GATE 100000`.
#[test]
fn a_storm_of_handlers() {
    both(LIMIT, |host| ask(host, "storm", 3));
}

/// For a longer test, run `threads PORT GATE 2000`.
#[test]
fn more_threads_than_waiters() {
    both(LIMIT, |host| ask(host, "threads", 100));
}

/// The calls continue on their descriptors. The peer is notified of the close only after they have
/// returned.
#[test]
fn numbers_that_are_closed_under_calls() {
    both_at_once(LIMIT, |host| ask(host, "closes", 47));
}

#[test]
fn sleepers_on_a_connection_that_switches() {
    both_at_once(LIMIT, |host| ask(host, "switches", 1));
}
