//! Lists the containers of this host that have an address of the overlay and no supervisor that this
//! router knows, for `shunt status` and `shunt doctor`. Their connections stay on the overlay.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use serde_json::{Value, json};
use shunt_sys::{addresses, netns};

use crate::shared::Shared;

/// The number of containers that are listed. The others are only counted.
const MOST: usize = 1024;

/// Why a container is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// None of its processes has a supervisor.
    NotSupervised,
    /// It has a supervisor, which does not come to this router.
    NotKnown,
}

/// A network namespace with processes.
#[derive(Debug, Default)]
struct Container {
    /// Its processes, without those of shunt.
    processes: Vec<u32>,
    has_supervisor: bool,
}

/// Lists the containers.
pub(crate) fn report(shared: &Shared) -> Value {
    let known: HashSet<u64> =
        shared.registry.namespaces().iter().filter_map(|namespace| namespace.inode()).collect();
    let mut listed = Vec::new();
    for (inode, container) in containers() {
        if known.contains(&inode) {
            continue;
        }
        let Some((process, address)) = container.address(shared) else { continue };
        let cause = if container.has_supervisor { Cause::NotKnown } else { Cause::NotSupervised };
        let program = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        listed.push(json!({
            "address": address,
            "pid": process,
            "program": program.trim_end(),
            "reason": cause.label(),
            "explanation": cause.explanation(),
            "advice": cause.advice(),
        }));
    }
    let left_out = listed.len().saturating_sub(MOST);
    listed.truncate(MOST);
    json!({ "containers": listed, "left-out": left_out })
}

/// Returns the network namespaces other than this one, by their inodes.
fn containers() -> BTreeMap<u64, Container> {
    let inode = |process: &str| fs::metadata(format!("/proc/{process}/ns/net")).map(|found| found.ino());
    let own = inode("self").ok();
    let mut containers: BTreeMap<u64, Container> = BTreeMap::new();
    for process in shunt_sys::proc::pids() {
        let Ok(inode) = inode(&process.to_string()) else { continue };
        if Some(inode) == own {
            continue;
        }
        let container = containers.entry(inode).or_default();
        match is_supervisor(process) {
            true => container.has_supervisor = true,
            false => container.processes.push(process),
        }
    }
    containers
}

/// Returns `true` for a supervisor or its keeper: a process of shunt's command that still has the
/// arguments with which it supervises.
fn is_supervisor(process: u32) -> bool {
    let program = fs::read_link(format!("/proc/{process}/exe")).unwrap_or_default();
    let name = program.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    // After an update, the kernel appends that the file is deleted.
    matches!(name.trim_end_matches(" (deleted)"), "shunt" | "shunt-runtime")
        && fs::read(format!("/proc/{process}/cmdline")).is_ok_and(|words| {
            let mut words = words.split(|byte| *byte == 0);
            words.any(|word| [&b"overlay"[..], b"create", b"exec", b"run"].contains(&word))
        })
}

impl Container {
    /// Returns one of its processes, and its address that belongs to this host's part of the
    /// overlay.
    fn address(&self, shared: &Shared) -> Option<(u32, IpAddr)> {
        let process = *self.processes.iter().min()?;
        let namespace = File::open(format!("/proc/{process}/ns/net")).ok()?;
        let asker = netns::inside(namespace.as_fd(), addresses::open).ok()?;
        let loaded = shared.loaded();
        let is_ours = |address: &IpAddr| {
            let host = shared.map().host_of(*address);
            loaded.config.is_overlays(*address) && host.is_none_or(|host| host.name == loaded.config.name)
        };
        addresses::all(&asker).ok()?.into_iter().find(is_ours).map(|address| (process, address))
    }
}

impl Cause {
    fn label(self) -> &'static str {
        match self {
            Cause::NotSupervised => "not-supervised",
            Cause::NotKnown => "not-known",
        }
    }

    fn explanation(self) -> &'static str {
        match self {
            Cause::NotSupervised => "No supervisor was started with it.",
            Cause::NotKnown => "Its supervisor does not come to this router.",
        }
    }

    fn advice(self) -> &'static str {
        match self {
            Cause::NotSupervised => {
                "Start it again with `--runtime=shunt`, or its program with `shunt overlay run`, after \
                 the router's directory /run/shunt-overlay exists."
            }
            Cause::NotKnown => {
                "Start it again if it has `SHUNT_OVERLAY=off` or a supervisor of an older version. A \
                 supervisor started by `shunt overlay run` needs the directory of this router's socket, \
                 and `secure = true` does not accept one from before the router."
            }
        }
    }
}
