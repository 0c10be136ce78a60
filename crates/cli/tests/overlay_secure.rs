//! Containers that are not trusted: the attempts of a hostile program with a socket of the host
//! network, and their outcomes. Needs root and gcc.
//!
//! `overlay/attempts.md` lists the attempts of `overlay/attack.c` with their outcomes.

#[path = "overlay/attempts.rs"]
mod attempts;
#[path = "overlay/lab.rs"]
mod lab;

use std::process::Command;

use attempts::{Kept, attack, compare};
use lab::{A, B, CLIENT, CLIENT_IPV6, Lab, SERVER, SERVER_IPV6};
use serde_json::json;

/// Echoes all bytes, on connections accepted at an address, or on a connection to it.
const ECHO: &str = "
import socket, sys
def echo(s):
    while data := s.recv(65536):
        s.sendall(data)
if sys.argv[1] == 'accept':
    family = socket.AF_INET6 if ':' in sys.argv[2] else socket.AF_INET
    listener = socket.create_server((sys.argv[2], 9000), family=family)
    print('listening', flush=True)
    while True:
        connection, _ = listener.accept()
        try:
            echo(connection)
        except OSError:
            pass
else:
    connection = socket.create_connection((sys.argv[2], 9000))
    print('connected', flush=True)
    echo(connection)
";

fn attack_in(lab: &Lab, is_supervised: bool, way: &str, pass: &str) -> Command {
    let mut command = lab.command(A, is_supervised, attack());
    command.args([way, CLIENT, SERVER, "192.168.77.", "wire", pass]);
    command
}

/// Returns the hostile program for an overlay of IPv6. `hosts` is the prefix of the hosts'
/// addresses.
fn attack_ipv6(lab: &Lab, way: &str, hosts: &str) -> Command {
    let mut command = lab.command(A, true, attack());
    command.args([way, CLIENT_IPV6, SERVER_IPV6, hosts, "wire", "-"]);
    command
}

/// Enables connection tracking on both hosts, so that their kernels know where each connection
/// leads.
fn translate(lab: &Lab) {
    for host in [A, B] {
        let mut nft = Command::new("nft");
        nft.arg("add table inet t; add chain inet t c { type filter hook input priority 0; }; add rule inet t c ct state established accept");
        assert!(lab.hosts[host].net.inside(|| nft.status()).unwrap().success());
    }
}

/// A policy with a class that differs from the program's own.
const POLICY: &str =
    "[[rule]]\nname = 'all'\naction = 'allow'\ndscp = 'cs1'\npriority = 5\nrate = '400mbit'\n";

/// Starts routers with that policy, on hosts that track connections.
fn translating() -> Lab {
    translated(Lab::with_routers())
}

fn translated(lab: Lab) -> Lab {
    translate(&lab);
    lab.apply(A, POLICY);
    lab
}

#[test]
fn a_program_that_connects_gets_what_the_page_says() {
    let mut lab = translating();
    let mut server = lab.command(B, true, "python3");
    lab.launch(B, server.args(["-c", ECHO, "accept", "0.0.0.0"]), "listening");
    let output = lab.output(A, &mut attack_in(&lab, true, "connect", "-"));
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(lab.paths(A, "client"), (1, json!({})), "{said} {}", String::from_utf8_lossy(&output.stderr));
    compare(&said, Kept::UnderFilter);
}

#[test]
fn a_program_that_accepts_gets_the_same() {
    let mut lab = translating();
    let hostile = lab.launch(A, &mut attack_in(&lab, true, "accept", "-"), "listening");
    let mut client = lab.command(B, true, "python3");
    lab.launch(B, client.args(["-c", ECHO, "connect", CLIENT]), "connected");
    let said = lab.await_end(hostile);
    assert_eq!(lab.paths(A, "server"), (1, json!({})), "{said}");
    compare(&said, Kept::UnderFilter);
}

/// The overlay has IPv6 addresses. The hosts have addresses of either family, which must not be
/// visible.
#[test]
fn a_program_on_an_overlay_of_ipv6_gets_the_same() {
    for (hosts_are_ipv6, hosts) in [(true, "2001:db8:77::"), (false, "192.168.77.")] {
        let mut lab = translated(Lab::of_both_families(hosts_are_ipv6));
        let mut server = lab.command(B, true, "python3");
        let server = lab.launch(B, server.args(["-c", ECHO, "accept", "::"]), "listening");
        let output = lab.output(A, &mut attack_ipv6(&lab, "connect", hosts));
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(
            lab.paths(A, "client"),
            (1, json!({})),
            "{said} {}",
            String::from_utf8_lossy(&output.stderr)
        );
        compare(&said, Kept::UnderFilter);
        lab.stop(server);
        let hostile = lab.launch(A, &mut attack_ipv6(&lab, "accept", hosts), "listening");
        let mut client = lab.command(B, true, "python3");
        lab.launch(B, client.args(["-c", ECHO, "connect", CLIENT_IPV6]), "connected");
        let said = lab.await_end(hostile);
        assert_eq!(lab.paths(A, "server"), (1, json!({})), "{said}");
        compare(&said, Kept::UnderFilter);
    }
}

/// The program is in the container, but outside the filter. It should never be started like this.
/// The page lists its outcomes.
#[test]
fn a_program_outside_the_filter_gets_what_the_page_says() {
    let mut lab = translating();
    let mut server = lab.command(B, true, "python3");
    lab.launch(B, server.args(["-c", ECHO, "accept", "0.0.0.0"]), "listening");
    let meeting = lab.path("meeting").display().to_string();
    let given = lab.launch(A, &mut attack_in(&lab, false, "given", &meeting), "waiting");
    let output = lab.output(A, &mut attack_in(&lab, true, "connect", &meeting));
    assert!(output.status.success(), "{output:?}");
    let has_lsm = lab.status(A)["without-lsm"].is_null();
    compare(&lab.await_end(given), if has_lsm { Kept::OutsideWithLsm } else { Kept::Outside });
}

/// Returns the command in a new PID namespace, like that of a container.
fn contained(command: &Command) -> Command {
    let mut unshare = Command::new("unshare");
    unshare
        .args(["--pid", "--fork", "--mount-proc", "--"])
        .arg(command.get_program())
        .args(command.get_args());
    unshare
}

fn serve(lab: &mut Lab) {
    let mut server = lab.command(B, true, "python3");
    lab.launch(B, server.args(["-c", ECHO, "accept", "0.0.0.0"]), "listening");
}

/// Reports that it is connected. When the file exists, it reports the outcome of further calls.
const CONVERSE: &str = "
import os, socket, sys, time
s = socket.create_connection(('10.50.2.2', 9000))
s.sendall(b'x' * 1000)
left = 1000
while left:
    left -= len(s.recv(left))
print('connected', flush=True)
while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
if len(sys.argv) > 1:
    import errno
    copy, outcomes = os.dup(s.fileno()), []
    for call in [lambda: os.read(copy, 1), lambda: os.write(copy, b'x'), lambda: s.send(b'x')]:
        try:
            outcomes.append(call())
        except OSError as error:
            outcomes.append(errno.errorcode[error.errno])
    print(*outcomes)
";

/// Pretends to be a supervisor, and prints whether the router accepts that.
const PRETEND: &str = "
import socket, sys
requests = [
    '{\"hello\":{\"version\":7,\"guards\":true}}',
    '{\"connect\":{\"to\":\"10.50.2.2:9000\",\"from\":null}}',
    '{\"accepted\":{\"local\":\"10.50.1.2:9000\",\"remote\":\"10.50.2.2:9000\"}}',
]
for words in requests:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s, socket.socket() as shown:
        s.connect(sys.argv[1])
        socket.send_fds(s, [words.encode()], [shown.fileno()])
        s.settimeout(20)
        # What was shown is closed in any case.
        print(s.recv(1000) not in [b'', b'\"done\"'])
";

/// A router is cloned for connections of containers with their own control group. That takes longer
/// with more memory.
#[test]
fn a_router_keeps_no_memory_that_it_took_to_start() {
    let lab = Lab::with_routers();
    let kilobytes = lab.memory(A);
    assert!(kilobytes < 16 * 1024, "{kilobytes} kB");
}

#[test]
fn only_processes_of_the_host_are_supervisors() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    let mut pretend = Command::new("python3");
    pretend.args(["-c", PRETEND, lab.socket(A).to_str().unwrap()]);
    let of_container = lab.output(A, &mut contained(&pretend));
    assert_eq!(String::from_utf8_lossy(&of_container.stdout), "False\nFalse\nFalse\n", "{of_container:?}");
    let of_host = lab.output(A, &mut pretend);
    assert_eq!(String::from_utf8_lossy(&of_host.stdout), "True\nTrue\nTrue\n", "{of_host:?}");
}

#[test]
fn a_program_is_served_only_if_its_whole_container_is_under_the_filter() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    let mut run = lab.command(A, true, "python3");
    run.args(["-c", CONVERSE]);
    let output = lab.output(A, &mut contained(&run));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "connected\n", "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    assert_eq!(lab.paths(A, "client"), (1, json!({})));

    // Another process runs in the container, and could receive the socket.
    let words: Vec<String> = std::iter::once(run.get_program())
        .chain(run.get_args())
        .map(|word| format!("'{}'", word.to_str().unwrap().replace('\'', "'\\''")))
        .collect();
    let mut beside = Command::new("sh");
    beside.args(["-c", &format!("sleep 60 & {}", words.join(" "))]);
    let output = lab.output(A, &mut contained(&beside));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "connected\n", "{output:?}");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("something in this one is not under its filter"), "{complaint}");
    assert_eq!(lab.paths(A, "client").0, 1);
    assert!(lab.log(A).contains("of its container is not under the filter"));
}

/// Revoking a connection affects all copies of its descriptor. The error is one that TCP has.
#[test]
fn a_connection_that_is_revoked_ends_as_one_that_is_aborted() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    let mut client = lab.command(A, true, "python3");
    let client = lab.launch(A, client.args(["-c", CONVERSE]).arg(lab.path("go")), "connected");
    let said = lab.apply(A, "default = 'deny'\n");
    assert!(said.contains("1 connections have been ended"), "{said}");
    std::fs::write(lab.path("go"), "").unwrap();
    assert_eq!(lab.await_end(client), "connected\nECONNABORTED EPIPE EPIPE\n");
}

/// A supervisor continues without the router that started it, and finds the next router.
#[test]
fn a_supervisor_outlives_the_router_that_has_started_it() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    const AGAIN: &str = "
import os, socket, sys, time
for number in ['1', '2']:
    while not os.path.exists(sys.argv[1] + number):
        time.sleep(0.01)
    with socket.create_connection(('10.50.2.2', 9000)) as s:
        s.sendall(b'x')
        assert s.recv(1) == b'x'
    print('connected', number, flush=True)
";
    let mut client = lab.command(A, true, "sh");
    client.args(["-c", "echo up; exec python3 -c \"$1\" \"$2\"", "sh", AGAIN]).arg(lab.path("go"));
    let client = lab.launch(A, &mut client, "up");
    std::fs::write(lab.path("go1"), "").unwrap();
    lab::await_until(|| lab.said(client).contains("connected 1"), || lab.said(client));
    assert_eq!(lab.paths(A, "client"), (1, json!({})));
    lab.kill(A);
    lab.start(A);
    lab::await_until(|| lab.status(A)["now"]["supervisors"] == 1, || lab.status(A).to_string());
    std::fs::write(lab.path("go2"), "").unwrap();
    assert!(lab.await_end(client).ends_with("connected 2\n"));
    assert_eq!(lab.paths(A, "client"), (1, json!({})));
}

/// The key of all routers is replaced step by step, while they run. No connection stays on the
/// overlay at any step.
#[test]
fn routers_change_their_key_while_they_run() {
    let mut lab = Lab::build();
    lab.make_key("key-a");
    std::fs::copy(lab.path("key-a"), lab.path("key-b")).unwrap();
    lab.start_with(A, "key-a");
    lab.start_with(B, "key-b");
    serve(&mut lab);
    let mut connections = 0;
    let mut connect = |lab: &Lab| {
        let mut client = lab.command(A, true, "python3");
        let output = lab.output(A, client.args(["-c", CONVERSE]));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "connected\n", "{output:?}");
        connections += 1;
        assert_eq!(lab.paths(A, "client"), (connections, json!({})));
    };
    let change = |lab: &Lab, host: usize, words: &[&str]| {
        let path = lab.path(["key-a", "key-b"][host]).display().to_string();
        let before = lab.log(host).matches("the key file is another").count();
        let output = lab::shunt(&[&["overlay", "new-key"], words, &[&path]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let is_taken = || lab.log(host).matches("the key file is another").count() > before;
        lab::await_until(is_taken, || lab.log(host));
    };
    let former = std::fs::read_to_string(lab.path("key-a")).unwrap();
    connect(&lab);
    change(&lab, A, &["--next"]);
    connect(&lab);
    // The copy has the same owner and mode.
    std::fs::copy(lab.path("key-a"), lab.path("key-b")).unwrap();
    lab::await_until(|| lab.log(B).contains("the key file is another"), || lab.log(B));
    connect(&lab);
    for step in ["--use-next", "--retire"] {
        for host in [B, A] {
            change(&lab, host, &[step]);
            connect(&lab);
        }
    }
    for name in ["key-a", "key-b"] {
        let now = std::fs::read_to_string(lab.path(name)).unwrap();
        assert!(now.len() == former.len() && now != former);
    }
    let twice = lab::shunt(&["overlay", "new-key", "--retire", lab.path("key-a").to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&twice.stderr).contains("make the next one first"), "{twice:?}");
}
