//! PostgreSQL with pgbench: SELECT only and TPC-B, simple and prepared, 8 clients. SQL verifies the
//! balances. Also queries that are compiled.

use shunt_compat::{Expected, Host, Program, both};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

const CLIENTS: usize = 8;
/// PostgreSQL refuses to run as root.
const USER: &str = "postgres";

struct Database {
    _server: Program,
    port: u16,
}

impl Database {
    fn start(host: &Host) -> Database {
        let limit = Duration::from_secs(60);
        let dir = database_dir(host);
        host.program("initdb")
            .native()
            .user(USER)
            .args([
                "--auth",
                "trust",
                "--no-sync",
                "--username",
                "postgres",
                "--encoding",
                "UTF8",
                "--pgdata",
            ])
            .arg(&dir)
            .run("initdb", limit);
        let port = host.port();
        let server = host
            .program("postgres")
            .user(USER)
            .arg("-D")
            .arg(&dir)
            .args(["-p", &port.to_string(), "-c", "listen_addresses=127.0.0.1"])
            .args(["-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "max_wal_size=256MB"])
            .stopped_by_interrupt()
            .start("postgres");
        let database = Database { _server: server, port };
        host.wait_for_port(port);
        for _ in 0..200 {
            let ready = host.program("pg_isready").native().words(&format!("-h 127.0.0.1 -p {port}"));
            if ready.start("pg_isready").wait(limit).success() {
                return database;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("postgres did not come up\n{}", host.logs());
    }

    fn pgbench(&self, host: &Host, arguments: &str) -> String {
        host.program("pgbench")
            .user(USER)
            .words(&format!("-h 127.0.0.1 -p {} -U postgres {arguments} postgres", self.port))
            .run("pgbench", Duration::from_secs(40))
            .stdout
    }

    fn sql(&self, host: &Host, statement: &str) -> String {
        host.program("psql")
            .user(USER)
            .words(&format!("-h 127.0.0.1 -p {} -U postgres -X -A -t -c", self.port))
            .arg(statement)
            .arg("postgres")
            .run("psql", Duration::from_secs(20))
            .stdout
    }
}

/// Creates a directory that belongs to the user of the server.
fn database_dir(host: &Host) -> PathBuf {
    let dir = host.path("data");
    fs::create_dir(&dir).expect("own directory");
    if rustix::process::geteuid().is_root() {
        let status =
            std::process::Command::new("chown").arg(USER).arg(&dir).status().expect("chown (coreutils)");
        assert!(status.success(), "the user {USER} is missing: run `make test`, which installs PostgreSQL");
    }
    dir
}

/// Runs `pgbench -c 8` in this mode, twice. The report must show no failure and every transaction.
fn run(script: &'static str, mode: &'static str, transactions: usize) {
    both(Duration::from_secs(100), move |host| {
        let database = Database::start(host);
        database.pgbench(host, "-i -s 2 -q");
        let transport = host.watch_transport();
        let report =
            database.pgbench(host, &format!("-n {script} -M {mode} -c {CLIENTS} -j 2 -t {transactions}"));
        transport.expect(Expected { port: database.port, connections: CLIENTS, share: 0.9 });
        let all = CLIENTS * transactions;
        assert!(report.contains("number of failed transactions: 0 "), "{report}");
        assert!(report.contains(&format!("actually processed: {all}/{all}")), "{report}");
        let history = database.sql(host, "select count(*) from pgbench_history");
        let balanced = database.sql(
            host,
            "select (select coalesce(sum(delta), 0) from pgbench_history) = (select sum(bbalance) from pgbench_branches)
                and (select sum(bbalance) from pgbench_branches) = (select sum(abalance) from pgbench_accounts)
                and (select sum(bbalance) from pgbench_branches) = (select sum(tbalance) from pgbench_tellers)",
        );
        assert_eq!(balanced.trim(), "t", "the balances do not add up");
        // A row set that is larger than any buffer on its way.
        let rows = database.sql(host, "select aid, bid, repeat('x', 40) from pgbench_accounts order by aid");
        (history, rows)
    });
}

#[test]
fn select_only_simple() {
    run("-S", "simple", 8000);
}

#[test]
fn select_only_prepared() {
    run("-S", "prepared", 12_000);
}

#[test]
fn tpc_b_simple() {
    run("-b tpcb-like", "simple", 1500);
}

#[test]
fn tpc_b_prepared() {
    run("-b tpcb-like", "prepared", 1500);
}

/// Queries that LLVM compiles. Each session loads its library at its first query, and the constants
/// there look like system calls.
#[test]
fn compiled_queries() {
    const CLIENTS: usize = 2;
    const TRANSACTIONS: usize = 200;
    both(Duration::from_secs(100), |host| {
        let database = Database::start(host);
        let script = host.write(
            "compiled.sql",
            "\\set number random(1, 100)\nselect sum(x * :number) from generate_series(1, 100) x;\n",
        );
        database.sql(host, "alter system set jit_above_cost = 0");
        database.sql(host, "select pg_reload_conf()");
        let plan = "explain (analyze) select sum(x) from generate_series(1, 100) x";
        assert!(database.sql(host, plan).contains("JIT:"), "LLVM compiles nothing");
        let transport = host.watch_transport();
        let report = database.pgbench(
            host,
            &format!("-n -f {} -c {CLIENTS} -t {TRANSACTIONS}", script.to_str().expect("a plain path")),
        );
        transport.expect(Expected { port: database.port, connections: CLIENTS, share: 0.5 });
        let all = CLIENTS * TRANSACTIONS;
        assert!(report.contains(&format!("actually processed: {all}/{all}")), "{report}");
    });
}
