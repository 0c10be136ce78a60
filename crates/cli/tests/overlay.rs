//! Tests of containers on two hosts. Unmodified programs use the host network under addresses of
//! the overlay. Needs root, nginx, curl and Go.

#[path = "overlay/lab.rs"]
mod lab;
#[path = "overlay/nginx.rs"]
mod nginx;

use std::fs;
use std::process::Command;

use lab::{A, B, CLIENT, Lab, SERVER, go, held_page};

/// Much more than all bytes of connection set-up.
const PAYLOAD: u64 = 20_000_000;

/// Runs nginx with a file of that size, and logs the client addresses that it sees.
fn serve_files(lab: &mut Lab, is_supervised: bool) {
    let log = nginx::directory(lab).join("access.log");
    let site = nginx::Site {
        workers: 2,
        http: &format!(
            "log_format seen '$remote_addr $remote_port $server_addr $server_port'; access_log {} seen;",
            log.display()
        ),
        server: "listen 80; location /seen { return 200 \"$remote_addr $server_addr\"; }",
        sockets: 1,
    };
    nginx::serve(lab, is_supervised, &site, &[("file".to_owned(), vec![b'x'; PAYLOAD as usize])]);
}

fn curl(lab: &Lab, is_supervised: bool, path: &str) -> std::process::Output {
    let mut curl = lab.command(A, is_supervised, "curl");
    curl.args(["-sS", "--max-time", "60", "-w", "\n%{local_ip} %{remote_ip} %{remote_port}"]);
    lab.output(A, curl.arg(format!("http://{SERVER}{path}")))
}

#[test]
fn curl_and_nginx_cross_the_host_network_and_see_the_overlay() {
    let mut lab = Lab::with_routers();
    serve_files(&mut lab, true);
    let before = (lab.bytes(A, "vxlan"), lab.bytes(A, "wire"));
    let output = curl(&lab, true, "/file");
    assert!(output.status.success(), "{output:?}");
    let (body, seen) = output.stdout.split_at(PAYLOAD as usize);
    assert!(body.iter().all(|byte| *byte == b'x'));
    assert_eq!(String::from_utf8_lossy(seen).trim(), format!("{CLIENT} {SERVER} 80"));
    let (vxlan, wire) = (lab.bytes(A, "vxlan") - before.0, lab.bytes(A, "wire") - before.1);
    assert!(vxlan < 20_000, "{vxlan} bytes crossed the overlay");
    assert!(wire > PAYLOAD, "{wire} bytes crossed the host network");
    assert_eq!(lab.paths(A, "client"), (1, serde_json::json!({})));
    assert_eq!(lab.paths(B, "server"), (1, serde_json::json!({})));
    let log = fs::read_to_string(lab.path("nginx/access.log")).unwrap();
    let words: Vec<&str> = log.split_whitespace().collect();
    assert_eq!([words[0], words[2], words[3]], [CLIENT, SERVER, "80"], "{log}");
}

/// Returns the Go client. Client and server check that each connection carries its own bytes, and
/// that both see addresses of the overlay.
fn go_client(lab: &Lab, is_supervised: bool, [connections, at_a_time, bytes]: [u32; 3]) -> Command {
    let mut client = lab.command(A, is_supervised, go("client"));
    client.args([
        format!("{SERVER}:9000"),
        connections.to_string(),
        at_a_time.to_string(),
        bytes.to_string(),
    ]);
    client.arg("0");
    client
}

fn serve_go(lab: &mut Lab, is_supervised: bool, network: &str) {
    let mut server = lab.command(B, is_supervised, go("server"));
    lab.launch(B, server.args([network, ":9000"]), "listening");
}

fn assert_ok(output: &std::process::Output, connections: u32) {
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("ok {connections}\n"), "{output:?}");
}

#[test]
fn static_programs_take_the_host_network_and_no_two_connections_are_swapped() {
    let mut lab = Lab::with_routers();
    // Its listening socket is an IPv6 socket, and so are the connections that it accepts.
    serve_go(&mut lab, true, "tcp");
    let before = lab.bytes(A, "vxlan");
    const CONNECTIONS: u32 = 400;
    let output = lab.output(A, &mut go_client(&lab, true, [CONNECTIONS, 32, 50_000]));
    assert_ok(&output, CONNECTIONS);
    let vxlan = lab.bytes(A, "vxlan") - before;
    assert!(vxlan < u64::from(CONNECTIONS) * 2_000, "{vxlan} bytes crossed the overlay");
    assert_eq!(lab.paths(A, "client"), (CONNECTIONS.into(), serde_json::json!({})));
    assert_eq!(lab.paths(B, "server"), (CONNECTIONS.into(), serde_json::json!({})));
    // The router keeps no descriptor of them.
    for host in [A, B] {
        let complaint = || format!("{} {}", lab.descriptors(host), lab.status(host));
        lab::await_until(|| lab.descriptors(host) < 60, complaint);
    }
}

/// Several processes accept from one socket, blocking or not, and clients use sockets of both
/// families. Each connection must carry its own client's bytes, under its own client's address.
#[test]
fn many_processes_accept_from_one_socket_and_nothing_is_swapped() {
    const CONNECTIONS: u32 = 240;
    const SERVE: &str = "
import os, select, socket, sys
listener = socket.create_server(('', 9000), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
for worker in range(8):
    if os.fork() == 0:
        break
else:
    print('listening', flush=True)
    os.wait()
listener.setblocking(sys.argv[1] == 'waits')
while True:
    if sys.argv[1] != 'waits':
        select.select([listener], [], [])
    try:
        connection, peer = listener.accept()
    except BlockingIOError:
        continue  # Another process was faster.
    connection.setblocking(True)
    with connection:
        assert connection.getpeername() == peer
        connection.sendall(f'{peer[0]} {peer[1]} '.encode() + connection.recv(1000))
";
    const ASK: &str = "
import socket, sys, threading
def converse(first):
    for number in range(first, int(sys.argv[1]), 8):
        with socket.socket(socket.AF_INET6 if number % 2 else socket.AF_INET) as s:
            s.connect(('::ffff:10.50.2.2' if number % 2 else '10.50.2.2', 9000))
            s.sendall(b'bytes of %d' % number)
            answer = b''
            while part := s.recv(1000):
                answer += part
            name = s.getsockname()
            wanted = f'::ffff:{name[0].removeprefix(\"::ffff:\")} {name[1]} bytes of {number}'
            if answer.decode() != wanted:
                print(answer, wanted)
threads = [threading.Thread(target=converse, args=[first]) for first in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print('ok')
";
    for way in ["waits", "polls"] {
        let mut lab = Lab::with_routers();
        let mut server = lab.command(B, true, "python3");
        lab.launch(B, server.args(["-c", SERVE, way]), "listening");
        let mut client = lab.command(A, true, "python3");
        let output = lab.output(A, client.args(["-c", ASK, &CONNECTIONS.to_string()]));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{way} {output:?}");
        assert_eq!(lab.paths(A, "client"), (CONNECTIONS.into(), serde_json::json!({})), "{way}");
        assert_eq!(lab.paths(B, "server"), (CONNECTIONS.into(), serde_json::json!({})), "{way}");
    }
}

/// After a program has closed a descriptor, epoll must not report it any more. No other process
/// holds the socket.
#[test]
fn what_a_program_has_closed_is_closed() {
    let mut lab = Lab::with_routers();
    const SERVE: &str = "
import select, socket
listener, wait, connections = socket.create_server(('', 9000), backlog=128), select.epoll(), {}
wait.register(listener, select.EPOLLIN)
print('listening', flush=True)
while True:
    for number, events in wait.poll():
        if number == listener.fileno():
            connection = listener.accept()[0]
            connections[connection.fileno()] = connection
            wait.register(connection, select.EPOLLIN)
        elif number not in connections:
            print('closed descriptor', flush=True)
            raise SystemExit
        elif said := connections[number].recv(100):
            connections[number].sendall(said)
        else:
            # As many programs do: the kernel forgets the registration.
            connections.pop(number).close()
";
    const ASK: &str = "
import socket
for number in range(400):
    with socket.create_connection(('10.50.2.2', 9000)) as s:
        s.sendall(b'x')
        assert s.recv(1) == b'x'
print('ok')
";
    let mut server = lab.command(B, true, "python3");
    lab.launch(B, server.args(["-c", SERVE]), "listening");
    let output = lab.output(A, lab.command(A, true, "python3").args(["-c", ASK]));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{output:?}");
    assert_eq!(lab.paths(B, "server"), (400, serde_json::json!({})));
}

/// A client may send before it checks that it is connected. Its connection then stays on the
/// overlay, if connect has not waited.
///
/// The server's accept must not wait for the client to check, because that would take seconds for
/// each connection.
#[test]
fn accept_does_not_wait_for_a_client_that_has_sent_already() {
    let mut lab = Lab::build();
    lab.hold_ms = 0;
    lab.start(A);
    lab.start(B);
    const SERVE: &str = "
import socket
listener = socket.create_server(('', 9000), backlog=128)
print('listening', flush=True)
while True:
    connection, peer = listener.accept()
    with connection:
        connection.sendall(connection.recv(1))
";
    const ASK: &str = "
import select, socket, time
begun = time.monotonic()
for number in range(10):
    with socket.socket() as s:
        s.setblocking(False)
        try:
            s.connect(('10.50.2.2', 9000))
        except BlockingIOError:
            select.select([], [s], [])
        s.send(b'x')
        select.select([s], [], [])
        assert s.recv(1) == b'x'
took = time.monotonic() - begun
assert took < 10, took
print('ok')
";
    let mut server = lab.command(B, true, "python3");
    lab.launch(B, server.args(["-c", SERVE]), "listening");
    let output = lab.output(A, lab.command(A, true, "python3").args(["-c", ASK]));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{output:?}");
    assert_eq!(lab.paths(B, "server"), (0, serde_json::json!({ "used": 10 })));
}

#[test]
fn a_peer_without_shunt_is_found_out_and_left_alone() {
    let mut lab = Lab::with_routers();
    serve_go(&mut lab, false, "tcp4");
    assert_ok(&lab.output(A, &mut go_client(&lab, true, [20, 4, 10_000])), 20);
    assert_eq!(lab.paths(A, "client"), (0, serde_json::json!({ "not-supervised": 20 })));
    drop(lab);

    let mut lab = Lab::with_routers();
    serve_go(&mut lab, true, "tcp4");
    assert_ok(&lab.output(A, &mut go_client(&lab, false, [20, 4, 10_000])), 20);
    assert_eq!(lab.paths(B, "server"), (0, serde_json::json!({ "not-offered": 20 })));
}

#[test]
fn established_connections_outlive_routers_and_new_ones_fall_back_until_they_are_there_again() {
    let mut lab = Lab::with_routers();
    serve_go(&mut lab, true, "tcp4");
    let mut client = lab.command(A, true, go("client"));
    client.args([&format!("{SERVER}:9000"), "1", "1", "100000", "3000"]);
    let paused = lab.launch(A, &mut client, "paused");
    assert_eq!((lab.paths(A, "client").0, lab.paths(B, "server").0), (1, 1));
    lab.kill(A);
    lab.kill(B);
    // The connections still have their overlay addresses, which the client checks again.
    assert_ok(&lab.output(A, &mut go_client(&lab, true, [10, 2, 10_000])), 10);
    assert_eq!(lab.await_end(paused), "paused\nok 1\n");
    lab.start(A);
    lab.start(B);
    let came_back = || {
        let output = lab.output(A, &mut go_client(&lab, true, [1, 1, 1_000]));
        assert_ok(&output, 1);
        lab.paths(B, "server").0 > 0
    };
    lab::await_until(came_back, || lab.status(B).to_string());
}

/// The bytes and the end of the stream must arrive, although the clients finished before the server
/// accepted.
#[test]
fn clients_that_send_and_finish_at_once() {
    const SERVE: &str = "
import socket, sys, time
is_ipv6 = sys.argv[1] == '::'
family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
listener = socket.create_server((sys.argv[1], 9000), family=family, dualstack_ipv6=is_ipv6)
print('listening', flush=True)
time.sleep(3)
while True:
    connection, _ = listener.accept()
    with connection:
        said = b''
        while part := connection.recv(1000):
            said += part
        print(said.decode(), end='', flush=True)
        try:
            connection.sendall(said)
        except OSError:
            pass
";
    const ASK: &str = "
import socket
finished = []
for number in range(20):
    s = socket.create_connection(('10.50.2.2', 9000))
    s.sendall(b'bytes of %d\\n' % number)
    if number % 2:
        s.shutdown(socket.SHUT_WR)
        finished.append((s, number))
    else:
        s.close()
for s, number in finished:
    answer = b''
    while part := s.recv(1000):
        answer += part
    assert answer == b'bytes of %d\\n' % number, (number, answer)
";
    for family in ["10.50.2.2", "::"] {
        let mut lab = Lab::with_routers();
        let mut server = lab.command(B, true, "/usr/bin/python3");
        let server = lab.launch(B, server.args(["-c", SERVE, family]), "listening");
        let mut client = lab.command(A, true, "/usr/bin/python3");
        let output = lab.output(A, client.args(["-c", ASK]));
        assert!(output.status.success(), "{family}: {output:?}");
        let all = || (0..20).all(|number| lab.said(server).contains(&format!("bytes of {number}\n")));
        lab::await_until(all, || lab.said(server));
        assert_eq!(lab.paths(A, "client"), (20, serde_json::json!({})), "{family}");
        assert_eq!(lab.paths(B, "server"), (20, serde_json::json!({})), "{family}");
        assert_eq!(lab.status(B)["connections"]["reset"], 0, "{family}");
    }
}

#[test]
fn the_control_group_of_a_router_that_was_killed_is_removed_by_the_next_one() {
    let mut lab = Lab::with_routers();
    let groups = [A, B].map(|host| lab.group(host));
    lab.kill(A);
    assert!(groups.iter().all(|group| group.exists()), "nobody has noticed yet");
    lab.start(A);
    assert_eq!(groups.map(|group| group.exists()), [false, true]);
}

#[test]
fn routers_with_different_keys_have_nothing_to_do_with_each_other() {
    let mut lab = Lab::build();
    lab.make_key("other");
    lab.start(A);
    lab.start_with(B, "other");
    serve_go(&mut lab, true, "tcp4");
    assert_ok(&lab.output(A, &mut go_client(&lab, true, [3, 1, 10_000])), 3);
    // A router with another key gets no answer at all, not even an error.
    assert_eq!(lab.paths(A, "client"), (0, serde_json::json!({ "router-silent": 3 })));
    lab::await_until(|| lab.status(B)["connections"]["strangers"] != 0, || lab.status(B).to_string());
}

/// The other router has version 5. It calls, and closes what begins with another version.
#[test]
fn a_router_of_another_version_is_logged_and_leaves_connections_on_the_overlay() {
    let mut lab = Lab::build();
    const OLD: &str = "
import os, socket, threading
def call():
    while True:
        with socket.create_connection(('192.168.77.1', 7450)) as s:
            s.sendall(b'shuntol\\x05' + os.urandom(64))
            print('answered', s.recv(64), flush=True)
            threading.Event().wait(0.2)
threading.Thread(target=call, daemon=True).start()
with socket.create_server(('192.168.77.2', 7450)) as listener:
    while True:
        s, _ = listener.accept()
        if s.recv(8) == b'shuntol\\x05':
            print('understood', flush=True)
        s.close()
";
    lab.start(A);
    let mut old = Command::new("python3");
    let old = lab.launch_on_host(B, old.args(["-c", OLD]), "answered b'shuntol\\x07'");
    lab::await_until(
        || lab.status(A)["now"]["lines"]["other-versions"]["192.168.77.2"] == 5,
        || lab.status(A).to_string(),
    );
    serve_go(&mut lab, false, "tcp4");
    assert_ok(&lab.output(A, &mut go_client(&lab, true, [3, 1, 10_000])), 3);
    assert_eq!(lab.paths(A, "client"), (0, serde_json::json!({ "stranger": 3 })));
    let control = lab.control(A);
    let mut status = Command::new(env!("CARGO_BIN_EXE_shunt"));
    let status = status.args(["overlay", "status", "--control"]).arg(control).output().unwrap();
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("the router of 192.168.77.2 has version 5 of the protocol"), "{status}");
    let log = lab.log(A);
    assert_eq!(log.matches("has another version of the protocol").count(), 1, "{log}");
    assert!(!lab.said(old).contains("understood"));
    assert_eq!(lab.status(A)["connections"]["strangers"], 0);
    // The other host gets the new version.
    lab.stop(old);
    lab.start(B);
    let has_line = || {
        let lines = &lab.status(A)["now"]["lines"];
        lines["to"]["192.168.77.2:7450"] == true && lines["other-versions"] == serde_json::json!({})
    };
    lab::await_until(has_line, || lab.status(A).to_string());
    assert!(lab.log(A).contains("has a version of the protocol now that this one has too"));
}

/// A router that hangs must have the effect of a missing router, except for the first call that
/// detects it.
#[test]
fn a_router_that_hangs_keeps_nobody_from_the_overlay() {
    let mut lab = Lab::build();
    lab.patience_ms = 300;
    lab.start(A);
    lab.start(B);
    serve_go(&mut lab, true, "tcp4");
    for host in [A, B] {
        lab.hang(host, true);
        assert_ok(&lab.output(A, &mut go_client(&lab, true, [10, 2, 10_000])), 10);
        lab.hang(host, false);
    }
    let came_back = || {
        assert_ok(&lab.output(A, &mut go_client(&lab, true, [1, 1, 1_000])), 1);
        lab.paths(B, "server").0 > 0
    };
    lab::await_until(came_back, || lab.status(B).to_string());
}

/// connect must report errors in the same way with and without shunt.
#[test]
fn connections_that_fail_do_so_as_on_the_overlay() {
    let mut lab = Lab::with_routers();
    serve_go(&mut lab, true, "tcp4");
    const SCRIPT: &str = "
import errno, selectors, socket, sys
def blocking(address):
    with socket.socket() as s:
        return errno.errorcode.get(s.connect_ex(address), 'connected')
def waiting(address):
    with socket.socket() as s, selectors.EpollSelector() as wait:
        s.setblocking(False)
        wait.register(s, selectors.EVENT_WRITE)
        first = s.connect_ex(address)
        wait.select()
        return [errno.errorcode[first], errno.errorcode.get(s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), 'connected'),
            errno.errorcode.get(s.connect_ex(address), 'connected')]
for address in [('10.50.2.2', 9000), ('10.50.2.2', 9001), ('10.50.2.99', 9000), ('10.50.1.2', 9000)]:
    print(address, blocking(address), waiting(address))
";
    let said = |is_supervised| {
        let mut python = lab.command(A, is_supervised, "python3");
        let output = lab.output(A, python.args(["-c", SCRIPT]));
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let natively = said(false);
    assert!(natively.contains("ECONNREFUSED") && natively.contains("EHOSTUNREACH"), "{natively}");
    assert_eq!(said(true), natively);
    assert_eq!(lab.paths(A, "client").0, 2, "{}", lab.status(A));
}

/// The programs make blocking calls, and one of them has a timer that interrupts accept.
#[test]
fn programs_that_block_take_the_host_network_and_are_interrupted_as_always() {
    let mut lab = Lab::with_routers();
    const SERVE: &str = "
import signal, socket
class Alarm(Exception):
    pass
def alarm(*_):
    raise Alarm
signal.signal(signal.SIGALRM, alarm)
with socket.create_server(('', 9000)) as listener:
    print('listening', flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        listener.accept()
    except Alarm:
        print('interrupted', flush=True)
    while True:
        connection, peer = listener.accept()
        with connection:
            assert peer == connection.getpeername(), peer
            connection.sendall(repr((peer[0], connection.getsockname())).encode() + connection.recv(1000))
";
    const ASK: &str = "
import socket
for number in range(20):
    with socket.socket() as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, number % 2)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 40000)
        s.settimeout(20) if number % 3 == 0 else None
        before = [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)]
        s.connect(('10.50.2.2', 9000))
        after = [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)]
        assert before == after, (before, after)
        assert s.getpeername() == ('10.50.2.2', 9000) and s.getsockname()[0] == '10.50.1.2'
        s.sendall(b' %d' % number)
        answer = b''
        while part := s.recv(1000):
            answer += part
        assert answer == b\"('10.50.1.2', ('10.50.2.2', 9000)) %d\" % number, answer
print('ok')
";
    let mut server = lab.command(B, true, "python3");
    lab.launch(B, server.args(["-c", SERVE]), "interrupted");
    let mut client = lab.command(A, true, "python3");
    let output = lab.output(A, client.args(["-c", ASK]));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{output:?}");
    assert_eq!(lab.paths(A, "client"), (20, serde_json::json!({})));
    assert_eq!(lab.paths(B, "server"), (20, serde_json::json!({})));
}

/// A descriptor that is in an epoll instance before it connects must keep its registration, also in
/// a child's copy of the instance. A descriptor with copies stays on the overlay.
#[test]
fn descriptors_keep_what_is_known_of_them() {
    let mut lab = Lab::with_routers();
    serve_go(&mut lab, true, "tcp4");
    const SCRIPT: &str = "
import errno, os, select, socket
def converse(copies):
    s = socket.socket()
    s.setblocking(False)
    wait = select.epoll()
    wait.register(s, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
    copy = s.dup() if copies else None
    assert s.connect_ex(('10.50.2.2', 9000)) == errno.EINPROGRESS
    while not [1 for fd, events in wait.poll() if events & select.EPOLLOUT]:
        pass
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    assert not os.get_inheritable(s.fileno()) and not s.getblocking()
    s.sendall(b'name 5\\n12345')
    answer = b''
    while not answer.endswith(b'12345'):
        assert [1 for fd, events in wait.poll() if fd == s.fileno()]
        try:
            answer += s.recv(1000)
        except BlockingIOError:
            pass
    assert answer.startswith(b'name 10.50.2.2:9000 10.50.1.2:'), answer
    if copies:
        assert copy.getsockname() == s.getsockname() and copy.getpeername() == s.getpeername()
converse(False)
converse(True)
print('ok')
";
    let mut client = lab.command(A, true, "python3");
    let output = lab.output(A, client.args(["-c", SCRIPT]));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{output:?}");
    assert_eq!(lab.paths(A, "client"), (1, serde_json::json!({ "shared": 1 })));
    assert_eq!(lab.paths(B, "server").0, 1);
}

/// A container shows sockets whose locks it holds, and exits. It holds a lock by making the kernel
/// wait for a page (userfaultfd) during a send.
#[test]
fn sockets_whose_locks_are_held_hold_up_nobody_else() {
    let mut lab = Lab::with_routers();
    serve_go(&mut lab, true, "tcp4");
    const SCRIPT: &str = "
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
threading.Thread(target=lambda: libc.send(client.fileno(), ctypes.c_void_p(page), ctypes.c_size_t(4096), 0), daemon=True).start()
time.sleep(0.3)
room, length = ctypes.create_string_buffer(100), ctypes.c_int(100)
asked = threading.Thread(target=lambda: libc.getsockopt(client.fileno(), 6, 11, room, ctypes.byref(length)), daemon=True)
asked.start()
asked.join(0.3)
assert asked.is_alive(), 'the lock is not held'
conversations = []
for number in range(60):
    for words in [b'{\"connect\":{\"to\":\"10.50.2.2:9000\"}}', b'{\"accepted\":{\"local\":\"10.50.1.2:1\",\"remote\":\"10.50.2.2:1\"}}']:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        s.connect(sys.argv[1])
        socket.send_fds(s, [words], [client.fileno()])
        conversations.append(s)
print('held', flush=True)
time.sleep(60)
";
    let evil = shunt_netns::Net::new();
    let mut script = Command::new("python3");
    script.args(["-c", &held_page(SCRIPT)]).arg(lab.socket(A));
    lab.launch_in(&evil, &mut script, "held");
    assert_ok(&lab.output(A, &mut go_client(&lab, true, [10, 2, 10_000])), 10);
    assert_eq!(lab.paths(A, "client").0, 10, "{}", lab.status(A));
}

/// A peer that is no router of this overlay must be rejected. Neither that peer nor a container
/// that uses up its share may affect others.
#[test]
fn strangers_are_turned_away_while_others_are_served() {
    let mut lab = Lab::with_routers();
    serve_go(&mut lab, true, "tcp4");
    // The connections come from a configured host, as those of a container behind address
    // translation would, but without the key.
    const NOISE: &str = "
import os, socket
for length in [0, 1, 81, 82, 4096]:
    with socket.create_connection(('192.168.77.2', 7450)) as s:
        try:
            s.sendall(os.urandom(length))
            s.shutdown(socket.SHUT_WR)
            assert s.recv(1) == b'', length
        except OSError:
            pass  # It has hung up, or been reset since that was more than was read.
";
    let noise = |net: &shunt_netns::Net, script: &str, socket: &str| {
        let mut python = Command::new("python3");
        python.args(["-c", script, socket]);
        let output = net.inside(|| python.output().unwrap());
        assert!(output.status.success(), "{output:?}");
    };
    noise(&lab.hosts[A].net, NOISE, "");
    assert!(
        lab.status(B)["strangers"].is_null() && lab.status(B)["connections"]["strangers"].as_u64() >= Some(2)
    );
    // A container sends invalid requests, and keeps as many connections open as possible.
    const FLOOD: &str = "
import socket, subprocess, sys
def connect():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(sys.argv[1])
    return s
for words in [b'', b'{', b'\\xff' * 9000, b'{\"hello\":1}', b'{\"connect\":{\"to\":\"10.50.2.2:9000\"}}', b'{\"accepted\":{\"local\":\"10.50.1.2:1\",\"remote\":\"10.50.2.2:1\"}}', b'\"moment\"', b'{\"hello\":99}']:
    with connect() as s:
        s.send(words)
# A file that is no socket, a pipe and a socket that was connected already.
for shown in [open('/dev/null').fileno(), 0, socket.create_connection(('10.50.2.2', 9000)).detach()]:
    for words in [b'{\"connect\":{\"to\":\"10.50.2.2:9000\"}}', b'{\"accepted\":{\"local\":\"10.50.1.2:1\",\"remote\":\"10.50.2.2:1\"}}', b'{\"hello\":1}']:
        with connect() as s:
            socket.send_fds(s, [words], [shown])
            s.settimeout(20)
            s.recv(1000)
open_ones = []
for number in range(1500):
    s = connect()
    s.setblocking(False)
    open_ones.append(s)
print('full', flush=True)
import time
time.sleep(1.5)
";
    let socket = lab.socket(A).display().to_string();
    noise(&lab.hosts[A].container, FLOOD, &socket);
    let mut flood = Command::new("python3");
    lab.launch(B, flood.args(["-c", FLOOD, &lab.socket(B).display().to_string()]), "full");
    // The exhausted share is that of the server's container. This client belongs to another
    // container.
    let status = lab.status(B);
    assert!(status["connections"]["client"]["overlay"]["busy"].as_u64() >= Some(1), "{status}");
    assert_ok(&lab.output(A, &mut go_client(&lab, true, [10, 2, 10_000])), 10);

    // A router must not accept a supervisor in a network namespace that an unprivileged user has
    // created.
    let mut unshare = Command::new("unshare");
    unshare.args(["-U", "-r", "-n", "--"]).arg(env!("CARGO_BIN_EXE_shunt"));
    unshare.args(["overlay", "run", "--router", &socket, "--", "echo", "it runs"]);
    let output = lab.output(A, &mut unshare);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "it runs\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("runs on the overlay"), "{output:?}");
}

#[test]
fn what_is_wrong_is_said_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("overlay.toml");
    let key = directory.path().join("key");
    let route = |text: &str| {
        fs::write(&config, text.replace("KEY", key.to_str().unwrap())).unwrap();
        let output = lab::shunt(&["overlay", "router", "--config", config.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let text = "name = 'a'\nkey = 'KEY'\nprefixes = ['10.50.0.0/16']\n\
        [[host]]\nname = 'a'\naddress = '192.168.0.1:7450'\ncontainers = ['10.50.1.0/24']\n";
    assert!(route(text).contains("No such file"), "there is no key yet");
    assert!(lab::shunt(&["overlay", "new-key", key.to_str().unwrap()]).status.success());
    assert!(route("name = 'a'").contains("missing field"));
    assert!(route(&text.replace("10.50.1.0/24", "10.51.0.0/24")).contains("is not within prefixes"));
    let nobody = lab::shunt(&["overlay", "status", "--control", "/nonexistent/socket"]);
    assert!(String::from_utf8_lossy(&nobody.stderr).contains("no router answers"));
    // A program without a router runs, and its exit code is passed on.
    let words = ["overlay", "run", "--router", "/nonexistent/router", "--", "sh", "-c", "echo out; exit 7"];
    let output = lab::shunt(&words);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(7), &b"out\n"[..]));
    assert!(String::from_utf8_lossy(&output.stderr).contains("runs on the overlay until a router answers"));
    let missing = lab::shunt(&["overlay", "run", "--", "no-such-program"]);
    assert_eq!(missing.status.code(), Some(127));
}

/// The port of an open connection must not be reused, although the overlay carries no packets of
/// it.
#[test]
fn no_two_open_connections_have_the_same_names() {
    let mut lab = Lab::with_routers();
    serve_go(&mut lab, true, "tcp4");
    // The range has only a few more ports than the test uses.
    let range = || fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40049").unwrap();
    lab.hosts[A].container.inside(range);
    const SCRIPT: &str = "
import socket
open_ones = [socket.create_connection(('10.50.2.2', 9000)) for _ in range(40)]
assert len({s.getsockname() for s in open_ones}) == 40
print('ok')
";
    let mut client = lab.command(A, true, "python3");
    let output = lab.output(A, client.args(["-c", SCRIPT]));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{output:?}");
    assert_eq!(lab.paths(A, "client"), (40, serde_json::json!({})));
    lab::await_until(|| lab.status(A)["now"]["connections"]["client"] == 0, || lab.status(A).to_string());
}

/// A port of the host is busy for a minute after its connection (TIME_WAIT), for each port of the
/// other router. The kernel has so few in this test that one port of the router does not suffice.
#[test]
fn a_host_that_has_no_free_port_reports_that_and_uses_all_ports_of_the_router() {
    const CONNECTIONS: u64 = 60;
    const CONNECT: &str = "
import socket, sys
for number in range(int(sys.argv[1])):
    with socket.create_connection(('10.50.2.2', 9000)) as s:
        s.sendall(b'name 5\\n12345')
        answer = b''
        while not answer.endswith(b'12345'):
            part = s.recv(1000)
            assert part, 'it has ended'
            answer += part
print('ok')
";
    for (ports, moves_all) in [(1, false), (4, true)] {
        let mut lab = Lab::build();
        lab.ports = ports;
        lab.hosts[A]
            .net
            .inside(|| fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40019").unwrap());
        lab.start(A);
        lab.start(B);
        serve_go(&mut lab, true, "tcp4");
        let mut client = lab.command(A, true, "python3");
        let output = lab.output(A, client.args(["-c", CONNECT, &CONNECTIONS.to_string()]));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{output:?}");
        let (moved, stayed) = lab.paths(A, "client");
        if moves_all {
            assert_eq!((moved, stayed), (CONNECTIONS, serde_json::json!({})));
        } else {
            assert!((10..=20).contains(&moved), "{moved} {stayed}");
            assert_eq!(stayed, serde_json::json!({ "ports": CONNECTIONS - moved }));
        }
    }
}

/// The servers run on while their host's router is replaced. They get connections of the host
/// network as soon as the new router is ready, whether they wait in accept or for events.
#[test]
fn listening_sockets_are_known_to_the_next_router_before_it_is_ready() {
    const SERVE: &str = "
import socket
listener = socket.create_server(('', 9001))
print('listening', flush=True)
while True:
    with listener.accept()[0] as connection:
        connection.sendall(connection.recv(1000))
";
    const CONNECT: &str = "
import socket
for request in [b'name 5\\n12345', b'one']:
    port = 9001 if request == b'one' else 9000
    with socket.create_connection(('10.50.2.2', port)) as s:
        s.sendall(request)
        answer = b''
        while not answer.endswith(request[-3:]):
            part = s.recv(1000)
            assert part, 'it has ended'
            answer += part
print('ok')
";
    let mut lab = Lab::with_routers();
    serve_go(&mut lab, true, "tcp4");
    let mut python = lab.command(B, true, "python3");
    lab.launch(B, python.args(["-c", SERVE]), "listening");
    let connect = |lab: &Lab| {
        let mut client = lab.command(A, true, "python3");
        let output = lab.output(A, client.args(["-c", CONNECT]));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{output:?}");
    };
    for (round, host) in [B, B, A].into_iter().enumerate() {
        connect(&lab);
        let record = lab.control(host).with_extension("supervisors");
        let recorded = || fs::read(&record).ok().and_then(|it| serde_json::from_slice::<Vec<u32>>(&it).ok());
        let servers = if host == B { 2 } else { 0 };
        lab::await_until(|| recorded().is_some_and(|it| it.len() == servers), || format!("{:?}", recorded()));
        let starts = lab.log(host).matches("the router serves").count();
        lab.kill(host);
        lab.start(host);
        lab::await_until(|| lab.log(host).matches("the router serves").count() > starts, || lab.log(host));
        let has_lines = || {
            let up = |at: usize, router: &str| lab.status(at)["now"]["lines"]["to"][router] == true;
            up(A, lab.routers[B]) && up(B, lab.routers[A])
        };
        lab::await_until(has_lines, || lab.status(A).to_string());
        assert_eq!(lab.status(B)["now"]["listeners"], 2, "{round}");
        connect(&lab);
        assert_eq!(lab.paths(A, "client").1, serde_json::json!({}), "{round}");
    }
}
