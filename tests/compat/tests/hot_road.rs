//! How many instructions a call takes whose connection is in shared memory, from the program's call to its return, as callgrind counts them.
//! On a machine that others use that is the same each time, which no time is: a change that makes the road longer fails here. But for a wait
//! on an epoll set: it asks the kernel as well after 50 us at the latest, which at callgrind's pace is every seventh or so.

use shunt_compat::{Host, compile, under_shunt};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);
/// Calls that are counted.
const CALLS: usize = 2000;

/// Instructions per call of a function of the program's.
fn instructions(host: &Host, function: &str) -> usize {
    let tools = host.tools().expect("this is under shunt");
    let ended = host
        .program("valgrind")
        .native()
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--trace-children=yes"])
        .arg(format!("--toggle-collect={function}"))
        .arg("env")
        .arg(format!("LD_PRELOAD={}", tools.library.display()))
        .arg(format!("SHUNT_BROKER={}", host.broker_socket().display()))
        .args(["SHUNT_OFFER=at-once", "./hot_road"])
        .arg(CALLS.to_string())
        .run("valgrind", LIMIT);
    let collected = ended.stderr.lines().rev().find_map(|line| line.split_once("Collected : "));
    let collected: usize = collected.and_then(|(_, count)| count.trim().parse().ok()).expect("a count");
    collected / CALLS
}

#[test]
fn calls_take_no_more_instructions_than_they_did() {
    under_shunt(LIMIT, |host| {
        compile(host, "hot_road", &[]);
        for (function, most) in [("measured_send", 310), ("measured_receive", 305), ("measured_wait", 1300)] {
            let count = instructions(host, function);
            eprintln!("{function}: {count} instructions, {most} at most");
            // By TCP it is a system call: none of its instructions, and few of ours.
            assert!(count > 150, "{function}: {count} instructions: it has not gone by shared memory");
            assert!(count <= most, "{function}: {count} instructions, where {most} were enough");
        }
    });
}
