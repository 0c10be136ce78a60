//! Shared parts of the scale tests: starting the load, and reading the resource usage of processes
//! from /proc.

mod usage;

pub use usage::{Usage, link_kib};

use shunt_abi::reason::Transport;
use shunt_abi::status::{Direction, Snapshot};
use shunt_compat::{Host, Launch, Program};
use std::path::Path;
use std::time::{Duration, Instant};

/// Returns the command for the load program. Only tests know its path, so they pass it.
pub fn load<'h>(host: &'h Host, executable: &str, words: &str) -> Launch<'h> {
    host.program(executable).words(words)
}

/// Starts a server on a host that is configured for many connections. Returns the server and its
/// port.
pub fn serve(host: &Host, executable: &str) -> (Program, u16) {
    widen(host);
    let port = host.port();
    (serve_at(host, executable, port, "server"), port)
}

/// Starts a server with this name.
pub fn serve_at(host: &Host, executable: &str, port: u16, name: &str) -> Program {
    let server = load(host, executable, &format!("serve {port}")).start(name);
    host.wait_for_port(port);
    server
}

/// Configures the host's network stack for many connections to one port, and for quick reuse of
/// ports.
pub fn widen(host: &Host) {
    assert!(host.ground().is_isolated(), "the tests of scale need a network namespace: run them as root");
    let settings = [
        // Above the ports at which the tests listen.
        ("net/ipv4/ip_local_port_range", "10000 65535"),
        ("net/ipv4/tcp_tw_reuse", "1"),
        ("net/core/somaxconn", "4096"),
    ];
    for (name, value) in settings {
        // These are the settings of the calling thread's network namespace.
        let path = format!("/proc/sys/{name}");
        std::fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

/// Waits until `ready` returns `true`, for at most `limit`.
pub fn wait_until(what: &str, limit: Duration, mut ready: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !ready() {
        assert!(Instant::now() < deadline, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until a server has released everything of peers that have gone. `before` is its usage
/// without peers.
pub fn wait_until_let_go(server: u32, port: u16, before: &Usage, limit: Duration) {
    wait_until("the server lets go of its peers", limit, || {
        drop(std::net::TcpStream::connect(("127.0.0.1", port)));
        let now = Usage::of(server).expect("it serves");
        now.links == 0 && now.descriptors <= before.descriptors + 8
    });
}

/// Counts the ends of connections that are attached in both directions, or will be with the next
/// byte. Returns the other ends too.
pub fn ends(snapshot: &Snapshot) -> (usize, Vec<&shunt_abi::status::Connection>) {
    let shared =
        |one: &Direction| one.transport == Transport::Shm || one.reason == shunt_abi::reason::Reason::Idle;
    let all = snapshot.processes.iter().flat_map(|process| &process.connections);
    let (on, off): (Vec<_>, Vec<_>) = all.partition(|one| shared(&one.send) && shared(&one.receive));
    (on.len(), off)
}

/// Returns how many members of a swarm have reported that they are ready.
pub fn ready_members(directory: &Path) -> usize {
    let names = std::fs::read_dir(directory).expect("the host's own directory").flatten();
    names.filter(|entry| entry.file_name().to_string_lossy().starts_with("ready-")).count()
}
