//! Python: blocking sockets with threads, and asyncio streams.

use shunt_compat::{Expected, Host, both};
use std::time::Duration;

const CONNECTIONS: usize = 12;

/// Server and client, and what the client says it got back.
fn echo(host: &Host, server_style: &str, client_style: &str) -> String {
    let port = host.port();
    let server =
        host.script("python3", "echo.py").args(["server", server_style, &port.to_string()]).start("server");
    host.wait_for_port(port);
    let road = host.watch_road();
    let client = host
        .script("python3", "echo.py")
        .args(["client", client_style, &port.to_string(), &CONNECTIONS.to_string(), "200", "1"])
        .run("client", Duration::from_secs(30));
    road.expect(Expected { port, connections: CONNECTIONS, share: 0.9 });
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
