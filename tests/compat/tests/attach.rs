//! `shunt attach` and `shunt detach` under load. Every answer must be right, before, meanwhile and
//! afterwards. Connections that are made after the attachment must use shared memory.

#![cfg(target_arch = "x86_64")]

use shunt_compat::{Host, Launch, Program, compile, find_program, under_shunt};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(150);
const SOON: Duration = Duration::from_secs(40);
const CONNECTIONS: usize = 3;

fn command(host: &Host, name: &str) -> Command {
    let mut command = Command::new(&host.tools().expect("a host under shunt").shunt);
    command.arg(name).env("SHUNT_CONFIG", "");
    if name == "attach" {
        command.arg("--broker").arg(host.broker_socket());
    }
    command
}

fn run(host: &Host, name: &str, pid: u32) -> Output {
    command(host, name).arg(pid.to_string()).output().expect("the command is there")
}

/// Attaches or detaches, and returns the output.
fn done(host: &Host, name: &str, pid: u32) -> String {
    let output = run(host, name, pid);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{name}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Returns why the program is refused.
fn refused(host: &Host, pid: u32) -> String {
    let output = run(host, "attach", pid);
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn clients<'h>(host: &'h Host, port: u16, end: &str, style: &str) -> Launch<'h> {
    host.script("/usr/bin/python3", "running.py").args([
        &port.to_string(),
        &CONNECTIONS.to_string(),
        end,
        style,
    ])
}

fn end(host: &Host, clients: Program, file: &str) {
    host.write(file, "");
    let ended = clients.wait(SOON);
    assert!(ended.success(), "{}{}", ended.stdout, ended.stderr);
}

/// Makes a connection to our own server. Returns it once the server has accepted it.
fn exchange(port: u16) -> TcpStream {
    let mut connection = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    let mut answer = [0];
    connection.write_all(b"a").and_then(|()| connection.read_exact(&mut answer)).expect("it answers");
    assert_eq!(&answer, b"b");
    connection
}

/// Enters a server that has `old` clients already, and leaves it again while new clients work.
/// `in_accept` threads of the server wait in accept since before. What they accept stays on TCP.
fn enter_and_leave(host: &Host, server: &Program, port: u16, style: &str, in_accept: usize) {
    host.wait_for_port(port);
    let old = clients(host, port, "end.old", style).native().start("old");
    let transport = host.watch_transport();
    wait_for_connections(server, CONNECTIONS);
    let told = done(host, "attach", server.pid());
    assert!(told.contains("is under shunt"), "{told}");
    let accepted: Vec<_> = (0..in_accept).map(|_| exchange(port)).collect();
    drop(accepted);
    if style == "java" {
        // The only thread that accepts is in accept since before.
        drop(TcpStream::connect(("127.0.0.1", port)).expect("it listens"));
    }
    let new = clients(host, port, "end.new", style).start("new");
    // Each connection is seen at both ends.
    transport.wait_for_shm(port, CONNECTIONS, SOON);
    let again = refused(host, server.pid());
    assert!(again.contains("under shunt already"), "{again}");
    done(host, "detach", server.pid());
    let late = clients(host, port, "end.late", style).start("late");
    end(host, new, "end.new");
    end(host, late, "end.late");
    end(host, old, "end.old");
}

/// Waits until the process has so many sockets besides its listener.
fn wait_for_connections(server: &Program, count: usize) {
    let begin = Instant::now();
    let sockets = || {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("it runs");
        let targets = fds.flatten().filter_map(|fd| std::fs::read_link(fd.path()).ok());
        targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
    };
    while sockets() <= count {
        assert!(begin.elapsed() < SOON, "{} sockets", sockets());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn own_server(style: &'static str, flags: &'static [&'static str]) {
    under_shunt(LIMIT, move |host| {
        compile(host, "running", flags);
        let port = host.port();
        let threads = 3 * CONNECTIONS;
        let in_accept = if style == "blocking" { threads - CONNECTIONS } else { 0 };
        let server = host
            .program("./running")
            .args([&port.to_string(), &threads.to_string(), style])
            .native()
            .start("server");
        enter_and_leave(host, &server, port, "successor", in_accept);
        host.write("end", "");
        let ended = server.wait(SOON);
        assert!(ended.success(), "{}{}", ended.stdout, ended.stderr);
    });
}

#[test]
fn threads_that_wait_in_one_epoll_instance_see_no_interruption() {
    own_server("epoll", &["-Wl,-z,now"]);
}

#[test]
fn calls_that_are_bound_when_they_are_made_lead_to_the_shim() {
    own_server("each", &["-Wl,-z,lazy"]);
}

#[test]
fn signal_handlers_go_on_running() {
    own_server("signals", &[]);
}

#[test]
fn signals_that_a_wait_unblocks_are_blocked_afterwards() {
    own_server("masked", &[]);
}

#[test]
fn threads_that_block_in_accept_go_on() {
    own_server("blocking", &[]);
}

#[test]
fn redis_goes_on() {
    under_shunt(LIMIT, |host| {
        let port = host.port();
        let line = format!("--port {port} --bind 127.0.0.1 --appendonly no --dir {}", host.dir().display());
        let server = host.program("redis-server").words(&line).args(["--save", ""]).native().start("server");
        enter_and_leave(host, &server, port, "redis", 0);
        drop(server);
    });
}

#[test]
fn memcached_goes_on() {
    under_shunt(LIMIT, |host| {
        let port = host.port();
        let line = format!("-u root -l 127.0.0.1 -p {port} -U 0 -t 4");
        let server = host.program("memcached").words(&line).native().start("server");
        enter_and_leave(host, &server, port, "memcached", 0);
        drop(server);
    });
}

#[test]
fn jvm_goes_on() {
    under_shunt(LIMIT, |host| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/Echo.java");
        let compiled = Command::new(find_program("javac")).arg("-d").arg(host.dir()).arg(source).status();
        assert!(compiled.expect("javac can be started").success());
        let port = host.port();
        let directory = host.dir().to_string_lossy().into_owned();
        let server = host
            .program("java")
            .args(["-Xmx256m", "-cp", &directory, "Echo", "server", "channels", &port.to_string()])
            .native()
            .start("server");
        enter_and_leave(host, &server, port, "java", 0);
        drop(server);
    });
}

/// When the clients are entered.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    /// While the server still waits for their offers.
    Soon,
    /// After the server has given these up.
    Late,
}

/// Enters a server and the clients that it has already. Their connections must move to shared
/// memory, whichever program is entered first, and go on after the server is left.
fn enter_both(host: &Host, server: &Program, port: u16, style: &str, then: Then) {
    host.wait_for_port(port);
    let broker = host.broker_socket().to_string_lossy().into_owned();
    // `shunt explain` reads there where the broker is.
    let old = clients(host, port, "end.old", style).native().env("SHUNT_BROKER", &broker).start("old");
    let transport = host.watch_transport();
    wait_for_connections(server, CONNECTIONS);
    let told = done(host, "attach", server.pid());
    assert!(told.contains(&format!("and {CONNECTIONS} of those")), "{told}");
    if then == Then::Late {
        wait_until_given_up(host, server.pid());
    }
    done(host, "attach", old.pid());
    transport.wait_for_shm(port, CONNECTIONS, SOON);
    done(host, "detach", server.pid());
    end(host, old, "end.old");
}

/// Waits until the process has given up the offers of all connections, because no other end was
/// offered.
fn wait_until_given_up(host: &Host, pid: u32) {
    let begin = Instant::now();
    loop {
        let output = command(host, "status")
            .args(["--json", "--program", &pid.to_string()])
            .arg("--broker")
            .arg(host.broker_socket())
            .output()
            .expect("the command is there");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let status: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let given_up = &status["processes"][0]["bypasses"]["peer_not_offered"];
        if given_up.as_u64().is_some_and(|count| count >= CONNECTIONS as u64) {
            return;
        }
        assert!(begin.elapsed() < SOON, "{text}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn own_server_with_its_clients(style: &'static str, then: Then) {
    under_shunt(LIMIT, move |host| {
        compile(host, "running", &[]);
        let port = host.port();
        let threads = 3 * CONNECTIONS;
        let server = host
            .program("./running")
            .args([&port.to_string(), &threads.to_string(), style])
            .native()
            .env("SHUNT_BROKER", host.broker_socket())
            .start("server");
        enter_both(host, &server, port, "successor", then);
        host.write("end", "");
        let ended = server.wait(SOON);
        assert!(ended.success(), "{}{}", ended.stdout, ended.stderr);
    });
}

#[test]
fn connections_from_before_move_with_one_epoll_instance() {
    own_server_with_its_clients("epoll", Then::Soon);
}

#[test]
fn connections_from_before_move_with_an_epoll_instance_for_each_thread() {
    own_server_with_its_clients("each", Then::Soon);
}

#[test]
fn connections_from_before_move_with_threads_that_block_in_read() {
    own_server_with_its_clients("blocking", Then::Soon);
}

#[test]
fn connections_from_before_move_under_signals() {
    own_server_with_its_clients("signals", Then::Soon);
}

#[test]
fn connections_whose_other_end_is_entered_late_move() {
    own_server_with_its_clients("epoll", Then::Late);
    own_server_with_its_clients("blocking", Then::Late);
}

/// A stream of stdio has the connection too, so it is not taken over.
#[test]
fn connection_that_cannot_be_taken_over_has_a_reason_of_its_own() {
    under_shunt(LIMIT, |host| {
        compile(host, "running", &[]);
        let port = host.port();
        let server = host.program("./running").args([&port.to_string(), "9", "epoll"]).start("server");
        host.wait_for_port(port);
        let code = format!(
            "import ctypes, socket\n\
             connection = socket.create_connection(('127.0.0.1', {port}))\n\
             libc = ctypes.CDLL(None)\n\
             libc.fdopen.restype = ctypes.c_void_p\n\
             assert libc.fdopen(connection.fileno(), b'r+')\n\
             print('ready')\n\
             while True:\n    connection.sendall(b'a')\n    assert connection.recv(1) == b'b'"
        );
        let broker = host.broker_socket().to_string_lossy().into_owned();
        let client = host.program("/usr/bin/python3").args(["-u", "-c", &code]).native();
        // `shunt explain` reads there where the broker is.
        let mut client = client.env("SHUNT_BROKER", &broker).start("client");
        client.wait_for_output("ready", SOON);
        let told = done(host, "attach", client.pid());
        assert!(told.contains("none of those that it has"), "{told}");
        let begin = Instant::now();
        loop {
            let explain =
                command(host, "explain").arg(client.pid().to_string()).env("SHUNT_BROKER", &broker).output();
            let text = String::from_utf8_lossy(&explain.expect("the command is there").stdout).into_owned();
            if text.contains("before_attach") {
                break;
            }
            assert!(begin.elapsed() < SOON, "{text}");
            std::thread::sleep(Duration::from_millis(100));
        }
        drop(client);
        host.write("end", "");
        let ended = server.wait(SOON);
        assert!(ended.success(), "{}{}", ended.stdout, ended.stderr);
    });
}

/// The only thread executes all functions of both. Afterwards it must be as before.
#[test]
fn program_with_one_thread_is_entered_and_left() {
    under_shunt(LIMIT, |host| {
        let code = "import time; print('ready'); time.sleep(1000)";
        let mut program = host.program("/usr/bin/python3").args(["-u", "-c", code]).native().start("one");
        program.wait_for_output("ready", SOON);
        done(host, "attach", program.pid());
        done(host, "detach", program.pid());
        assert!(program.is_running());
    });
}

/// The command is killed after each of many delays. The program must go on each time, and can be
/// entered afterwards.
#[test]
fn killed_attachment_leaves_the_program_running() {
    const KILLS: u32 = 60;
    under_shunt(LIMIT, |host| {
        compile(host, "running", &[]);
        let port = host.port();
        let server =
            host.program("./running").args([&port.to_string(), "9", "epoll"]).native().start("server");
        host.wait_for_port(port);
        let old = clients(host, port, "end.old", "successor").native().start("old");
        let transport = host.watch_transport();
        wait_for_connections(&server, CONNECTIONS);
        for kill in 0..KILLS {
            let mut attach = command(host, "attach")
                .arg(server.pid().to_string())
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::null())
                .spawn()
                .expect("the command is there");
            std::thread::sleep(Duration::from_micros(u64::from(kill) * 1000));
            let _ = attach.kill();
            let _ = attach.wait();
            assert!(old.is_running() && server.is_running(), "after kill {kill}");
        }
        let last = run(host, "attach", server.pid());
        let why = String::from_utf8_lossy(&last.stderr).into_owned();
        assert!(last.status.success() || why.contains("under shunt already"), "{why}");
        let new = clients(host, port, "end.new", "successor").start("new");
        transport.wait_for_shm(port, CONNECTIONS, SOON);
        end(host, new, "end.new");
        end(host, old, "end.old");
        host.write("end", "");
        // A killed attachment may interrupt a wait, as a debugger's does.
        let _ = server.wait(SOON);
    });
}

#[test]
fn program_that_cannot_be_entered_is_refused_with_a_reason() {
    under_shunt(LIMIT, |host| {
        let port = host.port();
        compile(host, "running", &["-static"]);
        let server =
            host.program("./running").args([&port.to_string(), "1", "epoll"]).native().start("static");
        host.wait_for_port(port);
        let why = refused(host, server.pid());
        assert!(why.contains("statically linked"), "{why}");
        drop(server);

        compile(host, "running", &[]);
        let port = host.port();
        let under = host.program("./running").args([&port.to_string(), "1", "epoll"]).start("under");
        host.wait_for_port(port);
        let why = refused(host, under.pid());
        assert!(why.contains("under shunt already"), "{why}");
        drop(under);

        let python = |name: &str, code: &str| {
            let mut program = host.program("/usr/bin/python3").args(["-u", "-c", code]).native().start(name);
            program.wait_for_output("ready", SOON);
            program
        };
        let filtered = python(
            "filtered",
            "import ctypes, time\n\
             libc = ctypes.CDLL(None)\n\
             libc.prctl(38, 1, 0, 0, 0)\n\
             code = (ctypes.c_ulong * 1)(0x7fff000000000006)\n\
             class Program(ctypes.Structure): _fields_ = [('len', ctypes.c_ushort), ('code', ctypes.c_void_p)]\n\
             filter = Program(1, ctypes.addressof(code))\n\
             assert libc.prctl(22, 2, ctypes.byref(filter), 0, 0) == 0\n\
             print('ready')\n\
             time.sleep(1000)",
        );
        let why = refused(host, filtered.pid());
        assert!(why.contains("seccomp"), "{why}");
        drop(filtered);

        let plain = python("plain", "import time; print('ready'); time.sleep(1000)");
        let tracer = host
            .program("strace")
            .args(["-o", "/dev/null", "-p", &plain.pid().to_string()])
            .native()
            .start("strace");
        let begin = Instant::now();
        let traced = || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", plain.pid())).expect("it runs");
            !status.contains("TracerPid:\t0\n")
        };
        while !traced() {
            assert!(begin.elapsed() < SOON, "strace does not trace it");
            std::thread::sleep(Duration::from_millis(5));
        }
        let why = refused(host, plain.pid());
        assert!(why.contains("traces it already"), "{why}");
        drop(tracer);
        drop(plain);

        let why = refused(host, u32::MAX >> 2);
        assert!(why.contains("there is no process"), "{why}");
    });
}

/// Waits until the state of a process, as /proc shows it, is one of these.
fn wait_for_state(pid: u32, wanted: &str) {
    let begin = Instant::now();
    let is_there = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        let state = status.lines().find_map(|line| line.strip_prefix("State:\t")).expect("a state");
        state.starts_with(|letter| wanted.contains(letter))
    };
    while !is_there() {
        assert!(begin.elapsed() < SOON, "process {pid} is not in state {wanted}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn send(pid: u32, signal: &str) {
    let sent = Command::new("kill").args([signal, &pid.to_string()]).status();
    assert!(sent.expect("kill can be started").success());
}

fn child_of(pid: u32) -> u32 {
    let begin = Instant::now();
    loop {
        let path = format!("/proc/{pid}/task/{pid}/children");
        let children = std::fs::read_to_string(path).expect("it runs");
        if let Some(child) = children.split_whitespace().next() {
            return child.parse().expect("a process id");
        }
        assert!(begin.elapsed() < SOON, "process {pid} has no child");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn program_in_an_unsafe_state_is_refused_and_goes_on() {
    under_shunt(LIMIT, |host| {
        compile(host, "running", &[]);
        let start = |style: &str| host.program("./running").args(["0", "1", style]).native().start(style);

        let program = start("handler");
        wait_for_state(program.pid(), "S");
        let why = refused(host, program.pid());
        assert!(why.contains("none of its threads was at a point"), "{why}");
        assert!(program.is_running());
        drop(program);

        let program = start("vfork");
        let child = child_of(program.pid());
        wait_for_state(child, "S");
        for pid in [program.pid(), child] {
            let why = refused(host, pid);
            assert!(why.contains("shares its memory"), "{why}");
        }
        assert!(program.is_running());
        send(child, "-KILL");
        drop(program);

        let program = start("epoll");
        send(program.pid(), "-STOP");
        wait_for_state(program.pid(), "T");
        let why = refused(host, program.pid());
        assert!(why.contains("is stopped"), "{why}");
        wait_for_state(program.pid(), "T");
        send(program.pid(), "-CONT");
        wait_for_state(program.pid(), "SR");
        assert!(program.is_running());
        drop(program);

        let code = "import time; print('ready'); time.sleep(1000)";
        let mut program = host
            .program("unshare")
            .args(["--pid", "--fork", "--kill-child", "/usr/bin/python3", "-u", "-c", code])
            .native()
            .start("namespace");
        program.wait_for_output("ready", SOON);
        let child = child_of(program.pid());
        let why = refused(host, child);
        assert!(why.contains("another PID namespace"), "{why}");
        send(child, "-KILL");
        drop(program);
    });
}
