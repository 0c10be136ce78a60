//! The resources of a process, read from /proc.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;

/// The resources of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Private memory, in KiB.
    pub private_kib: u64,
    /// The process's share of the memory of links and pages, in KiB.
    pub shared_kib: u64,
    /// The number of descriptors.
    pub descriptors: u64,
    /// The number of mappings.
    pub mappings: u64,
    /// The number of mappings that are links.
    pub links: u64,
    /// The number of threads.
    pub threads: u64,
}

impl Usage {
    /// Reads the current usage of a process; `None` if it has ended.
    pub fn of(pid: u32) -> Option<Usage> {
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let mappings = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
        Some(Usage {
            private_kib: field(&rollup, "Pss_Anon:")?,
            shared_kib: field(&rollup, "Pss_Shmem:")?,
            descriptors: fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64,
            mappings: mappings.lines().count() as u64,
            links: mappings.matches("/memfd:shunt-link").count() as u64,
            threads: field(&status, "Threads:")?,
        })
    }
}

/// Returns the memory of all links that a process has mapped, in KiB, whichever process has touched
/// it. Returns `None` if /proc cannot be read.
pub fn link_kib(pid: u32) -> Option<u64> {
    let mut links = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/map_files")).ok()?.flatten() {
        // The entry was unmapped in the meantime.
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        if target.to_string_lossy().starts_with("/memfd:shunt-link")
            && let Ok(file) = fs::metadata(entry.path())
        {
            links.insert(file.ino(), file.blocks() / 2);
        }
    }
    Some(links.values().sum())
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}
