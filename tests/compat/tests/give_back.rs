//! Bytes in a lane when its reader leaves the reach of the shim. They must arrive through TCP, in
//! their place.

use shunt_compat::{Host, both};
use std::time::Duration;

fn hand_over(host: &Host, how: &str) -> String {
    let port = host.port().to_string();
    let mut server = host.script("python3", "give_back.py").args(["server", &port, how]).start("server");
    server.wait_for_output("ready", Duration::from_secs(40));
    host.script("python3", "give_back.py")
        .args(["client", &port, how])
        .run("client", Duration::from_secs(20));
    server.wait(Duration::from_secs(40)).stdout
}

#[test]
fn a_program_without_the_shim_reads_on_after_exec() {
    both(Duration::from_secs(60), |host| hand_over(host, "exec"));
}

#[test]
fn another_process_reads_on_a_descriptor_that_was_sent_to_it() {
    both(Duration::from_secs(60), |host| hand_over(host, "pass"));
}

#[test]
fn another_process_waits_on_an_epoll_set_that_was_sent_to_it() {
    both(Duration::from_secs(60), |host| hand_over(host, "set"));
}

#[test]
fn splice_reads_on_inside_the_kernel() {
    both(Duration::from_secs(60), |host| hand_over(host, "splice"));
}
