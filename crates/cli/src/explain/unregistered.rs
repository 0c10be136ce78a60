//! Programs under shunt that have not registered with a broker: they have used no TCP connection
//! yet, or they have not made a call since the broker was restarted.

use std::fs;
use std::path::Path;

use serde::Serialize;

use shunt_sys::proc::pids;

use super::process::{broker_paths, is_under_shunt};

/// A program under shunt that its broker does not know.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Unregistered {
    pub(crate) program: String,
    pub(crate) pid: u32,
}

/// Returns the programs of this host that look for their broker at `broker`, as far as this user
/// may see them, except those that `is_known`. Brokers are no such programs.
pub(crate) fn unregistered(broker: &Path, is_known: impl Fn(u32) -> bool) -> Vec<Unregistered> {
    let broker = fs::canonicalize(broker).unwrap_or_else(|_| broker.to_owned());
    let looks_there = |pid: u32| {
        let paths = broker_paths(pid, shunt_attach::view(pid).as_ref());
        let path = paths.iter().find(|path| path.exists());
        path.is_some_and(|path| fs::canonicalize(path).is_ok_and(|path| path == broker))
    };
    let mut found: Vec<Unregistered> = pids()
        .filter(|pid| !is_known(*pid) && is_under_shunt(*pid) && looks_there(*pid))
        .filter_map(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
            Some(Unregistered { program: name.trim_end().to_owned(), pid })
        })
        .collect();
    found.sort();
    found
}
