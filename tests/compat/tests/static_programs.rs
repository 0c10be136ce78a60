//! Programs without a dynamic linker, whose system calls shunt redirects: static programs of glibc
//! and musl, at a fixed address and position-independent, and Go programs without libc. They must
//! behave as natively, and be on shared memory.

use shunt_abi::reason::Reason;
use shunt_compat::Phase::{self, Shm, Tcp};
use shunt_compat::{
    Host, Way, ask_statically, both, both_at_once, compile, compile_for_musl, compile_go, converse, gate,
    run_phases, run_with_itself,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);
const CONNECTIONS: usize = 8;

/// The libc and the way of linking.
#[derive(Clone, Copy)]
enum Linked {
    Glibc,
    GlibcAnywhere,
    Musl,
}

const EVERY: [Linked; 3] = [Linked::Glibc, Linked::GlibcAnywhere, Linked::Musl];

impl Linked {
    fn compile(self, host: &Host, name: &str) {
        match self {
            Linked::Glibc => compile(host, name, &["-static"]),
            Linked::GlibcAnywhere => compile(host, name, &["-static-pie", "-fPIE"]),
            Linked::Musl => compile_for_musl(host, name, &["-static"]),
        };
    }
}

fn run(host: &Host, linked: Linked, name: &str, arguments: &[&str]) -> String {
    linked.compile(host, name);
    run_with_itself(host, name, arguments, LIMIT)
}

#[test]
fn a_server_with_threads_and_its_clients() {
    both(LIMIT, |host| EVERY.map(|linked| run(host, linked, "exchange", &[])));
}

#[test]
fn epoll_in_the_order_of_what_came() {
    both(LIMIT, |host| EVERY.map(|linked| run(host, linked, "order", &[&host.port().to_string(), "level"])));
}

#[test]
fn whoever_sleeps_is_woken() {
    both(LIMIT, |host| EVERY.map(|linked| run(host, linked, "next", &[&host.port().to_string()])));
}

/// The peers of a program may have other processors. So a program that may use only one processor
/// may spin, unless the machine has only one.
#[test]
fn who_may_use_one_processor_spins() {
    both(LIMIT, |host| {
        Linked::Musl.compile(host, "exchange");
        let status = std::fs::read_to_string("/proc/self/status").expect("a process has one");
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let first =
            allowed.and_then(|list| list.trim().split([',', '-']).next()).expect("a list of processors");
        let printed =
            host.program("taskset").args(["--cpu-list", first, "./exchange"]).run("exchange", LIMIT).stdout;
        let machine = std::fs::read_to_string("/sys/devices/system/cpu/online").expect("a machine has some");
        if let Some(status) = host.status().filter(|_| machine.contains([',', '-'])) {
            assert!(status.totals.share.on_shm > 0, "{:?}", status.totals.share);
            assert!(status.totals.counters["spin_nanos"] > 0, "{:?}", status.totals.counters);
        }
        printed
    });
}

#[test]
fn which_calls_go_on_after_a_handler() {
    both_at_once(LIMIT, |host| ask_statically(host, "interrupts", 1));
}

#[test]
fn what_handlers_see() {
    both(LIMIT, |host| ask_statically(host, "handlers", 1));
}

#[test]
fn a_storm_of_handlers() {
    both(LIMIT, |host| ask_statically(host, "storm", 3));
}

#[test]
fn more_threads_than_waiters() {
    both(LIMIT, |host| ask_statically(host, "threads", 100));
}

#[test]
fn threads_that_are_cancelled() {
    both_at_once(LIMIT, |host| ask_statically(host, "cancels", 1));
}

#[test]
fn numbers_that_are_closed_under_calls() {
    both_at_once(LIMIT, |host| ask_statically(host, "closes", 47));
}

#[test]
fn sleepers_on_a_connection_that_switches() {
    both_at_once(LIMIT, |host| ask_statically(host, "switches", 1));
}

/// musl decides by a thread's program counter whether to cancel it. Such a program is not changed.
#[test]
fn threads_that_musl_cancels() {
    both(LIMIT, |host| {
        for header in ["lane.h", "questions.h"] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(header);
            std::fs::copy(source, host.path(header)).expect("a copy");
        }
        Linked::Musl.compile(host, "cancels");
        host.write("gate", "");
        let program = host.program("./cancels").args([&host.port().to_string(), "gate"]);
        program.run("cancels", LIMIT).stdout
    });
}

fn forks(linked: Linked, name: &'static str, phases: &'static [Phase]) {
    both(LIMIT, move |host| {
        compile(host, "serve_on", &[]);
        linked.compile(host, "forks");
        let port = host.port();
        run_phases(host, host.program("./forks").args([name, &port.to_string()]), port, phases)
    });
}

#[test]
fn a_child_takes_over() {
    forks(Linked::Glibc, "child_takes_over", &[Shm, Shm]);
}

#[test]
fn a_child_takes_over_with_musl() {
    forks(Linked::Musl, "child_takes_over", &[Shm, Shm]);
}

#[test]
fn parent_and_child_take_turns() {
    forks(Linked::Glibc, "turns", &[Shm, Tcp(Reason::Shared), Shm]);
}

#[test]
fn parent_and_child_take_turns_with_musl() {
    forks(Linked::Musl, "turns", &[Shm, Tcp(Reason::Shared), Shm]);
}

/// Returns a Go program without cgo.
fn go(name: &str) -> PathBuf {
    compile_go(Path::new(env!("CARGO_TARGET_TMPDIR")), name)
}

/// Go's garbage collector runs all the time, and preempts goroutines by signals.
#[test]
fn a_server_of_gos_and_its_clients() {
    let program = go("web");
    both(LIMIT, move |host| {
        let port = host.port();
        let (number, count) = (port.to_string(), CONNECTIONS.to_string());
        let go = || host.program(program.to_string_lossy());
        let client = go().args(["ask", &number, &count, "40", &gate(port)]);
        // Every tenth request has a separate connection, which is too short for shared memory.
        converse(host, (port, CONNECTIONS), (go().args(["serve", &number]), client), Way::Shm)
    });
}

/// Returns two counts of a process: doorbells rung, and bytes on shared memory.
fn rings_and_bytes(host: &Host, pid: u32) -> Option<(u64, u64)> {
    let all = host.status()?.processes;
    let one = all.into_iter().find(|process| process.pid == pid).expect("it is under shunt");
    Some((one.totals.counters["doorbells_rung"], one.totals.bytes.shm))
}

/// Each end has several threads and goroutines for a request. One notification at most may be sent
/// for the request, and one for the answer.
#[test]
fn a_request_to_a_server_of_gos_rings_once_and_so_does_its_answer() {
    const REQUESTS: u64 = 2000;
    const PAGE: u64 = 1000;
    let program = go("kept");
    both(LIMIT, move |host| {
        let port = host.port();
        let (number, count, gate) = (port.to_string(), REQUESTS.to_string(), gate(port));
        let go = || host.program(program.to_string_lossy());
        let server = go().args(["serve", &number]).start("server");
        host.wait_for_port(port);
        let transport = host.watch_transport();
        let mut client = go().args(["ask", &number, &count, &gate]).start("client");
        transport.wait_for_shm(port, 1, LIMIT);
        host.write(&format!("{gate}.warm"), "");
        client.wait_for_output("warm", LIMIT);
        let ends = [server.pid(), client.pid()];
        let counts = || ends.map(|pid| rings_and_bytes(host, pid));
        let before = counts();
        host.write(&format!("{gate}.begin"), "");
        client.wait_for_output("done", LIMIT);
        for (before, after) in before.into_iter().zip(counts()) {
            let (Some((rung, moved)), Some((rings, bytes))) = (before, after) else { continue };
            assert!(bytes - moved >= REQUESTS * PAGE, "{}", transport.report(port));
            assert!(rings - rung <= REQUESTS + REQUESTS / 10, "{} rings", rings - rung);
        }
        host.write(&gate, "");
        client.wait(LIMIT).stdout
    });
}

/// The other end is in Python, and has the shim from the dynamic linker.
#[test]
fn a_server_of_gos_and_python() {
    let program = go("echo");
    both(LIMIT, move |host| {
        let port = host.port();
        let (number, count) = (port.to_string(), CONNECTIONS.to_string());
        let client =
            host.script("python3", "echo.py").args(["client", "threads", &number, &count, "60", &gate(port)]);
        let server = host.program(program.to_string_lossy()).args(["serve", &number]);
        converse(host, (port, CONNECTIONS), (server, client), Way::Shm)
    });
}

/// Each child is created by vfork in its parent's memory, and executes another program while
/// connections are in use.
#[test]
fn a_program_of_gos_that_starts_others() {
    let program = go("spawn");
    both(LIMIT, move |host| {
        let port = host.port();
        let (number, count) = (port.to_string(), CONNECTIONS.to_string());
        let go = || host.program(program.to_string_lossy());
        let client = go().args(["ask", &number, &count, &gate(port)]);
        converse(host, (port, CONNECTIONS), (go().args(["serve", &number]), client), Way::Shm)
    });
}
