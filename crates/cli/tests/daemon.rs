//! Tests of `shunt daemon`: its socket, its end, and the requirements of a service manager.

mod common;

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::thread::CapabilitySet;
use serde_json::Value;

fn start(shell: &Shell) -> Running {
    let broker = Running::start(shell.shunt(["daemon"]));
    eventually("the broker answers", || shell.broker_pid().is_some());
    broker
}

#[test]
fn a_stopped_broker_takes_its_socket_with_it() {
    let shell = Shell::new();
    for signal in ["TERM", "INT", "HUP"] {
        let broker = start(&shell);
        assert_eq!(shell.broker_pid(), Some(broker.0.id()));
        broker.signal(signal);
        let ended = broker.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stderr.contains(&format!("SIG{signal}")), "the log says why: {}", ended.stderr);
        assert!(!shell.socket().exists());
    }
}

#[test]
fn a_killed_brokers_socket_is_replaced() {
    let shell = Shell::new();
    let broker = start(&shell);
    broker.signal("KILL");
    assert_eq!(broker.end().signal, Some(9));
    assert!(shell.socket().exists());
    Ended::of(shell.shunt(["status"])).saying(1, &["no broker is running", "shunt run"]);
    shell.run(["true"]).quietly(0);
    assert!(shell.broker_pid().is_some());
}

#[test]
fn a_second_broker_is_refused() {
    let shell = Shell::new();
    let broker = start(&shell);
    let ended = Ended::of(shell.shunt(["daemon"]));
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("already running"), "{ended:?}");
    // `--detach` succeeds, because a broker runs.
    Ended::of(shell.shunt(["daemon", "--detach"])).quietly(0);
    assert_eq!(shell.broker_pid(), Some(broker.0.id()));
}

#[test]
fn an_idle_broker_ends_by_itself() {
    let shell = Shell::new();
    let broker = Running::start(shell.shunt(["daemon", "--idle-exit", "1"]));
    eventually("the socket is there", || shell.socket().exists());
    let begin = Instant::now();
    assert_eq!(broker.end().code, Some(0));
    assert!(begin.elapsed() > Duration::from_millis(500));
    assert!(!shell.socket().exists());
}

#[test]
fn a_detached_broker_accepts_when_the_command_returns_and_holds_nothing_of_the_starters() {
    let shell = Shell::new();
    let lock = shell.path("lock");
    shell.sh(&format!("$SHUNT daemon --detach 7>'{}'", lock.display())).quietly(0);
    let broker = shell.broker_pid().expect("it accepts at once");
    for descriptor in std::fs::read_dir(format!("/proc/{broker}/fd")).unwrap() {
        // The broker may close a descriptor meanwhile: the connection of the command that has just
        // queried its pid.
        let Ok(leads_to) = std::fs::read_link(descriptor.unwrap().path()) else { continue };
        assert_ne!(leads_to, lock, "the broker holds what was open when it was started");
    }
    let directory = std::fs::read_link(format!("/proc/{broker}/cwd")).unwrap();
    assert_eq!(directory, std::path::Path::new("/"));
}

/// Needs root.
#[test]
fn a_broker_gives_up_what_it_does_not_need() {
    let shell = Shell::new();
    let broker = start(&shell);
    let status = std::fs::read_to_string(format!("/proc/{}/status", broker.0.id())).unwrap();
    let set = |name: &str| {
        let bits = status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
        CapabilitySet::from_bits_retain(u64::from_str_radix(bits, 16).unwrap())
    };
    let unit = include_str!("../../../packaging/systemd/system/shunt.service");
    let allowed = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    let allowed: CapabilitySet = allowed
        .split(' ')
        .map(|name| CapabilitySet::from_name(name.strip_prefix("CAP_").unwrap()).unwrap())
        .collect();
    assert_eq!(set("CapPrm:"), allowed, "as the unit says");
    assert_eq!(set("CapBnd:"), allowed);
    assert_eq!(set("CapEff:"), allowed - CapabilitySet::SYS_ADMIN);
    assert!(set("CapInh:").is_empty() && set("CapAmb:").is_empty());
    assert!(status.contains("NoNewPrivs:\t1"), "{status}");
}

#[test]
fn the_log_has_a_filter_and_a_file() {
    let shell = Shell::new();
    let log = shell.path("broker.log");
    let mut command = shell.shunt(["daemon", "--detach", "--log-file"]);
    command.arg(&log);
    Ended::of(command).quietly(0);
    // The broker accepts programs shortly before it says so.
    eventually("the log is written", || std::fs::read_to_string(&log).unwrap().contains("listening"));
    let mut command = shell.shunt(["daemon", "--socket"]);
    command.arg(shell.path("b.sock")).env("SHUNT_LOG", "shunt_broker=loud");
    Ended::of(command).saying(1, &["SHUNT_LOG", "shunt_broker=debug"]);
}

#[test]
fn the_service_manager_is_told() {
    let shell = Shell::new();
    let path = shell.path("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut command = shell.shunt(["daemon"]);
    command.env("NOTIFY_SOCKET", &path);
    let broker = Running::start(command);
    let hear = || {
        let mut buffer = [0; 64];
        let length = manager.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).trim().to_owned()
    };
    assert_eq!(hear(), "READY=1");
    assert!(shell.broker_pid().is_some(), "ready means that it accepts");
    broker.signal("TERM");
    assert_eq!(hear(), "STOPPING=1");
    assert_eq!(broker.end().code, Some(0));
}

/// Echoes on every connection. It writes its port to the named file.
const SERVER: &str = "
import os, socket, sys, threading
def serve(peer):
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := peer.recv(100):
        peer.sendall(data)
listener = socket.create_server(('127.0.0.1', 0))
with open(sys.argv[1] + '.new', 'w') as file:
    file.write(str(listener.getsockname()[1]))
os.rename(sys.argv[1] + '.new', sys.argv[1])
while True:
    threading.Thread(target=serve, args=listener.accept()[:1]).start()
";
const CLIENT: &str = "
import socket, sys, time
peer = socket.create_connection(('127.0.0.1', int(open(sys.argv[1]).read())))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while True:
    peer.sendall(b'x')
    assert peer.recv(1) == b'x'
    time.sleep(0.001)
";

fn python(shell: &Shell, script: &str) -> Running {
    let port = shell.path("port");
    let mut command = shell.shunt(["run", "--", "python3", "-c", script]);
    command.arg(port);
    Running::start(command)
}

/// Waits until both directions of a process's only connection use shared memory.
#[track_caller]
fn comes_onto_shared_memory(shell: &Shell, what: &str, process: &Running) {
    let pid = process.0.id();
    let is_on = |status: &Value| {
        let all = status["processes"].as_array().into_iter().flatten();
        let of_it =
            all.filter(|one| one["pid"] == pid).flat_map(|one| one["connections"].as_array()).flatten();
        of_it.into_iter().any(|one| one["send"]["transport"] == "shm" && one["receive"]["transport"] == "shm")
    };
    eventually(what, || {
        let ended = Ended::of(shell.shunt(["status", "--json"]));
        serde_json::from_str(&ended.stdout).is_ok_and(|status| is_on(&status))
    });
}

#[test]
fn programs_from_before_and_after_their_runtime_directory_was_removed_pair() {
    let shell = Shell::new();
    let broker = start(&shell);
    let _server = python(&shell, SERVER);
    eventually("the server listens", || shell.path("port").exists());
    let before = python(&shell, CLIENT);
    comes_onto_shared_memory(&shell, "a client from before", &before);
    std::fs::remove_dir_all(shell.path("shunt")).unwrap();
    eventually("the same broker listens again", || shell.broker_pid() == Some(broker.0.id()));
    let after = python(&shell, CLIENT);
    comes_onto_shared_memory(&shell, "a client from after", &after);
    comes_onto_shared_memory(&shell, "the client from before, still", &before);
}

#[test]
fn a_broker_hands_its_programs_over_to_the_one_that_has_its_place() {
    let shell = Shell::new();
    let broker = start(&shell);
    let _server = python(&shell, SERVER);
    eventually("the server listens", || shell.path("port").exists());
    let mut before = python(&shell, CLIENT);
    comes_onto_shared_memory(&shell, "a client from before", &before);
    // The stopped broker cannot check its socket before the other broker is there.
    broker.signal("STOP");
    std::fs::remove_dir_all(shell.path("shunt")).unwrap();
    Ended::of(shell.shunt(["daemon", "--detach"])).quietly(0);
    let other = shell.broker_pid();
    assert!(other.is_some() && other != Some(broker.0.id()));
    broker.signal("CONT");
    let ended = broker.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("another broker has the place"), "{ended:?}");
    let after = python(&shell, CLIENT);
    comes_onto_shared_memory(&shell, "a client from after, with a server from before", &after);
    // The client continues, and connects to the new broker when it has another connection to offer.
    assert_eq!(before.0.try_wait().unwrap(), None, "the client from before has ended");
    assert_eq!(shell.broker_pid(), other);
}

fn listener(shell: &Shell, kind: SocketType) -> OwnedFd {
    std::fs::create_dir(shell.path("shunt")).unwrap();
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(shell.socket()).unwrap()).unwrap();
    listen(&socket, 16).unwrap();
    socket
}

/// Runs `shunt daemon` with `socket` as the socket that the service manager passes.
fn activated(shell: &Shell, socket: &OwnedFd) -> Running {
    let mut command: Command = shell.shunt(["daemon"]);
    let program = command.get_program().to_owned();
    let environment: Vec<_> =
        command.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))).collect();
    command = Command::new("sh");
    command.args(["-c", "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" daemon 3<&0 </dev/null"]).arg(program);
    command.envs(environment).stdin(Stdio::from(socket.try_clone().unwrap()));
    Running::start(command)
}

#[test]
fn a_socket_from_the_service_manager_is_used_and_left_in_place() {
    let shell = Shell::new();
    let socket = listener(&shell, SocketType::SEQPACKET);
    let broker = activated(&shell, &socket);
    eventually("the broker answers", || shell.broker_pid() == Some(broker.0.id()));
    broker.signal("TERM");
    assert_eq!(broker.end().code, Some(0));
    assert!(shell.socket().exists());
}

#[test]
fn a_socket_of_another_kind_is_refused() {
    let shell = Shell::new();
    let socket = listener(&shell, SocketType::STREAM);
    let ended = activated(&shell, &socket).end();
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("ListenSequentialPacket="), "{ended:?}");
}

#[test]
fn a_detached_broker_tells_prometheus_all_that_the_dashboard_asks_for() {
    let shell = Shell::new();
    let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    Ended::of(shell.shunt(["daemon", "--detach", "--metrics", &at])).quietly(0);
    // This produces a bad message, which the broker then counts.
    let stranger =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::connect(&stranger, &SocketAddrUnix::new(shell.socket()).unwrap()).unwrap();
    rustix::net::send(&stranger, b"?", rustix::net::SendFlags::empty()).unwrap();
    rustix::net::recv(&stranger, &mut [0; 1], rustix::net::RecvFlags::empty()).expect("it hangs up");
    let mut stream = TcpStream::connect(&at).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    dashboard::expect_all_on(&page, "shunt_broker");
    dashboard::expect_all_on(&page, "shunt_build");
}

/// Grafana requires that each panel of an imported file has a unique id and place, and that all
/// sources and variables are defined.
#[test]
fn the_dashboard_is_whole() {
    let dashboard = dashboard::read();
    let variables: Vec<&str> = dashboard["templating"]["list"]
        .as_array()
        .unwrap()
        .iter()
        .map(|variable| variable["name"].as_str().unwrap())
        .collect();
    let panels = dashboard["panels"].as_array().unwrap();
    let number = |panel: &Value, of: &str| panel[of].as_u64().unwrap_or_else(|| panic!("{of} of {panel}"));
    let mut taken = HashSet::new();
    for panel in panels {
        assert!(taken.insert(number(panel, "id").to_string()), "two panels have one number: {panel}");
        let place = &panel["gridPos"];
        let (x, y, width) = (number(place, "x"), number(place, "y"), number(place, "w"));
        assert!(x + width <= 24, "a row has 24 columns: {panel}");
        assert!(taken.insert(format!("{x} {y}")), "two panels have one place: {panel}");
        if panel["type"] != "row" {
            assert_eq!(panel["datasource"]["uid"], "${datasource}");
            assert!(panel["targets"].as_array().is_some_and(|targets| !targets.is_empty()), "{panel}");
        }
    }
    for expression in dashboard::expressions(&dashboard) {
        for part in expression.split('$').skip(1) {
            let name: String =
                part.chars().take_while(|letter| letter.is_ascii_alphabetic() || *letter == '_').collect();
            assert!(name.starts_with("__") || variables.contains(&name.as_str()), "{expression}");
        }
        let [open, close] =
            ["([{", ")]}"].map(|kind| expression.chars().filter(|letter| kind.contains(*letter)).count());
        assert_eq!(open, close, "{expression}");
    }
}

/// The steps of a threshold ascend from one without a value. A panel shows them by its colour, or
/// by lines.
#[test]
fn thresholds_of_the_dashboard_ascend_and_are_shown() {
    let dashboard = dashboard::read();
    let mut count = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        let defaults = &panel["fieldConfig"]["defaults"];
        let Some(steps) = defaults["thresholds"]["steps"].as_array() else { continue };
        let values: Vec<Option<f64>> = steps.iter().map(|step| step["value"].as_f64()).collect();
        assert!(values.len() > 1 && values[0].is_none() && values.is_sorted(), "{panel}");
        assert!(values[1..].iter().all(Option::is_some), "{panel}");
        let is_shown = defaults["color"]["mode"] == "thresholds"
            || defaults["custom"]["thresholdsStyle"]["mode"] == "line";
        assert!(is_shown, "{panel}");
        count += 1;
    }
    assert!(count >= 4, "{count} panels have thresholds");
}

/// Reads the alert rules, which use a part of YAML that needs no parser: each scalar is plain or in
/// single quotes, on the line of its key.
#[test]
fn each_alert_rule_is_complete() {
    let text = std::fs::read_to_string(dashboard::ALERTS).unwrap();
    let mut rules: Vec<Vec<(&str, &str)>> = Vec::new();
    let lines = text.lines().skip_while(|line| line.starts_with('#') || *line == "groups:");
    for line in lines.filter(|line| *line != "    rules:" && *line != "  - name: shunt") {
        let (key, value) = line.split_once(':').unwrap_or_else(|| panic!("no key in {line:?}"));
        let value = value.trim();
        let is_plain = value.chars().all(|letter| letter.is_ascii_alphanumeric());
        let is_quoted = value.len() > 2 && value.starts_with('\'') && value.ends_with('\'');
        let inner = value.trim_matches('\'');
        assert!((is_plain || is_quoted) && !inner.contains('\''), "{line:?}");
        if key.trim_start() == "- alert" {
            rules.push(Vec::new());
        }
        rules.last_mut().unwrap_or_else(|| panic!("{line:?} is not in a rule")).push((key, inner));
    }
    let mut names = HashSet::new();
    for rule in &rules {
        let required = [
            "      - alert",
            "        expr",
            "        labels",
            "          severity",
            "        annotations",
            "          summary",
            "          description",
        ];
        let keys: Vec<&str> = rule.iter().map(|(key, _)| *key).filter(|key| *key != "        for").collect();
        assert_eq!(keys, required, "{rule:?}");
        assert!(names.insert(rule[0].1), "two rules have the name {}", rule[0].1);
        let value = |of: &str| rule.iter().find(|(key, _)| key.trim() == of).map_or("", |(_, value)| value);
        assert!(["warning", "info"].contains(&value("severity")), "{rule:?}");
        for pair in ["()", "{}", "[]"] {
            let [open, close] = [0, 1].map(|at| value("expr").matches(&pair[at..=at]).count());
            assert_eq!(open, close, "{rule:?}");
        }
    }
    assert!(rules.len() >= 8, "{rules:?}");
    // Prometheus' own tool checks the expressions, where it is installed.
    if let Ok(output) = Command::new("promtool").args(["check", "rules", dashboard::ALERTS]).output() {
        assert!(output.status.success(), "{output:?}");
    }
}
