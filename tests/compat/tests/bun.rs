//! Bun, an executable of 90 MB. It creates and fills its epoll instances through libc, and waits on
//! them by an inline system call. None of its connections may be on shared memory, and everything
//! must work.

use shunt_compat::{Host, Launch, Way, both, converse, gate, node_package};
use std::path::{Path, PathBuf};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);
/// Why its connections are on TCP.
const REASON: &str = "own_calls";
const CLIENTS: usize = 8;

/// Returns the path of the build for all x86-64 processors. Hosts have no network, so this runs
/// before.
fn fetch() -> PathBuf {
    node_package("@oven/bun-linux-x64-baseline", "1.4.5").join("bin/bun")
}

fn bun<'h>(host: &'h Host, program: &Path) -> Launch<'h> {
    host.program(program.to_str().expect("plain"))
}

#[test]
fn a_web_server_answers_clients_under_shunt() {
    let program = fetch();
    both(LIMIT, move |host| {
        let port = host.port();
        let page = host.write("page.js", include_str!("../programs/page_bun.js"));
        let server = bun(host, &program).arg(page).arg(port.to_string());
        let client = host
            .script("python3", "pages.py")
            .args([&port.to_string(), "/", &CLIENTS.to_string(), "40"])
            .arg(gate(port));
        converse(host, (port, CLIENTS), (server, client), Way::Tcp(REASON))
    });
}

#[test]
fn streams_with_backpressure_from_and_to_bun() {
    let program = fetch();
    both(LIMIT, move |host| {
        let script = host.write("echo.js", include_str!("../programs/echo.js"));
        let port = host.port();
        let number = port.to_string();
        let node = host.script("node", "echo.js").args(["server", &number]).start("node");
        host.wait_for_port(port);
        let transport = host.watch_transport();
        let to_node =
            bun(host, &program).arg(&script).args(["client", &number, "4", "8"]).run("to-node", LIMIT);
        assert_eq!(transport.on_shm(port), 0, "{}", transport.report(port));
        drop(node);
        let port = port + 1;
        let number = port.to_string();
        let server = bun(host, &program).arg(&script).args(["server", &number]).start("bun");
        host.wait_for_port(port);
        let to_bun = host.script("node", "echo.js").args(["client", &number, "4", "8"]).run("to-bun", LIMIT);
        assert_eq!(transport.on_shm(port), 0, "{}", transport.report(port));
        drop(server);
        assert!(to_node.success() && to_bun.success(), "{}\n{}", to_node.stderr, to_bun.stderr);
        (to_node.stdout, to_bun.stdout)
    });
}
