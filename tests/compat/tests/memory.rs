//! The effect of the shim's shared memory on the limits of a program: its locked memory, its core
//! dumps, its control group, and the budget that an operator has set.

use shunt_compat::{Host, Program, compile, under_shunt};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
/// The number of connections of the program `memory`, each to another process.
const PEERS: usize = 6;

/// The program's report of the shim's mappings.
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
    let transport = host.watch_transport();
    let gate = format!("gate-{when}");
    let running = host.program("./memory").args([&port.to_string(), &gate, when]).start(when);
    transport.wait_for_shm(port, PEERS, LIMIT);
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

/// A link has 544 MiB of address space, and a few pages of memory.
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

/// A server that has sent on each of `count` connections as much as does not block, and its client,
/// which has read nothing.
struct Full {
    server: Program,
    client: Program,
    last: String,
}

impl Full {
    /// Starts both programs. The shell runs `before` in front of each command, in the process that
    /// executes it.
    fn reach(host: &Host, name: &str, count: usize, before: &str, options: &[&str]) -> Full {
        compile(host, "budget", &[]);
        let port = host.port();
        let (gate, last) = (format!("{name}.gate"), format!("{name}.last"));
        let start = |role: &str, more: &str| {
            let command = format!("{before} exec ./budget {role} {port} {count} {more}");
            host.program("sh").shunt_args(options).args(["-c", &command]).start(&format!("{name}-{role}"))
        };
        let transport = host.watch_transport();
        let mut server = start("server", "");
        server.wait_for_output("listening", LIMIT);
        let client = start("client", &format!("{gate} {last}"));
        transport.wait_for_shm(port, count, LIMIT);
        host.write(&gate, "");
        server.wait_for_output("sent", LIMIT);
        Full { server, client, last }
    }

    /// Returns the memory of the rings that the server writes, how many rings have not grown, and
    /// how many lanes were left because of the budget.
    fn rings(&self, host: &Host) -> (u64, u64, u64) {
        let status = host.status().expect("a broker");
        let pid = self.server.pid();
        let process =
            status.processes.iter().find(|process| process.pid == pid).expect("the server is there");
        let counted = |name: &str| process.totals.counters.get(name).copied().unwrap_or(0);
        let reasons = process.totals.bypasses.get("memory_budget").copied().unwrap_or(0);
        (counted("ring_bytes"), counted("rings_not_grown"), reasons)
    }

    fn finish(self, host: &Host, count: usize) {
        host.write(&self.last, "");
        let (client, server) = (self.client.wait(LIMIT), self.server.wait(LIMIT));
        assert!(client.success(), "{}\n{}{}", client.status, client.stdout, client.stderr);
        assert!(server.success(), "{}\n{}{}", server.status, server.stdout, server.stderr);
        assert!(client.stdout.contains(&format!("all of {count}")), "{}", client.stdout);
    }
}

const MIB: u64 = 1 << 20;

#[test]
fn rings_grow_no_further_than_the_operator_says() {
    under_shunt(Duration::from_secs(120), |host| {
        const COUNT: usize = 40;
        let full = Full::reach(host, "unlimited", COUNT, "", &[]);
        let (held, refused, _) = full.rings(host);
        assert!(held > COUNT as u64 * 190_000 && refused == 0, "{held} bytes, {refused} refused");
        full.finish(host, COUNT);
        let full = Full::reach(host, "limited", COUNT, "", &["--ring-memory", "2"]);
        let (held, refused, reasons) = full.rings(host);
        assert!(held <= 2 * MIB + COUNT as u64 * 4096, "{held} bytes");
        assert!(refused > 0 && reasons > 0, "{refused} refused, {reasons} with a reason");
        full.finish(host, COUNT);
    });
}

/// A link keeps the spill of a connection that has been closed, charged to its sender, until the
/// link is dropped. The other connection on the link moves to another link for that.
#[test]
fn a_spill_that_is_used_no_more_is_given_back_beside_a_connection_that_stays() {
    under_shunt(Duration::from_secs(120), |host| {
        let port = host.port();
        let number = port.to_string();
        let over = host.path("over").display().to_string();
        let at_once = ["--offer", "at-once"];
        let script = || host.script("python3", "spilled_once.py").shunt_args(at_once);
        let mut server = script().args(["serve", &number]).start("serve");
        server.wait_for_output("listening", LIMIT);
        let client = script().args(["ask", &number, &over]).start("ask");
        server.wait_for_output("closed", LIMIT);
        let seen = || {
            let status = host.status().expect("a broker");
            let process = status.processes.iter().find(|process| process.pid == server.pid());
            let totals = &process.expect("the server is there").totals;
            let held = totals.counters.get("ring_bytes").copied().unwrap_or(0);
            (held, totals.bypasses.get("link_retired").copied().unwrap_or(0))
        };
        let (held, _) = seen();
        assert!(held > 2 * MIB, "{held} bytes");
        let deadline = Instant::now() + LIMIT;
        while seen().0 > MIB || seen().1 == 0 {
            assert!(Instant::now() < deadline, "{:?}", seen());
            sleep(Duration::from_millis(100));
        }
        host.write("over", "");
        assert!(client.wait(LIMIT).success() && server.wait(LIMIT).success());
    });
}

/// A memory control group, of the cgroup version that this machine has.
struct Group(PathBuf);

impl Group {
    fn make(limit: u64) -> Group {
        let before = Path::new("/sys/fs/cgroup/memory");
        let (root, file) = match before.is_dir() {
            true => (before, "memory.limit_in_bytes"),
            false => (Path::new("/sys/fs/cgroup"), "memory.max"),
        };
        let path = root.join(format!("shunt-memory-{}", std::process::id()));
        fs::create_dir(&path).expect("root may make a control group");
        fs::write(path.join(file), limit.to_string()).expect("the memory controller is there");
        Group(path)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let root = self.0.parent().expect("a group is below another").join("cgroup.procs");
        for pid in fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(&root, pid);
        }
        let _ = fs::remove_dir(&self.0);
    }
}

/// Natively, TCP's buffers take as much as the group has. Rings of full size for all connections
/// would exceed it, and the kernel would kill the program.
#[test]
fn rings_leave_a_control_group_what_it_needs() {
    under_shunt(Duration::from_secs(120), |host| {
        const COUNT: usize = 400;
        let group = Group::make(64 * MIB);
        let enter = format!("echo $$ > {}/cgroup.procs;", group.0.display());
        let full = Full::reach(host, "group", COUNT, &enter, &[]);
        let (held, refused, reasons) = full.rings(host);
        assert!(held < 56 * MIB, "{held} bytes");
        assert!(refused > 0 && reasons > 0, "{refused} refused, {reasons} with a reason");
        full.finish(host, COUNT);
    });
}
