//! `shunt daemon`: its socket, its end, and what a service manager expects of it.

mod common;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};

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
    // Asked to be there, it is.
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
        // The broker may close one of its own in the meantime: the connection of who has just asked for its pid.
        let Ok(leads_to) = std::fs::read_link(descriptor.unwrap().path()) else { continue };
        assert_ne!(leads_to, lock, "the broker holds what was open when it was started");
    }
    let directory = std::fs::read_link(format!("/proc/{broker}/cwd")).unwrap();
    assert_eq!(directory, std::path::Path::new("/"));
}

#[test]
fn the_log_has_a_filter_and_a_file() {
    let shell = Shell::new();
    let log = shell.path("broker.log");
    let mut command = shell.shunt(["daemon", "--detach", "--log-file"]);
    command.arg(&log);
    Ended::of(command).quietly(0);
    assert!(std::fs::read_to_string(&log).unwrap().contains("listening"));
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

fn listener(shell: &Shell, kind: SocketType) -> OwnedFd {
    std::fs::create_dir(shell.path("shunt")).unwrap();
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(shell.socket()).unwrap()).unwrap();
    listen(&socket, 16).unwrap();
    socket
}

/// `shunt daemon` with `socket` as the one that the service manager hands over.
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
