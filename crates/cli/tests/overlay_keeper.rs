//! A killed supervisor loses nothing: its keeper has its descriptors, and executes a successor.
//! Connections under way are established, and later ones move to the host network again. Needs
//! root, nginx and Python.

#[path = "overlay/lab.rs"]
mod lab;
#[path = "overlay/nginx.rs"]
mod nginx;
#[path = "overlay/pair.rs"]
mod pair;

use std::fs;
use std::path::PathBuf;

use lab::{A, B, Lab, SERVER, await_until};
use nginx::Site;
use pair::{await_pair, pair, signal};
use rustix::process::Signal;

/// Four threads request a page again and again, each time on another connection: two by blocking
/// calls, two by non-blocking ones. A fifth one keeps its connection.
const LOAD: &str = "
import errno, os, select, socket, sys, threading, time
done, failed, stop = [0] * 5, [], sys.argv[1]
REQUEST = b'GET /page HTTP/1.1\\r\\nHost: x\\r\\nConnection: %s\\r\\n\\r\\n'
PAGE = b'x' * 3000

def connect(blocks):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\\1\\0\\0\\0\\0\\0\\0\\0')
    if blocks:
        s.connect(('10.50.2.2', 80))
    else:
        s.setblocking(False)
        error = s.connect_ex(('10.50.2.2', 80))
        assert error == errno.EINPROGRESS, os.strerror(error)
        assert select.select([], [s], [], 30)[1], 'it is never writable'
        error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        assert error == 0, os.strerror(error)
    s.settimeout(30)
    return s

def request(s, kept):
    s.sendall(REQUEST % (b'keep-alive' if kept else b'close'))
    came = b''
    while PAGE not in came:
        more = s.recv(65536)
        assert more, ('it ends', came)
        came += more

def run(at):
    what = 'connect'
    try:
        kept = connect(True) if at == 4 else None
        while not os.path.exists(stop):
            what = 'connect'
            s = kept or connect(at < 2)
            what = 'request'
            request(s, kept)
            if not kept:
                s.close()
            else:
                time.sleep(0.02)
            done[at] += 1
    except Exception as error:
        failed.append((at, what, done[at], repr(error)))

threads = [threading.Thread(target=run, args=(at,)) for at in range(5)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    print('done', min(done), 'failed', failed, flush=True)
    time.sleep(0.02)
print('ended', sum(done), 'failed', failed, flush=True)
";

fn serve(lab: &mut Lab) {
    let site = Site { workers: 2, http: "", server: "listen 80;", sockets: 1 };
    nginx::serve(lab, true, &site, &[("page".to_owned(), vec![b'x'; 3000])]);
}

/// A load that runs until the test ends it.
struct Load {
    launched: usize,
    stop: PathBuf,
}

impl Load {
    fn start(lab: &mut Lab) -> Load {
        let stop = lab.path("stop");
        let mut client = lab.command(A, true, "python3");
        let launched = lab.launch(A, client.args(["-c", LOAD]).arg(&stop), "done 1");
        Load { launched, stop }
    }

    /// Returns how often each thread has at least got the page.
    fn done(&self, lab: &Lab) -> u64 {
        let said = lab.said(self.launched);
        assert!(
            said.contains("failed []") && !said.contains("failed [("),
            "{}",
            said.lines().last().unwrap()
        );
        let line = said.lines().rfind(|line| line.starts_with("done ") && line.ends_with(']'));
        line.and_then(|line| line.split(' ').nth(1)?.parse().ok()).unwrap_or(0)
    }

    /// Waits until each thread has got the page `more` times again.
    fn await_more(&self, lab: &Lab, more: u64) {
        let before = self.done(lab);
        await_until(
            || self.done(lab) >= before + more,
            || lab.said(self.launched).lines().last().unwrap().into(),
        );
    }

    fn end(self, lab: &mut Lab) {
        fs::write(&self.stop, "").unwrap();
        let said = lab.await_end(self.launched);
        let last = said.lines().last().unwrap();
        assert!(last.starts_with("ended") && last.ends_with("failed []"), "{last}");
    }
}

/// Waits until further connections use the host network.
fn await_moved(lab: &Lab) {
    let before = lab.paths(B, "server").0;
    await_until(|| lab.paths(B, "server").0 > before + 10, || lab.status(B).to_string());
}

/// Starts both routers, which trust containers.
fn trusting() -> Lab {
    let mut lab = Lab::build();
    lab.configuration = "secure = false".to_owned();
    lab.start(A);
    lab.start(B);
    lab
}

#[test]
fn a_killed_supervisor_loses_no_connection_under_load() {
    kill_under_load(Lab::with_routers());
}

#[test]
fn a_killed_supervisor_of_a_trusted_program_loses_none_either() {
    kill_under_load(trusting());
}

fn kill_under_load(mut lab: Lab) {
    serve(&mut lab);
    let load = Load::start(&mut lab);
    await_moved(&lab);
    for round in 0..20 {
        let host = [B, A][round % 2];
        let before = await_pair(&lab, host, None);
        signal(before.supervisor, Signal::KILL);
        let after = await_pair(&lab, host, Some(before));
        // The keeper has become the supervisor.
        assert_eq!(after.supervisor, before.keeper);
        load.await_more(&lab, 2);
    }
    await_moved(&lab);
    load.end(&mut lab);
    assert_eq!(lab.status(B)["now"]["listeners"], 1);
    // The routers know of each connection that has moved.
    let ends = || (lab.paths(A, "client").0, lab.paths(B, "server").0);
    await_until(|| ends().0 == ends().1, || format!("{} {}", lab.status(A), lab.status(B)));
    assert_eq!(lab.status(B)["connections"]["reset"], 0, "{}", lab.status(B));
}

/// Killed, it is replaced by another one within a second, and the supervisor runs on.
#[test]
fn a_killed_keeper_is_replaced() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    let load = Load::start(&mut lab);
    await_moved(&lab);
    for _ in 0..3 {
        let before = await_pair(&lab, B, None);
        signal(before.keeper, Signal::KILL);
        await_until(
            || pair(&lab, B).is_some_and(|after| after.keeper != before.keeper),
            || format!("{before:?} {:?}", pair(&lab, B)),
        );
        let after = pair(&lab, B).unwrap();
        assert_eq!(after.supervisor, before.supervisor);
        signal(after.supervisor, Signal::KILL);
        assert_eq!(await_pair(&lab, B, Some(after)).supervisor, after.keeper);
        load.await_more(&lab, 2);
    }
    await_moved(&lab);
    load.end(&mut lab);
}

#[test]
fn a_stopped_supervisor_is_replaced() {
    let mut lab = Lab::with_routers();
    serve(&mut lab);
    let load = Load::start(&mut lab);
    await_moved(&lab);
    for host in [B, A] {
        let before = await_pair(&lab, host, None);
        signal(before.supervisor, Signal::STOP);
        assert_eq!(await_pair(&lab, host, Some(before)).supervisor, before.keeper);
        load.await_more(&lab, 2);
    }
    await_moved(&lab);
    load.end(&mut lab);
}

/// The client's end is on the host network already, and the server has not accepted yet.
#[test]
fn a_connection_that_awaits_accept_survives_the_supervisor() {
    const SERVER_SCRIPT: &str = "
import os, socket, sys, time
listener = socket.create_server(('', 9000), backlog=64)
print('listening', flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
s = listener.accept()[0]
s.sendall(s.recv(100))
print('served', flush=True)
time.sleep(60)
";
    const CLIENT_SCRIPT: &str = "
import socket
s = socket.create_connection(('10.50.2.2', 9000))
s.sendall(b'hello')
print('sent', flush=True)
s.settimeout(60)
assert s.recv(100) == b'hello'
print('ok', flush=True)
";
    let mut lab = Lab::with_routers();
    let go = lab.path("go");
    let mut server = lab.command(B, true, "python3");
    lab.launch(B, server.args(["-c", SERVER_SCRIPT]).arg(&go), "listening");
    let mut client = lab.command(A, true, "python3");
    let client = lab.launch(A, client.args(["-c", CLIENT_SCRIPT]), "sent");
    await_until(|| lab.paths(A, "client").0 == 1, || lab.status(A).to_string());
    let mut before = await_pair(&lab, B, None);
    for _ in 0..3 {
        signal(before.supervisor, Signal::KILL);
        before = await_pair(&lab, B, Some(before));
    }
    fs::write(&go, "").unwrap();
    assert!(lab.await_end(client).contains("ok"));
    assert_eq!(lab.paths(B, "server").0, 1, "{SERVER}");
}

/// A thread waits in accept all the time, and many supervisors come and go.
#[test]
fn a_waiting_accept_is_handed_from_supervisor_to_supervisor() {
    const SERVER_SCRIPT: &str = "
import socket
listener = socket.create_server(('', 9000), backlog=64)
print('listening', flush=True)
while True:
    s = listener.accept()[0]
    s.sendall(s.recv(100))
    s.close()
";
    const CLIENT_SCRIPT: &str = "
import socket
with socket.create_connection(('10.50.2.2', 9000), timeout=60) as s:
    s.sendall(b'hello')
    assert s.recv(100) == b'hello'
";
    let mut lab = Lab::with_routers();
    let mut server = lab.command(B, true, "python3");
    lab.launch(B, server.args(["-c", SERVER_SCRIPT]), "listening");
    let exchange = |lab: &Lab| {
        let mut client = lab.command(A, true, "python3");
        let output = lab.output(A, client.args(["-c", CLIENT_SCRIPT]));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    exchange(&lab);
    let mut before = await_pair(&lab, B, None);
    for round in 0..5 {
        signal(before.supervisor, Signal::KILL);
        before = await_pair(&lab, B, Some(before));
        exchange(&lab);
        assert_eq!(lab.paths(B, "server").0, round + 2, "{}", lab.status(B));
    }
}

/// A router that is started again from a newer file: its supervisors become that file's too.
#[test]
fn supervisors_are_renewed_after_an_update() {
    let mut lab = trusting();
    let program = lab.path("shunt");
    fs::copy(env!("CARGO_BIN_EXE_shunt"), &program).unwrap();
    let mut server = std::process::Command::new(&program);
    server.args(["overlay", "run", "--router"]).arg(lab.socket(B)).args(["--", "python3", "-c"]).arg(
        "import socket, time; s = socket.create_server(('', 9000)); print('listening', flush=True); time.sleep(1000)",
    );
    lab.launch(B, &mut server, "listening");
    let before = await_pair(&lab, B, None);
    let new = lab.path("new");
    fs::copy(env!("CARGO_BIN_EXE_shunt"), &new).unwrap();
    fs::rename(&new, &program).unwrap();
    lab.kill(B);
    lab.start(B);
    let after = await_pair(&lab, B, Some(before));
    assert_eq!(fs::read_link(format!("/proc/{}/exe", after.supervisor)).unwrap(), program);
    await_until(|| lab.status(B)["now"]["listeners"] == 1, || lab.status(B).to_string());
}
