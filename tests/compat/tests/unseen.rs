//! Programs that wait by system calls of their own, which no hook sees: what is sent to them reaches them all the same, in
//! whatever call the sender waits for their answer (L9).

use shunt_compat::{Expected, Host, both};
use std::path::Path;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const MESSAGES: &str = "600";
/// The message before which a connection is on shared memory, and after which nobody sees its server wait.
const LATE: &str = "300";

/// The server waits in this way, from its first message on or once its connection is on shared memory.
fn unseen(how: &'static str) {
    both(LIMIT, move |host| {
        let program = build(host);
        for (index, seen) in ["recv", "poll", "select", "epoll"].into_iter().enumerate() {
            for (when, share) in [("0", 0.0), (LATE, 0.3)] {
                let port = host.port() + 2 * index as u16 + u16::from(share > 0.0);
                let number = port.to_string();
                let road = host.watch_road();
                let server = host.program(&program).args(["serve", &number, how, when]).start("serve");
                host.wait_for_port(port);
                let asked =
                    host.program(&program).args(["ask", &number, seen, MESSAGES]).start("ask").wait(LIMIT);
                assert_eq!(asked.stdout, "every answer came\n", "{how} from {when}, asked by {seen}");
                let served = server.wait(LIMIT);
                assert!(served.success(), "{}", served.stderr);
                if share > 0.0 {
                    road.expect(Expected { port, connections: 1, share });
                }
            }
        }
    });
}

fn build(host: &Host) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/unseen.c");
    let program = host.path("unseen");
    host.program("gcc").native().args(["-O1", "-pthread", "-o"]).arg(&program).arg(source).run("gcc", LIMIT);
    program.to_string_lossy().into_owned()
}

#[test]
fn by_poll() {
    unseen("poll");
}

#[test]
fn by_epoll() {
    unseen("epoll");
}

#[test]
fn by_a_signal() {
    unseen("signal");
}

#[test]
fn by_a_ring() {
    unseen("ring");
}

#[test]
fn by_another_thread() {
    unseen("thread");
}
