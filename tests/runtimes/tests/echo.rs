//! Tests each runtime's server with clients of the same runtime, of tokio and of Python: with
//! single messages and bursts, on several connections. The results must be the same as natively, no
//! client may hang, and the transport must be the expected one.

use shunt_compat::{Host, Way, both, converse, gate};
use shunt_runtimes::CONNECTIONS;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const TOKIO: &str = env!("CARGO_BIN_EXE_echo-tokio");

/// Runs all clients against `server` and returns their results; `way` is the expected transport.
fn everybody(server: &'static str, way: Way) {
    both(LIMIT, move |host| {
        let clients: [(&str, Option<&str>); 4] =
            [("itself", None), ("tokio", None), ("threads", Some("threads")), ("asyncio", Some("asyncio"))];
        clients.map(|(name, python)| {
            let program = if name == "tokio" { TOKIO } else { server };
            ask(host, server, program, python, way)
        })
    });
}

fn ask(host: &Host, server: &str, client: &str, python: Option<&str>, way: Way) -> String {
    let port = host.port();
    let (number, gate) = (port.to_string(), gate(port));
    let serving = host.program(server).args(["serve", &number]);
    let asking = match python {
        Some(style) => {
            let count = CONNECTIONS.to_string();
            host.script("python3", "echo.py").args(["client", style, &number, &count, "60", &gate])
        }
        None => host.program(client).args(["ask", &number, &gate]),
    };
    converse(host, (port, CONNECTIONS), (serving, asking), way)
}

#[test]
fn tokio_is_on_shared_memory() {
    everybody(TOKIO, Way::Shm);
}

/// smol, like async-std, makes its system calls inline.
#[test]
fn smol_is_on_shared_memory() {
    everybody(env!("CARGO_BIN_EXE_echo-smol"), Way::Shm);
}

#[test]
fn async_std_is_on_shared_memory() {
    everybody(env!("CARGO_BIN_EXE_echo-async-std"), Way::Shm);
}

#[test]
fn monoio_is_seen_to_use_a_ring() {
    everybody(env!("CARGO_BIN_EXE_echo-monoio"), Way::Tcp("io_uring"));
}
