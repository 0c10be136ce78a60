//! The ways from the client to the server that are compared.

mod haproxy;
mod plain;
mod shunt;
mod ssh;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;

use super::lab::Lab;
use crate::process::Process;

/// A way, as it is set up and taken down again.
pub(super) trait Way {
    /// Why this machine cannot go it, if so.
    fn missing(&self) -> Option<String> {
        None
    }

    /// Starts what it needs, and waits until that is ready.
    fn start(&self, lab: &Lab) -> Result<Running>;

    /// Undoes what it changed on the hosts. What it started has ended.
    fn end(&self, _lab: &Lab) -> Result<()> {
        Ok(())
    }
}

/// A way that is up.
pub(super) struct Running {
    /// What the client connects to.
    pub(super) target: SocketAddr,
    /// What runs on the relays.
    pub(super) relays: Vec<Process>,
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Name {
    /// The direct path, without relays
    Direct,
    /// Through the relays as routers
    Routed,
    /// ssh's port forwarding between the relays
    Ssh,
    /// HAProxy on both relays, with splice
    Haproxy,
    /// The same with large windows between the relays
    HaproxyWindow,
    /// shunt relay with everything switched off
    Relay,
    /// The same with early SYN
    RelayEarly,
    /// The same with warm connections as well
    RelayPool,
    /// The same with turbo start as well: all of shunt relay
    RelayTurbo,
    /// All of it, with an encrypted leg
    RelayEncrypted,
}

impl Name {
    /// In its row.
    pub(super) fn label(self) -> &'static str {
        match self {
            Name::Direct => "direct, end to end",
            Name::Routed => "routed, not split",
            Name::Ssh => "ssh forwarding",
            Name::Haproxy => "HAProxy, splice",
            Name::HaproxyWindow => "HAProxy, splice, large window",
            Name::Relay => "shunt relay, plain",
            Name::RelayEarly => "  + early SYN",
            Name::RelayPool => "  + warm connections",
            Name::RelayTurbo => "  + turbo start",
            Name::RelayEncrypted => "  + an encrypted leg",
        }
    }

    pub(super) fn way(self) -> Box<dyn Way> {
        let shunt = |early, pool, turbo, encrypt| Box::new(shunt::Relay { early, pool, turbo, encrypt });
        match self {
            Name::Direct => Box::new(plain::Direct),
            Name::Routed => Box::new(plain::Routed),
            Name::Ssh => Box::new(ssh::Forwarding),
            Name::Haproxy => Box::new(haproxy::Haproxy { large_window: false }),
            Name::HaproxyWindow => Box::new(haproxy::Haproxy { large_window: true }),
            Name::Relay => shunt(false, false, false, false),
            Name::RelayEarly => shunt(true, false, false, false),
            Name::RelayPool => shunt(true, true, false, false),
            Name::RelayTurbo => shunt(true, true, true, false),
            Name::RelayEncrypted => shunt(true, true, true, true),
        }
    }

    /// Whether the burst, the processor time and the memory are measured too: of the whole, what it is compared with, and
    /// what the lab itself takes.
    pub(super) fn is_weighed(self) -> bool {
        matches!(
            self,
            Name::Routed | Name::Haproxy | Name::HaproxyWindow | Name::RelayTurbo | Name::RelayEncrypted
        )
    }
}

impl Running {
    /// Nothing runs on the relays.
    fn without_relays(target: SocketAddr) -> Running {
        Running { target, relays: Vec::new() }
    }

    /// Processor time so far of what runs on the relays.
    pub(super) fn cpu(&self) -> Duration {
        self.relays.iter().map(Process::tree_cpu).sum()
    }

    /// Memory in which what runs on the relays is resident.
    pub(super) fn resident(&self) -> u64 {
        self.relays.iter().map(Process::tree_resident).sum()
    }
}

/// Where a program is; administrators' programs are not in everybody's PATH.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories =
        std::env::split_paths(&path).chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from));
    directories.map(|directory| directory.join(program)).find(|path| path.is_file())
}

/// Why the first of these programs that is not installed stands in the way.
fn not_installed(programs: &[&str]) -> Option<String> {
    let missing = programs.iter().find(|program| find(program).is_none())?;
    Some(format!("{missing} is not installed"))
}
