//! Processes that have an io_uring. It may have a socket where no descriptor shows it: among its registered files, or under what is under
//! way. Nothing takes the place of a socket there.

use std::collections::HashSet;
use std::fs;
use std::sync::Mutex;

use super::NEVER;

/// So many processes are remembered; with more, any may have made one.
const MAKERS: usize = 4096;

/// Processes that have made one, which they may have hidden: a ring can do without a descriptor.
#[derive(Debug, Default)]
pub(super) struct Rings(Mutex<HashSet<u32>>);

impl Rings {
    /// The process of this thread makes one.
    pub(super) fn note(&self, thread: u32) {
        let mut makers = self.0.lock().expect(NEVER);
        if let Some(process) = process_of(thread)
            && makers.len() < MAKERS
        {
            makers.insert(process);
        }
    }

    /// Whether the process of this thread may have made one.
    pub(super) fn has_made(&self, thread: u32) -> bool {
        let makers = self.0.lock().expect(NEVER);
        match makers.len() {
            0 => false,
            MAKERS.. => true,
            _ => process_of(thread).is_none_or(|process| makers.contains(&process)),
        }
    }
}

fn process_of(thread: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok())
}

/// Whether a ring may have files of its own: registered ones, or those of what is under way.
pub(super) fn may_have_files(thread: u32, ring: i32) -> bool {
    fs::read_to_string(format!("/proc/{thread}/fdinfo/{ring}")).map_or(true, |text| !has_no_files(&text))
}

/// As the kernel tells of a ring: `UserFiles:` with their number, and behind the line `PollList:` what waits. It leaves both out while somebody
/// else is at the ring.
fn has_no_files(ring: &str) -> bool {
    let mut lines = ring.lines();
    let has_none = lines.any(|line| line.strip_prefix("UserFiles:").is_some_and(|count| count.trim() == "0"));
    has_none
        && lines.any(|line| line == "PollList:")
        && lines.next().is_some_and(|line| !line.contains("op="))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_any_of_its_threads() {
        let rings = Rings::default();
        let this = || rustix::thread::gettid().as_raw_pid() as u32;
        assert!(!rings.has_made(this()));
        rings.note(this());
        std::thread::scope(|scope| scope.spawn(|| assert!(rings.has_made(this()))).join().unwrap());
        assert!(!rings.has_made(1));
    }

    #[test]
    fn a_ring_that_may_have_files_is_told_from_one_that_has_none() {
        const IDLE: &str = "SqThread:\t-1\nUserFiles:\t0\nUserBufs:\t0\nPollList:\nCqOverflowList:\n";
        assert!(has_no_files(IDLE));
        let registered = IDLE.replace("UserFiles:\t0", "UserFiles:\t1\n    0: socket:[7]");
        let waiting = IDLE.replace("PollList:", "PollList:\n  op=6, task_works=0");
        let untold = "pos:\t0\nflags:\t02000002\nUserFiles:\t0\n";
        for ring in [&registered, &waiting, untold, &IDLE[..IDLE.len() - 16]] {
            assert!(!has_no_files(ring), "{ring}");
        }
    }
}
