//! Bytes that go back from a lane to TCP while TCP has no room for all of them. The sender is not
//! ready to send, does not spin, and everything arrives once, also if the sender is gone then.

use shunt_compat::both;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

fn return_to_full_tcp(style: &'static str, end: &'static str) {
    both(LIMIT, move |host| {
        let port = host.port();
        let gate = host.path("gate");
        let transport = host.watch_transport();
        let program = host
            .script("python3", "returning.py")
            .arg(port.to_string())
            .arg(&gate)
            .args([style, end])
            .start("sender");
        transport.wait_for_shm(port, 1, LIMIT);
        host.write("gate", "");
        let ended = program.wait(LIMIT);
        assert!(ended.success(), "{}", ended.stderr);
        assert_eq!(ended.stdout, "refused often: False\nbusy: False\nwhole: True\n", "{}", ended.stderr);
    });
}

#[test]
fn poll_waits_until_tcp_has_the_returned_bytes() {
    return_to_full_tcp("poll", "shut");
}

#[test]
fn select_waits_until_tcp_has_the_returned_bytes() {
    return_to_full_tcp("select", "close");
}

#[test]
fn epoll_waits_until_tcp_has_the_returned_bytes() {
    return_to_full_tcp("epoll", "shut");
}

#[test]
fn edge_triggered_epoll_waits_until_tcp_has_the_returned_bytes() {
    return_to_full_tcp("edge", "close");
}

#[test]
fn forked_child_sends_after_the_returned_bytes() {
    return_to_full_tcp("poll", "fork");
}

#[test]
fn returned_bytes_arrive_after_an_exit() {
    return_to_full_tcp("poll", "exit");
}

#[test]
fn returned_bytes_arrive_after_a_kill() {
    return_to_full_tcp("epoll", "kill");
}
