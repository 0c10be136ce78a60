//! Latencies of requests, which programs measure while someone asks (`shunt_abi::latency`).

use shunt_abi::latency::{Latency, bucket_of};
use shunt_abi::reason::Transport;
use shunt_abi::status::{Connection, Snapshot};
use shunt_compat::{Host, Program, under_shunt};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(40);

/// What the server waits before it answers.
const ANSWER_NANOS: u64 = 50_000_000;

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Starts a server and a client. Their requests become slow when the gate of `name` is written.
fn pair(host: &Host, name: &str, is_server_native: bool) -> (Program, Program, u16) {
    let port = host.port();
    let server = host.script("python3", "latency.py").args(["server", &port.to_string()]);
    let server = if is_server_native { server.native() } else { server }.start(&format!("server {name}"));
    host.wait_for_port(port);
    let client = host.script("python3", "latency.py").args(["client", &port.to_string(), name, "done"]);
    (server, client.start(&format!("client {name}")), port)
}

/// Returns the client's end of the connection to this port, once its row is there.
fn client_end(snapshot: &Snapshot, port: u16) -> Option<&Connection> {
    snapshot.processes.iter().flat_map(|process| &process.connections).find(|end| end.remote.port() == port)
}

fn latency(host: &Host, port: u16) -> Latency {
    let status = host.status().expect("there is a broker");
    client_end(&status, port).expect("the connection goes on").latency.clone()
}

#[test]
fn a_client_measures_its_requests_only_while_someone_asks() {
    under_shunt(LIMIT, |host| {
        let transport = host.watch_transport();
        let (server, client, port) = pair(host, "shm", false);
        // A connection to a program that is not under shunt stays on TCP.
        let (tcp_server, tcp_client, tcp_port) = pair(host, "tcp", true);
        transport.wait_for_shm(port, 1, LIMIT);
        drop(transport);
        eventually("both are listed", || {
            let status = host.status().expect("there is a broker");
            [port, tcp_port].iter().all(|port| client_end(&status, *port).is_some())
        });
        for port in [port, tcp_port] {
            assert!(latency(host, port).is_unknown(), "no one has asked");
        }
        for name in ["shm", "tcp"] {
            host.write(name, "");
            eventually("requests are slow", || host.path(&format!("{name}.slow")).exists());
        }

        let asked = host.status_with_latency().expect("there is a broker");
        for (port, transport) in [(port, Transport::Shm), (tcp_port, Transport::Tcp)] {
            let end = client_end(&asked, port).expect("the connection goes on");
            assert_eq!((end.connected, end.send.transport), (true, transport));
            assert!(end.latency.count() > 0, "{end:?}");
            let quicker: u64 = end.latency.buckets[..bucket_of(ANSWER_NANOS)].iter().sum();
            assert_eq!(quicker, 0, "no answer comes before the server has sent it: {end:?}");
            assert!(end.latency.sum_nanos >= ANSWER_NANOS * end.latency.count(), "{end:?}");
        }
        let mut ends = asked.processes.iter().flat_map(|process| &process.connections);
        let accepted = ends.find(|end| end.local.port() == port).expect("the server is under shunt");
        assert!(!accepted.connected && accepted.latency.is_unknown(), "{accepted:?}");

        // No one asks any more. A few requests later, none of them has been measured.
        eventually("the wish ends", || {
            let before = [port, tcp_port].map(|port| latency(host, port));
            std::thread::sleep(Duration::from_millis(500));
            before == [port, tcp_port].map(|port| latency(host, port))
        });
        host.write("done", "");
        for client in [client, tcp_client] {
            let ended = client.wait(LIMIT);
            assert!(ended.success(), "{}", ended.stderr);
        }
        drop((server, tcp_server));
    });
}
