//! Reports which namespaces another process lives in, and whether it may inspect other processes.

use std::os::fd::AsFd;

use rustix::event::PollFlags;
use rustix::fs::stat;

use crate::proc::Fields;
use crate::ready;

/// The namespaces that decide which processes another process may inspect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    user: (u64, u64),
    pid: (u64, u64),
}

/// The bit of CAP_SYS_PTRACE in a capability set.
const SYS_PTRACE: u32 = 19;

/// Returns the namespaces of a process, or `None` if the kernel does not let this process inspect
/// it.
pub fn home(pid: u32) -> Option<Home> {
    home_of(&pid.to_string())
}

/// Returns the namespaces of this process.
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

/// Returns the user id whose processes the kernel lets inspect a process. It is the process's own
/// user, or root if the process has changed its user since it was started.
pub fn owner(pid: u32) -> Option<u32> {
    stat(format!("/proc/{pid}")).ok().map(|directory| directory.st_uid)
}

/// The current identity of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Present {
    /// The effective user id.
    pub user: u32,
    /// Device and inode of the network namespace.
    pub network: (u64, u64),
}

/// The maximum number of threads of a process that are checked.
const THREADS: usize = 4096;

/// Returns whether `is` holds for any thread of a process. Each thread has its own user and network
/// namespace. Returns `None` if the process is not visible from here.
pub fn has_thread(pid: u32, is: impl Fn(Present) -> bool) -> Option<bool> {
    if is(present(&pid.to_string())?) {
        return Some(true);
    }
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten().take(THREADS);
    let mut found =
        threads.filter_map(|thread| present(&format!("{pid}/task/{}", thread.file_name().to_str()?)));
    Some(found.any(is))
}

fn present(thread: &str) -> Option<Present> {
    let user = Fields::status(thread).ok()?.word("Uid", 1)?;
    Some(Present { user, network: network(thread)? })
}

/// Returns device and inode of this thread's network namespace.
pub fn own_network() -> Option<(u64, u64)> {
    network("thread-self")
}

fn network(thread: &str) -> Option<(u64, u64)> {
    stat(format!("/proc/{thread}/ns/net")).ok().map(|file| (file.st_dev, file.st_ino))
}

/// Returns `true` if a process may inspect every other process of its user namespace.
pub fn may_look_into_all(pid: u32) -> bool {
    let set = Fields::status(pid).ok().and_then(|status| status.number("CapEff", 16));
    set.is_some_and(|set| set & 1 << SYS_PTRACE != 0)
}

/// Returns `true` if the process of a pidfd has not ended. If so, information that was read by its
/// process id since the pidfd was opened belongs to that process.
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
        // The state of a thread that is not the main thread.
        std::thread::spawn(move || {
            let alone = rustix::thread::UnshareFlags::NEWNET;
            // SAFETY: only the network namespace of this thread changes.
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
