//! Processes that have ended in the last minute, which `shunt status` still shows: eight runs of
//! curl would otherwise leave nothing to see.
//!
//! Any client can have many processes end. So each principal has [`PROCESSES`] places, and all
//! together have [`ALL`]. A new process takes the place of the principal's oldest one, or else the
//! oldest one of all.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use shunt_abi::status::Process;

use crate::principal::Principal;

/// How long a process or a connection that has ended is shown.
pub(crate) const SHOWN: Duration = Duration::from_secs(60);
/// How many connections of such a process are shown.
pub(crate) const ROWS: usize = 16;
/// The number of processes of one principal.
const PROCESSES: usize = 64;
/// The number of processes of all principals.
const ALL: usize = 512;

/// A process that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) principal: Principal,
    pub(crate) process: Process,
    at: Instant,
}

impl Ended {
    /// Returns the process as a status shows it.
    pub(crate) fn shown(&self) -> Process {
        Process { ended_seconds_ago: Some(self.at.elapsed().as_secs()), ..self.process.clone() }
    }
}

/// The processes that have ended last.
#[derive(Debug, Default)]
pub(crate) struct EndedProcesses {
    /// The last one is at the end.
    queue: VecDeque<Ended>,
}

impl EndedProcesses {
    /// Adds a process that has ended now.
    pub(crate) fn add(&mut self, principal: Principal, process: Process, now: Instant) {
        while self.queue.front().is_some_and(|ended| now.duration_since(ended.at) > SHOWN) {
            self.queue.pop_front();
        }
        let is_of_it = |ended: &&Ended| ended.principal == principal;
        if self.queue.iter().filter(is_of_it).count() >= PROCESSES {
            let oldest = self.queue.iter().position(|ended| ended.principal == principal);
            oldest.and_then(|oldest| self.queue.remove(oldest));
        } else if self.queue.len() >= ALL {
            self.queue.pop_front();
        }
        self.queue.push_back(Ended { principal, process, at: now });
    }

    /// Returns the processes that have ended in the last minute, the last one first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Ended> {
        self.queue.iter().rev().take_while(|ended| ended.at.elapsed() <= SHOWN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32) -> Process {
        serde_json::from_value(serde_json::json!({
            "pid": pid, "uid": 0, "program": "curl", "connections": [], "left_out": 0
        }))
        .unwrap()
    }

    fn pids(ended: &EndedProcesses) -> Vec<u32> {
        ended.iter().map(|one| one.process.pid).collect()
    }

    #[test]
    fn those_of_the_last_minute_are_shown_the_last_one_first() {
        let (mut ended, now) = (EndedProcesses::default(), Instant::now());
        let Some(long_ago) = now.checked_sub(SHOWN + Duration::from_secs(1)) else { return };
        ended.add(Principal::unknown(None), process(1), long_ago);
        assert!(pids(&ended).is_empty());
        ended.add(Principal::unknown(None), process(2), now);
        ended.add(Principal::unknown(None), process(3), now);
        assert_eq!((pids(&ended), ended.queue.len()), (vec![3, 2], 2));
    }

    #[test]
    fn a_principal_takes_the_places_of_its_own_processes() {
        let (mut ended, now) = (EndedProcesses::default(), Instant::now());
        let [one, other] = [1, 2].map(|uid| Principal::unknown(Some(uid)));
        ended.add(one, process(1), now);
        for pid in 0..1000 {
            ended.add(other, process(1000 + pid), now);
        }
        assert_eq!(pids(&ended).last(), Some(&1));
        assert_eq!(ended.queue.len(), 1 + PROCESSES);
    }
}
