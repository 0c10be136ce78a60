//! Tracks processes that have an io_uring. An io_uring can hold a socket without a descriptor: as a
//! registered file, or in a request under way. A socket that may be in one is not replaced.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use shunt_sys::proc::Fields;

use super::NEVER;
use super::record::Record;

/// The number of processes that are remembered. Once it is reached, any process may have an
/// io_uring.
const MAKERS: usize = 4096;

/// The processes that have made an io_uring. It may be invisible now, since it needs no descriptor.
#[derive(Debug)]
pub(super) struct Rings {
    record: Arc<Record>,
    makers: Mutex<HashSet<u32>>,
    /// A former supervisor has seen some, which are not known now.
    has_others: bool,
}

impl Rings {
    pub(super) fn new(record: Arc<Record>) -> Rings {
        Rings { has_others: record.has_rings(), record, makers: Mutex::default() }
    }

    /// Notes that the process of this thread makes an io_uring.
    pub(super) fn note(&self, thread: u32) {
        self.record.set_rings();
        let mut makers = self.makers.lock().expect(NEVER);
        if let Some(process) = process_of(thread)
            && makers.len() < MAKERS
        {
            makers.insert(process);
        }
    }

    /// Returns `true` if the process of this thread may have made an io_uring.
    pub(super) fn has_made(&self, thread: u32) -> bool {
        let makers = self.makers.lock().expect(NEVER);
        if self.has_others {
            return true;
        }
        match makers.len() {
            0 => false,
            MAKERS.. => true,
            _ => process_of(thread).is_none_or(|process| makers.contains(&process)),
        }
    }
}

fn process_of(thread: u32) -> Option<u32> {
    Fields::status(thread).ok()?.word("Tgid", 0)
}

/// Returns `true` if an io_uring may hold files: registered ones, or those of requests under way.
pub(super) fn may_have_files(thread: u32, ring: i32) -> bool {
    Fields::descriptor(thread, ring).map_or(true, |ring| !has_no_files(ring.text()))
}

/// Parses the fdinfo of an io_uring: `UserFiles:` has the number of registered files, and the
/// pending requests follow the line `PollList:`. The kernel omits both while another thread has the
/// ring locked.
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
        let record = Arc::new(Record::new().unwrap());
        let rings = Rings::new(record.clone());
        let this = || rustix::thread::gettid().as_raw_pid() as u32;
        assert!(!rings.has_made(this()));
        rings.note(this());
        std::thread::scope(|scope| scope.spawn(|| assert!(rings.has_made(this()))).join().unwrap());
        assert!(!rings.has_made(1));
        // A successor does not know which process it was.
        assert!(Rings::new(record).has_made(1));
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
