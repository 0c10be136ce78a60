//! What a comparison ran on.

use serde::Serialize;

use crate::stage::Stage;

/// Printed with every report: without it a figure means nothing.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) kernel: String,
    pub(crate) processor: String,
    /// Processors that this process may use.
    pub(crate) processors: usize,
    /// The load of the last minute before the comparison began.
    pub(crate) load_before: f64,
}

/// The machine, and where on it the two programs of a local comparison have their places.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Place {
    #[serde(flatten)]
    pub(crate) machine: Machine,
    /// The processors of the server and of the client where they are pinned.
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

impl Place {
    pub(crate) fn describe(stage: &Stage) -> Place {
        Place { machine: Machine::describe(), pinned: stage.cpus(), own_namespace: stage.is_isolated() }
    }
}

fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0.0)
}
