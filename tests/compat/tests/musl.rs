//! Programs of musl. The same libshunt.so serves them and programs of glibc.

use shunt_abi::reason::Reason;
use shunt_compat::Phase::{self, Shm, Tcp};
use shunt_compat::{Host, both, compile, compile_for_musl, run_phases, run_with_itself};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);

fn run(host: &Host, name: &str, arguments: &[&str]) -> String {
    compile_for_musl(host, name, &[]);
    run_with_itself(host, name, arguments, LIMIT)
}

#[test]
fn a_server_with_threads_and_its_clients() {
    both(LIMIT, |host| run(host, "exchange", &[]));
}

/// Unlike Linux and glibc, musl leaves the timeout of select as it is.
#[test]
fn select_leaves_the_timeout_as_libc_does() {
    both(LIMIT, |host| run(host, "select_rest", &[]));
    both(LIMIT, |host| {
        compile(host, "select_rest", &[]);
        let printed = run_with_itself(host, "select_rest", &[], LIMIT);
        // Natively the second one may take no time that counts.
        printed.lines().next().map(str::to_owned)
    });
}

#[test]
fn threads_and_handlers_with_the_least_stacks() {
    both(LIMIT, |host| run(host, "small_stacks", &[&host.port().to_string()]));
}

#[test]
fn epoll_in_the_order_of_what_came() {
    both(LIMIT, |host| run(host, "order", &[&host.port().to_string(), "level"]));
}

#[test]
fn whoever_sleeps_is_woken() {
    both(LIMIT, |host| run(host, "next", &[&host.port().to_string()]));
}

/// Runs a scenario of `forks.c` with musl. The peer is a program of glibc.
fn forks(name: &'static str, phases: &'static [Phase]) {
    both(LIMIT, move |host| {
        // An inline system call would keep the program on TCP, because shunt does not redirect
        // calls in dynamic programs of musl.
        compile_for_musl(host, "forks", &["-DBY_LIBC"]);
        compile(host, "serve_on", &[]);
        let port = host.port();
        run_phases(host, host.program("./forks").args([name, &port.to_string()]), port, phases)
    });
}

#[test]
fn a_child_takes_over() {
    forks("child_takes_over", &[Shm, Shm]);
}

#[test]
fn parent_and_child_take_turns() {
    forks("turns", &[Shm, Tcp(Reason::Shared), Shm]);
}

#[test]
fn a_child_that_is_made_past_libc() {
    forks("turns_of_raw_clone", &[Shm, Tcp(Reason::Shared), Shm]);
}
