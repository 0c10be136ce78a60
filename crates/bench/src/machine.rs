//! Describes the machine that a comparison runs on.

use std::fmt;
use std::sync::OnceLock;

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
    /// That load for each processor.
    pub(crate) load_per_processor: f64,
    /// A warning if other programs were busy, in a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) warning: Option<String>,
}

/// The load for each processor above which figures are not reliable.
const BUSY: f64 = 0.5;

/// The warning of this program's first description of the machine. Later ones include its own load.
static WARNING: OnceLock<Option<String>> = OnceLock::new();

/// Returns the warning of the first description of the machine.
pub(crate) fn warning() -> Option<String> {
    WARNING.get().cloned().flatten()
}

fn warning_of(load: f64, processors: usize) -> Option<String> {
    let each = load / processors as f64;
    (each > BUSY).then(|| {
        format!(
            "Warning: other programs kept this machine busy before the measurement (load average {load:.1}, {each:.1} for each \
             of {processors} processors). The figures are not reliable; measure again when it is idle."
        )
    })
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
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let load_before = load_average();
        let warning = WARNING.get_or_init(|| warning_of(load_before, processors)).clone();
        Machine {
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            processor,
            processors,
            load_before,
            load_per_processor: load_before / processors as f64,
            warning,
        }
    }
}

/// The first words of every report, up to the load before; the bracket stays open.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { kernel, processor, processors, load_before, .. } = self;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_is_warned_about_by_its_load_for_each_processor() {
        assert_eq!(warning_of(1.0, 2), None);
        assert_eq!(warning_of(30.0, 64), None);
        let warning = warning_of(18.0, 2).unwrap();
        assert!(warning.contains("load average 18.0, 9.0 for each of 2 processors"), "{warning}");
    }
}
