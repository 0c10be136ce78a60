//! Inspects a turn that does not count, because inspection takes time: its memory, and the causes
//! that keep programs from shared memory.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shunt_abi::reason::Transport;
use shunt_abi::status::{Process, Snapshot};

use crate::process::{pss_of_trees, trees};
use crate::stage::Stage;

/// The inspection of a turn.
pub(super) struct Look {
    /// Other processes to inspect.
    also: Vec<u32>,
    /// The time at which `shunt explain` is called.
    explain_at: Option<Duration>,
    last: Option<Instant>,
    pub(super) seen: Seen,
}

/// The results of an inspection.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// The maximum memory of all processes, in bytes.
    pub(super) memory: u64,
    /// At that time: the memory of the rings of all connections, and below, the connections on shared
    /// memory. 0 on the native side.
    pub(super) ring_bytes: u64,
    pub(super) connections: u64,
    pub(super) kept: Vec<Kept>,
}

/// A program that cannot use shared memory at all.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Kept {
    pub(super) program: String,
    #[serde(flatten)]
    pub(super) cause: Cause,
}

/// A cause in the words of `shunt explain`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Cause {
    pub(super) label: String,
    pub(super) explanation: String,
    pub(super) advice: String,
}

#[derive(Deserialize)]
struct Answer {
    processes: Vec<Explained>,
}

#[derive(Deserialize)]
struct Explained {
    program: String,
    causes: Vec<Cause>,
}

/// The cause that `shunt explain` reports for a zombie.
const ENDED: &str = "ended";
/// The interval between two readings of the memory.
const PAUSE: Duration = Duration::from_millis(100);

/// Returns the memory of all rings, and the number of connections that use some.
fn rings(snapshot: &Snapshot) -> (u64, u64) {
    let of = |process: &Process| process.totals.counters.get("ring_bytes").copied().unwrap_or_default();
    let ends = snapshot.processes.iter().flat_map(|process| &process.connections);
    let on_shm = ends.filter(|end| [end.send, end.receive].iter().any(|one| one.transport == Transport::Shm));
    // A connection has two ends.
    (snapshot.processes.iter().map(of).sum(), (on_shm.count() as u64).div_ceil(2))
}

impl Look {
    /// Inspects the turn's processes and these.
    pub(super) fn new(also: Vec<u32>, explain_at: Option<Duration>) -> Look {
        Look { also, explain_at, last: None, seen: Seen::default() }
    }

    /// Inspects the trees of these processes. `elapsed` is the time since the load's start.
    pub(super) fn at(&mut self, roots: &[u32], stage: &Stage, elapsed: Duration) {
        if self.last.is_none_or(|last| last.elapsed() >= PAUSE) {
            let memory = pss_of_trees(&[roots, &self.also].concat());
            if memory > self.seen.memory {
                self.seen.memory = memory;
                // Only under shunt there is a process besides those of the turn: the broker.
                if let Some(snapshot) = (!self.also.is_empty()).then(|| stage.status().ok()).flatten() {
                    (self.seen.ring_bytes, self.seen.connections) = rings(&snapshot);
                }
            }
            self.last = Some(Instant::now());
        }
        if self.explain_at.take_if(|at| elapsed >= *at).is_some() {
            self.explain(&trees(roots), stage);
        }
    }

    /// Explains processes. Those that have ended meanwhile are skipped.
    fn explain(&mut self, pids: &[u32], stage: &Stage) {
        let answers = pids.iter().filter_map(|pid| stage.explain(*pid).ok());
        let answers = answers.filter_map(|json| serde_json::from_str::<Answer>(&json).ok());
        for Explained { program, causes } in answers.flat_map(|answer| answer.processes) {
            for cause in causes.into_iter().filter(|cause| cause.label != ENDED) {
                let kept = Kept { program: program.clone(), cause };
                if !self.seen.kept.contains(&kept) {
                    self.seen.kept.push(kept);
                }
            }
        }
    }
}
