//! Servers with several listening sockets at one port (SO_REUSEPORT). The kernel chooses a socket
//! for each connection on the overlay. The process that accepts there must get the host connection.
//! Needs root, nginx, curl, Python and Go.

#[path = "overlay/lab.rs"]
mod lab;
#[path = "overlay/nginx.rs"]
mod nginx;

use std::fs;
use std::process::Output;

use lab::{A, B, Lab, SERVER, go};

const CONNECTIONS: u32 = 240;

/// Listens with several sockets at one port, in threads or processes, and accepts in a blocking
/// call or after select. Each answer contains the client's address, its bytes, and the number of
/// the listener.
const SERVE: &str = "
import os, select, socket, sys, threading
style, count, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def listen():
    listener = socket.socket(socket.AF_INET6)
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(('::', 9000))
    listener.listen(128)
    return listener
def serve(listener, number):
    listener.setblocking(number % 2 == 0)
    while True:
        if number % 2:
            select.select([listener], [], [])
        connection, peer = listener.accept()
        connection.setblocking(True)
        with connection:
            assert connection.getpeername() == peer
            connection.sendall(f'{number} {peer[0]} {peer[1]} '.encode() + connection.recv(1000))
listeners = [listen() for _ in range(count)]
for number in range(first + 1, first + count):
    if style == 'threads':
        threading.Thread(target=serve, args=[listeners[number - first], number]).start()
    elif os.fork() == 0:
        serve(listeners[number - first], number)
print('listening', flush=True)
serve(listeners[0], first)
";

/// Prints which listeners have answered, if every connection had its own bytes and addresses.
const ASK: &str = "
import socket, sys, threading
served = set()
def converse(first):
    for number in range(first, int(sys.argv[1]), 8):
        with socket.socket() as s:
            s.connect(('10.50.2.2', 9000))
            s.sendall(b'bytes of %d' % number)
            answer = b''
            while part := s.recv(1000):
                answer += part
            name = s.getsockname()
            server, rest = answer.decode().split(' ', 1)
            if rest != f'::ffff:{name[0]} {name[1]} bytes of {number}':
                print(answer, name)
            served.add(int(server))
threads = [threading.Thread(target=converse, args=[first]) for first in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sorted(served))
";

fn serve(lab: &mut Lab, is_supervised: bool, words: [&str; 3]) -> usize {
    let mut server = lab.command(B, is_supervised, "/usr/bin/python3");
    lab.launch(B, server.arg("-c").arg(SERVE).args(words), "listening")
}

fn ask(lab: &Lab) -> String {
    let mut client = lab.command(A, true, "/usr/bin/python3");
    said(lab.output(A, client.args(["-c", ASK, &CONNECTIONS.to_string()])))
}

fn said(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn expect_host(lab: &Lab, connections: u32) {
    assert_eq!(lab.paths(A, "client"), (connections.into(), serde_json::json!({})));
    assert_eq!(lab.paths(B, "server"), (connections.into(), serde_json::json!({})));
}

#[test]
fn threads_and_processes_with_a_socket_each_get_their_own_connections() {
    for style in ["threads", "processes"] {
        let mut lab = Lab::with_routers();
        serve(&mut lab, true, [style, "4", "0"]);
        assert_eq!(ask(&lab), "[0, 1, 2, 3]", "{style}");
        expect_host(&lab, CONNECTIONS);
    }
}

/// Each program has its own supervisor. When one of them ends, the others continue.
#[test]
fn programs_that_were_started_one_by_one_share_a_port() {
    let mut lab = Lab::with_routers();
    serve(&mut lab, true, ["threads", "2", "0"]);
    let second = serve(&mut lab, true, ["processes", "2", "2"]);
    assert_eq!(ask(&lab), "[0, 1, 2, 3]");
    expect_host(&lab, CONNECTIONS);
    lab.stop(second);
    let is_one = || lab.status(B)["now"]["supervisors"] == 1;
    lab::await_until(is_one, || lab.status(B).to_string());
    assert_eq!(ask(&lab), "[0, 1]");
    expect_host(&lab, 2 * CONNECTIONS);
}

/// No supervisor would ask for a connection that the unsupervised program accepts. So the router
/// promises none at this port.
#[test]
fn a_program_that_is_not_supervised_keeps_all_that_share_its_port_on_the_overlay() {
    let mut lab = Lab::with_routers();
    serve(&mut lab, true, ["threads", "2", "0"]);
    let stranger = serve(&mut lab, false, ["threads", "2", "2"]);
    assert_eq!(ask(&lab), "[0, 1, 2, 3]");
    assert_eq!(lab.paths(A, "client"), (0, serde_json::json!({ "not-supervised": CONNECTIONS })));
    lab.stop(stranger);
    assert_eq!(ask(&lab), "[0, 1]");
    assert_eq!(
        lab.paths(A, "client"),
        (CONNECTIONS.into(), serde_json::json!({ "not-supervised": CONNECTIONS }))
    );
    assert_eq!(lab.status(B)["connections"]["reset"], 0);
}

#[test]
fn go_servers_that_share_a_port() {
    let mut lab = Lab::with_routers();
    for _ in 0..3 {
        let mut server = lab.command(B, true, go("server"));
        lab.launch(B, server.args(["tcp4", ":9000", "shared"]), "listening");
    }
    let mut client = lab.command(A, true, go("client"));
    client.args([&format!("{SERVER}:9000"), "400", "32", "5000", "0"]);
    assert_eq!(said(lab.output(A, &mut client)), "ok 400");
    expect_host(&lab, 400);
}

/// `listen ... reuseport` creates a socket for each worker.
#[test]
fn nginx_with_a_socket_for_each_worker() {
    const FILES: usize = 64;
    let mut lab = Lab::with_routers();
    let content = |file: usize| -> Vec<u8> { (0..300_000).map(|at| (at * (file + 2) % 251) as u8).collect() };
    let log = nginx::directory(&lab).join("access.log");
    let http = format!("log_format worker '$pid $remote_addr'; access_log {} worker;", log.display());
    let site = nginx::Site { workers: 4, http: &http, server: "listen 80 reuseport;", sockets: 4 };
    let files: Vec<_> = (0..FILES).map(|file| (file.to_string(), content(file))).collect();
    nginx::serve(&mut lab, true, &site, &files);
    for file in 0..FILES {
        let mut curl = lab.command(A, true, "curl");
        curl.args(["-sS", "--fail", "--max-time", "60", &format!("http://{SERVER}/{file}")]);
        let output = lab.output(A, &mut curl);
        assert!(
            output.status.success() && output.stdout == content(file),
            "file {file}: {:?}",
            output.stderr
        );
    }
    expect_host(&lab, FILES as u32);
    let log = fs::read_to_string(log).unwrap();
    let workers: std::collections::BTreeSet<&str> =
        log.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert!(workers.len() >= 2, "each by the kernel's choice: {log}");
}
