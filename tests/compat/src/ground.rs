//! The network environment of a host. For root it is a new network namespace: all ports are free,
//! ephemeral ports are plenty, and processes that are left at the end can be found. For other users
//! it is the caller's namespace, where only the process groups started here are known.

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A namespace, or a list of the process groups that were started.
#[derive(Debug)]
pub struct Ground {
    namespace: Option<Namespace>,
    groups: Mutex<Vec<u32>>,
    /// Process groups of the harness.
    spared: Mutex<Vec<u32>>,
}

#[derive(Debug)]
struct Namespace {
    /// Keeps the namespace alive. It ends with this process, because its standard input is then
    /// closed.
    holder: Mutex<Child>,
    holder_pid: u32,
    name: PathBuf,
}

impl Ground {
    /// Moves the calling thread, and the processes that it starts from now on, to a new
    /// environment.
    pub fn enter() -> Ground {
        let namespace = rustix::process::geteuid().is_root().then(Namespace::enter);
        Ground { namespace, groups: Mutex::default(), spared: Mutex::default() }
    }

    /// Returns `true` if this is a separate network namespace.
    pub fn is_isolated(&self) -> bool {
        self.namespace.is_some()
    }

    /// Records a process group that was started here.
    pub(crate) fn note_group(&self, group: u32) {
        self.groups.lock().expect("no holder panics").push(group);
    }

    /// Records a process group of the harness, which is not a leftover and is not killed.
    pub(crate) fn spare_group(&self, group: u32) {
        self.spared.lock().expect("no holder panics").push(group);
    }

    /// Returns the processes that are still running here.
    pub fn leftovers(&self) -> Vec<u32> {
        let groups = self.groups.lock().expect("no holder panics").clone();
        let spared = self.spared.lock().expect("no holder panics").clone();
        let mine = |pid: u32| match &self.namespace {
            Some(namespace) => {
                pid != namespace.holder_pid
                    && pid != std::process::id()
                    && fs::read_link(format!("/proc/{pid}/ns/net")).is_ok_and(|name| name == namespace.name)
            }
            None => groups.contains(&process_group(pid)),
        };
        all_processes()
            .filter(|pid| mine(*pid) && !is_zombie(*pid) && !spared.contains(&process_group(*pid)))
            .collect()
    }

    /// Kills all processes that run here.
    pub fn kill_all(&self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let leftovers = self.leftovers();
            if leftovers.is_empty() || Instant::now() > deadline {
                return;
            }
            for pid in leftovers {
                let _ = kill_process(parse_pid(pid), Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Namespace {
    fn enter() -> Namespace {
        let mut holder = Command::new("unshare")
            .args(["--net", "--", "sh", "-c", "ip link set lo up && echo up && exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare (util-linux) and ip (iproute2) are needed: run `make test`");
        let mut line = String::new();
        BufReader::new(holder.stdout.as_mut().expect("piped"))
            .read_line(&mut line)
            .expect("the holder of the namespace says when it is up");
        assert_eq!(line.trim(), "up", "as root, the tests need to make network namespaces (CAP_SYS_ADMIN)");
        let holder_pid = holder.id();
        let path = format!("/proc/{holder_pid}/ns/net");
        let handle = File::open(&path).expect("the holder is alive");
        move_into_link_name_space(handle.as_fd(), Some(LinkNameSpaceType::Network))
            .expect("root may enter a network namespace it made");
        let name = fs::read_link(&path).expect("the holder is alive");
        Namespace { holder: Mutex::new(holder), holder_pid, name }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Ok(holder) = self.holder.get_mut() {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

/// Sends a signal to a process group.
pub(crate) fn signal_group(group: u32, signal: Signal) {
    let _ = kill_process_group(parse_pid(group), signal);
}

/// Converts the process id that std returns as a number.
pub(crate) fn parse_pid(pid: u32) -> Pid {
    Pid::from_raw(pid as i32).expect("the kernel's process ids are positive")
}

fn all_processes() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns a field of /proc/PID/stat. Field 0 is the state.
pub(crate) fn stat_field(pid: u32, field: usize) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split_whitespace().nth(field).map(str::to_owned)
}

fn process_group(pid: u32) -> u32 {
    stat_field(pid, 2).and_then(|group| group.parse().ok()).unwrap_or(0)
}

fn is_zombie(pid: u32) -> bool {
    stat_field(pid, 0).is_none_or(|state| state == "Z" || state == "X")
}
