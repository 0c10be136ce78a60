//! Describes the machine of a measurement in detail, for other people.

use std::fs::read_to_string;
use std::time::SystemTime;

use serde::Serialize;

use crate::machine::Machine;
use crate::process::bytes_after;

/// The machine of a measurement.
#[derive(Debug, Serialize)]
pub(super) struct Surroundings {
    #[serde(flatten)]
    machine: Machine,
    /// The load average of the last minute at the end.
    load_after: f64,
    memory_bytes: u64,
    /// The CPU flags report a hypervisor.
    is_virtual: bool,
    /// The frequency governor of the first processor, if readable.
    governor: Option<String>,
    /// The kernel's mitigations of processor vulnerabilities, by name.
    mitigations: Vec<(String, String)>,
    shunt: &'static str,
    date: String,
}

impl Surroundings {
    /// Describes the machine after the measurement. `before` was described before it.
    pub(super) fn describe(before: Machine) -> Surroundings {
        let cpuinfo = read_to_string("/proc/cpuinfo").unwrap_or_default();
        let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
        let governor = read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").ok();
        Surroundings {
            machine: before,
            load_after: Machine::describe().load_before,
            memory_bytes: bytes_after(&read_to_string("/proc/meminfo").unwrap_or_default(), "MemTotal:"),
            is_virtual: flags.split_whitespace().any(|flag| flag == "hypervisor"),
            governor: governor.map(|name| name.trim().to_owned()),
            mitigations: mitigations(),
            shunt: env!("CARGO_PKG_VERSION"),
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        }
    }

    /// Returns table rows of names and values.
    pub(super) fn rows(&self) -> Vec<Vec<String>> {
        let machine = &self.machine;
        let virtually = if self.is_virtual { ", in a virtual machine" } else { "" };
        let mut rows = vec![
            ("date".to_owned(), self.date.clone()),
            ("shunt".to_owned(), self.shunt.to_owned()),
            ("kernel".to_owned(), format!("Linux {}", machine.kernel)),
            ("processor".to_owned(), format!("{}{virtually}", machine.processor)),
            ("processors that may be used".to_owned(), machine.processors.to_string()),
            ("memory".to_owned(), format!("{:.1} GB", self.memory_bytes as f64 / 1e9)),
            (
                "load of the last minute".to_owned(),
                format!("{:.1} before, {:.1} after", machine.load_before, self.load_after),
            ),
            (
                "frequency governor".to_owned(),
                self.governor.clone().unwrap_or_else(|| "not readable here".to_owned()),
            ),
        ];
        let mitigated =
            self.mitigations.iter().map(|(name, state)| (format!("fault: {name}"), state.clone()));
        rows.extend(mitigated);
        rows.into_iter().map(|(name, value)| vec![name, value]).collect()
    }

    /// Returns a warning if the machine was busy before the measurement.
    pub(super) fn warning(&self) -> Option<&str> {
        self.machine.warning.as_deref()
    }

    /// Returns the description in one line.
    pub(super) fn line(&self) -> String {
        let machine = &self.machine;
        format!("{machine}, {:.1} after); shunt {}, {}", self.load_after, self.shunt, self.date)
    }
}

/// Returns the mitigations of vulnerabilities that affect this processor.
fn mitigations() -> Vec<(String, String)> {
    let directory = std::fs::read_dir("/sys/devices/system/cpu/vulnerabilities");
    let mut all: Vec<(String, String)> = directory
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let state = read_to_string(entry.path()).ok()?.trim().to_owned();
            Some((entry.file_name().to_string_lossy().into_owned(), state))
        })
        .filter(|(_, state)| state != "Not affected")
        .collect();
    all.sort();
    all
}
