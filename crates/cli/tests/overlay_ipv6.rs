//! Overlays of IPv6, on hosts with addresses of either family. Programs use the host network under
//! overlay addresses, with policy, discovery and reports. Needs root, nginx, curl, Python, Go and
//! etcd. overlay_secure.rs tests untrusted programs.

#[path = "overlay/lab.rs"]
mod lab;
#[path = "overlay/nginx.rs"]
mod nginx;

use std::fs;
use std::net::Ipv6Addr;
use std::process::{Command, Output};

use lab::{A, B, CLIENT_IPV6, Lab, SERVER, SERVER_IPV6, go};
use serde_json::{Value, json};

fn said(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn python(lab: &Lab, script: &str, words: &[&str]) -> String {
    let mut client = lab.command(A, true, "/usr/bin/python3");
    said(lab.output(A, client.args(["-c", script]).args(words)))
}

fn expect_host(lab: &Lab, connections: u64) {
    assert_eq!(lab.paths(A, "client"), (connections, json!({})));
    assert_eq!(lab.paths(B, "server"), (connections, json!({})));
}

#[test]
fn curl_and_nginx_cross_the_host_network_and_see_the_overlay() {
    const PAYLOAD: usize = 5_000_000;
    for hosts_are_ipv6 in [true, false] {
        let mut lab = Lab::of_both_families(hosts_are_ipv6);
        let content: Vec<u8> = (0..PAYLOAD).map(|at| (at * 31 % 251) as u8).collect();
        let log = nginx::directory(&lab).join("access.log");
        let http = format!(
            "log_format seen '$remote_addr $server_addr $server_port'; access_log {} seen;",
            log.display()
        );
        // The socket is IPv6-only, as nginx creates it.
        let site = nginx::Site { workers: 2, http: &http, server: "listen [::]:80;", sockets: 1 };
        nginx::serve(&mut lab, true, &site, &[("file".to_owned(), content.clone())]);
        let before = (lab.bytes(A, "vxlan"), lab.bytes(A, "wire"));
        let mut curl = lab.command(A, true, "curl");
        curl.args(["-sS", "--fail", "--max-time", "60", "-w", "\n%{local_ip} %{remote_ip} %{remote_port}"]);
        let output = lab.output(A, curl.arg(format!("http://[{SERVER_IPV6}]/file")));
        assert!(output.status.success(), "{output:?}");
        let (body, seen) = output.stdout.split_at(PAYLOAD);
        assert!(body == content);
        assert_eq!(String::from_utf8_lossy(seen).trim(), format!("{CLIENT_IPV6} {SERVER_IPV6} 80"));
        let (vxlan, wire) = (lab.bytes(A, "vxlan") - before.0, lab.bytes(A, "wire") - before.1);
        assert!(vxlan < 20_000, "{vxlan} bytes crossed the overlay");
        assert!(wire > PAYLOAD as u64, "{wire} bytes crossed the host network");
        expect_host(&lab, 1);
        let log = fs::read_to_string(log).unwrap();
        assert_eq!(log.trim(), format!("{CLIENT_IPV6} {SERVER_IPV6} 80"));
    }
}

/// Several processes accept from one socket of both families, and clients use both, blocking or
/// not. Each connection must carry its own client's bytes, under its own client's address.
#[test]
fn both_families_at_once_and_nothing_is_swapped() {
    const CONNECTIONS: u64 = 240;
    const SERVE: &str = "
import os, select, socket
listener = socket.create_server(('', 9000), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
for worker in range(7):
    if os.fork() == 0:
        break
else:
    print('listening', flush=True)
waits = os.getpid() % 2
listener.setblocking(False)
while True:
    select.select([listener], [], [])
    try:
        connection, peer = listener.accept()
    except BlockingIOError:
        continue  # Another process was faster.
    connection.setblocking(True)
    with connection:
        assert connection.getpeername() == peer
        own = connection.getsockname()[0]
        connection.sendall(f'{peer[0]} {peer[1]} {own} '.encode() + connection.recv(1000))
";
    const ASK: &str = "
import select, socket, sys, threading
def converse(first):
    for number in range(first, int(sys.argv[1]), 8):
        is_ipv6, waits = number % 3 != 0, number % 2
        with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as s:
            to = 'fd00:50:2::2' if is_ipv6 else '10.50.2.2'
            if waits:
                s.connect((to, 9000))
            else:
                s.setblocking(False)
                s.connect_ex((to, 9000))
                select.select([], [s], [])
                assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
                s.setblocking(True)
            assert s.getpeername()[:2] == (to, 9000), s.getpeername()
            s.sendall(b'bytes of %d' % number)
            answer = b''
            while part := s.recv(1000):
                answer += part
            name, mapped = s.getsockname(), '' if is_ipv6 else '::ffff:'
            wanted = f'{mapped}{name[0]} {name[1]} {mapped}{to} bytes of {number}'
            if answer.decode() != wanted:
                print(answer, wanted)
threads = [threading.Thread(target=converse, args=[first]) for first in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print('ok')
";
    let mut lab = Lab::of_both_families(false);
    let mut server = lab.command(B, true, "/usr/bin/python3");
    lab.launch(B, server.args(["-c", SERVE]), "listening");
    assert_eq!(python(&lab, ASK, &[&CONNECTIONS.to_string()]), "ok");
    expect_host(&lab, CONNECTIONS);
}

/// The programs make their own system calls, and print the addresses that they see.
#[test]
fn static_programs_see_the_overlays_addresses() {
    for (hosts_are_ipv6, network) in [(true, "tcp"), (false, "tcp6")] {
        let mut lab = Lab::of_both_families(hosts_are_ipv6);
        let mut server = lab.command(B, true, go("server"));
        lab.launch(B, server.args([network, ":9000"]), "listening");
        let mut client = lab.command(A, true, go("client"));
        client.args([&format!("[{SERVER_IPV6}]:9000"), "200", "16", "20000", "0"]);
        assert_eq!(said(lab.output(A, &mut client)), "ok 200");
        expect_host(&lab, 200);
    }
}

const CONVERSE: &str = "
import socket, sys
family = socket.AF_INET6 if sys.argv[1] == '6' else socket.AF_INET
with socket.socket(family) as s:
    s.connect((sys.argv[2], 9000))
    s.sendall(b'name 5\\n12345')
    answer = b''
    while not answer.endswith(b'12345'):
        answer += s.recv(1000)
print(answer.decode().split('\\n')[1])
";

/// An IPv4 socket cannot become an IPv6 one, so its connection stays on the overlay. An IPv6 socket
/// with an IPv4 address is moved.
#[test]
fn hosts_of_ipv6_serve_what_is_a_socket_of_ipv6() {
    let mut lab = Lab::of_both_families(true);
    let mut server = lab.command(B, true, go("server"));
    lab.launch(B, server.args(["tcp", ":9000"]), "listening");
    assert_eq!(python(&lab, CONVERSE, &["6", &format!("::ffff:{SERVER}")]), "12345");
    expect_host(&lab, 1);
    assert_eq!(python(&lab, CONVERSE, &["4", SERVER]), "12345");
    assert_eq!(lab.paths(A, "client"), (1, json!({ "family": 1 })));
    let mut server = lab.command(B, true, go("server"));
    lab.launch(B, server.args(["tcp4", "10.50.2.2:9001"]), "listening");
    let script = CONVERSE.replace("9000", "9001");
    assert_eq!(python(&lab, &script, &["6", &format!("::ffff:{SERVER}")]), "12345");
    assert_eq!(lab.paths(A, "client"), (1, json!({ "family": 2 })));
    assert_eq!(lab.status(B)["connections"]["reset"], 0);
}

fn nft(lab: &Lab, words: &str) -> Vec<u8> {
    let mut nft = Command::new("nft");
    let output = lab.hosts[A].net.inside(|| nft.args(["-j", words]).output().unwrap());
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

/// Counts the packets of that class from host a to the other router.
fn count_class(lab: &Lab) {
    nft(
        lab,
        "add table ip6 t; add chain ip6 t c { type filter hook output priority 0; }; \
         add rule ip6 t c tcp dport 7450 ip6 dscp cs1 counter",
    );
}

fn counted(lab: &Lab) -> u64 {
    let listed: Value = serde_json::from_slice(&nft(lab, "list ruleset")).unwrap();
    let counters =
        listed["nftables"].as_array().unwrap().iter().flat_map(|one| one["rule"]["expr"].as_array());
    let packets = counters.flatten().find_map(|part| part["counter"]["packets"].as_u64());
    packets.unwrap_or_else(|| panic!("{listed}"))
}

#[test]
fn a_policy_names_addresses_of_ipv6_and_holds_for_connections_in_use() {
    let mut lab = Lab::of_both_families(true);
    for port in [":9000", ":9001"] {
        let mut server = lab.command(B, true, go("server"));
        lab.launch(B, server.args(["tcp", port]), "listening");
    }
    lab.apply(A, "[[rule]]\nname = 'no'\naction = 'deny'\nfrom = ['fd00:50:1::/48']\nports = [9001]\n");
    const DENIED: &str = "
import socket
for address in ['fd00:50:2::2', '::ffff:10.50.2.2']:
    try:
        socket.create_connection((address, 9001))
        print('connected')
    except OSError as error:
        print(error.errno == 111)
";
    assert_eq!(python(&lab, DENIED, &[]), "True\nconnected", "the rule is about the other family");
    // A connection in use gets another class, and its packets carry it.
    count_class(&lab);
    let mut client = lab.command(A, true, go("client"));
    client.args([&format!("[{SERVER_IPV6}]:9000"), "1", "1", "1000", "4000"]);
    let client = lab.launch(A, &mut client, "paused");
    assert_eq!(counted(&lab), 0);
    let applied =
        lab.apply(A, "[[rule]]\nname = 'class'\naction = 'allow'\nto = ['fd00:50:2::2']\ndscp = 'cs1'\n");
    assert!(lab.await_end(client).contains("ok 1"));
    assert!(counted(&lab) > 0, "{applied}");
    // A new connection has the class from its start.
    let before = counted(&lab);
    assert_eq!(python(&lab, CONVERSE, &["6", SERVER_IPV6]), "12345");
    assert!(counted(&lab) > before);
    // Another policy ends the connections that it forbids.
    let mut client = lab.command(A, true, go("client"));
    client.args([&format!("[{SERVER_IPV6}]:9000"), "1", "1", "1000", "60000"]);
    lab.launch(A, &mut client, "paused");
    let applied = lab.apply(A, "[[rule]]\nname = 'no'\naction = 'deny'\nto = ['fd00:50:2::2']\n");
    assert!(!applied.starts_with('0'), "{applied}");
    let left = || lab.status(A)["now"]["connections"]["client"].clone();
    lab::await_until(|| left() == 0, || lab.status(A).to_string());
}

#[test]
fn a_container_that_has_moved_is_found_by_etcd() {
    const ETCD: &str = "http://192.168.77.1:2379";
    const MOVED: &str = "fd00:50:1::7";
    let mut lab = Lab::with_both_prefixes(true);
    lab.configuration = format!("[etcd]\nendpoints = ['{ETCD}']\nlease-s = 2");
    lab.start_etcd("etcd", ETCD, &[]);
    lab.start(A);
    lab.start(B);
    // The configuration places this address on host a.
    let container = lab.add(B, "10.50.1.7".parse().unwrap());
    let moved: Ipv6Addr = MOVED.parse().unwrap();
    container.words(&format!("ip address add {moved}/32 dev eth0 nodad"));
    let mut server = lab.command(B, true, go("server"));
    lab.launch_in(&container, server.args(["tcp", ":9000"]), "listening");
    let is_found = || {
        let before = lab.paths(A, "client").0;
        assert_eq!(python(&lab, CONVERSE, &["6", MOVED]), "12345");
        lab.paths(A, "client").0 > before
    };
    lab::await_until(is_found, || lab.status(A).to_string());
}

#[test]
fn each_connection_is_reported_with_its_addresses() {
    let mut lab = Lab::of_both_families(true);
    for (port, is_supervised) in [("9000", true), ("9001", false)] {
        let mut server = lab.command(B, is_supervised, go("server"));
        lab.launch(B, server.args(["tcp", &format!(":{port}")]), "listening");
    }
    let clients = ["9000", "9001"].map(|port| {
        let mut client = lab.command(A, true, go("client"));
        client.args([&format!("[{SERVER_IPV6}]:{port}"), "1", "1", "1000", "20000"]);
        lab.launch(A, &mut client, "paused")
    });
    let ask = |host: usize, words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shunt"));
        // There is no broker in this directory.
        command.args(words).arg("--control").arg(lab.control(host)).env("XDG_RUNTIME_DIR", lab.path(""));
        let output = lab.hosts[host].net.inside(|| command.output().unwrap());
        assert!(output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let status: Value = serde_json::from_str(&ask(A, &["status", "--json"])).unwrap();
    let listed = status["overlay"]["connections"].as_array().unwrap();
    let to = |port: &str| {
        let remote = json!(format!("[{SERVER_IPV6}]:{port}"));
        listed.iter().find(|one| one["remote"] == remote).unwrap_or_else(|| panic!("{status}"))
    };
    assert_eq!((&to("9000")["path"], &to("9001")["reason"]), (&json!("host"), &json!("not-supervised")));
    assert_eq!(to("9000")["host"]["remote"], "[2001:db8:77::2]:7450");
    let own = to("9000")["local"].as_str().unwrap();
    assert!(own.starts_with(&format!("[{CLIENT_IPV6}]:")), "{own}");
    let pid = lab.pid(clients[0]).to_string();
    for subject in [&pid, own] {
        let text = ask(A, &["explain", subject]);
        assert!(text.contains(&format!("[{SERVER_IPV6}]:9000: on the host network")), "{text}");
    }
    let doctor = ask(A, &["doctor"]);
    assert!(doctor.contains("1 reached"), "{doctor}");
    // A router that is restarted takes the connection over.
    lab.kill(A);
    lab.start(A);
    assert_eq!(lab.status(A)["now"]["connections"]["client"], 1);
}
