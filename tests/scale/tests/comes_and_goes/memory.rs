//! Checks that the memory of rings follows the load. Connections come and fill their rings; then
//! half of them close and the others fall idle. The memory must return to the same level in each
//! tide. `SCALE_MEMORY_TIDES` sets the number of tides.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use shunt_compat::{Host, Program, under_shunt};
use shunt_scale::{Usage, ends, link_kib, load, serve, wait_until};

const CONNECTIONS: usize = 300;
const LIMIT: Duration = Duration::from_secs(60);
/// Memory that a tide may leave in links that are still in use: headers, and the first pages of
/// rings.
const LEFT_KIB: u64 = 4 * 1024;

#[test]
fn the_memory_of_rings_is_given_back_when_connections_go_or_fall_idle() {
    let tides: usize = std::env::var("SCALE_MEMORY_TIDES").map_or(2, |text| text.parse().expect("a number"));
    let time = LIMIT * (4 * tides as u32 + 1);
    under_shunt(time, move |host: &Host| {
        let group = Group::make();
        let executable = env!("CARGO_BIN_EXE_scale-load");
        let (server, port) = serve(host, executable);
        let directory = host.path("");
        let words = format!("tide {port} {CONNECTIONS} {tides} {}", directory.display());
        let mut client = load(host, executable, &words).start("client");
        for pid in [server.pid(), client.pid()] {
            group.iter().for_each(|group| group.add(pid));
        }
        let mut levels = Vec::new();
        for tide in 0..tides {
            client.wait_for_output(&format!("rise {tide}"), LIMIT);
            wait_until("all come onto shared memory", LIMIT, || on_shared_memory(host) == 2 * CONNECTIONS);
            host.replace(&format!("rise-{tide}"), "");
            client.wait_for_output(&format!("flood {tide}"), LIMIT);
            let high = link_kib(server.pid()).expect("root may look");
            println!("tide {tide}, flood: {high} KiB of links, group: {:?}", group.as_ref().map(Group::kib));
            // The fill level of each ring depends on the speed of both ends.
            assert!(high > 3 * LEFT_KIB, "they did not fill their rings: {high} KiB");
            host.replace(&format!("ebb-{tide}"), "");
            client.wait_for_output(&format!("ebb {tide}"), LIMIT);
            wait_until("the memory is given back", LIMIT, || held(&server, &client) <= LEFT_KIB);
            println!(
                "tide {tide}, ebb: {} KiB of links, group: {:?}",
                held(&server, &client),
                group.as_ref().map(Group::kib)
            );
            host.replace(&format!("turn-{tide}"), "");
            client.wait_for_output(&format!("turn {tide}"), LIMIT);
            wait_until("what was idle is on shared memory again", LIMIT, || {
                on_shared_memory(host) == CONNECTIONS
            });
            host.replace(&format!("low-{tide}"), "");
            client.wait_for_output(&format!("gone {tide}"), LIMIT);
            // Both processes keep running.
            wait_until("the links are dropped", LIMIT, || {
                let dropped = [&server, &client].into_iter().all(|end| usage(end).links == 0);
                dropped && host.status().is_some_and(|snapshot| snapshot.links == 0)
            });
            levels.push(Level {
                group: group.as_ref().map(Group::kib),
                server: usage(&server),
                client: usage(&client),
                broker: host.broker_pid().and_then(Usage::of).expect("it serves"),
            });
            println!("{:?}", levels.last());
            host.replace(&format!("next-{tide}"), "");
        }
        let ended = client.wait(LIMIT);
        assert!(ended.success(), "{}", ended.stderr);
        server.stop();
        judge(&levels);
    });
}

/// The resources held between two tides.
#[derive(Debug)]
struct Level {
    /// The memory of the control group of both processes, in KiB, if one can be created.
    group: Option<u64>,
    server: Usage,
    client: Usage,
    broker: Usage,
}

/// Checks that the last tide leaves no more than the first, apart from noise.
fn judge(levels: &[Level]) {
    let (Some(first), Some(last)) = (levels.first(), levels.last()) else { return };
    type Part = fn(&Level) -> u64;
    let parts: [(&str, Part, u64); 7] = [
        ("the group's memory, KiB", |one| one.group.unwrap_or(0), 8192),
        ("the server's own memory, KiB", |one| one.server.private_kib, 2048),
        ("the server's descriptors", |one| one.server.descriptors, 4),
        ("the server's mappings", |one| one.server.mappings, 4),
        ("the client's mappings", |one| one.client.mappings, 4),
        ("the broker's own memory, KiB", |one| one.broker.private_kib, 2048),
        ("the broker's mappings", |one| one.broker.mappings, 80),
    ];
    for (name, part, allowance) in parts {
        let (before, after) = (part(first), part(last));
        println!("{name}: {before} after the first tide, {after} after the last");
        assert!(after <= before + before / 10 + allowance, "{name} grew from {before} to {after}");
    }
}

/// A temporary memory control group, on hosts with cgroup version 1.
struct Group(PathBuf);

impl Group {
    fn make() -> Option<Group> {
        let path = Path::new("/sys/fs/cgroup/memory").join(format!("shunt-scale-{}", std::process::id()));
        fs::create_dir(&path).ok().map(|()| Group(path))
    }

    fn add(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).expect("root may move a process");
    }

    fn kib(&self) -> u64 {
        let text = fs::read_to_string(self.0.join("memory.usage_in_bytes")).expect("every group says so");
        text.trim().parse::<u64>().expect("a number") / 1024
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // If the test has failed, processes may still be in the group. They end with the host.
        for pid in fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write("/sys/fs/cgroup/memory/cgroup.procs", pid);
        }
        let _ = fs::remove_dir(&self.0);
    }
}

fn on_shared_memory(host: &Host) -> usize {
    host.status().map_or(0, |snapshot| ends(&snapshot).0)
}

fn held(server: &Program, client: &Program) -> u64 {
    let of = |program: &Program| link_kib(program.pid()).expect("it lives");
    of(server).max(of(client))
}

fn usage(server: &Program) -> Usage {
    Usage::of(server.pid()).expect("it serves")
}
