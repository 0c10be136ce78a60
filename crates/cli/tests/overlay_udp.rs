//! Rules for UDP are in the network namespaces of containers, as long as the policy has them.
//!
//! Needs root, for network namespaces; nftables and Python, which `make test` installs.

#[path = "overlay/lab.rs"]
mod lab;

use std::process::Command;

use lab::{A, B, Lab};

/// Answers datagrams at the ports 5300 and 5301.
const SERVE: &str = "
import selectors, socket
wait = selectors.DefaultSelector()
for port in [5300, 5301]:
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind(('10.50.2.2', port))
    wait.register(s, selectors.EVENT_READ)
print('serving', flush=True)
while True:
    for key, _ in wait.select():
        data, client = key.fileobj.recvfrom(100)
        key.fileobj.sendto(data, client)
";

/// Prints the result of sending a datagram to each port, from port 6000.
const ASK: &str = "
import socket
def ask(port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind(('10.50.1.2', 6000))
        s.connect(('10.50.2.2', port))
        s.settimeout(1)
        try:
            s.send(b'12345')
            return s.recv(100).decode()
        except ConnectionRefusedError:
            return 'refused'
        except PermissionError:
            return 'forbidden'
        except TimeoutError:
            return 'nothing'
print(ask(5300), ask(5301))
";

fn ask(lab: &Lab) -> String {
    let output = lab.output(A, lab.command(A, false, "python3").args(["-c", ASK]));
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

fn tables(lab: &Lab, host: usize) -> String {
    let output = lab.output(host, Command::new("nft").args(["list", "tables"]));
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs supervised programs in both containers. One of them serves.
fn serve(lab: &mut Lab) {
    let mut server = lab.command(B, true, "python3");
    lab.launch(B, server.args(["-c", SERVE]), "serving");
    let mut other = lab.command(A, true, "sh");
    lab.launch(A, other.args(["-c", "echo here; exec sleep 1000"]), "here");
    let are_both = || [A, B].iter().all(|host| lab.status(*host)["now"]["supervisors"] == 1);
    lab::await_until(are_both, || format!("{}\n{}", lab.status(A), lab.status(B)));
}

#[test]
fn rules_for_udp_hold_at_both_ends_until_they_are_removed() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    assert_eq!(ask(&lab), "12345 12345");
    let rule = |action: &str, more: &str| {
        format!(
            "default = 'deny'\n[[rule]]\nname = 'one'\nprotocol = 'udp'\naction = '{action}'\nports = [5300]\n{more}"
        )
    };
    let said = lab.apply(B, &rule("deny", ""));
    assert!(said.contains("rules for UDP are in effect in 1 network namespaces"), "{said}");
    assert_eq!(ask(&lab), "refused 12345", "the default is for TCP");
    lab.apply(
        B,
        &rule("drop", "from = ['10.50.1.0/24']\nto = ['10.50.2.2']\nsource-ports = ['5999-6001']\n"),
    );
    assert_eq!(ask(&lab), "nothing 12345");
    for other in ["from = ['10.50.9.0/24']\n", "to = ['10.50.2.3']\n", "source-ports = [6001]\n"] {
        lab.apply(B, &rule("drop", other));
        assert_eq!(ask(&lab), "12345 12345", "{other}");
    }
    // The client's host decides too, and the first rule that matches does.
    lab.apply(B, "");
    assert!(!tables(&lab, B).contains("shunt"));
    lab.apply(A, &rule("drop", "[[rule]]\nname = 'two'\nprotocol = 'udp'\naction = 'deny'\n"));
    assert!(
        ["forbidden refused", "forbidden forbidden", "nothing refused"].contains(&ask(&lab).as_str()),
        "{}",
        ask(&lab)
    );
    assert!(tables(&lab, A).contains("shunt"));
    assert_eq!(lab.status(A)["now"]["udp"]["namespaces"], 1);

    // The next router of a killed one has no rules.
    lab.kill(A);
    assert!(tables(&lab, A).contains("shunt"));
    lab.start(A);
    lab::await_until(|| !tables(&lab, A).contains("shunt"), || lab.status(A).to_string());
    assert_eq!(ask(&lab), "12345 12345");
}

/// A container that starts later gets the rules, and loses them with its last supervised program.
#[test]
fn rules_for_udp_come_to_containers_that_start_later() {
    let mut lab = Lab::with_routers();
    let policy = "[[rule]]\nname = 'one'\nprotocol = 'udp'\naction = 'drop'\nports = [5300]\n";
    let said = lab.apply(B, policy);
    assert!(!said.contains("UDP"), "{said}");
    let mut server = lab.command(B, true, "python3");
    let server = lab.launch(B, server.args(["-c", SERVE]), "serving");
    lab::await_until(|| tables(&lab, B).contains("shunt"), || lab.status(B).to_string());
    assert_eq!(ask(&lab), "nothing 12345");
    lab.stop(server);
    lab::await_until(|| !tables(&lab, B).contains("shunt"), || lab.status(B).to_string());
}

#[test]
fn what_the_kernel_cannot_do_for_udp_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("policy.toml");
    for (key, what) in [
        ("action = 'overlay'", "action = \"overlay\""),
        ("action = 'allow'\nrate = '1mbit'", "rate and container-rate"),
        ("action = 'allow'\npriority = 3", "dscp and priority"),
        ("action = 'deny'\ndirection = 'egress'", "direction"),
        ("action = 'deny'\nports = ['dns']", "names of ports"),
    ] {
        std::fs::write(&path, format!("[[rule]]\nname = 'a'\nprotocol = 'udp'\n{key}\n")).unwrap();
        let output = lab::shunt(&["overlay", "policy", "check", path.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(&format!("policy.toml:3: a rule for UDP cannot have {what}")), "{said}");
    }
}
