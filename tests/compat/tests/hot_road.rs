//! How many instructions a call takes whose connection is in shared memory, from the program's call to its return, as callgrind counts them.
//! On a machine that others use that is the same each time, which no time is: a change that makes the road longer fails here. But for a wait
//! on an epoll set: it asks the kernel as well after 50 us at the latest, which at callgrind's pace is every seventh or so.

use rustix::event::epoll::EventFlags;
use shunt_compat::{Host, compile, under_shunt};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);
/// Calls that are counted.
const CALLS: usize = 2000;

const IN: u32 = EventFlags::IN.bits();
const EDGES: u32 = EventFlags::ET.bits();
/// What nginx and the runtime of Go ask for.
const ALL_EDGES: u32 = IN | EventFlags::OUT.bits() | EventFlags::RDHUP.bits() | EDGES;

/// Instructions per call of a function of the program's, whose set has its connections for these events.
fn instructions(host: &Host, function: &str, events: u32) -> usize {
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
        .args([CALLS.to_string(), events.to_string()])
        .run("valgrind", LIMIT);
    let collected = ended.stderr.lines().rev().find_map(|line| line.split_once("Collected : "));
    let collected: usize = collected.and_then(|(_, count)| count.trim().parse().ok()).expect("a count");
    collected / CALLS
}

#[test]
fn calls_take_no_more_instructions_than_they_did() {
    under_shunt(LIMIT, |host| {
        compile(host, "hot_road", &[]);
        for (function, events, most) in [
            ("measured_send", IN, 165),
            ("measured_receive", IN, 155),
            ("measured_wait", IN, 1250),
            ("measured_wait", IN | EDGES, 1000),
            ("measured_wait", ALL_EDGES, 1100),
        ] {
            let count = instructions(host, function, events);
            eprintln!("{function} for {events:#x}: {count} instructions, {most} at most");
            // By TCP it is a system call: none of its instructions, and few of ours.
            assert!(count > 100, "{function}: {count} instructions: it has not gone by shared memory");
            assert!(count <= most, "{function}: {count} instructions, where {most} were enough");
        }
    });
}
