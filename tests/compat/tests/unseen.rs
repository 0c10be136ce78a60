//! Programs that wait by inline system calls. No hook sees these calls, and without unwind tables
//! shunt does not redirect them. Such programs stay on TCP (L11) and receive everything. Other
//! tests have receivers that are late (L9).

use shunt_abi::reason::Transport;
use shunt_compat::{both, compile};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const MESSAGES: &str = "600";
/// The message after which the server's waits become invisible. A connection could be on shared
/// memory before.
const LATE: &str = "300";

/// The server waits in this way, from its first message or after its connection could be on shared
/// memory.
fn unseen(how: &'static str) {
    both(LIMIT, move |host| {
        compile(host, "unseen", &["-fno-asynchronous-unwind-tables"]);
        for (index, seen) in ["recv", "poll", "select", "epoll"].into_iter().enumerate() {
            for (place, when) in ["0", LATE].into_iter().enumerate() {
                let port = host.port() + (2 * index + place) as u16;
                let number = port.to_string();
                let transport = host.watch_transport();
                let server = host.program("./unseen").args(["serve", &number, how, when]).start("serve");
                host.wait_for_port(port);
                let asked =
                    host.program("./unseen").args(["ask", &number, seen, MESSAGES]).start("ask").wait(LIMIT);
                assert_eq!(asked.stdout, "every answer came\n", "{how} from {when}, asked by {seen}");
                let served = server.wait(LIMIT);
                assert!(served.success(), "{}", served.stderr);
                assert_eq!(transport.on_shm(port), 0, "{}", transport.report(port));
            }
        }
    });
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

/// A receiver that has many bytes to read from TCP before the lane, and reads them slowly, must not
/// be taken for one that never reads the lane.
#[test]
fn who_reads_slowly_what_comes_before_a_lane_is_given_time() {
    both(LIMIT, |host| {
        let number = host.port().to_string();
        let over = host.path("over").display().to_string();
        let mut serve = host.script("python3", "backlog.py").args(["serve", &number, &over]).start("serve");
        serve.wait_for_output("listening", LIMIT);
        let transport = host.watch_transport();
        let mut ask = host.script("python3", "backlog.py").args(["ask", &number, &over]).start("ask");
        ask.wait_for_output("every byte came", LIMIT);
        if transport.is_watched() {
            let status = host.status().expect("a broker");
            let server = status.processes.iter().find(|one| one.pid == serve.pid()).expect("its server");
            assert!(!server.totals.bypasses.contains_key("unread"), "{:?}", server.totals.bypasses);
            let [connection] = &server.connections[..] else { panic!("{:?}", server.connections) };
            assert_eq!(connection.send.transport, Transport::Shm, "{connection:?}");
            assert!(connection.send.tcp_bytes >= 500_000 && connection.send.shm_bytes > 0, "{connection:?}");
        }
        host.write("over", "");
        assert!(ask.wait(LIMIT).success() && serve.wait(LIMIT).success());
    });
}

/// A receiver that is late for bytes in a lane is treated as an untracked waiter once. For the next
/// lane of the connection it has the same time as for the first.
#[test]
fn who_was_late_once_is_given_time_again() {
    both(LIMIT, |host| {
        let number = host.port().to_string();
        let at_once = ["--offer", "at-once"];
        let over = host.path("over").display().to_string();
        let mut serve =
            host.script("python3", "late.py").shunt_args(at_once).args(["serve", &number]).start("serve");
        serve.wait_for_output("listening", LIMIT);
        let transport = host.watch_transport();
        let mut ask = host
            .script("python3", "late.py")
            .shunt_args(at_once)
            .args(["ask", &number, "0.6", "0.01", "150", &over])
            .start("ask");
        ask.wait_for_output("every answer came", LIMIT);
        if transport.is_watched() {
            let status = host.status().expect("a broker");
            let server = status.processes.iter().find(|one| one.pid == serve.pid()).expect("its server");
            // On a very busy machine, the receiver may be late for another reason.
            let times = server.totals.bypasses.get("unread").copied().unwrap_or(0);
            assert!((1..=2).contains(&times), "{:?}", server.totals.bypasses);
            assert!(
                server.connections.iter().all(|one| one.send.transport == Transport::Shm),
                "{:?}",
                server.connections
            );
        }
        host.write("over", "");
        assert!(ask.wait(LIMIT).success() && serve.wait(LIMIT).success());
    });
}
