//! Each runtime's server, asked by itself, by tokio and by Python: one message at a time and many at once, on several
//! connections. What comes back is the same as natively, nobody waits for ever, and the road is the one that can be had.

use shunt_compat::{Host, Way, both, converse, gate};
use shunt_runtimes::CONNECTIONS;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const TOKIO: &str = env!("CARGO_BIN_EXE_echo-tokio");

/// What `server` was asked by everybody, and heard; `way` is its road.
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

/// Its system calls are its own, as async-std's.
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
