//! Describes the machine that a comparison runs on.

use std::fmt;

use serde::Serialize;

use crate::stage::Stage;

/// The machine. Every report includes it, because figures have no meaning without it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) kernel: String,
    pub(crate) processor: String,
    /// The number of processors that this process may use.
    pub(crate) processors: usize,
    /// The load average of the last minute before the comparison.
    pub(crate) load_before: f64,
}

/// The machine, and the processors of the two programs of a local comparison.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Place {
    #[serde(flatten)]
    pub(crate) machine: Machine,
    /// The processors that the server and the client are pinned to.
    pub(crate) pinned: (usize, usize),
    pub(crate) own_namespace: bool,
}

impl Machine {
    pub(crate) fn describe() -> Machine {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let processor = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| Some(line.strip_prefix("model name")?.split_once(": ")?.1.to_owned()))
            .unwrap_or_else(|| std::env::consts::ARCH.to_owned());
        Machine {
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            processor,
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            load_before: load_average(),
        }
    }
}

/// The first words of every report, up to the load before; the bracket stays open.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { kernel, processor, processors, load_before } = self;
        write!(f, "Linux {kernel}, {processor}, {processors} processors (load {load_before:.1} before")
    }
}

impl Place {
    pub(crate) fn describe(stage: &Stage) -> Place {
        Place { machine: Machine::describe(), pinned: stage.cpus(), own_namespace: stage.is_isolated() }
    }
}

fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0.0)
}
