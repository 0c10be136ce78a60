//! Invalid arguments: descriptors, lengths, flags, times and addresses that no call accepts. Each
//! must be refused as by the kernel, with the same errno, and the connection must lose nothing.

use shunt_compat::{ask, both};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);

#[test]
fn numbers_that_no_call_wants() {
    both(LIMIT, |host| ask(host, "numbers", 1));
}

#[test]
fn addresses_that_cannot_be_touched() {
    both(LIMIT, |host| ask(host, "pointers", 1));
}

#[test]
fn one_call_moves_as_much_as_the_kernel_would() {
    both(LIMIT, |host| ask(host, "large", 1));
}

#[test]
fn sendfile_from_everything_that_has_a_descriptor() {
    both(LIMIT, |host| ask(host, "sources", 1));
}
