//! The additional parts of a lab of three hosts: a container that moves between two of them, and
//! the source from which routers learn its place.

use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

use super::{Host, Lab, PATIENCE, Routers, Routing, await_answer};
use crate::find;
use crate::interrupt::wait_until;
use crate::namespace::Namespace;
use crate::process::Process;
use crate::stage::Role;

const ETCD_PORT: u16 = 2379;

/// The source from which routers learn the host of the moving container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::overlay) enum Map {
    /// The routers' files.
    File,
    /// etcd, where the host's router publishes it under this prefix.
    Etcd { prefix: String },
}

/// The place of the moving container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::overlay) enum Moving {
    /// The server's host.
    Before,
    /// The third host.
    After,
}

impl Moving {
    pub(super) fn host(self) -> usize {
        match self {
            Moving::Before => 1,
            Moving::After => 2,
        }
    }
}

/// The running container. It is removed on drop.
pub(in crate::overlay) struct Container<'a> {
    host: &'a Host,
    net: Namespace,
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        // Deleting the device frees the address immediately. The kernel removes the namespace only
        // later.
        let _ = self.host.net.words("ip link del moving");
    }
}

impl Lab {
    /// Starts the moving container on a host. It pings the client's container, so the overlay knows
    /// its place.
    pub(in crate::overlay) fn moving(&self, at: Moving) -> Result<Container<'_>> {
        let container = Container { host: &self.hosts[at.host()], net: Namespace::new()? };
        container.host.join(&container.net, "moving", Lab::MOVING)?;
        await_answer(&container.net, self.host(Role::Client).container_address)?;
        Ok(container)
    }

    /// Returns the command of a synthetic load in the moving container.
    pub(in crate::overlay) fn serving(&self, container: &Container<'_>, is_shunt: bool) -> Command {
        self.worker_in(&container.net, container.host, is_shunt)
    }

    /// Returns the command of a synthetic load in the client's container.
    pub(in crate::overlay) fn reaching(&self, is_shunt: bool) -> Command {
        let host = self.host(Role::Client);
        self.worker_in(&host.container, host, is_shunt)
    }

    /// Starts etcd on the client's host, until the result is dropped.
    pub(in crate::overlay) fn start_etcd(&self) -> Result<Process> {
        let host = self.host(Role::Client);
        let mut command = host.net.command(find::installed("etcd")?);
        let (own, peers) = (self.etcd(), format!("http://{}:2380", host.address));
        command.arg("--data-dir").arg(self.path("etcd")).args(["--listen-peer-urls", &peers]);
        command.args(["--listen-client-urls", &own, "--advertise-client-urls", &own]);
        let etcd = Process::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()), "etcd")?;
        wait_until(PATIENCE, || host.net.listens_at(ETCD_PORT), || "etcd does not listen".to_owned())?;
        Ok(etcd)
    }

    pub(super) fn etcd(&self) -> String {
        format!("http://{}:{ETCD_PORT}", self.host(Role::Client).address)
    }
}

impl Routers<'_> {
    /// Updates the files to the container's new place, and makes the routers read them again.
    pub(in crate::overlay) fn have_moved(&self) -> Result<()> {
        for (host, router) in self.lab.hosts.iter().zip(&self.running) {
            self.lab.write_config(host, Routing::moving(&Map::File), Moving::After)?;
            // Signal only the router: its supervisors are in its process group.
            kill_process(Pid::from_raw(router.id().cast_signed()).context("a process")?, Signal::HUP)?;
        }
        Ok(())
    }
}

/// Joins all hosts with one bridge.
pub(super) fn switch(hosts: &[Host]) -> Result<Namespace> {
    let switch = Namespace::new()?;
    switch.words("ip link add bridge type bridge")?;
    switch.words("ip link set bridge up")?;
    for host in hosts {
        let (name, path) = (host.name, host.net.path());
        switch.words(&format!("ip link add {name} type veth peer name wire netns {}", path.display()))?;
        switch.words(&format!("ip link set {name} master bridge up"))?;
    }
    Ok(switch)
}
