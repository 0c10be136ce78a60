//! What there is in a lab of three hosts beside that of two: a container that moves from one to another, and where routers learn of it.

use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

use super::{Host, Lab, Routers, Routing, await_answer, await_until};
use crate::find;
use crate::namespace::Namespace;
use crate::process::Process;
use crate::stage::Role;

const ETCD_PORT: u16 = 2379;

/// Where routers learn on which host the container is that moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::overlay) enum Map {
    /// Their files say it.
    File,
    /// Its host's router publishes it, below this prefix.
    Etcd { prefix: String },
}

/// Where that container is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::overlay) enum Moving {
    /// With the server.
    Before,
    /// On the third host.
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

/// The container that moves, as long as it is there.
pub(in crate::overlay) struct Container<'a> {
    host: &'a Host,
    net: Namespace,
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        // Its address is free at once, and not when the kernel comes to take the namespace down.
        let _ = self.host.net.words("ip link del moving");
    }
}

impl Lab {
    /// The container that moves, on the host where it is. The overlay knows of it: it has said something to the client's container.
    pub(in crate::overlay) fn moving(&self, at: Moving) -> Result<Container<'_>> {
        let container = Container { host: &self.hosts[at.host()], net: Namespace::new()? };
        container.host.join(&container.net, "moving", Lab::MOVING)?;
        await_answer(&container.net, self.host(Role::Client).container_address)?;
        Ok(container)
    }

    /// A load of ours in it.
    pub(in crate::overlay) fn serving(&self, container: &Container<'_>, is_shunt: bool) -> Command {
        self.worker_in(&container.net, container.host, is_shunt)
    }

    /// A load of ours in the client's container.
    pub(in crate::overlay) fn reaching(&self, is_shunt: bool) -> Command {
        let host = self.host(Role::Client);
        self.worker_in(&host.container, host, is_shunt)
    }

    /// On the client's host, until what is returned is dropped.
    pub(in crate::overlay) fn start_etcd(&self) -> Result<Process> {
        let host = self.host(Role::Client);
        let mut command = host.net.command(find::installed("etcd")?);
        let (own, peers) = (self.etcd(), format!("http://{}:2380", host.address));
        command.arg("--data-dir").arg(self.path("etcd")).args(["--listen-peer-urls", &peers]);
        command.args(["--listen-client-urls", &own, "--advertise-client-urls", &own]);
        let etcd = Process::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()), "etcd")?;
        await_until(|| host.net.listens_at(ETCD_PORT), || "etcd does not listen".to_owned())?;
        Ok(etcd)
    }

    pub(super) fn etcd(&self) -> String {
        format!("http://{}:{ETCD_PORT}", self.host(Role::Client).address)
    }
}

impl Routers<'_> {
    /// Has the files say that the container has moved, and be read again.
    pub(in crate::overlay) fn have_moved(&self) -> Result<()> {
        for (host, router) in self.lab.hosts.iter().zip(&self.running) {
            self.lab.write_config(host, Routing::moving(&Map::File), Moving::After)?;
            // The router alone: supervisors are of its group.
            kill_process(Pid::from_raw(router.id().cast_signed()).context("a process")?, Signal::HUP)?;
        }
        Ok(())
    }
}

/// Wires of all hosts to one bridge.
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
