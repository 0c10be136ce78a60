//! Finds the supervisor in a host's container, and its keeper.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::fs;
use std::os::unix::fs::MetadataExt;

use rustix::process::{Pid, Signal, kill_process};

use super::lab::{Lab, await_until};

/// The processes of shunt in a host's container: the supervisor and its keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) supervisor: u32,
    pub(crate) keeper: u32,
}

/// Returns all pairs in a host's container, by the ids of their supervisors.
pub(crate) fn pairs(lab: &Lab, host: usize) -> Vec<Pair> {
    let namespace = fs::metadata(lab.hosts[host].container.path()).unwrap().ino();
    let is_shunts = |process: &u32| {
        fs::metadata(format!("/proc/{process}/ns/net")).is_ok_and(|it| it.ino() == namespace)
            && fs::read_link(format!("/proc/{process}/exe"))
                .is_ok_and(|exe| exe.to_string_lossy().contains("shunt"))
    };
    let entries = fs::read_dir("/proc").unwrap();
    let processes = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let found: Vec<u32> = processes.filter(is_shunts).collect();
    let parent = |process: u32| {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse::<u32>().ok())
    };
    let pair_of = |keeper: &u32| {
        let supervisor = parent(*keeper).filter(|parent| found.contains(parent))?;
        Some(Pair { supervisor, keeper: *keeper })
    };
    let mut pairs: Vec<Pair> = found.iter().filter_map(pair_of).collect();
    pairs.sort_by_key(|pair| pair.supervisor);
    pairs
}

/// Returns the only pair.
pub(crate) fn pair(lab: &Lab, host: usize) -> Option<Pair> {
    pairs(lab, host).first().copied()
}

/// Waits for a supervisor and its keeper, neither of which is in `former`.
pub(crate) fn await_pair(lab: &Lab, host: usize, former: Option<Pair>) -> Pair {
    let is_other = |found: &Pair| {
        former.is_none_or(|former| former.supervisor != found.supervisor && former.keeper != found.keeper)
    };
    await_until(
        || pair(lab, host).as_ref().is_some_and(is_other),
        || format!("{former:?} {:?}", pair(lab, host)),
    );
    pair(lab, host).unwrap()
}

pub(crate) fn signal(process: u32, signal: Signal) {
    kill_process(Pid::from_raw(process as i32).unwrap(), signal).unwrap();
}
