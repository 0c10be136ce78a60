//! A broker of another version, as after an upgrade, which rejects a program. The program stays on
//! TCP, reports the reason, and does not retry excessively.

use shunt_abi::reason::Transport;
use shunt_compat::{Host, Program, under_shunt};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

fn server(host: &Host, style: &str, limit: &str) -> (Program, u16) {
    let port = host.port();
    let _ = host.script("python3", "echo.py");
    let server = host
        .program("prlimit")
        .arg(limit)
        .arg(shunt_compat::find_program("python3"))
        .arg(host.path("echo.py"))
        .args(["server", style, &port.to_string()])
        .start("server");
    host.wait_for_port(port);
    (server, port)
}

fn clients(host: &Host, name: &str, port: u16, connections: usize, until: &str) -> Program {
    host.script("python3", "echo.py")
        .args(["client", "threads", &port.to_string(), &connections.to_string(), "20", until])
        .start(name)
}

#[test]
fn a_broker_of_another_version_is_asked_ever_more_rarely_and_the_reason_is_said() {
    under_shunt(Duration::from_secs(120), |host| {
        host.kill_broker();
        let mut broker = host
            .script("python3", "other_version.py")
            .native()
            .arg(host.broker_socket())
            .args([(shunt_abi::VERSION + 1).to_string(), "6".into()])
            .start("broker-of-another-version");
        broker.wait_for_output("listening", LIMIT);
        let (server, port) = server(host, "asyncio", "--nofile=1024");
        let load = clients(host, "load", port, 4, &host.path("over").display().to_string());
        let ended = broker.wait(LIMIT);
        let came = ended.stdout.lines().find_map(|line| line.strip_prefix("came ")).expect("a count");
        let came: u32 = came.parse().expect("a number");
        // Both programs try immediately, then after a tenth of a second, a fifth and so on: fewer
        // than sixty times each.
        assert!((2..=20).contains(&came), "{came} times in six seconds");
        // When a broker of their version starts, they register with it, and report the earlier
        // reason.
        host.start_broker();
        let transport = host.watch_transport();
        transport.wait_for_shm(port, 4, Duration::from_secs(40));
        let status = host.status().expect("a broker");
        for process in &status.processes {
            assert!(process.totals.bypasses.contains_key("broker_version"), "{:?}", process.totals.bypasses);
        }
        host.write("over", "");
        assert!(load.wait(LIMIT).success());
        drop(server);
    });
}

/// The server may use 32 descriptors for its own waiters and its peers'. The first two clients have
/// 28 waiters, nearly all but those that the server needs itself.
#[test]
fn two_clients_with_many_waiters_leave_doorbells_for_a_third() {
    under_shunt(Duration::from_secs(120), |host| {
        let (server, port) = server(host, "asyncio", "--nofile=256");
        let over = host.path("over").display().to_string();
        let on_shm = |pid| {
            let processes = host.status().map(|status| status.processes).unwrap_or_default();
            let ends = processes.into_iter().filter(|one| one.pid == pid).flat_map(|one| one.connections);
            ends.filter(|one| one.send.transport == Transport::Shm && one.receive.transport == Transport::Shm)
                .count()
        };
        let wait_for = |pid, count| {
            let deadline = Instant::now() + Duration::from_secs(30);
            while on_shm(pid) < count {
                assert!(Instant::now() < deadline, "too few on shared memory: {:?}", host.status());
                std::thread::sleep(Duration::from_millis(50));
            }
        };
        let first = clients(host, "first", port, 14, &over);
        wait_for(first.pid(), 14);
        let second = clients(host, "second", port, 14, &over);
        // The second client may get only some descriptors and give them up, or get all. In both
        // cases it has tried by then.
        std::thread::sleep(Duration::from_secs(2));
        let third = clients(host, "third", port, 4, &over);
        wait_for(third.pid(), 4);
        // The first client keeps its share.
        wait_for(first.pid(), 14);
        host.write("over", "");
        [first, second, third].into_iter().for_each(|one| assert!(one.wait(LIMIT).success()));
        drop(server);
    });
}
