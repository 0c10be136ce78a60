//! What is looked at in a turn that is not measured, as looking takes time: memory, and what keeps programs from shared memory.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::process::{pss_of_trees, trees};
use crate::stage::Stage;

/// See the module.
pub(super) struct Look {
    /// Looked at as well.
    also: Vec<u32>,
    /// When `shunt explain` is asked.
    explain_at: Option<Duration>,
    last: Option<Instant>,
    pub(super) seen: Seen,
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// The most memory of all processes at a time, in bytes.
    pub(super) memory: u64,
    pub(super) kept: Vec<Kept>,
}

/// A program that is kept from shared memory as a whole.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Kept {
    pub(super) program: String,
    #[serde(flatten)]
    pub(super) cause: Cause,
}

/// As `shunt explain` says it.
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

/// What is said of a process that has ended and is not collected yet.
const ENDED: &str = "ended";
/// Between two looks at the memory.
const PAUSE: Duration = Duration::from_millis(100);

impl Look {
    /// At the turn's own processes, and these.
    pub(super) fn new(also: Vec<u32>, explain_at: Option<Duration>) -> Look {
        Look { also, explain_at, last: None, seen: Seen::default() }
    }

    /// At what has come of these processes, so long after the load has begun.
    pub(super) fn at(&mut self, roots: &[u32], stage: &Stage, elapsed: Duration) {
        if self.last.is_none_or(|last| last.elapsed() >= PAUSE) {
            self.seen.memory = self.seen.memory.max(pss_of_trees(&[roots, &self.also].concat()));
            self.last = Some(Instant::now());
        }
        if self.explain_at.take_if(|at| elapsed >= *at).is_some() {
            self.explain(&trees(roots), stage);
        }
    }

    /// A process that has ended meanwhile is not explained.
    fn explain(&mut self, pids: &[u32], stage: &Stage) {
        let answers = pids.iter().filter_map(|pid| stage.explain(*pid).ok());
        let answers = answers.filter_map(|json| serde_json::from_slice::<Answer>(&json).ok());
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
