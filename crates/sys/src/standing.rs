//! How another process stands to this one: in which namespaces it lives, and whether it may look into others.

use std::fs::read_to_string;
use std::os::fd::AsFd;

use rustix::event::PollFlags;
use rustix::fs::stat;

use crate::ready;

/// The namespaces that decide whose processes one may look into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    user: (u64, u64),
    pid: (u64, u64),
}

/// CAP_SYS_PTRACE, in the order of the kernel's sets.
const SYS_PTRACE: u32 = 19;

/// Where a process lives; nothing, if the kernel does not let this one look into it.
pub fn home(pid: u32) -> Option<Home> {
    home_of(&pid.to_string())
}

/// Where this one does.
pub fn own_home() -> Option<Home> {
    home_of("self")
}

fn home_of(process: &str) -> Option<Home> {
    let namespace = |kind| {
        let file = stat(format!("/proc/{process}/ns/{kind}")).ok()?;
        Some((file.st_dev, file.st_ino))
    };
    Some(Home { user: namespace("user")?, pid: namespace("pid")? })
}

/// The user whom the kernel lets look into a process: whose it is, or root if it has been somebody else's since it was started.
pub fn owner(pid: u32) -> Option<u32> {
    stat(format!("/proc/{pid}")).ok().map(|directory| directory.st_uid)
}

/// Who a thread is now: its effective user, and the inode of its network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Present {
    /// Its effective user.
    pub user: u32,
    /// Its network namespace.
    pub network: (u64, u64),
}

/// More threads of a process than these are not looked at.
const THREADS: usize = 4096;

/// Returns whether a process has a thread for which `is` holds: each has a user and a network namespace of its own. `None`: the process is
/// not seen from here.
pub fn has_thread(pid: u32, is: impl Fn(Present) -> bool) -> Option<bool> {
    if is(present(&format!("/proc/{pid}"))?) {
        return Some(true);
    }
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten().take(THREADS);
    let mut found = threads.filter_map(|thread| present(thread.path().to_str()?));
    Some(found.any(is))
}

fn present(directory: &str) -> Option<Present> {
    let status = read_to_string(format!("{directory}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let user = users.split_whitespace().nth(1)?.parse().ok()?;
    Some(Present { user, network: network(directory)? })
}

/// Returns the inode of this thread's network namespace.
pub fn own_network() -> Option<(u64, u64)> {
    network("/proc/thread-self")
}

fn network(directory: &str) -> Option<(u64, u64)> {
    stat(format!("{directory}/ns/net")).ok().map(|file| (file.st_dev, file.st_ino))
}

/// Whether a process may look into every other of its user namespace.
pub fn may_look_into_all(pid: u32) -> bool {
    let status = read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = effective.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set & 1 << SYS_PTRACE != 0)
}

/// Whether the process of a pidfd has not ended: what was read of its number before was of it.
pub fn is_alive(pidfd: impl AsFd) -> bool {
    ready::now(pidfd, PollFlags::IN).is_ok_and(|found| found.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::process::Command;

    #[test]
    fn a_process_in_namespaces_of_its_own_is_told_apart() {
        assert!(own_home().is_some());
        assert_eq!(home(std::process::id()), own_home());
        let mut at_home = Command::new("sleep").arg("60").spawn().unwrap();
        let mut away = Command::new("unshare").args(["--user", "sleep", "60"]).spawn().unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while home(away.id()) == own_home() {
            assert!(std::time::Instant::now() < deadline, "it does not go away");
            std::thread::yield_now();
        }
        assert_eq!(home(at_home.id()), own_home());
        let pidfd = pidfd_open(Pid::from_child(&at_home), PidfdFlags::empty()).unwrap();
        assert!(is_alive(&pidfd));
        at_home.kill().unwrap();
        at_home.wait().unwrap();
        assert!(!is_alive(&pidfd) && home(at_home.id()).is_none());
        away.kill().unwrap();
        away.wait().unwrap();
    }

    #[test]
    fn a_process_is_what_one_of_its_threads_is_now() {
        let (pid, user) = (std::process::id(), rustix::process::geteuid().as_raw());
        let own = Present { user, network: own_network().unwrap() };
        assert_eq!(has_thread(pid, |present| present == own), Some(true));
        assert_eq!(has_thread(pid, |present| present.user == 12_345), Some(false));
        assert_eq!(has_thread(u32::MAX, |_| true), None);
        // Another thread than the first.
        std::thread::spawn(move || {
            let alone = rustix::thread::UnshareFlags::NEWNET;
            // SAFETY: the network is the thread's own, and nothing else.
            unsafe { rustix::thread::unshare_unsafe(alone) }.expect("needs root");
            let apart = own_network().unwrap();
            assert_ne!(apart, own.network);
            assert_eq!(has_thread(pid, |present| present.network == apart), Some(true));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn capabilities_are_those_that_are_effective() {
        let may = rustix::thread::capabilities(None).unwrap();
        let has = may.effective.contains(rustix::thread::CapabilitySet::SYS_PTRACE);
        assert_eq!(may_look_into_all(std::process::id()), has);
        assert_eq!(owner(std::process::id()), Some(rustix::process::geteuid().as_raw()));
        let mut child = Command::new("setpriv")
            .args(["--reuid", "65534", "--clear-groups", "sleep", "60"])
            .spawn()
            .unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while may_look_into_all(child.id()) {
            assert!(std::time::Instant::now() < deadline, "it keeps what it has");
            std::thread::yield_now();
        }
        while owner(child.id()) != Some(65534) {
            assert!(std::time::Instant::now() < deadline, "it stays root's");
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
