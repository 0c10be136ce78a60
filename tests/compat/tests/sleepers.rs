//! Threads that sleep in every kind of call while other threads use their connections. Connections
//! start, switch and end all the time. Every thread must be woken, and every byte must be right.

use shunt_compat::{Expected, ask, both, compile};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);
/// For a longer test, run `mingle serve PORT 0` and `mingle load PORT 600`, both under shunt.
const SECONDS: &str = "6";

/// Runs the programs; `extra` is an argument of both.
fn mingle(extra: &'static [&'static str]) {
    both(LIMIT, move |host| {
        compile(host, "mingle", &[]);
        let mut reports = Vec::new();
        // On a busy machine the broker's messages may be late, or a server may look like an
        // untracked waiter.
        for _ in 0..4 {
            let number = host.port();
            let port = number.to_string();
            let start = |name: &str, seconds: &str| {
                host.program("./mingle").args([name, &port, seconds]).args(extra).start(name)
            };
            let _server = start("serve", "0");
            host.wait_for_port(number);
            let transport = host.watch_transport();
            let ended = start("load", SECONDS).wait(LIMIT);
            assert!(ended.success(), "{}\n{}\n{}", ended.status, ended.stdout, ended.stderr);
            assert_eq!(ended.stdout, "every byte was right\n");
            if !transport.is_watched() || transport.on_shm(number) > 0 {
                return;
            }
            reports.push(transport.report(number));
        }
        panic!("{}", reports.join("\n"));
    });
}

#[test]
fn everybody_is_woken() {
    mingle(&[]);
}

#[test]
fn everybody_is_woken_while_the_programs_fork() {
    mingle(&["fork"]);
}

#[test]
fn who_polls_what_went_back_takes_no_wake_up_of_the_next_connection() {
    both(LIMIT, |host| {
        compile(host, "next", &[]);
        let port = host.port().to_string();
        let transport = host.watch_transport();
        let ended = host.program("./next").arg(&port).start("next").wait(LIMIT);
        assert!(ended.success(), "{}\n{}\n{}", ended.status, ended.stdout, ended.stderr);
        assert_eq!(ended.stdout, "everybody was woken\n");
        let number = port.parse().expect("a number");
        assert!(!transport.is_watched() || transport.on_shm(number) > 0, "{}", transport.report(number));
    });
}

/// A peer that makes no calls receives no doorbell, so it cannot wake this process. A thread that
/// waits for it must poll, but rarely.
#[test]
fn who_waits_for_a_program_that_makes_no_calls_sleeps_longer_and_longer() {
    both(LIMIT, |host| {
        let port = host.port().to_string();
        let start = |role: &str| {
            let program = host.script("python3", "no_calls.py").shunt_args(["--offer", "at-once"]);
            program.args([role, &port]).arg(host.path("over")).start(role)
        };
        let mut server = start("serve");
        server.wait_for_output("listening", LIMIT);
        let mut client = start("silent");
        client.wait_for_output("slept", LIMIT);
        if let Some(status) = host.status() {
            let server = status.processes.iter().find(|one| one.pid == server.pid()).expect("its server");
            let counted = |name: &str| server.totals.counters.get(name).copied().unwrap_or(0);
            assert_eq!(counted("adopted"), 1, "{:?}", server.totals.counters);
            // Polling every millisecond would be 2,000 times.
            assert!(counted("degraded_sleeps") < 500, "{:?}", server.totals.counters);
        }
        host.write("over", "");
        assert!(client.wait(LIMIT).success() && server.wait(LIMIT).success());
    });
}

/// More threads than a process has waiters. Few of them wait at the same time.
const THREADS: usize = 100;

#[test]
fn threads_that_do_not_wait_leave_the_waiters_to_others() {
    both(LIMIT, |host| {
        let port = host.port();
        let transport = host.watch_transport();
        let start = |role: &str| {
            let program = host.script("python3", "many_threads.py").env("SHUNT_SPIN", "off");
            program.words(&format!("{role} {port}")).arg(host.dir()).arg(THREADS.to_string()).start(role)
        };
        let mut server = start("server");
        server.wait_for_output("listening", LIMIT);
        let client = start("client");
        server.wait_for_output("done", LIMIT);
        for process in host.status().into_iter().flat_map(|status| status.processes) {
            assert!(!process.totals.bypasses.contains_key("no_waiter"), "{:?}", process.totals.bypasses);
        }
        host.write("end", "");
        for program in [client, server] {
            let ended = program.wait(LIMIT);
            assert!(ended.success(), "{}", ended.stderr);
        }
        transport.expect(Expected { port, connections: THREADS, share: 0.5 });
    });
}

#[test]
fn senders_are_told_of_room_that_comes_while_they_learn_that_there_is_none() {
    both(LIMIT, |host| ask(host, "room", 4));
}

#[test]
fn every_set_is_told_of_room() {
    both(LIMIT, |host| ask(host, "two_sets", 1));
}
