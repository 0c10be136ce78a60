//! The compared ways from the client to the server.

mod haproxy;
mod shunt;
mod ssh;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use shunt_bench_args::relay::Name;

use super::lab::{self, Lab};
use crate::process::Process;

/// A way that can be set up and taken down.
pub(super) trait Way {
    /// Returns the reason why this machine cannot use it, if there is one.
    fn missing(&self) -> Option<String> {
        None
    }

    /// Starts its programs and waits until they are ready.
    fn start(&self, lab: &Lab) -> Result<Running>;

    /// Undoes its changes on the hosts, after its programs have ended.
    fn end(&self, _lab: &Lab) -> Result<()> {
        Ok(())
    }
}

/// A running way.
pub(super) struct Running {
    /// The address that the client connects to.
    pub(super) target: SocketAddr,
    /// The programs on the relays.
    pub(super) relays: Vec<Process>,
}

/// Returns the way of this name.
pub(super) fn way(name: Name) -> Box<dyn Way> {
    let shunt = |early, pool, turbo, encrypt| Box::new(shunt::Relay { early, pool, turbo, encrypt });
    match name {
        Name::Direct => Box::new(WithoutRelays((lab::SERVER_DIRECT, lab::PORT).into())),
        Name::Routed => Box::new(WithoutRelays(lab::server())),
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

/// Returns true if burst, processor time and memory are measured too: for the complete relay,
/// for the ways that it is compared with, and for the lab itself.
pub(super) fn is_weighed(name: Name) -> bool {
    matches!(
        name,
        Name::Routed | Name::Haproxy | Name::HaproxyWindow | Name::RelayTurbo | Name::RelayEncrypted
    )
}

/// A way without programs on the relays, to this address: the paper's end-to-end path, or the path
/// through the relays' network without splitting TCP.
struct WithoutRelays(SocketAddr);

impl Way for WithoutRelays {
    fn start(&self, _: &Lab) -> Result<Running> {
        Ok(Running { target: self.0, relays: Vec::new() })
    }
}

impl Running {
    /// Returns the processor time of the programs on the relays so far.
    pub(super) fn cpu(&self) -> Duration {
        self.relays.iter().map(Process::tree_cpu).sum()
    }

    /// Returns the resident memory of the programs on the relays.
    pub(super) fn resident(&self) -> u64 {
        self.relays.iter().map(Process::tree_resident).sum()
    }
}
