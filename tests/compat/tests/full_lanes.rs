//! A write that TCP's buffers would take is not late because a lane is full, however its writer
//! waits: both ends write before either reads, a reader pauses, a reader is slow. The connections
//! stay on shared memory.

use shunt_compat::{Expected, both_at_once, compile};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);
/// Connections of `full_lanes.c`.
const KINDS: usize = 5;

fn writes(style: &'static str) {
    both_at_once(LIMIT, move |host| {
        compile(host, "full_lanes", &[]);
        let port = host.port();
        let gate = host.path("gate");
        let transport = host.watch_transport();
        let program =
            host.program("./full_lanes").arg(port.to_string()).arg(&gate).arg(style).start("writer");
        transport.wait_for_shm(port, KINDS, LIMIT);
        host.write("gate", "");
        let ended = program.wait(LIMIT);
        assert!(ended.success(), "{}", ended.stderr);
        let expected = "both write before they read: 0 late\nthe reader pauses: 0 late\n\
                        the reader is slow: 0 late\nas much as TCP takes: 0 late\nmore than TCP takes: whole\n";
        assert_eq!(ended.stdout, expected, "{}", ended.stderr);
        transport.expect(Expected { port, connections: KINDS, share: 0.9 });
    });
}

#[test]
fn by_calls_that_block() {
    writes("block");
}

#[test]
fn by_sendfile() {
    writes("file");
}

#[test]
fn by_calls_that_do_not_and_poll() {
    writes("poll");
}

#[test]
fn by_calls_that_do_not_and_epoll() {
    writes("epoll");
}

#[test]
fn by_calls_that_do_not_and_an_epoll_instance_that_never_sleeps() {
    writes("busy");
}
