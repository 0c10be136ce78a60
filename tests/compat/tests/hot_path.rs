//! Counts the instructions of a call whose connection is on shared memory, from the program's call
//! to its return, with callgrind. Unlike times, these counts do not depend on the load of the
//! machine. A change that makes the path longer fails here.
//!
//! A wait on an epoll instance also asks the kernel once 50 us have passed since it last did. How
//! many waits that are depends on the speed of the machine. So the waits that ask the kernel are
//! counted, and both kinds have limits.

use rustix::event::epoll::EventFlags;
use shunt_compat::{Host, compile, under_shunt};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);
/// The number of calls that are counted.
const CALLS: usize = 2000;

const IN: u32 = EventFlags::IN.bits();
const EDGES: u32 = EventFlags::ET.bits();
/// The events for which nginx and Go's runtime register.
const ALL_EDGES: u32 = IN | EventFlags::OUT.bits() | EventFlags::RDHUP.bits() | EDGES;

/// A pause after which every wait must ask the kernel.
const PAUSE: Duration = Duration::from_micros(100);

/// The cost of the calls of one function of the program.
struct Counted {
    instructions: usize,
    /// How many of the calls asked the kernel for events of an epoll instance.
    asked: usize,
}

/// Counts the calls of a function. The program registers its connections for `events`.
fn count(host: &Host, function: &str, events: u32, pause: Duration) -> Counted {
    let tools = host.tools().expect("this is under shunt");
    let ended = host
        .program("valgrind")
        .native()
        .args([
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            "--trace-children=yes",
            "--trace-syscalls=yes",
        ])
        .arg(format!("--toggle-collect={function}"))
        .arg("env")
        .arg(format!("LD_PRELOAD={}", tools.library.display()))
        .arg(format!("SHUNT_BROKER={}", host.broker_socket().display()))
        .args(["SHUNT_OFFER=at-once", "./hot_path"])
        .args([CALLS.to_string(), events.to_string(), pause.as_micros().to_string()])
        .run("valgrind", LIMIT);
    let (_, measured) = ended.stderr.rsplit_once("sys_getppid").expect("the program's sign that it begins");
    let asked = measured.matches("sys_epoll_pwait").count();
    let collected = measured.lines().rev().find_map(|line| line.split_once("Collected : "));
    let instructions = collected.and_then(|(_, count)| count.trim().parse().ok()).expect("a count");
    Counted { instructions, asked }
}

/// Checks a count. On TCP the count would be small, because the call is a system call.
fn check(what: &str, instructions: usize, most: usize) {
    eprintln!("{what}: {instructions} instructions, {most} at most");
    assert!(instructions > 100, "{what}: {instructions} instructions: it has not gone by shared memory");
    assert!(instructions <= most, "{what}: {instructions} instructions, where {most} were enough");
}

#[test]
fn calls_take_no_more_instructions_than_they_did() {
    under_shunt(LIMIT, |host| {
        compile(host, "hot_path", &[]);
        for (function, most) in [("measured_send", 165), ("measured_receive", 155)] {
            check(function, count(host, function, IN, Duration::ZERO).instructions / CALLS, most);
        }
        for (events, most, most_asking) in [(IN, 1050, 1900), (IN | EDGES, 870, 1330), (ALL_EDGES, 930, 1390)]
        {
            let asking = count(host, "measured_wait", events, PAUSE);
            assert_eq!(asking.asked, CALLS, "each asks after such a pause");
            let mixed = count(host, "measured_wait", events, Duration::ZERO);
            assert!(
                mixed.asked < CALLS * 9 / 10,
                "{} have asked: too many to tell what the others take",
                mixed.asked
            );
            let each_asking = asking.instructions / CALLS;
            let others = (mixed.instructions - mixed.asked * each_asking) / (CALLS - mixed.asked);
            eprintln!("of {CALLS} waits for {events:#x} {} have asked the kernel", mixed.asked);
            check("a wait that lanes alone answer", others, most);
            check("a wait that asks the kernel too", each_asking, most_asking);
        }
    });
}
