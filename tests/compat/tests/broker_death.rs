//! Kills the broker with SIGKILL under load (L6). Established connections go on, and new ones use
//! TCP. After the broker has been restarted, new connections are paired again.

use shunt_compat::{Expected, Host, Program, under_shunt};
use std::time::{Duration, Instant};

const CONNECTIONS: usize = 10;

fn server(host: &Host) -> (Program, u16) {
    let port = host.port();
    let server =
        host.script("python3", "echo.py").args(["server", "threads", &port.to_string()]).start("server");
    host.wait_for_port(port);
    (server, port)
}

/// Starts clients that verify every echo for at least `seconds`.
fn clients(host: &Host, name: &str, port: u16, seconds: f64) -> Program {
    host.script("python3", "echo.py")
        .args(["client", "threads", &port.to_string(), &CONNECTIONS.to_string(), "20", &seconds.to_string()])
        .start(name)
}

fn verified(program: Program) {
    let ended = program.wait(Duration::from_secs(40));
    assert!(ended.success(), "{}\n{}", ended.stdout, ended.stderr);
}

#[test]
fn connections_outlive_the_broker_and_new_ones_are_paired_by_the_next() {
    under_shunt(Duration::from_secs(90), |host| {
        let (server, port) = server(host);
        let established = {
            let transport = host.watch_transport();
            let clients = clients(host, "established", port, 4.0);
            transport.wait_for_shm(port, CONNECTIONS, Duration::from_secs(40));
            clients
        };

        host.kill_broker();
        // Without a broker: new connections of a program that knew it, and a program that starts
        // without one.
        let orphans = clients(host, "orphans", port, 1.0);
        verified(orphans);
        verified(established);

        host.start_broker();
        let transport = host.watch_transport();
        let again = clients(host, "again", port, 3.0);
        transport.wait_for_shm(port, CONNECTIONS, Duration::from_secs(40));
        verified(again);
        transport.expect(Expected { port, connections: CONNECTIONS, share: 0.5 });
        drop(server);
    });
}

/// `shunt status` is complete soon after an upgrade, although no program makes a call.
#[test]
fn programs_that_sleep_register_with_the_broker_that_follows_one_that_was_stopped() {
    for call in ["recv", "poll", "epoll"] {
        under_shunt(Duration::from_secs(90), move |host| {
            let (port, mut server) = sleeping_server(host, call);
            let mut client = sleeping_client(host, port, call);
            let transport = host.watch_transport();
            transport.wait_for_shm(port, 1, Duration::from_secs(40));
            drop(transport);
            host.write("enough", "");
            client.wait_for_output("sleeps", Duration::from_secs(40));
            let before = ends(host, port);
            assert_eq!(before.len(), 2, "{call}: both ends are listed");
            host.stop_broker();
            host.start_broker();
            eventually_listed(host, port, &before);
            client.kill();
            server.kill();
        });
    }
}

/// Nothing wakes programs when the broker is killed. They notice at their next calls.
#[test]
fn programs_that_make_calls_register_with_the_broker_that_follows_one_that_was_killed() {
    under_shunt(Duration::from_secs(90), |host| {
        let (server, port) = server(host);
        let clients = clients(host, "clients", port, 6.0);
        let transport = host.watch_transport();
        transport.wait_for_shm(port, CONNECTIONS, Duration::from_secs(40));
        drop(transport);
        host.kill_broker();
        host.start_broker();
        let deadline = Instant::now() + Duration::from_secs(30);
        while clients.is_running() && on_shm(host, port).len() < 2 * CONNECTIONS {
            assert!(Instant::now() < deadline, "{:?}", host.status());
        }
        assert_eq!(on_shm(host, port).len(), 2 * CONNECTIONS, "{:?}", host.status());
        verified(clients);
        drop(server);
    });
}

fn sleeping_server(host: &Host, call: &str) -> (u16, Program) {
    let port = host.port();
    let mut server =
        host.script("python3", "sleeping_pair.py").args(["server", &port.to_string(), call]).start("server");
    server.wait_for_output("listening", Duration::from_secs(40));
    (port, server)
}

fn sleeping_client(host: &Host, port: u16, call: &str) -> Program {
    host.script("python3", "sleeping_pair.py")
        .args(["client", &port.to_string(), call])
        .arg(host.path("enough"))
        .start("client")
}

/// Returns the ends of connections to `port` that the broker lists: their bytes by shared memory.
fn on_shm(host: &Host, port: u16) -> Vec<(u64, u64)> {
    let ends = ends(host, port);
    ends.into_iter().filter(|(sent, received)| *sent > 0 && *received > 0).collect()
}

fn ends(host: &Host, port: u16) -> Vec<(u64, u64)> {
    let processes = host.status().map(|status| status.processes).unwrap_or_default();
    let connections = processes.into_iter().flat_map(|process| process.connections);
    let of_port = connections.filter(|one| [one.local.port(), one.remote.port()].contains(&port));
    let mut ends: Vec<_> = of_port.map(|one| (one.send.shm_bytes, one.receive.shm_bytes)).collect();
    ends.sort_unstable();
    ends
}

/// Waits until the broker lists the ends as an earlier one did.
fn eventually_listed(host: &Host, port: u16, before: &[(u64, u64)]) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while ends(host, port) != before {
        assert!(Instant::now() < deadline, "{:?}", host.status());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn redis_benchmark_does_not_notice() {
    under_shunt(Duration::from_secs(90), |host| {
        let port = host.port();
        let server = host
            .program("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .start("redis");
        host.wait_for_port(port);
        let load = host
            .program("redis-benchmark")
            .words(&format!("-h 127.0.0.1 -p {port} -t set,get,incr,lpush -c 50 -n 150000 -q"))
            .start("load");
        host.watch_transport().wait_for_shm(port, 40, Duration::from_secs(40));
        host.kill_broker();
        // The load opens new connections, first without a broker and later with one.
        std::thread::sleep(Duration::from_secs(1));
        host.start_broker();
        let ended = load.wait(Duration::from_secs(60));
        assert!(ended.success() && !ended.stderr.contains("rror"), "{}\n{}", ended.stdout, ended.stderr);
        drop(server);
    });
}

#[test]
fn without_any_broker_programs_run_on_tcp() {
    under_shunt(Duration::from_secs(60), |host| {
        let (server, port) = server(host);
        host.kill_broker();
        verified(clients(host, "clients", port, 0.5));
        drop(server);
    });
}

/// A waiter that is created after the broker's death cannot be announced to peers. It must not poll
/// every millisecond for that reason.
#[test]
fn whoever_waits_first_after_the_death_sleeps_too() {
    for call in ["recv", "poll", "epoll"] {
        under_shunt(Duration::from_secs(60), move |host| {
            let (port, directory) = (host.port(), host.path(""));
            let program = |words: &[&str]| {
                let (role, rest) = words.split_first().expect("a role");
                host.script("python3", "late_waiter.py")
                    .args([*role, &port.to_string()])
                    .arg(&directory)
                    .args(rest)
                    .start(role)
            };
            let mut server = program(&["server", call]);
            server.wait_for_output("listening", Duration::from_secs(40));
            let mut client = program(&["client"]);
            server.wait_for_output("used", Duration::from_secs(40));
            host.kill_broker();
            host.start_broker();
            host.replace("restarted", "");
            server.wait_for_output("thread", Duration::from_secs(40));
            let output = server.output();
            let thread = output.lines().find_map(|line| line.strip_prefix("thread ")).expect("it says which");
            let switches = || {
                let status = std::fs::read_to_string(format!("/proc/{}/task/{thread}/status", server.pid()));
                let status = status.expect("it waits");
                let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"));
                line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).expect("a number")
            };
            std::thread::sleep(Duration::from_millis(500));
            let before = switches();
            std::thread::sleep(Duration::from_secs(1));
            let woken = switches() - before;
            assert!(woken < 100, "{call}: woke up {woken} times for nothing");
            host.replace("again", "");
            client.wait_for_output("done", Duration::from_secs(40));
            verified(client);
            verified(server);
        });
    }
}
