//! Exhaustion of resources at any moment. One system call of the shim fails, once or from then on,
//! and the program must not be affected (L2). It stays on TCP, or falls back to it.

use shunt_compat::{Finished, Host, compile, under_shunt};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(30);
/// The last call that is made to fail. The connections are paired long before.
const MOST: usize = 48;
const WORKERS: usize = 4;

/// Runs the program, with the `nth` call that only the shim makes failing with `errno`, once or for
/// good.
fn run(host: &Host, nth: usize, how: &str, errno: i32) -> Finished {
    let shunt = &host.tools().expect("under shunt").shunt;
    host.program("./inject")
        .native()
        .args([&nth.to_string(), how, &errno.to_string()])
        .arg(shunt)
        .args(["run", "--broker"])
        .arg(host.broker_socket())
        .args(["--", "./exchange"])
        .start(&format!("exchange-{nth}"))
        .wait(LIMIT)
}

fn calls(ended: &Finished) -> usize {
    let line = ended.stderr.lines().find_map(|line| line.strip_prefix("calls: "));
    line.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("no count in {:?}", ended.stderr))
}

fn sweep(how: &'static str, errno: i32) {
    under_shunt(Duration::from_secs(300), move |host| {
        compile(host, "inject", &[]);
        compile(host, "exchange", &[]);
        let expected = host.program("./exchange").native().run("natively", LIMIT).stdout;
        let free = run(host, 0, how, errno);
        assert!(free.success() && free.stdout == expected, "{}\n{}", free.stdout, free.stderr);
        let pairs = host.status().expect("a broker").pairs_made;
        assert!(pairs > 0, "nothing was paired, so nothing is tried here");
        let last = calls(&free).min(MOST);
        assert!(last > 20, "only {last} calls");
        let one = |nth: usize| {
            let ended = run(host, nth, how, errno);
            assert!(
                ended.success() && ended.stdout == expected,
                "call {nth} of {last} fails with errno {errno}, {how}: {}\n{}{}",
                ended.status,
                ended.stdout,
                ended.stderr
            );
        };
        // Several run in parallel, because most of the time is spent waiting for timeouts.
        std::thread::scope(|scope| {
            for worker in 1..=WORKERS {
                scope.spawn(move || (worker..=last).step_by(WORKERS).for_each(one));
            }
        });
        // The shim's messages to the broker must be valid even then.
        let status = host.status().expect("a broker");
        assert!(status.bad_messages.is_empty(), "{:?}", status.bad_messages);
    });
}

#[test]
fn a_call_that_fails_once() {
    sweep("once", rustix::io::Errno::NOMEM.raw_os_error());
}

#[test]
fn calls_that_fail_from_some_moment_on() {
    sweep("on", rustix::io::Errno::MFILE.raw_os_error());
}
