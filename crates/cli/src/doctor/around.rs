//! Checks for features that the local path does not require: some make it faster, others are needed
//! by other parts of shunt.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::net::sockopt::socket_cookie;
use rustix::process::{Resource, getrlimit};
use shunt_abi::geometry::Geometry;
use shunt_broker::SYSTEM_SOCKET;
use shunt_kernel::sequence::Reader;
use shunt_serve::engine::try_kernel;
use shunt_serve::service::builtin;

use super::{Check, State};
use crate::config::{Faults, OfBroker, OfPrograms};
use crate::{broker, table};

/// Below this limit, a program may run out of descriptors earlier under shunt than without it.
const FEW_DESCRIPTORS: u64 = 256;
/// Less memory than a few busy links need.
const LITTLE_MEMORY: u64 = 256 << 20;

pub(super) fn checks() -> Vec<Check> {
    vec![
        configuration(),
        kernel(),
        processors(),
        memory(),
        descriptors(),
        tracing(),
        intercept(),
        containers(),
        services(),
        cgroups(),
        user_namespaces(),
    ]
}

fn configuration() -> Check {
    let check =
        |found: String| Check::ok("configuration", "which programs may use shared memory, and how", found);
    let wrong = |faults: Faults| {
        check(faults.to_string())
            .lacking(State::Missing, "fix the file: `shunt config check` lists all errors")
    };
    let read = OfPrograms::read().and_then(|programs| OfBroker::read(false).map(|_| programs));
    match read {
        Ok(programs) if programs.is_empty() => check("nothing is configured for programs".into()),
        Ok(_) => check("has rules for programs: see `shunt config show`".into()),
        Err(faults) => wrong(faults),
    }
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
        "threads that poll for a moment before they sleep, which needs a second processor",
        count.to_string(),
    );
    match count {
        1 => check.lacking(State::Limited, "nothing: programs sleep without polling"),
        _ => check,
    }
}

/// Checks the available memory. memfds are charged to memory, not to the size of /dev/shm.
fn memory() -> Check {
    let link = table::bytes(Geometry::default().link_bytes() as u64);
    let check = |found| Check::ok("memory", "the memory that each pair of programs shares (a link)", found);
    let available = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
    });
    let Some(available) = available else { return check("unknown".into()) };
    let check = check(format!(
        "{} available; a pair of programs shares up to {link}, allocated as it is used",
        table::bytes(available)
    ));
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
        "one for each peer program and for each sleeping thread",
        format!("a program may have {}, and raise that to {}", text(limit.current), text(limit.maximum)),
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
        Some(_) => "no process may trace".to_owned(),
    };
    Check::ok("ptrace_scope", "the supervisors of an overlay", found)
}

fn intercept() -> Check {
    let check = |found: &str| {
        Check::ok(
            "intercept",
            "programs that make system calls without libc: static programs, Go, and others",
            found.to_owned(),
        )
    };
    match shunt_intercept::IS_HERE {
        true => check("static programs, Go programs and the like can run under shunt"),
        false => check("not for this processor")
            .lacking(State::Limited, "link such programs dynamically; static ones stay on TCP"),
    }
}

/// Loads the eBPF programs and tries them on a new connection.
fn containers() -> Check {
    let has_broker = || broker::probe(Path::new(SYSTEM_SOCKET)).is_ok();
    of_origins(origins(), rustix::process::geteuid().is_root(), has_broker)
}

/// Returns the check for the result of a trial. The trial of another user than root fails for want
/// of rights, and says nothing about the system's broker.
fn of_origins(tried: Result<()>, is_root: bool, has_broker: impl Fn() -> bool) -> Check {
    let check =
        |found: String| Check::ok("eBPF", "connections between containers, by the system's broker", found);
    match tried {
        Ok(()) => check("works: the broker can tell which two sockets are connected".into()),
        Err(error) if is_root => check(format!("{error:#}")).lacking(
            State::Limited,
            "use a kernel with CONFIG_BPF_SYSCALL and CONFIG_DEBUG_INFO_BTF, and allow root bpf(2)",
        ),
        Err(_) if has_broker() => {
            check("not tried, since only root may; the system's broker, which needs it, runs".into())
        }
        Err(error) => check(format!("{error:#}")).lacking(
            State::Limited,
            "start the system's broker: `sudo systemctl start shunt.socket`, or `sudo shunt daemon --system --detach`",
        ),
    }
}

fn origins() -> Result<()> {
    let reader = Reader::load()?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen on 127.0.0.1")?;
    let one = TcpStream::connect(listener.local_addr()?).context("cannot connect to 127.0.0.1")?;
    let two = listener.accept()?.0;
    let origin = |socket: &TcpStream| anyhow::Ok(reader.look(socket, socket_cookie(socket)?)?.origin);
    ensure!(origin(&one)?.mirrored().contains(&origin(&two)?), "the ends of a connection are not recognised");
    Ok(())
}

/// Loads a service and attaches it to a sockmap that contains no socket.
fn services() -> Check {
    let check = |found: String| Check::ok("sockmap", "shunt serve, for conversations in the kernel", found);
    let echo = builtin::named("echo").expect("a builtin service");
    match try_kernel(echo.object, false) {
        Ok(()) => check("works: a service can be loaded".into()),
        Err(error) => check(error.to_string()).lacking(
            State::Limited,
            "run shunt serve as root, on a kernel with CONFIG_BPF_STREAM_PARSER; without that it serves in user space",
        ),
    }
}

fn cgroups() -> Check {
    let check = |found: &str| {
        Check::ok("cgroup v2", "connections between containers of two hosts (the overlay)", found)
    };
    match Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        true => check("mounted"),
        false => check("not at /sys/fs/cgroup")
            .lacking(State::Limited, "boot with systemd.unified_cgroup_hierarchy=1, or mount cgroup2 there"),
    }
}

fn user_namespaces() -> Check {
    let check = |found: &str| Check::ok("user namespaces", "checks of `shunt doctor` without root", found);
    let is = |path, value| read(path).is_some_and(|text| text.trim() == value);
    if is("/proc/sys/user/max_user_namespaces", "0")
        || is("/proc/sys/kernel/unprivileged_userns_clone", "0")
        || is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1")
    {
        return check("only root may make them").lacking(State::Limited, "run those parts as root");
    }
    match Path::new("/proc/self/ns/user").exists() {
        true => check("every user may make them"),
        false => check("none").lacking(State::Limited, "use a kernel with CONFIG_USER_NS"),
    }
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_gets_no_advice_about_a_broker_that_runs() {
        let refused = || Err(anyhow::anyhow!("Operation not permitted"));
        let advice = |is_root, has_broker| of_origins(refused(), is_root, || has_broker).advice;
        assert_eq!(advice(false, true), None);
        assert!(advice(false, false).unwrap().contains("systemctl start shunt.socket"));
        // Root's own trial has failed, whatever runs.
        assert!(advice(true, true).unwrap().contains("CONFIG_BPF_SYSCALL"));
        assert_eq!(of_origins(Ok(()), false, || false).advice, None);
    }
}
