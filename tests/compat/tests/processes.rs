//! Changes that a process makes to its descriptors, limits, user and namespaces while it holds a
//! connection.

use shunt_abi::reason::Reason;
use shunt_compat::{Phase, both, compile, run_phases};
use std::time::Duration;

use Phase::{Shm, Tcp, Unseen};

fn scenario(name: &'static str, phases: &'static [Phase]) {
    both(Duration::from_secs(120), move |host| {
        compile(host, "processes", &["-Wno-unused-result"]);
        let port = host.port();
        run_phases(host, host.program("./processes").args([name, &port.to_string()]), port, phases)
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

const PASSED_ON: Phase = Tcp(Reason::PassedOn);

scenarios! {
    passed_by_sendmsg: Shm, PASSED_ON, PASSED_ON;
    passed_by_sendmmsg: Shm, PASSED_ON, PASSED_ON;
    passed_by_number: Shm, PASSED_ON, PASSED_ON;
    looked_at_by_pidfd: Shm, Shm;
    shared_before_connect: Shm;
    closing_everything_else: Shm, Shm, Shm, Shm, Shm;
    duplicating_over_everything: Shm, Shm, Shm, Shm;
    daemon_without_descriptors: Shm, Shm;
    few_descriptors: Shm, Shm, Shm;
    no_descriptors: Shm, Tcp(Reason::DescriptorLimit);
    few_descriptors_from_the_start: Unseen;
    another_user: Shm, Shm;
    without_capabilities: Shm, Shm;
    another_root: Shm, Shm;
    another_root_from_the_start: Unseen;
    another_network: Shm, Shm;
    another_numbering: Shm, Unseen, Tcp(Reason::Exec);
}
