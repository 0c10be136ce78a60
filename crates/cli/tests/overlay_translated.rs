//! Service addresses, which are translated on the way to other addresses (as by kube-proxy and
//! IPVS). So the two programs see different addresses for one connection. Such connections stay on
//! the overlay and report the reason. Needs root, nft and Python.

#[path = "overlay/lab.rs"]
mod lab;

use std::process::Command;

use lab::{A, B, CLIENT, Lab, SERVER};
use serde_json::json;

/// Serves two ports in one process. Each answer contains the port, and the client's address.
const SERVE: &str = "
import socket, threading
def serve(listener, port):
    while True:
        connection, peer = listener.accept()
        with connection:
            connection.sendall(f'{port} {peer[0]} '.encode() + connection.recv(100))
listeners = [(socket.create_server(('10.50.2.2', port)), port) for port in (9000, 9001)]
for listener, port in listeners[1:]:
    threading.Thread(target=serve, args=(listener, port)).start()
print('listening', flush=True)
serve(*listeners[0])
";

const ASK: &str = "
import socket, sys
for place in sys.argv[1:]:
    host, port = place.split(':')
    with socket.create_connection((host, int(port))) as s:
        assert s.getpeername() == (host, int(port)), s.getpeername()
        s.sendall(b'bytes')
        print(s.recv(100).decode())
";

#[test]
fn connections_that_are_translated_stay_on_the_overlay() {
    /// The first address belongs to no host. The second is on the server's host, which has no such
    /// container. The third belongs to a server, but another server gets its connections.
    const SERVICES: [&str; 3] = ["10.50.9.9:80", "10.50.2.200:80", "10.50.2.2:9001"];
    let mut lab = Lab::build();
    lab.patience_ms = 1000;
    lab.start(A);
    lab.start(B);
    let mut server = lab.command(B, true, "/usr/bin/python3");
    lab.launch(B, server.args(["-c", SERVE]), "listening");
    let ask = |places: &[&str]| {
        let mut client = lab.command(A, true, "/usr/bin/python3");
        let output = lab.output(A, client.args(["-c", ASK]).args(places));
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(ask(&[SERVICES[2]]), format!("9001 {CLIENT} bytes\n"), "nothing is translated yet");
    let mut rules = "add table ip services\n\
        add chain ip services output { type nat hook output priority -100 ; }\n"
        .to_owned();
    for service in SERVICES {
        let (host, port) = service.split_once(':').unwrap();
        rules +=
            &format!("add rule ip services output ip daddr {host} tcp dport {port} dnat to {SERVER}:9000\n");
    }
    std::fs::write(lab.path("rules"), rules).unwrap();
    let mut nft = Command::new("nft");
    let output = lab.output(A, nft.arg("-f").arg(lab.path("rules")));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(ask(&SERVICES), format!("9000 {CLIENT} bytes\n").repeat(3));
    let (host, why) = lab.paths(A, "client");
    assert_eq!((host, &why["unknown-host"], &why["not-supervised"]), (1, &json!(1), &json!(1)), "{why}");
    // The lab's routers search for a socket at least as long as they wait for the answer.
    assert!(why["not-found"] == 1 || why["router-silent"] == 1, "{why}");
    assert_eq!((lab.paths(B, "server").0, &lab.status(B)["connections"]["reset"]), (1, &json!(0)));
    // An address without translation works as before.
    assert_eq!(ask(&[&format!("{SERVER}:9000")]), format!("9000 {CLIENT} bytes\n"));
    assert_eq!(lab.paths(A, "client").0, 2);
}
