//! Two hosts that know nothing of each other but the key: no `[[host]]` of the other one, no etcd
//! and no API server. Their routers find each other by the connections on the overlay.
//!
//! Needs root, for network namespaces; Python, Go and nft, which `make test` installs.

#[path = "overlay/lab.rs"]
mod lab;

use std::net::TcpListener;
use std::os::fd::AsFd;
use std::process::{Command, Output};

use lab::{A, B, Lab, SERVER, go};
use serde_json::{Value, json};
use shunt_kernel::hint::Hints;
use shunt_netns::Net;
use shunt_sys::identity;

/// A container that moves, and one on host b.
const MOVING: &str = "10.50.3.1";
const STAYING: &str = "10.50.2.9";

const IN_BAND: &str = "[in-band]\nhosts = ['192.168.77.0/24', '2001:db8:77::/64']";

/// Builds two hosts whose files name only themselves, and no containers.
fn strangers() -> Lab {
    let mut lab = Lab::build();
    lab.names_others = false;
    lab.containers = [String::new(), String::new()];
    lab.configuration = IN_BAND.to_owned();
    lab
}

/// Returns two hosts with routers, and a supervised server in host b's container.
fn serving() -> Lab {
    let mut lab = strangers();
    lab.start(A);
    lab.start(B);
    serve(&mut lab, true);
    lab
}

/// Starts a server in host b's container.
fn serve(lab: &mut Lab, is_supervised: bool) -> usize {
    let mut server = lab.command(B, is_supervised, go("server"));
    lab.launch(B, server.args(["tcp4", ":9000"]), "listening")
}

fn serve_at(lab: &mut Lab, host: usize, net: &Net, is_supervised: bool) -> usize {
    let mut server = lab.command(host, is_supervised, go("server"));
    lab.launch_in(net, server.args(["tcp4", ":9000"]), "listening")
}

/// Makes a connection from a container of a host, whose data both ends check.
fn converse(lab: &Lab, host: usize, from: &Net, with: &str) -> Output {
    let mut client = lab.command(host, true, go("client"));
    client.args([&format!("{with}:9000"), "1", "1", "1000", "0"]);
    let output = from.inside(|| client.output().unwrap());
    assert!(output.status.success(), "{output:?}");
    output
}

fn ask(lab: &Lab, with: &str) {
    converse(lab, A, &lab.hosts[A].container, with);
}

/// Exchanges bytes from host a's container by an IPv6 socket. Unlike [`ask`], this does not compare
/// addresses.
fn exchange(lab: &Lab, with: &str) {
    let mut client = lab.command(A, true, "python3");
    let script = format!(
        "import socket\nwith socket.socket(socket.AF_INET6) as s:\n s.connect(('::ffff:{with}', 9000))\n s.sendall(b'name 5\\n12345')\n assert s.recv(100)"
    );
    let output = lab.output(A, client.args(["-c", &script]));
    assert!(output.status.success(), "{output:?}");
}

fn moved(lab: &Lab) -> u64 {
    lab.paths(A, "client").0
}

fn stayed(lab: &Lab, host: usize, reason: &str) -> u64 {
    lab.paths(host, "client").1[reason].as_u64().unwrap_or(0)
}

fn await_moved(lab: &Lab, with: &str) {
    let moves = || {
        let before = moved(lab);
        ask(lab, with);
        moved(lab) > before
    };
    lab::await_until(moves, || lab.status(A).to_string());
}

/// Waits until a connection stays for that reason.
fn await_stayed(lab: &Lab, host: usize, from: &Net, with: &str, reason: &str) {
    let stays = || {
        let before = stayed(lab, host, reason);
        converse(lab, host, from, with);
        stayed(lab, host, reason) > before
    };
    lab::await_until(stays, || lab.status(host).to_string());
}

fn found(lab: &Lab, state: &str) -> u64 {
    lab.status(A)["now"]["in-band"]["containers"][state].as_u64().unwrap()
}

fn hints(lab: &Lab, result: &str) -> u64 {
    lab.status(A)["now"]["in-band"]["hints"][result].as_u64().unwrap()
}

fn await_state(lab: &Lab, state: &str, count: u64) {
    lab::await_until(|| found(lab, state) == count, || lab.status(A).to_string());
}

#[test]
fn the_first_connection_finds_the_host_and_the_second_is_moved() {
    let lab = serving();
    assert_eq!(lab.status(A)["now"]["lines"]["to"], json!({}));
    ask(&lab, SERVER);
    assert_eq!(lab.paths(A, "client"), (0, json!({ "discovering": 1 })));
    await_state(&lab, "known", 1);
    for connections in 1..=3 {
        ask(&lab, SERVER);
        assert_eq!(lab.paths(A, "client"), (connections, json!({ "discovering": 1 })));
        assert_eq!(lab.paths(B, "server").0, connections);
    }
    let status = lab.status(A);
    assert_eq!(status["now"]["in-band"]["routers"], json!(["192.168.77.2:7450"]));
    assert_eq!(status["now"]["lines"]["to"], json!({ "192.168.77.2:7450": true }));
    // Host b has made no connections, and so knows no other host.
    assert_eq!(lab.status(B)["now"]["in-band"]["routers"], json!([]));
    let control = lab.control(A).display().to_string();
    let text = lab::shunt(&["overlay", "status", "--control", &control]).stdout;
    assert!(
        String::from_utf8_lossy(&text).contains("in-band discovery: 1 containers known at 1 other routers")
    );

    // The policies of both hosts hold for containers that were found so.
    lab.apply(B, "[[rule]]\nname = 'no'\naction = 'deny'\nports = [9000]");
    assert_eq!(lab.ask_twice(), "ECONNREFUSED ECONNREFUSED");
    lab.apply(B, "default = 'allow'");
    lab.apply(A, "[[rule]]\nname = 'seen'\naction = 'overlay'\nports = [9000]");
    ask(&lab, SERVER);
    assert_eq!(stayed(&lab, A, "packet-policy"), 1);
    lab.apply(A, "default = 'allow'");
    await_moved(&lab, SERVER);
    // An encrypted overlay is not left.
    lab.reload(A, "move-brief = true", "move-brief = true\nencrypted = true");
    await_stayed(&lab, A, &lab.hosts[A].container, SERVER, "encrypted");
}

#[test]
fn routers_that_end_and_come_back_are_found_again() {
    let mut lab = serving();
    await_moved(&lab, SERVER);
    // A connection lasts while both routers are replaced.
    let mut lasting = lab.command(A, true, go("client"));
    lasting.args([&format!("{SERVER}:9000"), "1", "1", "1000", "600000"]);
    lab.launch(A, &mut lasting, "paused");
    lab.kill(B);
    await_state(&lab, "known", 0);
    ask(&lab, SERVER);
    lab.start(B);
    await_moved(&lab, SERVER);
    lab.kill(A);
    lab.start(A);
    assert_eq!(found(&lab, "known"), 0);
    // The new router's policy holds for the connection that the former one has moved.
    assert_eq!(lab.status(A)["now"]["connections"]["client"], 1, "{}", lab.status(A));
    await_moved(&lab, SERVER);
}

/// Its listening socket is older than the router, and so than the router's part of the kernel.
#[test]
fn a_server_that_is_older_than_its_router_is_found() {
    let mut lab = strangers();
    lab.configuration = format!("secure = false\n{IN_BAND}");
    lab.start(A);
    serve(&mut lab, true);
    ask(&lab, SERVER);
    lab.start(B);
    lab::await_until(|| lab.status(B)["now"]["listeners"] == 1, || lab.status(B).to_string());
    await_moved(&lab, SERVER);
    assert_eq!(lab.status(B)["now"]["in-band"]["hints"]["too-early"], 0);
}

#[test]
fn a_container_that_moves_is_found_where_it_is() {
    let mut lab = strangers();
    lab.start(A);
    lab.start(B);
    let staying = lab.add(B, STAYING.parse().unwrap());
    let before = lab.add(B, MOVING.parse().unwrap());
    let server = serve_at(&mut lab, B, &before, true);
    await_moved(&lab, MOVING);
    await_stayed(&lab, B, &staying, MOVING, "same-host");

    lab.stop(server);
    drop(before);
    let after = lab.add(A, MOVING.parse().unwrap());
    serve_at(&mut lab, A, &after, true);
    // Bridges forward to the place of the last packet.
    after.words(&format!("ping -c 1 -W 5 {STAYING}"));
    // Each connection reaches the server, whatever the routers still believe.
    await_stayed(&lab, A, &lab.hosts[A].container, MOVING, "same-host");
    let moves = || {
        let before = lab.paths(B, "client").0;
        converse(&lab, B, &staying, MOVING);
        lab.paths(B, "client").0 > before
    };
    lab::await_until(moves, || lab.status(B).to_string());
    assert_eq!(lab.status(A)["connections"]["reset"], 0);
    assert_eq!(lab.status(B)["connections"]["reset"], 0);
}

#[test]
fn a_container_whose_host_has_no_shunt_is_reached_on_the_overlay() {
    let mut lab = strangers();
    lab.start(A);
    serve(&mut lab, false);
    ask(&lab, SERVER);
    assert_eq!(lab.paths(A, "client"), (0, json!({ "discovering": 1 })));
    await_stayed(&lab, A, &lab.hosts[A].container, SERVER, "unknown-host");
    assert_eq!((hints(&lab, "received"), hints(&lab, "unanswered")), (0, 0));
    assert!(hints(&lab, "asked") > 1, "{}", lab.status(A));
    assert_eq!((found(&lab, "awaited"), moved(&lab)), (1, 0));
}

#[test]
fn a_router_with_another_key_is_not_found() {
    let mut lab = strangers();
    lab.make_key("other");
    lab.start(A);
    lab.start_with(B, "other");
    serve(&mut lab, true);
    ask(&lab, SERVER);
    lab::await_until(|| hints(&lab, "foreign") == 1, || lab.status(A).to_string());
    assert_eq!((found(&lab, "awaited"), moved(&lab)), (1, 0));
    assert_eq!(lab.status(A)["now"]["lines"]["to"], json!({}), "nothing is dialled");
}

/// A hostile container on host b answers with whatever it likes: here, its part is another loaded
/// program of the kernel.
#[test]
fn a_forged_or_repeated_hint_leads_nowhere() {
    let mut lab = serving();
    let hostile = lab.add(B, MOVING.parse().unwrap());
    let cookie = |net: &Net| {
        net.inside(|| identity::namespace(TcpListener::bind("127.0.0.1:0").unwrap().as_fd()).unwrap())
    };
    let (mut forging, mut seen) = Hints::load(&[("10.50.0.0".parse().unwrap(), 16)]).unwrap();
    let _hostile = forging.watch(cookie(&hostile), std::process::id()).unwrap().expect("a visible group");
    forging.answer(*b"anything you lik").unwrap();
    serve_at(&mut lab, B, &hostile, false);
    ask(&lab, MOVING);
    lab::await_until(|| hints(&lab, "foreign") == 1, || lab.status(A).to_string());
    assert_eq!(lab.status(A)["now"]["lines"]["to"], json!({}), "nothing is dialled");

    // It connects to another container, and repeats that one's answer.
    hostile.inside(|| std::net::TcpStream::connect((SERVER, 9000))).unwrap();
    let answer = seen.take().expect("the router of host b answers").answer;
    forging.answer(answer).unwrap();
    lab::await_until(
        || {
            ask(&lab, MOVING);
            hints(&lab, "refused") == 1
        },
        || lab.status(A).to_string(),
    );
    await_stayed(&lab, A, &lab.hosts[A].container, MOVING, "not-supervised");
    assert_eq!(moved(&lab), 0);
    // The other container is found as before.
    await_moved(&lab, SERVER);
}

/// Hints are below every other source.
#[test]
fn the_configuration_is_above_what_connections_show() {
    let mut lab = strangers();
    lab.names_others = true;
    lab.containers = ["'10.50.1.0/24', '10.50.3.0/24'", "'10.50.2.0/24'"].map(str::to_owned);
    lab.start(A);
    lab.start(B);
    let there = lab.add(B, MOVING.parse().unwrap());
    serve_at(&mut lab, B, &there, true);
    ask(&lab, MOVING);
    lab::await_until(|| hints(&lab, "known-otherwise") == 1, || lab.status(A).to_string());
    assert_eq!(lab.paths(A, "client"), (0, json!({ "same-host": 1 })), "as the file says");
}

#[test]
fn hosts_of_ipv6_are_found_too() {
    let mut lab = strangers();
    lab.routers = ["[2001:db8:77::1]:7450", "[2001:db8:77::2]:7450"];
    lab.ports = 3;
    lab.start(A);
    lab.start(B);
    let mut server = lab.command(B, true, go("server"));
    lab.launch(B, server.args(["tcp", ":9000"]), "listening");
    let moves = || {
        exchange(&lab, SERVER);
        moved(&lab) > 0
    };
    lab::await_until(moves, || lab.status(A).to_string());
    assert_eq!(lab.status(A)["now"]["in-band"]["routers"], json!(["[2001:db8:77::2]:7450"]));
}

/// A service's address is translated on the way, as by kube-proxy. The container that gets the
/// connection answers with its host, which does not have the service's address.
#[test]
fn a_translated_address_is_not_taken_for_a_container() {
    let lab = serving();
    let net = &lab.hosts[A].container;
    net.words("nft add table ip t");
    net.run("nft", ["add chain ip t c { type nat hook output priority -100 ; }"]);
    net.run("nft", [&format!("add rule ip t c ip daddr {MOVING} tcp dport 9000 dnat to {SERVER}:9000")]);
    exchange(&lab, MOVING);
    lab::await_until(|| hints(&lab, "refused") == 1, || lab.status(A).to_string());
    lab::await_until(
        || {
            exchange(&lab, MOVING);
            stayed(&lab, A, "not-supervised") > 0
        },
        || lab.status(A).to_string(),
    );
    assert_eq!(moved(&lab), 0);
    // The container's own address is found as before.
    await_moved(&lab, SERVER);
}

/// The network between the containers drops SYNs with options that it does not know.
#[test]
fn a_network_that_drops_the_option_costs_one_retransmission() {
    let lab = serving();
    let net = &lab.hosts[A].container;
    net.words("nft add table ip t");
    net.run("nft", ["add chain ip t c { type filter hook output priority 0 ; }"]);
    net.run("nft", ["add rule ip t c tcp flags & (syn|ack) == syn tcp doff > 10 drop"]);
    for _ in 0..3 {
        ask(&lab, SERVER);
    }
    assert_eq!((hints(&lab, "asked"), hints(&lab, "unanswered"), hints(&lab, "received")), (1, 1, 0));
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_shunt"));
    doctor.args(["doctor", "--json", "--control"]).arg(lab.control(A));
    let output = lab.hosts[A].net.inside(|| doctor.output().unwrap());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = report.to_string();
    assert!(text.contains("SYNs with its option were answered only without it"), "{text}");
}
