//! Redis, with redis-benchmark and redis-cli, also while it forks to save.

use shunt_compat::{Expected, Host, Program, both};
use std::time::Duration;

const CONNECTIONS: usize = 50;

fn redis(host: &Host) -> (Program, u16) {
    let port = host.port();
    let server = host
        .program("redis-server")
        .args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--appendonly",
            "no",
            "--save",
            "",
            "--enable-debug-command",
            "yes",
        ])
        .args([String::from("--dir"), host.dir().display().to_string()])
        .start("redis");
    host.wait_for_port(port);
    (server, port)
}

fn cli(host: &Host, port: u16, line: &str) -> String {
    host.program("redis-cli")
        .args(["-p", &port.to_string()])
        .words(line)
        .run("redis-cli", Duration::from_secs(20))
        .stdout
}

/// Runs redis-benchmark, and returns the names of the commands in its report.
fn benchmark(host: &Host, port: u16, requests: usize, pipeline: usize) -> Vec<String> {
    let run = host
        .program("redis-benchmark")
        .words(&format!("-h 127.0.0.1 -p {port} -t get,set -c {CONNECTIONS} -n {requests} -r 10000 -d 100"))
        .words(&format!("-P {pipeline} --csv"))
        .run("redis-benchmark", Duration::from_secs(30));
    assert!(!run.stderr.contains("rror"), "{}", run.stderr);
    let names = run.stdout.lines().skip(1).filter_map(|line| line.split(',').next());
    names.map(str::to_owned).collect()
}

#[test]
fn fifty_connections_one_request_at_a_time() {
    both(Duration::from_secs(60), |host| {
        let (server, port) = redis(host);
        let transport = host.watch_transport();
        let names = benchmark(host, port, 150_000, 1);
        transport.expect(Expected { port, connections: CONNECTIONS, share: 0.9 });
        drop(server);
        names
    });
}

#[test]
fn fifty_connections_sixteen_requests_at_a_time() {
    both(Duration::from_secs(60), |host| {
        let (server, port) = redis(host);
        let transport = host.watch_transport();
        let names = benchmark(host, port, 1_000_000, 16);
        transport.expect(Expected { port, connections: CONNECTIONS, share: 0.9 });
        drop(server);
        names
    });
}

#[test]
fn values_come_back_as_they_were_stored() {
    both(Duration::from_secs(60), |host| {
        let (server, port) = redis(host);
        let value: String = (0..3_000_000).map(|index| char::from(b'a' + (index / 7 % 23) as u8)).collect();
        let file = host.write("value", &value);
        let set = host
            .program("redis-cli")
            .args(["-p", &port.to_string(), "-x", "set", "large"])
            .input(file)
            .run("set", Duration::from_secs(20))
            .stdout;
        let large = cli(host, port, "get large");
        assert_eq!(large.trim_end(), value, "the large value");
        // Bulk loading: redis-cli sends everything and counts the answers.
        let commands: String =
            (0..20_000).map(|index| format!("SET key:{index} {}\r\n", index * 7)).collect();
        let bulk = host
            .program("redis-cli")
            .args(["-p", &port.to_string(), "--pipe"])
            .input(host.write("commands", commands))
            .run("pipe", Duration::from_secs(20))
            .stdout;
        let size = cli(host, port, "dbsize");
        let sample = cli(host, port, "mget key:0 key:777 key:19999");
        let digest = cli(host, port, "debug digest");
        drop(server);
        (set, bulk.lines().last().map(str::to_owned), size, sample, digest)
    });
}

#[test]
fn saving_in_the_background_under_load() {
    both(Duration::from_secs(90), |host| {
        let (server, port) = redis(host);
        benchmark(host, port, 20_000, 16);
        let transport = host.watch_transport();
        let load = host
            .program("redis-benchmark")
            .words(&format!("-h 127.0.0.1 -p {port} -t set,get -c {CONNECTIONS} -n 200000 -r 10000 -q"))
            .start("load");
        std::thread::sleep(Duration::from_millis(700));
        // The fork makes every connection fall back to TCP. Those that continue may attach again.
        let first = cli(host, port, "bgsave");
        let load = load.wait(Duration::from_secs(60));
        assert!(load.success(), "{}{}", load.stdout, load.stderr);
        transport.expect(Expected { port, connections: CONNECTIONS, share: 0.0 });
        let mut saved = String::new();
        for _ in 0..100 {
            saved = cli(host, port, "info persistence");
            if saved.contains("rdb_bgsave_in_progress:0") {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        drop(server);
        let file =
            host.program("redis-check-rdb").arg(host.path("dump.rdb")).run("check", Duration::from_secs(20));
        let sound = file.stdout.contains("RDB looks OK");
        (first, saved.contains("rdb_last_bgsave_status:ok"), sound)
    });
}
