//! Connections through address translation whose bytes all use lanes, for longer than connection
//! tracking remembers a silent connection. Every end and every fallback to TCP must reach the peer.

use shunt_compat::{Host, Mode, Program, both_at_once, keepalive_probes};
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
/// Connection tracking forgets a connection after this many seconds of silence.
const TIMEOUT: u64 = 3;
/// After this many probes of each end, one per second, a silent connection would have been
/// forgotten.
const PROBES: u64 = 5;

/// Groups of connections, one for each ending. Each group uses one pair of programs.
const GROUPS: [&str; 4] = [
    "server closes,client closes,client shuts down,server shuts down",
    "client forks",
    "server forks",
    "client sets options,server sets options",
];

/// Makes the kernel translate connections to `outside`, and forget them soon.
fn translate(outside: u16, inside: u16) {
    for name in ["established", "fin_wait", "close_wait"] {
        let path = format!("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_{name}");
        fs::write(path, TIMEOUT.to_string()).expect("root of a namespace of its own");
    }
    let rule = format!(
        "add table ip shunt; add chain ip shunt out {{ type nat hook output priority -100; }}; \
         add rule ip shunt out tcp dport {outside} redirect to :{inside}"
    );
    assert!(Command::new("nft").arg(rule).status().expect("nft is installed").success());
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until silent connections would have been forgotten.
fn outlast(host: &Host, ends: usize) {
    let before = keepalive_probes();
    match host.mode() == Mode::Native {
        true => std::thread::sleep(Duration::from_secs(TIMEOUT + 1)),
        false => wait_until("probes", || keepalive_probes() - before >= PROBES * ends as u64),
    }
}

/// The programs of a test, and the number of connections of each outside port.
struct Pairs {
    programs: Vec<Program>,
    outsides: Vec<(u16, usize)>,
}

impl Pairs {
    /// Starts a server and a client for each group of endings.
    fn start(host: &Host, groups: &[&str]) -> Pairs {
        let dir = host.dir().display().to_string();
        let mut pairs = Pairs { programs: Vec::new(), outsides: Vec::new() };
        for endings in groups {
            let (inside, outside) = (host.port(), host.port());
            translate(outside, inside);
            let start = |role: &str, port: u16| {
                let arguments = [role, &port.to_string(), &dir, endings];
                let flags = ["--offer", "at-once"];
                let launch = host.script("python3", "translated.py").args(arguments).shunt_args(flags);
                let mut program = launch.start(&format!("{role}-{port}"));
                program.wait_for_output("ready", LIMIT);
                program
            };
            pairs.programs.extend([start("serve", inside), start("dial", outside)]);
            pairs.outsides.push((outside, endings.split(',').count()));
        }
        let transport = host.watch_transport();
        pairs.outsides.iter().for_each(|(port, count)| transport.wait_for_shm(*port, *count, LIMIT));
        pairs
    }

    fn connections(&self) -> usize {
        self.outsides.iter().map(|(_, count)| count).sum()
    }

    /// Returns the output of all programs.
    fn observed(self) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        for program in self.programs {
            let ended = program.wait(LIMIT);
            assert!(ended.stderr.is_empty(), "{}", ended.stderr);
            lines.extend(ended.stdout.lines().map(str::to_owned));
        }
        lines.sort();
        lines
    }
}

#[test]
fn a_connection_that_is_silent_on_tcp_is_not_forgotten() {
    both_at_once(3 * LIMIT, |host| {
        let pairs = Pairs::start(host, &GROUPS);
        outlast(host, 2 * pairs.connections());
        host.write("end", "");
        // Two connections have one end that has finished, and only that end sends probes.
        outlast(host, 2);
        host.write("finish", "");
        pairs.observed()
    });
}

/// Endings whose FIN and RST segments are dropped.
const UNSAID: [&str; 4] = [
    "server closes,client closes,client shuts down,server shuts down",
    "server closes to poll,client closes to epoll,server closes to an edge,client closes to select",
    "server dies",
    "client dies",
];

#[test]
fn an_end_that_tcp_does_not_bring_comes_by_the_lane() {
    both_at_once(3 * LIMIT, |host| {
        let pairs = Pairs::start(host, &UNSAID);
        if host.mode() == Mode::Shunt {
            // Natively the peers would wait for ever.
            let rule = "add table ip filter; add chain ip filter out { type filter hook output priority 0; }; \
                        add rule ip filter out tcp flags & (fin | rst) != 0 drop";
            assert!(Command::new("nft").arg(rule).status().expect("nft is installed").success());
        }
        host.write("end", "");
        host.write("finish", "");
        pairs.observed()
    });
}
