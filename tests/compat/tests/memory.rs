//! What the shim's shared memory takes of memory that a program has locked, and of its core dump.

use shunt_compat::{Host, compile, under_shunt};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
/// Connections of the program `memory`, each to another process.
const PEERS: usize = 6;

/// What the program says of the mappings of the shim's.
#[derive(Debug)]
struct Mappings {
    count: usize,
    kib: usize,
    locked: usize,
    dumped: usize,
}

fn measure(host: &Host, when: &str) -> Mappings {
    compile(host, "memory", &[]);
    let port = host.port();
    let road = host.watch_road();
    let gate = format!("gate-{when}");
    let running = host.program("./memory").args([&port.to_string(), &gate, when]).start(when);
    road.wait_for_shm(port, PEERS, LIMIT);
    host.write(&gate, "");
    let ended = running.wait(LIMIT);
    assert!(ended.success(), "{}\n{}", ended.stdout, ended.stderr);
    let numbers: Vec<usize> = ended
        .stdout
        .split(|letter: char| !letter.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect();
    let &[count, kib, locked, dumped] = &numbers[..] else { panic!("{}", ended.stdout) };
    eprintln!("{when}: {}", ended.stdout.trim());
    Mappings { count, kib, locked, dumped }
}

/// A link has 32 MiB of address space, and a few pages of memory.
#[test]
fn locked_memory_holds_no_rings() {
    under_shunt(Duration::from_secs(120), |host| {
        for when in ["no", "before", "after"] {
            let Mappings { count, kib, locked, .. } = measure(host, when);
            assert!(count > PEERS, "{when}: there is a link for each, and a page");
            assert!(kib < PEERS * 512, "{when}: {kib} KiB");
            assert_eq!(locked, 0, "{when}");
        }
    });
}

#[test]
fn core_dumps_hold_no_rings() {
    under_shunt(Duration::from_secs(120), |host| {
        let Mappings { count, dumped, .. } = measure(host, "no");
        assert!(count > PEERS && dumped == 0, "{dumped} of {count} mappings are dumped");
    });
}
