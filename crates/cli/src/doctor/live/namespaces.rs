//! Two network namespaces without names, which a pair of interfaces (veth) joins. They end with
//! this process and the programs inside.

use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command};

use anyhow::{Result, bail, ensure};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::process::geteuid;
use shunt_sys::netns;

use super::ends::Limit;
use super::pair::{self, Pair};
use super::{Kind, Site, Tried, cause, needs_root};
use crate::broker;

const KIND: Kind = Kind::TwoNamespaces;
/// The addresses of the two ends. No other network is in these namespaces.
const SERVER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
const INTERFACE: &str = "shunt0";

pub(super) fn try_it(program: &Path, site: &Site, limit: &Limit) -> Result<Tried> {
    if !geteuid().is_root() {
        let needs = needs_root("Only root makes network namespaces.");
        return Ok(Tried::not_tried(KIND, needs));
    }
    let is_roots = site.broker.as_deref().and_then(|path| broker::probe(path).ok()).map(pair::is_roots);
    if is_roots == Some(false) {
        let needs = cause(
            "broker_of_a_user",
            "Only a broker of root's pairs programs of different network namespaces.",
            "Start the system's: `systemctl start shunt.socket`, or `shunt daemon --system --detach`.",
        );
        return Ok(Tried::not_tried(KIND, needs));
    }
    let (one, two) = match (new(), new()) {
        (Ok(one), Ok(two)) => (one, two),
        (Err(Errno::PERM), _) | (_, Err(Errno::PERM)) => {
            let needs = needs_root("This root may make no network namespaces (CAP_SYS_ADMIN).");
            return Ok(Tried::not_tried(KIND, needs));
        }
        (Err(error), _) | (_, Err(error)) => bail!("a network namespace cannot be made: {error}"),
    };
    if let Err(error) = join(&one, &two, limit) {
        limit.check()?;
        let lacks = cause(
            "no_veth",
            format!("Two network namespaces could not be joined: {error:#}."),
            "Install iproute2, and load the kernel module: `modprobe veth`.",
        );
        return Ok(Tried::not_tried(KIND, lacks));
    }
    let start = |namespace: &OwnedFd, arguments: &[&str]| {
        pair::start(program, site, arguments, |command| spawn(namespace, command))
    };
    let ip = SERVER.to_string();
    let server = start(&one, &["serve", &ip])?;
    let port = server.expect("port", limit)?;
    let client = start(&two, &["connect", &ip, &port])?;
    let pair = Pair { pids: [server.pid(), client.pid()], server, client };
    pair.exchange(KIND, &port, site, limit)
}

/// Makes a network namespace, which exists as long as the descriptor and the processes inside.
fn new() -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    netns::inside_new(|| open("/proc/thread-self/ns/net", flags, Mode::empty()))
}

fn spawn(namespace: &OwnedFd, command: &mut Command) -> std::io::Result<Child> {
    let mut child = None;
    netns::inside(namespace.as_fd(), || {
        child = Some(command.spawn());
        Ok(())
    })?;
    child.unwrap_or_else(|| Err(std::io::ErrorKind::Other.into()))
}

fn join(one: &OwnedFd, two: &OwnedFd, limit: &Limit) -> Result<()> {
    let path = format!("/proc/{}/fd/{}", std::process::id(), two.as_raw_fd());
    ip(one, &["link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", &path], limit)?;
    for (namespace, address) in [(one, SERVER), (two, CLIENT)] {
        let address = format!("{address}/30");
        ip(namespace, &["address", "add", &address, "dev", INTERFACE], limit)?;
        ip(namespace, &["link", "set", INTERFACE, "up"], limit)?;
    }
    Ok(())
}

/// Runs `ip` of iproute2 inside a namespace.
fn ip(namespace: &OwnedFd, arguments: &[&str], limit: &Limit) -> Result<()> {
    let mut command = Command::new("ip");
    // A user's PATH may lack the directories of administration.
    let path = std::env::var("PATH").unwrap_or_default();
    command.args(arguments).env("PATH", format!("{path}:/usr/sbin:/sbin"));
    let output = limit.run(&mut command, |command| spawn(namespace, command));
    let output = output.map_err(|error| error.context("ip (iproute2) cannot be run"))?;
    ensure!(output.is_success, "ip {}: {}", arguments.join(" "), output.complaint());
    Ok(())
}
