//! MariaDB with sysbench, whose threads have stacks of 64 KiB. In Debian's configuration MariaDB
//! writes its files through an io_uring, which must not affect its connections.

use shunt_compat::{Expected, Host, both};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(150);
const THREADS: usize = 8;
const EVENTS: usize = 800;

/// Runs sysbench against a server with this `option`, and returns the number of events that it
/// counts.
fn sysbench(host: &Host, option: &str) -> Option<String> {
    let port = host.port();
    let data = format!("--datadir={}", host.path("data").display());
    // On start, a server removes files from this directory that look like those of a dead server.
    let temporary = host.path("");
    let made = host
        .program("mariadb-install-db")
        .native()
        .env("TMPDIR", &temporary)
        .args(["--no-defaults", "--user=root", "--skip-test-db", &data])
        .run("install", LIMIT);
    assert!(made.success(), "{}", host.logs());
    let server = host
        .program("mariadbd")
        .env("TMPDIR", &temporary)
        .words(&format!(
            "--no-defaults --user=root --skip-grant-tables --bind-address=127.0.0.1 --port={port}"
        ))
        .args([option.to_owned(), data, format!("--socket={}", host.path("mariadb.sock").display())])
        .start("mariadbd");
    host.wait_for_port(port);
    let client = host
        .program("mariadb")
        .words(&format!("--no-defaults -h 127.0.0.1 -P {port} -u root -e"))
        .arg("CREATE DATABASE sbtest")
        .run("mariadb", LIMIT);
    assert!(client.success(), "{}", host.logs());
    let run = |action: &str| {
        let done = host
                .program("sysbench")
                .words(&format!(
                    "oltp_read_write --db-driver=mysql --mysql-host=127.0.0.1 --mysql-port={port} --mysql-user=root \
                     --tables=2 --table-size=2000 --threads={THREADS} --events={EVENTS} --time=0 {action}"
                ))
                .run("sysbench", LIMIT);
        assert!(done.success(), "{}", host.logs());
        done.stdout
    };
    run("prepare");
    let transport = host.watch_transport();
    let report = run("run");
    transport.expect(Expected { port, connections: THREADS, share: 0.9 });
    drop(server);
    let line =
        report.lines().find(|line| line.contains("total number of events")).expect("sysbench's report");
    line.split_whitespace().last().map(str::to_owned)
}

#[test]
fn sysbench_reads_and_writes() {
    both(LIMIT, |host| sysbench(host, "--innodb-use-native-aio=0"));
}

#[test]
fn sysbench_with_a_server_that_has_an_io_uring() {
    both(LIMIT, |host| sysbench(host, "--innodb-use-native-aio=1"));
}
