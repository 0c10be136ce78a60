//! What the tests of scale share: their load, and what is left of it in /proc.

mod usage;

pub use usage::{Usage, link_kib};

use shunt_abi::reason::Road;
use shunt_abi::status::{Direction, Snapshot};
use shunt_compat::{Host, Launch, Program};
use std::path::Path;
use std::time::{Duration, Instant};

/// The load program. Its path is known to tests only, so they pass it.
pub fn load<'h>(host: &'h Host, executable: &str, words: &str) -> Launch<'h> {
    host.program(executable).words(words)
}

/// Starts a server on a host, with room there for many connections. It, and its port.
pub fn serve(host: &Host, executable: &str) -> (Program, u16) {
    widen(host);
    let port = host.port();
    (serve_at(host, executable, port, "server"), port)
}

/// Starts a server of this name.
pub fn serve_at(host: &Host, executable: &str, port: u16, name: &str) -> Program {
    let server = load(host, executable, &format!("serve {port}")).start(name);
    host.wait_for_port(port);
    server
}

/// Makes room on the host's own network stack: many connections to one port, and soon again.
pub fn widen(host: &Host) {
    assert!(host.ground().is_isolated(), "the tests of scale need a network namespace: run them as root");
    let settings = [
        // Above what the tests listen at.
        ("net/ipv4/ip_local_port_range", "10000 65535"),
        ("net/ipv4/tcp_tw_reuse", "1"),
        ("net/core/somaxconn", "4096"),
    ];
    for (name, value) in settings {
        // Those of the calling thread's namespace.
        let path = format!("/proc/sys/{name}");
        std::fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

/// Waits for `ready`, for at most `limit`.
pub fn wait_until(what: &str, limit: Duration, mut ready: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !ready() {
        assert!(Instant::now() < deadline, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until a server, told of in `before` without any peers, holds nothing of those that have gone.
pub fn wait_until_let_go(server: u32, port: u16, before: &Usage, limit: Duration) {
    wait_until("the server lets go of its peers", limit, || {
        drop(std::net::TcpStream::connect(("127.0.0.1", port)));
        let now = Usage::of(server).expect("it serves");
        now.links == 0 && now.descriptors <= before.descriptors + 8
    });
}

/// Ends of connections that are on shared memory both ways, or will be with the next byte, and those that are not.
pub fn ends(snapshot: &Snapshot) -> (usize, Vec<&shunt_abi::status::Connection>) {
    let shared = |one: &Direction| one.road == Road::Shm || one.reason == shunt_abi::reason::Reason::Idle;
    let all = snapshot.processes.iter().flat_map(|process| &process.connections);
    let (on, off): (Vec<_>, Vec<_>) = all.partition(|one| shared(&one.send) && shared(&one.receive));
    (on.len(), off)
}

/// How many of a swarm's members have said that they are ready.
pub fn ready_members(directory: &Path) -> usize {
    let names = std::fs::read_dir(directory).expect("the host's own directory").flatten();
    names.filter(|entry| entry.file_name().to_string_lossy().starts_with("ready-")).count()
}
