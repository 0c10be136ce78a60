//! The machine around the local path: what makes it slower, and what later parts of shunt will need.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use shunt_abi::geometry::Geometry;

use super::{Check, State};
use crate::table;

/// Fewer descriptors than this, and a program under shunt may run out of them earlier than without.
const FEW_DESCRIPTORS: u64 = 256;
/// Less memory than a few busy links need.
const LITTLE_MEMORY: u64 = 256 << 20;
const CAP_SYS_ADMIN: u64 = 1 << 21;
const CAP_BPF: u64 = 1 << 39;

pub(super) fn checks() -> Vec<Check> {
    vec![kernel(), processors(), memory(), descriptors(), tracing(), ebpf(), cgroups(), user_namespaces()]
}

fn kernel() -> Check {
    let system = rustix::system::uname();
    let found =
        format!("Linux {} on {}", system.release().to_string_lossy(), system.machine().to_string_lossy());
    Check::ok("kernel", "everything", found)
}

fn processors() -> Check {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let check = Check::ok(
        "processors",
        "looking for work for a moment before sleeping, which needs a second processor",
        count.to_string(),
    );
    match count {
        1 => check.lacking(State::Limited, "nothing: programs sleep at once instead"),
        _ => check,
    }
}

/// memfds are charged to memory, not to the size of /dev/shm.
fn memory() -> Check {
    let link = table::bytes(Geometry::default().link_bytes() as u64);
    let check = |found| Check::ok("memory", "the links: each pair of programs shares one", found);
    let available = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
    });
    let Some(available) = available else { return check("unknown".into()) };
    let check =
        check(format!("{} available; a link takes up to {link}, as it is used", table::bytes(available)));
    if available < LITTLE_MEMORY {
        return check
            .lacking(State::Limited, "give the machine memory, or the broker smaller rings (--ring-bytes)");
    }
    check
}

fn descriptors() -> Check {
    let limit = getrlimit(Resource::Nofile);
    let text = |limit: Option<u64>| limit.map_or("unlimited".into(), |limit| limit.to_string());
    let check = Check::ok(
        "descriptors",
        "one per peer program and per thread that sleeps",
        format!("{}, may be raised to {}", text(limit.current), text(limit.maximum)),
    );
    match limit.current {
        Some(current) if current < FEW_DESCRIPTORS => {
            check.lacking(State::Limited, "raise the limit: `ulimit -n 4096`")
        }
        _ => check,
    }
}

fn tracing() -> Check {
    let found = match read("/proc/sys/kernel/yama/ptrace_scope").as_deref().map(str::trim) {
        None => "not restricted (no Yama)".to_owned(),
        Some("0") => "not restricted".to_owned(),
        Some("1") => "a program may trace its own children only".to_owned(),
        Some("2") => "only root may trace".to_owned(),
        Some(_) => "nobody may trace".to_owned(),
    };
    Check::ok("ptrace_scope", "nothing that shunt does today: it traces no program", found)
}

fn ebpf() -> Check {
    const MEANING: &str = "the parts to come that work in the kernel; not the local path";
    let check = |found: &str| Check::ok("eBPF", MEANING, found);
    // The switch exists exactly if the kernel has the system call.
    let Some(switch) = read("/proc/sys/kernel/unprivileged_bpf_disabled") else {
        return check("no bpf() system call").lacking(State::Limited, "use a kernel with CONFIG_BPF_SYSCALL");
    };
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return check("programs load, but the kernel has no type information")
            .lacking(State::Limited, "use a kernel with CONFIG_DEBUG_INFO_BTF");
    }
    if capabilities().is_some_and(|held| held & (CAP_BPF | CAP_SYS_ADMIN) != 0) {
        return check("may be loaded");
    }
    match switch.trim() {
        "0" => check("only socket filters may be loaded").lacking(State::Limited, "run those parts as root"),
        _ => check("not for this user").lacking(State::Limited, "run those parts as root"),
    }
}

fn capabilities() -> Option<u64> {
    let status = read("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

fn cgroups() -> Check {
    let check = |found: &str| Check::ok("cgroup v2", "the overlay to come; not the local path", found);
    match Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        true => check("mounted"),
        false => check("not at /sys/fs/cgroup")
            .lacking(State::Limited, "boot with systemd.unified_cgroup_hierarchy=1, or mount cgroup2 there"),
    }
}

fn user_namespaces() -> Check {
    let check = |found: &str| {
        Check::ok("user namespaces", "trying the overlay to come without root; not the local path", found)
    };
    let is = |path, value| read(path).is_some_and(|text| text.trim() == value);
    if is("/proc/sys/user/max_user_namespaces", "0")
        || is("/proc/sys/kernel/unprivileged_userns_clone", "0")
        || is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1")
    {
        return check("for root only").lacking(State::Limited, "run those parts as root");
    }
    match Path::new("/proc/self/ns/user").exists() {
        true => check("for every user"),
        false => check("none").lacking(State::Limited, "use a kernel with CONFIG_USER_NS"),
    }
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}
