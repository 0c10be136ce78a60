//! Python: blocking sockets with threads, and asyncio streams, with Python's event loop and with
//! uvloop. uvloop's libuv changes its epoll instance through an io_uring.

use shunt_compat::{Expected, Host, both, python_package};
use std::path::Path;
use std::time::Duration;

/// Debian's Python.
const PYTHON: &str = "/usr/bin/python3";
const UVLOOP: &str = "uvloop==0.23.0";
const CONNECTIONS: usize = 12;

/// Runs a server and a client, and returns the client's output.
fn echo(host: &Host, server_style: &str, client_style: &str) -> String {
    let port = host.port();
    let python = || {
        let script = host.script(PYTHON, "echo.py");
        if server_style == "uvloop" { script.env("PYTHONPATH", python_package(UVLOOP)) } else { script }
    };
    let server = python().args(["server", server_style, &port.to_string()]).start("server");
    host.wait_for_port(port);
    let transport = host.watch_transport();
    let client = python()
        .args(["client", client_style, &port.to_string(), &CONNECTIONS.to_string(), "200", "1"])
        .run("client", Duration::from_secs(30));
    transport.expect(Expected { port, connections: CONNECTIONS, share: 0.9 });
    drop(server);
    client.stdout
}

#[test]
fn blocking_sockets_with_threads() {
    both(Duration::from_secs(60), |host| echo(host, "threads", "threads"));
}

#[test]
fn asyncio_streams() {
    both(Duration::from_secs(60), |host| echo(host, "asyncio", "asyncio"));
}

#[test]
fn an_asyncio_server_and_blocking_clients() {
    both(Duration::from_secs(60), |host| echo(host, "asyncio", "threads"));
}

/// The worker waits for a listener and for connections that its threads return, with an event array
/// of as many entries as there are sockets. It fails if a socket is reported twice.
#[test]
fn a_worker_of_gunicorns_with_threads_lives_on() {
    both(Duration::from_secs(60), |host| {
        let (port, directory) = (host.port(), Path::new(env!("CARGO_MANIFEST_DIR")).join("programs"));
        let server = host
            .program("gunicorn")
            .args(["--workers", "1", "--threads", "8", "--keep-alive", "60", "--bind"])
            .args([format!("127.0.0.1:{port}"), "--chdir".into(), directory.display().to_string()])
            .args(["worker:app"])
            .start("server");
        host.wait_for_port(port);
        let transport = host.watch_transport();
        let client = host.script(PYTHON, "worker.py").args([&port.to_string(), "16", "400"]);
        let answers = client.run("client", Duration::from_secs(50)).stdout;
        transport.expect(Expected { port, connections: 16, share: 0.5 });
        server.stop();
        answers
    });
}

#[test]
fn uvloop_at_both_ends() {
    // Fetch it first, because hosts have no network but their own.
    python_package(UVLOOP);
    both(Duration::from_secs(60), |host| echo(host, "uvloop", "uvloop"));
}
