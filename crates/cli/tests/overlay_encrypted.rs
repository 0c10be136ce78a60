//! A connection never leaves an encrypted overlay for a network that is not encrypted. Needs root
//! and Go.

#[path = "overlay/lab.rs"]
mod lab;

use lab::{A, B, Lab, SERVER, await_until, go};

/// Makes one connection, and returns the reasons for which connections stayed so far.
fn connect(lab: &Lab) -> serde_json::Value {
    let mut client = lab.command(A, true, go("client"));
    let output = lab.output(A, client.args([&format!("{SERVER}:9000"), "1", "1", "1000", "0"]));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok 1\n", "{output:?}");
    lab.paths(A, "client").1
}

/// Makes connections until one has stayed for this reason.
fn await_reason(lab: &Lab, reason: &str) {
    let stayed = || lab.paths(A, "client").1[reason].as_u64().unwrap_or_default();
    let before = stayed();
    let has_stayed = || {
        connect(lab);
        stayed() > before
    };
    await_until(has_stayed, || lab.status(A).to_string());
    // It also stays when it is asked again.
    let (moved, _) = lab.paths(A, "client");
    connect(lab);
    assert_eq!(lab.paths(A, "client").0, moved, "{}", lab.status(A));
}

/// Makes connections until one is moved.
fn await_move(lab: &Lab) {
    let (before, _) = lab.paths(A, "client");
    let is_moved = || {
        connect(lab);
        lab.paths(A, "client").0 > before
    };
    await_until(is_moved, || lab.status(A).to_string());
}

#[test]
fn nothing_leaves_an_encrypted_overlay() {
    let mut lab = Lab::build();
    lab.configuration = "encrypted = \"auto\"".to_owned();
    lab.start(A);
    lab.start(B);
    let mut server = lab.command(B, true, go("server"));
    lab.launch(B, server.args(["tcp4", ":9000"]), "listening");
    await_move(&lab);

    // As Docker encrypts an overlay network: the VXLAN packets that have a mark. Each of the two
    // hosts notices it, and then no connection is moved.
    let policy = "src 192.168.77.1 dst 192.168.77.2 proto udp dport 4789 dir out mark 0xd0c4e3 mask 0xffffff";
    let reverse =
        "src 192.168.77.2 dst 192.168.77.1 proto udp dport 4789 dir out mark 0xd0c4e3 mask 0xffffff";
    for (host, policy) in [(A, policy), (B, reverse)] {
        lab.hosts[host].net.words(&format!(
            "ip xfrm policy add {policy} tmpl src 0.0.0.0 dst 0.0.0.0 proto esp mode transport"
        ));
        await_reason(&lab, "encrypted");
        lab.hosts[host].net.words(&format!("ip xfrm policy delete {policy}"));
        await_move(&lab);
    }

    // An overlay by routes through a program that may encrypt.
    lab.hosts[A].net.words("ip tuntap add dev tunnel mode tun");
    lab.hosts[A].net.words("ip link set tunnel up");
    lab.hosts[A].net.words("ip route add 10.50.2.0/24 dev tunnel");
    await_reason(&lab, "encrypted");
    // The administrator knows better.
    lab.reload(A, "encrypted = \"auto\"", "encrypted = false");
    await_move(&lab);
    lab.reload(A, "encrypted = false", "encrypted = true");
    lab.hosts[A].net.words("ip link delete tunnel");
    await_reason(&lab, "encrypted");
}
