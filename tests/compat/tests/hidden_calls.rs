//! Unusual ways to use a socket: stdio, system calls by number, POSIX AIO, io_uring, aliases of a
//! function. Each is used on a connection on shared memory, with bytes waiting in the lane.

use shunt_abi::reason::Transport;
use shunt_abi::status::Connection;
use shunt_compat::{Host, both, compile};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(20);
const SHM: &str = "shm";

/// A scenario of `programs/hidden_calls.c`, and the expected transport of the server's end
/// afterwards: shared memory, or the reason for TCP.
struct Scenario(&'static str, &'static str);

fn run_all(libraries: &'static [&'static str], scenarios: &'static [Scenario]) {
    both(Duration::from_secs(120), move |host| {
        compile(host, "hidden_calls", libraries);
        scenarios.iter().map(|scenario| run(host, scenario)).collect::<Vec<_>>()
    });
}

fn run(host: &Host, Scenario(name, transport): &Scenario) -> (String, String, String) {
    let port = host.port();
    let (gate, last_gate) = (format!("{name}.gate"), format!("{name}.last"));
    let program = |side: &str| {
        let program = host.path("hidden_calls");
        host.program(program.to_str().expect("plain"))
            .args([side, &port.to_string(), name, &gate, &last_gate])
            .start(&format!("{name}-{side}"))
    };
    let mut server = program("server");
    server.wait_for_output("listening", LIMIT);
    let mut client = program("client");
    let pid = server.pid();
    // The connection is attached, or has the expected reason for TCP.
    until(host, pid, name, |end| is_on_shm(end) || end.send.reason.label() == *transport);
    host.write(&gate, "");
    server.wait_for_output("done", LIMIT);
    client.wait_for_output("done", LIMIT);
    until(host, pid, name, |end| {
        if *transport == SHM { is_on_shm(end) } else { end.send.reason.label() == *transport }
    });
    host.write(&last_gate, "");
    let (server, client) = (server.wait(LIMIT), client.wait(LIMIT));
    for ended in [&server, &client] {
        assert!(ended.success(), "{name}: {}\n{}{}", ended.status, server.stdout, client.stdout);
    }
    (name.to_string(), server.stdout, client.stdout)
}

fn is_on_shm(end: &Connection) -> bool {
    end.send.transport == Transport::Shm && end.receive.transport == Transport::Shm
}

/// Waits until the server's end of the connection meets a condition. Returns immediately on a
/// native host.
fn until(host: &Host, pid: u32, name: &str, shows: impl Fn(&Connection) -> bool) {
    let deadline = Instant::now() + LIMIT;
    while let Some(snapshot) = host.status() {
        let process = snapshot.processes.iter().find(|process| process.pid == pid);
        if process.is_some_and(|process| process.connections.iter().any(&shows)) {
            return;
        }
        assert!(Instant::now() < deadline, "{name}: {:#?}\n{}", snapshot.processes, host.logs());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn plain_calls_and_other_names_of_them_stay_on_shared_memory() {
    run_all(&["-luring"], &[Scenario("plain", SHM), Scenario("aliases", SHM), Scenario("fortified", SHM)]);
}

#[test]
fn a_socket_and_something_else_may_have_the_same_user_data() {
    run_all(&["-luring"], &[Scenario("same-data", SHM)]);
}

#[test]
fn calls_that_mean_nothing_to_us_are_passed_through() {
    run_all(&["-luring"], &[Scenario("passed", SHM)]);
}

#[test]
fn the_resolvers_own_connections_are_left_alone() {
    run_all(&["-luring"], &[Scenario("resolver", SHM)]);
}

#[test]
fn stdio_goes_back_to_tcp() {
    run_all(
        &["-luring"],
        &[
            Scenario("stdio", "stdio"),
            Scenario("unbuffered", "stdio"),
            Scenario("mixed", "stdio"),
            Scenario("getline", "stdio"),
            Scenario("freopen", "stdio"),
            Scenario("dprintf", "stdio"),
            Scenario("standard-streams", "stdio"),
            Scenario("placed-stream", "stdio"),
            Scenario("fdopen-before-connect", "peer_not_offered"),
        ],
    );
}

#[test]
fn system_calls_by_number_are_the_calls_of_that_name() {
    run_all(
        &["-luring"],
        &[
            Scenario("number-read", SHM),
            Scenario("number-readv", SHM),
            Scenario("number-preadv2", SHM),
            Scenario("number-recvfrom", SHM),
            Scenario("number-recvmsg", SHM),
            Scenario("number-sendmmsg", SHM),
            Scenario("number-sendfile", SHM),
            Scenario("number-options", SHM),
            Scenario("number-ready", SHM),
            Scenario("number-recvmmsg", SHM),
            Scenario("number-splice", "splice"),
        ],
    );
}

#[test]
fn forks_by_number_go_back_to_tcp() {
    run_all(
        &["-luring"],
        &[
            Scenario("number-fork", "fork"),
            Scenario("number-clone", "fork"),
            Scenario("number-clone3", "fork"),
        ],
    );
}

#[test]
fn a_descriptor_table_of_ones_own_goes_back_to_tcp() {
    run_all(
        &["-luring"],
        &[Scenario("number-unshare", "own_table"), Scenario("close_range-unshare", "own_table")],
    );
}

#[test]
fn asynchronous_calls_go_back_to_tcp() {
    run_all(
        &["-luring"],
        &[
            Scenario("posix-aio", "async_io"),
            Scenario("lio_listio", "async_io"),
            Scenario("kernel-aio", "async_io"),
        ],
    );
}

#[test]
fn rings_go_back_to_tcp() {
    run_all(
        &["-luring"],
        &[
            Scenario("ring", "io_uring"),
            Scenario("ring-before", "io_uring"),
            Scenario("number-ring", "io_uring"),
        ],
    );
}

/// A uring that is used for other files does not keep connections from shared memory. A change of
/// an epoll instance by a uring has the effect of an epoll_ctl.
#[test]
fn rings_for_something_else_leave_connections_on_shared_memory() {
    run_all(
        &["-luring"],
        &[
            Scenario("ring-beside", SHM),
            Scenario("number-ring-beside", SHM),
            Scenario("ring-set", SHM),
            Scenario("number-ring-set", SHM),
            Scenario("ring-gone", SHM),
        ],
    );
}

#[test]
fn what_a_ring_is_to_do_with_a_connection_sends_it_back() {
    run_all(
        &["-luring"],
        &[
            Scenario("ring-poll", "io_uring"),
            Scenario("ring-set-polled", "io_uring"),
            Scenario("ring-registered", "io_uring"),
            Scenario("ring-updated", "io_uring"),
            Scenario("ring-entered", "io_uring"),
            Scenario("ring-set-linked", "io_uring"),
            Scenario("ring-set-drained", "io_uring"),
            Scenario("ring-set-refused", "io_uring"),
        ],
    );
}

#[test]
fn a_ring_that_cannot_be_looked_into_is_a_reason_for_the_whole_process() {
    run_all(
        &["-luring"],
        &[
            Scenario("ring-polling", "io_uring"),
            Scenario("ring-polling-before", "io_uring"),
            Scenario("ring-duplicated", "io_uring"),
            Scenario("ring-forked", "fork"),
        ],
    );
}

/// The system calls of a static program are redirected to the shim, so it sees a uring even if
/// liburing is linked statically.
#[test]
fn rings_of_a_static_program() {
    run_all(
        &["-static", "-l:liburing.a"],
        &[Scenario("ring-set", SHM), Scenario("ring-beside", SHM), Scenario("ring-entered", "io_uring")],
    );
}

/// The inline system calls of a dynamic program are redirected too.
#[test]
fn rings_of_a_liburing_that_is_built_in() {
    run_all(&["-l:liburing.a"], &[Scenario("ring-set", SHM), Scenario("ring-entered", "io_uring")]);
}

/// liburing's system calls are inline here, and there are no unwind tables. shunt still detects
/// them.
#[test]
fn a_ring_made_by_own_calls_keeps_a_program_on_tcp() {
    run_all(&["-l:liburing.a", "-Wl,--no-eh-frame-hdr"], &[Scenario("ring-before", "own_calls")]);
}
