//! Programs that install a seccomp filter while they hold a connection. The filter kills the
//! program for every system call that it would not make natively, so the shim may make no
//! additional ones. Other threads may wait meanwhile, and notice nothing.

use shunt_abi::reason::Reason;
use shunt_compat::{Phase, both, compile, run_phases};
use std::time::Duration;

use Phase::{Shm, Tcp, Unseen};

fn scenario(name: &'static str, phases: &'static [Phase]) {
    both(Duration::from_secs(120), move |host| {
        compile(host, "sandbox", &[]);
        compile(host, "serve_on", &[]);
        let port = host.port();
        run_phases(host, host.program("./sandbox").args([name, &port.to_string()]), port, phases)
    });
}

macro_rules! scenarios {
    ($($name:ident: $($phase:expr),*;)*) => { $(
        #[test]
        fn $name() {
            scenario(stringify!($name), &[$($phase),*]);
        }
    )* };
}

const SANDBOXED: Phase = Tcp(Reason::Sandboxed);

scenarios! {
    by_prctl: Shm, SANDBOXED;
    by_seccomp: Shm, Shm, SANDBOXED;
    strict: Shm, SANDBOXED;
    half_read: Shm, SANDBOXED;
    in_epoll_by_level: Shm, SANDBOXED;
    in_epoll_by_edge: Shm, SANDBOXED;
    polling: Shm, SANDBOXED;
    selecting: Shm, SANDBOXED;
    handlers: Shm, SANDBOXED;
    made_inside: Shm, SANDBOXED;
    fork_inside: Shm, SANDBOXED, SANDBOXED;
    child_in_sandbox: Shm, Unseen, Shm;
    grandchild_in_sandbox: Shm, Tcp(Reason::Exec);
    exec_inside: Shm, Unseen;
}

/// Runs a program whose other threads wait for connections on shared memory, by epoll_wait, poll
/// and recv, when its main thread installs a filter.
fn other_threads_wait(style: &'static str, busy: bool) {
    both(Duration::from_secs(180), move |host| {
        compile(host, "sandbox_threads", &[]);
        let port = host.port();
        let transport = host.watch_transport();
        let program = host
            .program("./sandbox_threads")
            .args([port.to_string().as_str(), style, if busy { "1" } else { "0" }])
            .start("threads");
        transport.wait_for_shm(port, 3, Duration::from_secs(60));
        host.write("go", "");
        let ended = program.wait(Duration::from_secs(90));
        assert!(ended.success(), "{:?}: {}{}", ended.status, ended.stdout, ended.stderr);
        ended.stdout
    });
}

#[test]
fn threads_that_sleep_lose_nothing() {
    for style in ["level", "edge", "oneshot"] {
        other_threads_wait(style, false);
    }
}

#[test]
fn threads_that_move_bytes_lose_nothing() {
    for style in ["level", "edge", "oneshot"] {
        other_threads_wait(style, true);
    }
}
