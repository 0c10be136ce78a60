//! The totals of all comparisons.

use crate::case::Verdict;
use std::fmt;

/// The totals of all comparisons.
#[derive(Default)]
pub(crate) struct Tally {
    sequences: u64,
    steps: u64,
    on_shm: u64,
    open: u64,
    late: u64,
    extra_edges: u64,
    /// Sequences that differ repeatedly.
    pub(crate) differences: usize,
    /// Sequences that differed only once.
    pub(crate) unconfirmed: usize,
}

impl Tally {
    pub(crate) fn add(&mut self, verdict: &Verdict) {
        self.sequences += 1;
        self.steps += verdict.steps as u64;
        self.on_shm += u64::from(verdict.on_shm);
        self.open += u64::from(verdict.open);
        self.late += u64::from(verdict.late);
        self.extra_edges += u64::from(verdict.extra_edges);
    }

    /// Sequences on shared memory, in percent.
    pub(crate) fn share(&self) -> u64 {
        self.on_shm * 100 / self.sequences.max(1)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} sequences compared, {} operations; {}% were on shared memory; {} differences, {} not seen again; \
             {} ended early where TCP leaves open how to go on; {} answers came late, {} edges were more than TCP's",
            self.sequences,
            self.steps,
            self.share(),
            self.differences,
            self.unconfirmed,
            self.open,
            self.late,
            self.extra_edges
        )
    }
}
