//! The policy of an overlay applies to unmodified programs, when they connect and afterwards. Needs
//! root and Go.

#[path = "overlay/lab.rs"]
mod lab;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use lab::{A, B, CLIENT, Lab, SERVER, go, held_page};
use serde_json::json;

/// Runs servers at the ports 9000 and 9001.
fn serve(lab: &mut Lab) {
    serve_as(lab, true);
}

fn serve_as(lab: &mut Lab, is_supervised: bool) {
    for port in [":9000", ":9001"] {
        let mut server = lab.command(B, is_supervised, go("server"));
        lab.launch(B, server.args(["tcp4", port]), "listening");
    }
}

fn python(lab: &Lab, is_supervised: bool, script: &str) -> String {
    let mut python = lab.command(A, is_supervised, "python3");
    let output = lab.output(A, python.args(["-c", script]));
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Prints the result of connect for each port, blocking and not.
const ASK: &str = "
import errno, selectors, socket
def ask(port, waits):
    with socket.socket() as s, selectors.DefaultSelector() as wait:
        s.setblocking(waits)
        error = s.connect_ex(('10.50.2.2', port))
        if error == errno.EINPROGRESS:
            wait.register(s, selectors.EVENT_WRITE)
            wait.select()
            error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            return errno.errorcode[error]
        s.setblocking(True)
        s.sendall(b'name 5\\n12345')
        answer = b''
        while not answer.endswith(b'12345'):
            part = s.recv(1000)
            assert part, 'it has ended'
            answer += part
        return 'connected'
print(*[ask(port, waits) for port in [9000, 9001] for waits in [True, False]])
";

#[test]
fn what_is_wrong_with_a_file_is_said_with_its_line() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("policy.toml");
    let check = |text: &str| {
        fs::write(&path, text).unwrap();
        let output = lab::shunt(&["overlay", "policy", "check", path.to_str().unwrap()]);
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(check("[[rule]]\nname = 'a'\naction = 'deny'\nports = [22]\n"), (Some(0), String::new()));
    let (code, said) = check("[[rule]]\nname = 'a'\naction = 'deny'\nfrom = ['web']\n");
    assert_eq!(code, Some(1));
    assert!(said.contains(&format!("{}:4: \"web\" is neither a prefix", path.display())), "{said}");
    let nobody = ["overlay", "policy", "show", "--control", "/nonexistent/socket"];
    let output = lab::shunt(&nobody);
    assert!(String::from_utf8_lossy(&output.stderr).contains("no router answers"));
}

#[test]
fn a_connection_is_denied_by_either_host_before_it_is_made() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    for (action, told, reason) in [("deny", "ECONNREFUSED", "denied"), ("drop", "ETIMEDOUT", "dropped")] {
        for host in [A, B] {
            let text = format!(
                "[labels]\nclients = ['10.50.1.0/24']\n[[rule]]\nname = 'one'\naction = '{action}'\nfrom = ['clients']\nports = [9000]\n"
            );
            lab.apply(host, &text);
            let said = python(&lab, true, ASK);
            assert_eq!(said, format!("{told} {told} connected connected\n"), "{action} {host}");
            lab.apply(host, "");
        }
        assert_eq!(lab.status(A)["connections"]["client"]["denied"][reason], 4);
    }
    assert_eq!(lab.paths(A, "client"), (8, json!({})));
    // The server does not see denied connections.
    assert_eq!(lab.paths(B, "server"), (8, json!({})));
    assert_eq!(python(&lab, true, ASK), "connected connected connected connected\n");
}

#[test]
fn what_only_some_may_do_is_denied_to_all_others() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    lab.apply(A, "default = 'deny'\n[[rule]]\nname = 'web'\naction = 'allow'\nto = ['10.50.2.2']\nports = ['9001-9010']\n");
    assert_eq!(python(&lab, true, ASK), "ECONNREFUSED ECONNREFUSED connected connected\n");
    let shown = lab.policy(A, &["show"]);
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(text.contains("10.50.2.2/32") && text.contains("9001-9010"), "{text}");
    let decide = |server: &str| {
        let decided = lab.policy(A, &["decide", CLIENT, server]);
        String::from_utf8(decided.stdout).unwrap()
    };
    let (allowed, denied) = (decide("10.50.2.2:9001"), decide("10.50.2.2:9000"));
    assert!(
        allowed.starts_with("allow\n") && allowed.ends_with("decided by the rule \"web\"\n"),
        "{allowed}"
    );
    assert!(denied.starts_with("deny\n") && denied.ends_with("decided by the default\n"), "{denied}");
}

/// The request that applies it has more than a megabyte.
#[test]
fn a_policy_with_thousands_of_rules_is_applied() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    let rule = |at: u32| {
        let (high, low) = (at / 250, at % 250);
        format!(
            "[[rule]]\nname = 'rule {at}'\naction = 'deny'\nfrom = ['10.50.{high}.{low}/32', '10.51.{high}.{low}/32']\n"
        )
    };
    // The client is 10.50.1.2.
    let others: String = (0..6_000).filter(|at| *at != 252).map(rule).collect();
    lab.apply(A, &others);
    assert_eq!(python(&lab, true, ASK), "connected connected connected connected\n");
    lab.apply(A, &(others + &rule(252)));
    assert_eq!(python(&lab, true, ASK), "ECONNREFUSED ECONNREFUSED ECONNREFUSED ECONNREFUSED\n");
    let decided = lab.policy(A, &["decide", "--json", CLIENT, "10.50.2.2:9000"]);
    let decided: serde_json::Value = serde_json::from_slice(&decided.stdout).unwrap();
    assert_eq!(decided["decided-by"], json!([{ "direction": null, "rule": "rule 252" }]));
}

/// The port is known when the client's socket is connected: the overlay connection is ended then.
#[test]
fn a_rule_can_be_about_the_port_of_the_client() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    let from = |lab: &Lab, port: u16| {
        let script = format!(
            "import errno, socket\nwith socket.socket() as s:\n    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n    \
             s.bind(('', {port}))\n    try:\n        s.connect(('10.50.2.2', 9000))\n        s.sendall(b'name 5\\n12345')\n        \
             print('answered' if s.recv(1000) else 'ended')\n    except OSError as error:\n        print(errno.errorcode[error.errno])"
        );
        python(lab, true, &script)
    };
    // A port that a connection has just had is in TIME_WAIT.
    for (host, first, last) in [(A, 7000, 7009), (B, 7100, 7109)] {
        lab.apply(
            host,
            &format!(
                "[[rule]]\nname = 'one'\naction = 'deny'\nsource-ports = ['{first}-{last}']\nports = [9000]\n"
            ),
        );
        for port in [first, last] {
            let said = from(&lab, port);
            assert!(
                ["ECONNREFUSED\n", "ECONNABORTED\n", "ECONNRESET\n", "ended\n"].contains(&said.as_str()),
                "{host} {said}"
            );
        }
        for port in [first - 1, last + 1] {
            assert_eq!(from(&lab, port), "answered\n", "{host}");
        }
        lab.apply(host, "");
    }
    assert_eq!(lab.paths(A, "client").0, 4, "{}", lab.status(A));
}

/// A reload for another reason does not permit again what has just been forbidden.
#[test]
fn a_policy_that_was_set_outlasts_a_reload_until_the_policy_file_changes() {
    let mut lab = Lab::build();
    let path = lab.path("of-file.toml");
    fs::write(&path, "").unwrap();
    lab.configuration = format!("policy = '{}'", path.display());
    lab.start(A);
    lab.start(B);
    serve(&mut lab);
    lab.apply(A, "default = 'deny'");
    let reload = |lab: &Lab, word: &str| {
        lab.reload(A, "move-brief = true", "move-brief = true");
        lab::await_until(|| lab.log(A).contains(word), || lab.log(A));
        lab::await_until(|| lab.log(A).contains("has been read again"), || lab.log(A));
    };
    reload(&lab, "stays in effect");
    assert_eq!(python(&lab, true, ASK), "ECONNREFUSED ECONNREFUSED ECONNREFUSED ECONNREFUSED\n");
    fs::write(&path, "[[rule]]\nname = 'one'\naction = 'deny'\nports = [9000]\n").unwrap();
    reload(&lab, "the policy file has changed");
    let is_in_effect = || python(&lab, true, ASK) == "ECONNREFUSED ECONNREFUSED connected connected\n";
    lab::await_until(is_in_effect, || lab.log(A));
    // The policy in effect is the file's, so the file decides.
    fs::write(&path, "").unwrap();
    reload(&lab, "has been read again");
    lab::await_until(|| python(&lab, true, ASK).starts_with("connected connected"), || lab.log(A));
}

/// The client has no supervisor, so its connection already exists when the server's host sees it.
#[test]
fn a_server_never_accepts_what_its_host_denies() {
    let mut lab = Lab::with_routers();
    const SERVE: &str = "
import socket, sys
with socket.create_server(('', 9000)) as listener:
    print('listening', flush=True)
    listener.setblocking(sys.argv[1] == 'waits')
    while True:
        try:
            connection, peer = listener.accept()
        except BlockingIOError:
            import select
            select.select([listener], [], [])
            continue
        with connection:
            connection.setblocking(True)
            connection.sendall(b'served')
";
    const CONNECT: &str = "
import socket
s = socket.create_connection(('10.50.2.2', 9000))
try:
    print(s.recv(100))
except ConnectionResetError:
    print('reset')
";
    for way in ["waits", "polls"] {
        let mut server = lab.command(B, true, "python3");
        let at = lab.launch(B, server.args(["-c", SERVE, way]), "listening");
        for _ in 0..2 {
            lab.apply(B, "[[rule]]\nname = 'all'\naction = 'deny'\nfrom = ['10.50.1.2']\n");
            assert_eq!(python(&lab, false, CONNECT), "reset\n", "{way}");
            lab.apply(B, "");
            assert_eq!(python(&lab, false, CONNECT), "b'served'\n", "{way}");
        }
        lab.stop(at);
    }
    let status = lab.status(B);
    assert_eq!(status["connections"]["server"]["denied"], json!({ "denied": 4 }), "{status}");
}

/// The broker of a host reads the rules for connections within that host.
#[test]
fn a_policy_is_published_for_connections_of_one_host() {
    let lab = Lab::with_routers();
    let published = || -> serde_json::Value {
        let text = std::fs::read_to_string(lab.control(A).with_extension("policy")).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    assert_eq!(published()["shared-by-default"], true);
    lab.apply(A, "default = 'deny'\n[[rule]]\nname = 'seen'\naction = 'overlay'\nports = [9000]\n");
    let policy = published();
    assert_eq!(policy["shared-by-default"], false);
    assert_eq!(policy["rules"][0]["shared"], false);
    assert_eq!(policy["rules"][0]["ports"]["numbers"], serde_json::json!([[9000, 9000]]));
}

#[test]
fn a_rule_that_needs_packets_leaves_a_connection_on_the_overlay() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    for host in [A, B] {
        lab.apply(host, "[[rule]]\nname = 'inspected'\naction = 'overlay'\nports = [9000]\n");
        assert_eq!(python(&lab, true, ASK), "connected connected connected connected\n");
        lab.apply(host, "");
    }
    assert_eq!(lab.paths(A, "client"), (4, json!({ "packet-policy": 4 })));
}

/// Opens connections to both ports, waits until all to one port have ended, and uses the others.
fn keep_open(ended: u64, kept: u64, error: &str) -> String {
    format!(
        "
import errno, select, socket, time
forbidden = [socket.create_connection(('{SERVER}', 9000)) for _ in range({ended})]
kept = [socket.create_connection(('{SERVER}', 9001)) for _ in range({kept})]
print('open', flush=True)
wait = select.poll()
for s in forbidden:
    wait.register(s, 0)
ended = set()
while len(ended) < {ended}:
    for fd, events in wait.poll():
        assert events & select.POLLERR, events
        wait.unregister(fd)
        ended.add(fd)
assert {{s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for s in forbidden}} == {{errno.{error}}}
for number, s in enumerate(kept):
    s.sendall(b'k%d 5\\n12345' % number)
    answer = b''
    while not answer.endswith(b'12345'):
        part = s.recv(1000)
        assert part, 'it has ended'
        answer += part
print('ok', flush=True)
time.sleep(60)
"
    )
}

const FORBID: &str = "[[rule]]\nname = 'one'\naction = 'deny'\nports = [9000]\n";

/// Connections to one port end when a policy forbids them. Those to the other port continue.
#[test]
fn another_policy_ends_what_it_forbids_and_nothing_else() {
    const ENDED: u64 = 1_000;
    const KEPT: u64 = 20;
    // On the host that forbids the connection, its end is aborted. The other end is reset.
    for (host, error) in [(A, "ECONNABORTED"), (B, "ECONNRESET")] {
        let mut lab = Lab::with_routers();
        serve(&mut lab);
        let mut client = lab.command(A, true, "python3");
        let client = lab.launch(A, client.args(["-c", &keep_open(ENDED, KEPT, error)]), "open");
        let shown = || {
            let output = lab.policy(host, &["show", "--json"]);
            serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["connections"].clone()
        };
        lab::await_until(|| shown()["default"] == ENDED + KEPT, || shown().to_string());
        let limit = "[[rule]]\nname = 'one'\naction = 'allow'\nports = [9000]\nrate = '1gbit'\n";
        let said = lab.apply(host, limit);
        println!("{said}");
        assert!(said.contains(&format!("{ENDED} go on with another rate or class\n")), "{said}");
        let said = lab.apply(host, FORBID);
        println!("{said}");
        assert!(said.starts_with(&format!("{ENDED} connections have been ended")), "{said}");
        lab::await_until(|| lab.said(client).ends_with("ok\n"), || lab.said(client));
        assert_eq!(shown(), json!({ "rules": [0], "default": KEPT }));
    }
}

/// A program is inside a call on one connection, because the kernel waits for a page (userfaultfd)
/// during a send. The other connections end immediately, and that one when the call returns.
#[test]
fn a_connection_whose_lock_is_held_keeps_no_other_open() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    const SCRIPT: &str = "
open_ones = [socket.create_connection(('10.50.2.2', 9000)) for _ in range(20)]
held = open_ones[7]
send = threading.Thread(target=lambda: libc.send(held.fileno(), ctypes.c_void_p(page), ctypes.c_size_t(4096), 0))
send.start()
time.sleep(0.3)
print('held', flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
os.close(faults)
send.join()
held.settimeout(20)
try:
    held.recv(1)
except ConnectionAbortedError:
    print('aborted')
";
    let mut client = lab.command(A, true, "python3");
    let client = lab.launch(A, client.args(["-c", &held_page(SCRIPT)]).arg(lab.path("go")), "held");
    let said = lab.apply(A, FORBID);
    let wanted = "1 end when their programs come out of the call that they are in\n";
    assert!(said.starts_with("19 connections have been ended") && said.ends_with(wanted), "{said}");
    fs::write(lab.path("go"), "").unwrap();
    assert_eq!(lab.await_end(client), "held\naborted\n");
}

/// A restarted router also ends connections that the previous router made.
#[test]
fn a_router_takes_over_the_connections_of_the_one_before() {
    const ENDED: u64 = 40;
    const KEPT: u64 = 5;
    for (host, error, begins_with_it) in [(A, "ECONNABORTED", false), (B, "ECONNRESET", true)] {
        let mut lab = Lab::with_routers();
        serve(&mut lab);
        let mut client = lab.command(A, true, "python3");
        let client = lab.launch(A, client.args(["-c", &keep_open(ENDED, KEPT, error)]), "open");
        let end = ["client", "server"][host];
        let count = |lab: &Lab| lab.status(host)["now"]["connections"][end].clone();
        lab::await_until(|| count(&lab) == ENDED + KEPT, || count(&lab).to_string());
        lab.kill(host);
        if begins_with_it {
            fs::write(lab.path("policy.toml"), FORBID).unwrap();
            lab.configuration = format!("policy = '{}'", lab.path("policy.toml").display());
            lab.start(host);
        } else {
            lab.start(host);
            let said = lab.apply(host, FORBID);
            assert!(said.starts_with(&format!("{ENDED} connections have been ended")), "{said}");
        }
        lab::await_until(|| lab.said(client).ends_with("ok\n"), || lab.said(client));
        assert_eq!(count(&lab), KEPT);
    }
}

/// A policy also ends connections that stay on the overlay and have only one supervised end.
#[test]
fn another_policy_ends_what_it_forbids_on_the_overlay_too() {
    const ENDED: u64 = 300;
    const KEPT: u64 = 5;
    for (host, error, end) in [(A, "ECONNABORTED", "client"), (B, "ECONNRESET", "server")] {
        let mut lab = Lab::with_routers();
        serve_as(&mut lab, host == B);
        let mut client = lab.command(A, host == A, "python3");
        let client = lab.launch(A, client.args(["-c", &keep_open(ENDED, KEPT, error)]), "open");
        let stayed = || {
            lab.paths(host, end).1.as_object().unwrap().values().map(|it| it.as_u64().unwrap()).sum::<u64>()
        };
        lab::await_until(|| stayed() == ENDED + KEPT, || lab.status(host).to_string());
        let said = lab.apply(host, FORBID);
        assert!(said.starts_with(&format!("{ENDED} connections have been ended")), "{said}");
        lab::await_until(|| lab.said(client).ends_with("ok\n"), || lab.said(client));
    }
}

/// A policy that is applied during the set-up of a connection ends it, even after the routers have
/// agreed.
#[test]
fn a_connection_that_was_permitted_when_it_was_begun_is_not_made() {
    let mut lab = Lab::build();
    lab.hold_ms = 0;
    lab.start(A);
    lab.start(B);
    serve(&mut lab);
    const SCRIPT: &str = "
import errno, os, select, socket, sys, time
s = socket.socket()
s.setblocking(False)
assert s.connect_ex(('10.50.2.2', 9000)) == errno.EINPROGRESS
select.select([], [s], [])
print('begun', flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print(errno.errorcode[s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)])
";
    let mut client = lab.command(A, true, "python3");
    let client = lab.launch(A, client.args(["-c", SCRIPT]).arg(lab.path("go")), "begun");
    lab.apply(A, FORBID);
    fs::write(lab.path("go"), "").unwrap();
    assert_eq!(lab.await_end(client), "begun\nECONNABORTED\n");
    assert_eq!(lab.status(A)["connections"]["client"]["denied"], json!({ "denied": 1 }));
}

/// Rate and priority of a rule apply to a connection from its start, and change while it is used.
#[test]
fn a_rule_gives_connections_a_rate_and_a_class_also_those_in_use() {
    let mut lab = Lab::build();
    // In secure mode, the program does not see these options.
    lab.configuration = "secure = false\n".into();
    lab.start(A);
    lab.start(B);
    serve(&mut lab);
    // The script prints the options of its socket on request, and how long 20 MB take.
    const SCRIPT: &str = "
import os, socket, sys, time
SO_MAX_PACING_RATE = 47
s = socket.create_connection(('10.50.2.2', 9000))
def options():
    rate = int.from_bytes(s.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8), sys.byteorder)
    return [rate, s.getsockopt(socket.IPPROTO_IP, socket.IP_TOS), s.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)]
def take(megabytes):
    begun = time.monotonic()
    s.sendall(b'name %d\\n' % (megabytes * 1_000_000))
    left = megabytes * 1_000_000 + len(b'name 10.50.2.2:9000 %s:%d\\n' % (s.getsockname()[0].encode(), s.getsockname()[1]))
    sent = 0
    s.setblocking(False)
    while left:
        if sent < megabytes * 1_000_000:
            try:
                sent += s.send(bytes(min(65536, megabytes * 1_000_000 - sent)))
            except BlockingIOError:
                pass
        try:
            part = s.recv(1 << 20)
            assert part, 'it has ended'
            left -= len(part)
        except BlockingIOError:
            time.sleep(0.0005)
    s.setblocking(True)
    return time.monotonic() - begun
def wait_for(word):
    while not os.path.exists(sys.argv[1] + word):
        time.sleep(0.01)
print('first', *options(), flush=True)
wait_for('second')
print('second', *options(), flush=True)
print('seconds', take(10), flush=True)
wait_for('third')
print('third', *options(), flush=True)
take(1)
";
    let rule = |rest: &str| format!("[[rule]]\nname = 'one'\naction = 'allow'\nports = [9000]\n{rest}");
    lab.apply(A, &rule("rate = '800mbit'\ndscp = 'cs1'\n"));
    let mut client = lab.command(A, true, "python3");
    client.args(["-c", SCRIPT]).arg(lab.path("go-"));
    let client = lab.launch(A, &mut client, "first");
    let said = lab.apply(A, &rule("rate = '40mbit'\npriority = '1:20'\n"));
    assert!(said.contains("1 go on with another rate or class\n"), "{said}");
    fs::write(lab.path("go-second"), "").unwrap();
    lab::await_until(|| lab.said(client).contains("seconds"), || lab.said(client));
    let said = lab.apply(A, "");
    assert!(said.contains("1 go on with another rate or class\n"), "{said}");
    fs::write(lab.path("go-third"), "").unwrap();
    let said = lab.await_end(client);
    let lines: Vec<Vec<f64>> = said
        .lines()
        .map(|line| line.split_whitespace().skip(1).map(|word| word.parse().unwrap()).collect())
        .collect();
    assert_eq!(lines[0], [100e6, 32.0, 0.0]);
    assert_eq!(lines[1], [5e6, 0.0, f64::from(0x1_0020)]);
    assert_eq!(lines[3], [u64::MAX as f64, 0.0, 0.0]);
    // 10 MB at 5 MB/s take 2 s. A busy machine takes longer.
    assert!(lines[2][0] > 1.5, "{said}");
    println!("10 MB at 40 Mbit/s: {:.2} s", lines[2][0]);
}

/// Returns the bytes that a traffic class of the client's host has sent.
fn class_bytes(lab: &Lab, class: &str) -> u64 {
    let mut tc = Command::new("tc");
    tc.args(["-s", "class", "show", "dev", "wire", "classid", class]);
    let output = lab.hosts[A].net.inside(|| tc.output().unwrap());
    let text = String::from_utf8(output.stdout).unwrap();
    let sent = text.split_once("Sent ").and_then(|(_, rest)| rest.split_whitespace().next()?.parse().ok());
    sent.unwrap_or_else(|| panic!("{text}"))
}

/// All connections of a container share a class of the host's queueing discipline, with its limit
/// and its counters. The limit changes while they are used. Other containers have their own class.
#[test]
fn connections_of_a_container_share_a_limit_and_are_counted_together() {
    const BYTES: u64 = 5_000_000;
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    let tc = |lab: &Lab, words: &str| lab.hosts[A].net.words(&format!("tc {words}"));
    tc(&lab, "qdisc add dev wire root handle 1: htb default 10");
    tc(&lab, "class add dev wire parent 1: classid 1:10 htb rate 10gbit");
    tc(&lab, "class add dev wire parent 1: classid 1:20 htb rate 20mbit");
    let rule = |action: &str| {
        format!(
            "[labels]\nlimited = ['{CLIENT}']\n[[rule]]\nname = 'free'\naction = 'allow'\nports = [9001]\n\
             [[rule]]\nname = 'limited'\nfrom = ['limited']\n{action}\n"
        )
    };
    lab.apply(A, &rule("action = 'allow'\npriority = '1:20'"));
    // Makes four connections at a time. The last one pauses after all bytes are sent.
    let send = |lab: &Lab, port: u16, bytes: u64| {
        let mut client = lab.command(A, true, go("client"));
        client.args([
            format!("{SERVER}:{port}"),
            "4".into(),
            "4".into(),
            (bytes / 4).to_string(),
            "0".into(),
        ]);
        let begun = Instant::now();
        let output = lab.output(A, &mut client);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "ok 4\n", "{output:?}");
        begun.elapsed().as_secs_f64()
    };
    let seconds = send(&lab, 9000, BYTES);
    // 5 MB at 2.5 MB/s take 2 s. A busy machine only takes longer.
    assert!(seconds > 1.5, "{seconds}");
    println!("5 MB in a class of 20 Mbit/s: {seconds:.2} s");
    let limited = class_bytes(&lab, "1:20");
    assert!((BYTES..BYTES * 6 / 5).contains(&limited), "{limited}");
    let free = send(&lab, 9001, BYTES);
    println!("5 MB in another: {free:.2} s");
    // The last segments of the earlier connections may be counted late.
    assert!(class_bytes(&lab, "1:20") - limited < BYTES / 100);
    assert!(class_bytes(&lab, "1:10") > BYTES);
    // A connection in use follows the current policy, and ends when it is forbidden.
    let mut client = lab.command(A, true, go("client"));
    client.args([&format!("{SERVER}:9000"), "1", "1", &BYTES.to_string(), "60000"]);
    let client = lab.launch(A, &mut client, "");
    lab::await_until(|| class_bytes(&lab, "1:20") > limited + 500_000, || lab.said(client));
    tc(&lab, "class change dev wire parent 1: classid 1:20 htb rate 1gbit");
    lab::await_until(|| lab.said(client).contains("paused"), || lab.said(client));
    // The earlier connections are removed shortly after their end.
    lab::await_until(|| lab.status(A)["now"]["connections"]["client"] == 1, || lab.status(A).to_string());
    let said = lab.apply(A, &rule("action = 'deny'"));
    assert!(said.starts_with("1 connections have been ended"), "{said}");
}

/// The router makes the classes itself, and leaves devices alone that have other ones.
#[test]
fn a_container_rate_limits_all_connections_of_a_container_together() {
    const BYTES: u64 = 5_000_000;
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    let qdiscs = |lab: &Lab| {
        let output = lab.hosts[A]
            .net
            .inside(|| Command::new("tc").args(["qdisc", "show", "dev", "wire"]).output().unwrap());
        String::from_utf8(output.stdout).unwrap()
    };
    let rule = |rate: &str| {
        format!(
            "[[rule]]\nname = 'limited'\naction = 'allow'\nfrom = ['{CLIENT}']\ncontainer-rate = '{rate}'\n"
        )
    };
    let client = |lab: &Lab, pause: &str| {
        let mut client = lab.command(A, true, go("client"));
        client.args([&format!("{SERVER}:9000"), "4", "4", &(BYTES / 4).to_string(), pause]);
        client
    };
    let send = |lab: &Lab| {
        let begun = Instant::now();
        let output = lab.output(A, &mut client(lab, "0"));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "ok 4\n", "{output:?}");
        begun.elapsed().as_secs_f64()
    };
    lab.apply(A, &rule("20mbit"));
    let seconds = send(&lab);
    // 5 MB at 2.5 MB/s take 2 s. A busy machine only takes longer.
    assert!(seconds > 1.5, "{seconds}");
    println!("5 MB of a container with 20 Mbit/s: {seconds:.2} s");
    assert_eq!(lab.paths(A, "client"), (4, json!({})));
    let limited = class_bytes(&lab, "5475:1");
    assert!((BYTES..BYTES * 6 / 5).contains(&limited), "{limited}");
    // Another rate has another class, also for connections in use.
    let open = lab.launch(A, &mut client(&lab, "60000"), "");
    lab::await_until(|| class_bytes(&lab, "5475:1") > limited + BYTES / 10, || lab.said(open));
    let said = lab.apply(A, &rule("1gbit"));
    assert!(said.contains("4 go on with another rate or class"), "{said}");
    lab::await_until(|| lab.said(open).contains("paused"), || lab.said(open));
    // How much is left for this class depends on the machine. It is an error if there is none.
    class_bytes(&lab, "5475:2");
    // Without such a rule there is no class, and connections continue.
    lab.apply(A, "");
    assert!(!qdiscs(&lab).contains("htb"), "{}", qdiscs(&lab));
    assert!(!lab.has_ended(open));
    lab.stop(open);

    let on_host = lab.paths(A, "client").0;
    lab.hosts[A].net.words("tc qdisc add dev wire root handle 1: htb default 10");
    let said = lab.apply(A, &rule("20mbit"));
    assert!(
        said.contains("container-rate is not in effect") && said.contains("wire has the queueing"),
        "{said}"
    );
    send(&lab);
    assert_eq!(lab.paths(A, "client"), (on_host, json!({ "limit": 4 })));
    lab.apply(A, "");
    assert!(qdiscs(&lab).contains("htb 1:"), "{}", qdiscs(&lab));
}

/// A control group, which is removed when this is dropped. All processes in it must have ended by
/// then.
struct Group(PathBuf);

impl Group {
    fn create(name: &str) -> Group {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let mount = mounts.lines().find_map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            (words[2] == "cgroup2").then(|| PathBuf::from(words[1]))
        });
        let mount = mount.expect("control groups of version 2 are mounted");
        let path = mount.join(format!("{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Group(path)
    }

    /// Returns the name that ss prints.
    fn name(&self) -> String {
        format!("cgroup:/{}", self.0.file_name().unwrap().to_str().unwrap())
    }

    /// Returns the command, to be run in the group.
    fn command(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        inside.args(["-c", "echo 0 > \"$0\" && exec \"$@\""]).arg(self.0.join("cgroup.procs"));
        inside.arg(command.get_program()).args(command.get_args());
        inside
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The last process leaves the group shortly after its end.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// The host accounts the traffic to the control group of the container, not of the router.
#[test]
fn the_host_connection_of_a_container_is_of_its_control_group() {
    let groups = [Group::create("shunt-test-one"), Group::create("shunt-test-two")];
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    const SCRIPT: &str = "
import socket, sys, time
family, address = [(socket.AF_INET, '10.50.2.2'), (socket.AF_INET6, '::ffff:10.50.2.2')][int(sys.argv[1])]
s = socket.socket(family)
s.connect((address, 9000))
assert s.getpeername()[:2] == (address, 9000), s.getpeername()
s.sendall(b'name 5\\n12345')
answer = b''
while not answer.endswith(b'12345'):
    answer += s.recv(1000)
print('open', flush=True)
time.sleep(60)
";
    for (at, group) in groups.iter().enumerate() {
        let mut client = lab.command(A, true, "python3");
        client.args(["-c", SCRIPT, &at.to_string()]);
        lab.launch(A, &mut group.command(&client), "open");
    }
    let mut ss = Command::new("ss");
    ss.args(["-tnH", "state", "established", "--cgroup", "dport", "=", ":7450"]);
    let output = lab.hosts[A].net.inside(|| ss.output().unwrap());
    let text = String::from_utf8(output.stdout).unwrap();
    // The third connection is the one between the routers.
    assert_eq!(text.lines().count(), 3, "{text}");
    for group in &groups {
        assert_eq!(text.matches(&group.name()).count(), 1, "{text}");
    }
    assert_eq!(lab.paths(A, "client"), (2, json!({})));
    assert_eq!(lab.status(A)["connections"]["unaccounted"], 0);
    drop(lab);
    let paths = groups.map(|group| group.0.clone());
    assert!(paths.iter().all(|path| !path.exists()), "{paths:?}");
}

/// A replacement for runc. The program gets a new control group and network namespace, and runs as
/// an unprivileged user.
const RUNC: &str = r#"#!/usr/bin/env python3
import json, os, sys
config = json.load(open(sys.argv[sys.argv.index('--bundle') + 1] + '/config.json'))
with open(os.environ['GROUP'], 'w') as group:
    group.write('0')
little = ['setpriv', '--reuid=65534', '--regid=65534', '--clear-groups', '--bounding-set=-all', '--inh-caps=-all', '--']
os.execvp('nsenter', ['nsenter', '--net=' + os.environ['NET'], '--', *little, *config['process']['args']])
"#;

/// The supervisor runs as root outside the container, but the traffic is accounted to the
/// container.
#[test]
fn a_container_of_a_runtime_is_counted_as_itself() {
    let group = Group::create("shunt-test-entered");
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    let runtime = lab.path("shunt-runtime");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_shunt"), &runtime).unwrap();
    let runc = lab.path("runc");
    fs::write(&runc, RUNC).unwrap();
    fs::set_permissions(&runc, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let settings = lab.path("runtime.toml");
    fs::write(&settings, format!("runtime = {runc:?}\nrouter = {:?}\n", lab.socket(A))).unwrap();
    const SCRIPT: &str = "
import os, socket
with socket.create_connection(('10.50.2.2', 9000)) as s:
    s.sendall(b'name 5\\n12345')
    answer = b''
    while not answer.endswith(b'12345'):
        answer += s.recv(1000)
    assert s.getpeername() == ('10.50.2.2', 9000) and os.getuid() == 65534
    print('open', flush=True)
    s.recv(1)
";
    let bundle = lab.path("bundle");
    fs::create_dir(&bundle).unwrap();
    let config = json!({
        "process": { "args": ["python3", "-c", SCRIPT], "env": [] },
        "linux": { "namespaces": [{ "type": "network" }] },
    });
    fs::write(bundle.join("config.json"), config.to_string()).unwrap();
    let mut command = Command::new(&runtime);
    command.args(["create", "--bundle"]).arg(&bundle).arg("it");
    command.env("SHUNT_RUNTIME_SETTINGS", &settings);
    command.env("GROUP", group.0.join("cgroup.procs")).env("NET", lab.hosts[A].container.path());
    let net = shunt_netns::Net::at(lab.hosts[A].net.path());
    lab.launch_in(&net, &mut command, "open");
    let mut ss = Command::new("ss");
    ss.args(["-tnH", "state", "established", "--cgroup", "dport", "=", ":7450"]);
    let output = lab.hosts[A].net.inside(|| ss.output().unwrap());
    let text = String::from_utf8(output.stdout).unwrap();
    // The other connection is that between the routers.
    assert_eq!((text.lines().count(), text.matches(&group.name()).count()), (2, 1), "{text}");
    assert_eq!(lab.paths(A, "client"), (1, json!({})));
    assert_eq!(lab.status(A)["connections"]["unaccounted"], 0);
    drop(lab);
    // The supervisor was in the group as well, and has ended.
    let path = group.0.clone();
    drop(group);
    assert!(!path.exists(), "{path:?}");
}
