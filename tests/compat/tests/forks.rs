//! Processes that share a connection or pass it on, by every kind of fork, spawn and exec.

use shunt_abi::reason::Reason;
use shunt_compat::{Phase, both, compile, run_phases};
use std::time::Duration;

use Phase::{Shm, Tcp, Unseen};

/// Without unwind tables, shunt does not find the program's inline system calls.
const UNSEEN_CALLS: &[&str] = &["-fno-asynchronous-unwind-tables"];

fn scenario(name: &'static str, flags: &'static [&'static str], phases: &'static [Phase]) {
    both(Duration::from_secs(120), move |host| {
        compile(host, "forks", flags);
        compile(host, "serve_on", &[]);
        if name == "through_a_static_program" {
            compile(host, "static_program", &["-static"]);
        }
        let port = host.port();
        run_phases(host, host.program("./forks").args([name, &port.to_string()]), port, phases)
    });
}

macro_rules! scenarios {
    ($($name:ident: $($phase:expr),*;)*) => { $(
        #[test]
        #[allow(non_snake_case)]
        fn $name() {
            scenario(stringify!($name), &["-DBY_LIBC"], &[$($phase),*]);
        }
    )* };
}

scenarios! {
    child_takes_over: Shm, Shm;
    child_from_the_start: Shm;
    child_after_an_offer: Tcp(Reason::Shared), Unseen;
    child_of_raw_clone: Shm, Shm;
    child_of_Fork: Shm, Shm;
    turns: Shm, Tcp(Reason::Shared), Shm;
    turns_of_raw_clone: Shm, Tcp(Reason::Shared), Shm;
    child_ends_unseen: Shm, Shm;
    daemonise: Shm, Shm;
    exec_without_the_shim: Shm, Unseen;
    exec_with_the_shim: Shm, Shm;
    exec_of_nothing: Shm, Shm, Tcp(Reason::Shared), Shm;
    through_a_static_program: Shm, Unseen, Unseen;
    fork_and_exec: Shm, Unseen, Tcp(Reason::Exec);
    fork_and_exec_with_the_shim: Shm, Tcp(Reason::Shared), Shm;
    another_program_takes_over: Shm, Shm;
    beside_another_program: Shm, Shm;
    vfork_and_exec: Shm, Unseen, Tcp(Reason::Exec);
    vfork_and_close: Shm, Shm;
    clone_and_close: Shm, Shm;
    spawn_without_the_shim: Shm, Unseen, Tcp(Reason::Exec);
    spawn_with_the_shim: Shm, Unseen, Tcp(Reason::Exec);
    shell: Shm, Unseen, Tcp(Reason::Exec);
    pipe_to_a_shell: Shm, Unseen, Tcp(Reason::Exec);
    clone_with_our_memory: Shm, Unseen, Unseen;
    clone_with_a_copy: Shm, Tcp(Reason::Shared), Tcp(Reason::Shared);
}

/// Inline system calls that shunt cannot redirect keep the program on TCP, whatever its children
/// do.
#[test]
fn forks_that_are_not_found() {
    const OWN_CALLS: Phase = Tcp(Reason::OwnCalls);
    scenario("child_of_bare_fork", UNSEEN_CALLS, &[OWN_CALLS, Unseen]);
    scenario("turns_of_bare_fork", UNSEEN_CALLS, &[OWN_CALLS, Unseen, Unseen]);
    scenario("orphan_of_bare_fork", UNSEEN_CALLS, &[OWN_CALLS, Unseen]);
}

/// A fork by an inline system call, which shunt redirects to the shim.
#[test]
fn child_of_a_fork_that_is_found() {
    scenario("child_of_bare_fork", &[], &[Shm, Shm]);
}

/// The child finds consistent state, whatever other threads were changing when the process forked.
#[test]
fn children_of_threads_at_work() {
    both(Duration::from_secs(180), |host| {
        compile(host, "forks_under_threads", &[]);
        let ended =
            host.program("./forks_under_threads").run("forks_under_threads", Duration::from_secs(150));
        assert_eq!(ended.stdout, "300 of 300 children ended well\n", "{}", ended.stderr);
    });
}
