//! Programs that install a seccomp filter while they hold a connection. The filter kills the
//! program for every system call that it would not make natively, so the shim may make no
//! additional ones.

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
