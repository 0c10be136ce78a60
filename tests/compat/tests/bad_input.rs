//! Bad conditions and bad input: no free descriptors, little address space, invalid messages on the
//! broker's socket, a peer that corrupts the shared memory. Each must cause a counted fallback, and
//! never a crash or a hang.

use shunt_compat::{Expected, Host, Program, both, find_program, under_shunt};
use std::time::Duration;

const CONNECTIONS: usize = 8;
const LIMIT: Duration = Duration::from_secs(40);

fn server(host: &Host, style: &str) -> (Program, u16) {
    let port = host.port();
    let server = host.script("python3", "echo.py").args(["server", style, &port.to_string()]).start("server");
    host.wait_for_port(port);
    (server, port)
}

fn client_arguments(port: u16, seconds: f64) -> [String; 6] {
    let text = |value: &dyn ToString| value.to_string();
    [text(&"client"), text(&"threads"), text(&port), text(&CONNECTIONS), text(&30), text(&seconds)]
}

fn client(host: &Host, port: u16, seconds: f64) -> Program {
    host.script("python3", "echo.py").args(client_arguments(port, seconds)).start("client")
}

/// Runs clients under these limits of util-linux's prlimit. They must receive the same as without.
fn limited(limits: &'static [&'static str]) {
    both(Duration::from_secs(90), move |host| {
        let (server, port) = server(host, "threads");
        let python = find_program("python3");
        // `script` only writes the file. The program that starts is prlimit, which executes Python.
        let _ = host.script("python3", "echo.py");
        let ended = host
            .program("prlimit")
            .args(limits)
            // Threads that allocate at the same time would take 64 MB of address space each.
            .env("MALLOC_ARENA_MAX", "1")
            .arg(python)
            .arg(host.path("echo.py"))
            .args(client_arguments(port, 0.5))
            .start("limited")
            .wait(LIMIT);
        drop(server);
        assert!(ended.success(), "{limits:?}: {}\n{}", ended.status, ended.stderr);
        ended.stdout
    });
}

#[test]
fn a_descriptor_table_with_no_room_for_more() {
    // Three for stdio, one for each connection, and those that Python opens for a moment while it
    // loads modules.
    limited(&["--nofile=14"]);
}

#[test]
fn a_descriptor_table_with_room_for_a_few() {
    limited(&["--nofile=20"]);
}

#[test]
fn an_address_space_without_room_for_a_link() {
    // Enough for Python and its threads, whose stacks have the second limit, but not for a link.
    limited(&["--as=70000000", "--stack=262144"]);
}

/// The shim's page is larger than the program's file size limit. Exceeding it raises SIGXFSZ, even
/// for a file in memory.
#[test]
fn a_limit_of_file_sizes() {
    both(Duration::from_secs(60), |host| {
        let port = host.port();
        let server = host
            .program("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .start("redis");
        host.wait_for_port(port);
        let ended = host
            .program("prlimit")
            .arg("--fsize=8192")
            .arg(find_program("redis-benchmark"))
            .words(&format!("-h 127.0.0.1 -p {port} -t set,get -c 8 -n 4000 -q"))
            .start("limited")
            .wait(LIMIT);
        drop(server);
        assert!(ended.success(), "{}\n{}", ended.status, ended.stderr);
    });
}

#[test]
fn rubbish_on_the_broker_socket() {
    under_shunt(Duration::from_secs(60), |host| {
        let (server, port) = server(host, "threads");
        let transport = host.watch_transport();
        let client = client(host, port, 3.0);
        transport.wait_for_shm(port, CONNECTIONS, LIMIT);
        let rubbish = host
            .script("python3", "rubbish.py")
            .native()
            .arg("broker")
            .arg(host.broker_socket())
            .run("rubbish", LIMIT);
        assert!(rubbish.stdout.contains("sent"), "{}", rubbish.stdout);
        assert!(client.wait(LIMIT).success(), "the clients, while the broker was sent rubbish");
        // The broker still pairs connections.
        let second = host.watch_transport();
        let client = self::client(host, port, 1.0);
        second.wait_for_shm(port, CONNECTIONS, LIMIT);
        assert!(client.wait(LIMIT).success(), "the clients, after the broker was sent rubbish");
        drop(server);
        assert!(second.bad_messages() > 0, "no bad message was counted\n{}", second.report(port));
    });
}

/// The echo server has two clients. One corrupts the memory that it shares with the server, and the
/// other must not be affected.
fn scribble(style: &'static str) {
    under_shunt(Duration::from_secs(90), move |host| {
        let (server, port) = server(host, style);
        let transport = host.watch_transport();
        let healthy = client(host, port, 6.0);
        transport.wait_for_shm(port, CONNECTIONS, LIMIT);
        let scribbler = host
            .script("python3", "rubbish.py")
            .arg("scribbler")
            .arg(port.to_string())
            .arg(host.dir())
            .start("rubbish");
        transport.wait_for_shm(port, CONNECTIONS + 4, LIMIT);
        host.write("gate", "");
        // The corrupting client may end in any way, but it must end.
        let scribbled = scribbler.wait(LIMIT);
        assert!(scribbled.stdout.contains("links"), "{}{}", scribbled.stdout, scribbled.stderr);
        assert!(!scribbled.stdout.contains("links 0"), "the scribbler found no link in its own mappings");
        let healthy = healthy.wait(LIMIT);
        assert!(healthy.success(), "the healthy client: {}\n{}", healthy.stdout, healthy.stderr);
        transport.expect(Expected { port, connections: CONNECTIONS + 4, share: 0.8 });
        assert!(server.is_running(), "the server fell over the scribbler");
        // The server still accepts connections and attaches them.
        let second = host.watch_transport();
        let client = client(host, port, 1.0);
        second.wait_for_shm(port, CONNECTIONS, LIMIT);
        assert!(client.wait(LIMIT).success(), "the clients after the scribbler");
    });
}

#[test]
fn a_scribbling_peer_of_a_server_with_threads() {
    scribble("threads");
}

#[test]
fn a_scribbling_peer_of_a_server_with_epoll() {
    scribble("asyncio");
}

#[test]
fn a_command_that_does_not_exist() {
    under_shunt(Duration::from_secs(20), |host| {
        for (name, expected) in [("./no-such-program", 127), ("/etc/passwd", 126)] {
            let ended = host.program(name).start("missing").wait(LIMIT);
            assert_eq!(ended.status.code(), Some(expected), "{name}: {}", ended.stderr);
            assert_eq!(ended.stderr.lines().count(), 1, "one line says why: {}", ended.stderr);
        }
    });
}
