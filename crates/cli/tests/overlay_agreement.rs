//! The two ends of a connection must use the same network path, whichever router or supervisor is
//! stopped, for however long and at which moment. A process that gets no processor time behaves
//! like a stopped one.
//!
//! A connection moves to the host network in two steps. First the server's router makes a
//! *promise*. The last message is the *commit*: the client's supervisor sends it when the client's
//! program has checked that it is connected (docs/overlay-protocol.md). Needs root, Go and Python.

#[path = "overlay/lab.rs"]
mod lab;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use lab::{A, B, Lab, SERVER, await_until, go};

/// Accepts, if a file is named only after that exists, and echoes all bytes.
const ECHO: &str = "
import os, socket, sys, threading, time
def echo(s):
    try:
        while data := s.recv(65536):
            s.sendall(data)
    except OSError:
        pass
listener = socket.create_server(('', 9000), backlog=64)
print('listening', flush=True)
while True:
    while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    threading.Thread(target=echo, args=(listener.accept()[0],)).start()
";

/// Accepts without blocking, after a file exists, and echoes all bytes. One thread serves all.
const ECHO_BY_EVENTS: &str = "
import os, selectors, socket, sys, time
listener = socket.create_server(('', 9000), backlog=64)
listener.setblocking(False)
print('listening', flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
with selectors.EpollSelector() as events:
    events.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.fileobj is listener:
                try:
                    while True:
                        connection, peer = listener.accept()
                        assert peer[0] == '10.50.1.2', peer
                        events.register(connection, selectors.EVENT_READ)
                except BlockingIOError:
                    pass
            elif data := key.fileobj.recv(65536):
                key.fileobj.sendall(data)
            else:
                events.unregister(key.fileobj)
                key.fileobj.close()
";

/// Connects without blocking. When a file exists, it checks that it is connected, and exchanges
/// bytes.
const LOOKS_LATE: &str = "
import errno, os, select, socket, sys, time
with socket.socket() as s:
    s.setblocking(False)
    assert s.connect_ex(('10.50.2.2', 9000)) == errno.EINPROGRESS
    select.select([], [s], [])
    print('under way', flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.005)
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    print('looked', flush=True)
    s.settimeout(60)
    s.sendall(b'x' * 1000)
    left = 1000
    while left:
        came = len(s.recv(left))
        assert came, 'it has ended'
        left -= came
    print('ok', flush=True)
";

/// Waits for the connection. When a file exists, it exchanges bytes.
const TALKS_LATE: &str = "
import os, socket, sys, time
with socket.create_connection(('10.50.2.2', 9000)) as s:
    print('connected', flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    s.settimeout(60)
    s.sendall(b'x' * 1000)
    left = 1000
    while left:
        came = len(s.recv(left))
        assert came, 'it has ended'
        left -= came
    print('ok', flush=True)
";

/// Starts routers with these waiting times.
fn lab(patience_ms: [u32; 2]) -> Lab {
    let mut lab = Lab::build();
    // The program checks its connection only after connect has returned.
    lab.hold_ms = 0;
    for host in [A, B] {
        lab.patience_ms = patience_ms[host];
        lab.start(host);
    }
    lab
}

fn serve(lab: &mut Lab, words: &[&PathBuf]) {
    let mut server = lab.command(B, true, "python3");
    lab.launch(B, server.args(["-c", ECHO]).args(words), "listening");
}

fn connect(lab: &mut Lab, script: &str, go: &PathBuf, word: &str) -> usize {
    let mut client = lab.command(A, true, "python3");
    lab.launch(A, client.args(["-c", script]).arg(go), word)
}

fn await_promises(lab: &Lab, count: u64) {
    await_until(|| lab.status(B)["now"]["promises"] == count, || lab.status(B).to_string());
}

/// Returns the number of connections on the host network, after waiting until both ends have
/// counted equally many.
fn agreed(lab: &Lab) -> u64 {
    let ends = || (lab.paths(A, "client").0, lab.paths(B, "server").0);
    // The client's end is counted shortly after it has started to exchange bytes.
    await_until(|| ends().0 == ends().1, || format!("{} {}", lab.status(A), lab.status(B)));
    ends().0
}

/// The client's program checks its connection after the server's host has given up.
#[test]
fn a_program_that_looks_too_late_for_the_other_host() {
    let mut lab = lab([10_000, 300]);
    serve(&mut lab, &[]);
    let go = lab.path("go");
    let client = connect(&mut lab, LOOKS_LATE, &go, "under way");
    await_until(|| lab.paths(B, "server").1["not-committed"] == 1, || lab.status(B).to_string());
    fs::write(go, "").unwrap();
    assert!(lab.await_end(client).ends_with("ok\n"), "{}", lab.said(client));
    assert_eq!(agreed(&lab), 0);
}

/// Stops the client's router after the promise, while the program checks its connection. The router
/// continues when one of the ends has given up.
fn stop_while_it_looks(patience_ms: [u32; 2], has_given_up: impl Fn(&Lab, usize) -> bool) {
    let mut lab = lab(patience_ms);
    serve(&mut lab, &[]);
    let go = lab.path("go");
    let client = connect(&mut lab, LOOKS_LATE, &go, "under way");
    await_promises(&lab, 1);
    lab.hang(A, true);
    fs::write(go, "").unwrap();
    await_until(|| has_given_up(&lab, client), || format!("{} {}", lab.said(client), lab.status(B)));
    lab.hang(A, false);
    assert!(lab.await_end(client).ends_with("ok\n"), "{}", lab.said(client));
    assert_eq!(agreed(&lab), 0);
}

/// The client's router is stopped between the promise and the commit, for longer than the server's
/// host waits.
#[test]
fn a_router_that_is_stopped_before_the_last_word() {
    stop_while_it_looks([10_000, 300], |lab, _| lab.paths(B, "server").1["not-committed"] == 1);
}

/// The client's router is stopped between the promise and the commit, for longer than the program's
/// supervisor waits.
#[test]
fn a_router_that_is_stopped_until_its_supervisor_has_given_up() {
    stop_while_it_looks([1_000, 10_000], |lab, client| lab.said(client).contains("looked"));
}

/// The commit is sent, but is lost until the server's host gives up. The two messages cross.
#[test]
fn a_last_word_that_crosses_the_end_of_patience() {
    let mut lab = lab([10_000, 300]);
    serve(&mut lab, &[]);
    let go = lab.path("go");
    let client = connect(&mut lab, LOOKS_LATE, &go, "under way");
    await_promises(&lab, 1);
    // Within half a second of the call, the supervisor sends a commit without waiting for its
    // acknowledgement. This commit comes later.
    std::thread::sleep(Duration::from_millis(600));
    let host = &lab.hosts[A].net;
    host.words("nft add table inet lossy");
    host.words("nft add chain inet lossy out { type filter hook output priority 0 ; }");
    host.words("nft add rule inet lossy out tcp dport 7450 drop");
    fs::write(go, "").unwrap();
    await_until(|| lab.paths(B, "server").1["not-committed"] == 1, || lab.status(B).to_string());
    lab.hosts[A].net.words("nft delete table inet lossy");
    assert!(lab.await_end(client).ends_with("ok\n"), "{}", lab.said(client));
    assert_eq!(agreed(&lab), 0);
    assert_eq!(lab.paths(A, "client").1["late"], 1, "{}", lab.status(A));
}

/// The server's router is stopped long after the commit, while the supervisor asks it about
/// accepted connections.
#[test]
fn a_router_that_is_stopped_while_it_is_asked_about_what_was_accepted() {
    const CONNECTIONS: usize = 8;
    let mut lab = lab([10_000, 300]);
    let accept = lab.path("accept");
    serve(&mut lab, &[&accept]);
    let go = lab.path("go");
    let clients: Vec<usize> =
        (0..CONNECTIONS).map(|_| connect(&mut lab, TALKS_LATE, &go, "connected")).collect();
    fs::write(go, "").unwrap();
    // This is longer than either end waits for the other.
    std::thread::sleep(Duration::from_secs(2));
    lab.hang(B, true);
    fs::write(accept, "").unwrap();
    // This is longer than the interval at which a router checks for promised connections that no
    // supervisor asks for.
    std::thread::sleep(Duration::from_secs(3));
    lab.hang(B, false);
    for client in clients {
        assert!(lab.await_end(client).ends_with("ok\n"), "{}", lab.said(client));
    }
    assert_eq!(agreed(&lab), CONNECTIONS as u64, "{}", lab.status(B));
}

/// The server's router is stopped after the commit. The server accepts other connections while that
/// one awaits the router, and gets it in the end, although no other one follows.
fn stop_while_it_is_asked(server: &str) {
    let mut lab = lab([1_000, 100]);
    let accept = lab.path("accept");
    let mut python = lab.command(B, true, "python3");
    lab.launch(B, python.args(["-c", server]).arg(&accept), "listening");
    let go = lab.path("go");
    let promised = connect(&mut lab, TALKS_LATE, &go, "connected");
    await_until(|| lab.paths(A, "client").0 == 1, || lab.status(A).to_string());
    lab.hang(B, true);
    fs::write(&accept, "").unwrap();
    for is_supervised in [false, true, false] {
        let begun = Instant::now();
        let mut other = lab.command(A, is_supervised, "python3");
        let other = lab.output(A, other.args(["-c", TALKS_LATE]).arg(&accept));
        assert!(other.stdout.ends_with(b"ok\n"), "{other:?}");
        println!("served after {:?}", begun.elapsed());
    }
    lab.hang(B, false);
    fs::write(go, "").unwrap();
    assert!(lab.await_end(promised).ends_with("ok\n"), "{}", lab.said(promised));
    assert_eq!(lab.status(B)["connections"]["reset"], 0, "{}", lab.status(B));
    assert_eq!(agreed(&lab), 1);
}

#[test]
fn a_promised_connection_whose_router_is_stopped_holds_up_no_blocking_accept() {
    stop_while_it_is_asked(ECHO);
}

#[test]
fn a_promised_connection_whose_router_is_stopped_holds_up_no_event_loop() {
    stop_while_it_is_asked(ECHO_BY_EVENTS);
}

/// Both routers run only from time to time, as on an overloaded machine.
#[test]
fn routers_that_are_starved() {
    let mut lab = lab([100, 100]);
    let mut server = lab.command(B, true, go("server"));
    lab.launch(B, server.args(["tcp4", ":9000"]), "listening");
    let mut client = lab.command(A, true, go("client"));
    client.args([&format!("{SERVER}:9000"), "400", "16", "2000", "0"]);
    let client = lab.launch(A, &mut client, "");
    // The pauses of the two routers differ and have no common pattern.
    let pauses = [7, 310, 45, 1_250, 3, 130, 620, 18, 900, 70, 1_600, 11, 240];
    let mut turn = 0;
    while !lab.has_ended(client) {
        for host in [A, B] {
            lab.hang(host, turn % (host + 2) == 0);
        }
        std::thread::sleep(Duration::from_millis(pauses[turn % pauses.len()]));
        turn += 1;
    }
    for host in [A, B] {
        lab.hang(host, false);
    }
    assert_eq!(lab.await_end(client), "ok 400\n", "{} {}", lab.status(A), lab.status(B));
    assert_eq!(lab.status(B)["connections"]["reset"], 0, "{}", lab.status(B));
    let agreed = agreed(&lab);
    println!("{agreed} of 400 connections took the host network");
}
