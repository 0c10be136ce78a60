//! What other processes have: epoll instances, and sockets that the program may share with them.

use std::collections::BTreeSet;
use std::fs;

use crate::Refusal;
use crate::process::Process;

/// A descriptor that matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An epoll instance. All of them have one inode.
    Instance,
    /// A socket with this inode.
    Socket(u64),
    /// An io_uring, which may be at work on any descriptor.
    Ring,
}

/// Returns the epoll instances, sockets and io_urings of a process, by rising descriptors. Returns
/// `None` if it cannot be asked.
pub(crate) fn descriptors(pid: i32) -> Option<Vec<(i32, Kind)>> {
    let listed = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let mut found: Vec<(i32, Kind)> = listed
        .flatten()
        .filter_map(|entry| {
            let kind = parse(fs::read_link(entry.path()).ok()?.to_str()?)?;
            Some((entry.file_name().to_str()?.parse().ok()?, kind))
        })
        .collect();
    found.sort_unstable_by_key(|(fd, _)| *fd);
    Some(found)
}

fn parse(target: &str) -> Option<Kind> {
    match target {
        "anon_inode:[eventpoll]" => Some(Kind::Instance),
        "anon_inode:[io_uring]" => Some(Kind::Ring),
        _ => Some(Kind::Socket(target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?)),
    }
}

/// What the processes have that have been asked.
#[derive(Debug, Default)]
pub(crate) struct Others {
    asked: BTreeSet<i32>,
    /// Their epoll instances, by process and descriptor.
    pub(crate) instances: Vec<(i32, i32)>,
    /// The inodes of their sockets.
    pub(crate) sockets: BTreeSet<u64>,
}

impl Others {
    /// Asks the processes that have not been asked. Most are asked before the program is stopped,
    /// since only a new process can have got something from it meanwhile.
    pub(crate) fn ask(&mut self, process: &Process) -> Result<(), Refusal> {
        for entry in fs::read_dir("/proc").map_err(Refusal::Unreadable)?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            if pid == process.pid || !self.asked.insert(pid) {
                continue;
            }
            for (fd, kind) in descriptors(pid).unwrap_or_default() {
                match kind {
                    Kind::Instance => self.instances.push((pid, fd)),
                    Kind::Socket(inode) => _ = self.sockets.insert(inode),
                    Kind::Ring => {}
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_of_descriptors_are_understood() {
        assert_eq!(parse("anon_inode:[eventpoll]"), Some(Kind::Instance));
        assert_eq!(parse("anon_inode:[io_uring]"), Some(Kind::Ring));
        assert_eq!(parse("socket:[4711]"), Some(Kind::Socket(4711)));
        for other in ["pipe:[4711]", "/socket:[4711]", "socket:[]", "anon_inode:[eventfd]"] {
            assert_eq!(parse(other), None);
        }
    }
}
