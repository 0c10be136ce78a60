//! A lab of two or three hosts with a container each, built of unnamed network namespaces.
//!
//! A wire, which may have a long delay, joins the hosts. Each host has a VXLAN and a bridge that
//! joins it with the container. The client's host runs on one processor and the server's on
//! another.

mod moving;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use shunt_wan::{Config, Link, Tun};
use tempfile::TempDir;

use super::side::Side;
use crate::find;
use crate::interrupt::wait_until;
use crate::namespace::Namespace;
use crate::process::{Process, run};
use crate::stage::{Role, two_cpus};
pub(super) use moving::{Container, Map, Moving};

/// The hosts and their wires.
pub(super) struct Lab {
    directory: TempDir,
    shunt: PathBuf,
    /// This program, which runs the synthetic loads.
    own: PathBuf,
    /// The hosts of the client and the server, and the destination of a moving container, if there
    /// is one.
    hosts: Vec<Host>,
    /// The link emulator, if the wire has a delay.
    _wire: Option<Link>,
    /// The switch that joins more than two hosts.
    _switch: Option<Namespace>,
}

struct Host {
    name: &'static str,
    address: Ipv4Addr,
    container_address: Ipv4Addr,
    net: Namespace,
    container: Namespace,
    cpu: usize,
}

/// The treatment of connections that end before moving them has paid off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Brief {
    /// They stay on the overlay, which is the routers' default.
    Stay,
    /// They move too.
    Move,
}

/// The configuration of the routers.
#[derive(Clone, Copy, Debug)]
struct Routing<'a> {
    is_secure: bool,
    brief: Brief,
    map: &'a Map,
}

impl Routing<'_> {
    /// Returns the configuration for a lab with a moving container.
    fn moving(map: &Map) -> Routing<'_> {
        Routing { is_secure: true, brief: Brief::Move, map }
    }
}

/// How long a program may take to start.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time-out of routers and programs for each other, in milliseconds. It is long, so that
/// connections do not fall back even on a busy machine.
const LIMIT_MS: u32 = 1_000;
/// The MTU and, below, the rate of a wire with a delay.
const MTU: u16 = 1_500;
const BITS_PER_SECOND: u64 = 10_000_000_000;
/// The port range. A client makes many connections, and each keeps its port for a minute after its
/// end.
const PORTS: &str = "1025 65535";

/// The address of another container on the client's host.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 50, 1, 3);

impl Lab {
    /// The address of the client's container.
    pub(super) const FIRST: Ipv4Addr = Ipv4Addr::new(10, 50, 1, 2);
    /// The address of the moving container.
    pub(super) const MOVING: Ipv4Addr = Ipv4Addr::new(10, 50, 9, 9);

    /// Builds two hosts without routers. A round trip on the wire takes `rtt`. Needs root.
    pub(super) fn build(rtt: Duration) -> Result<Lab> {
        Lab::with(rtt, false)
    }

    /// Builds three hosts, so that a container of the server's host can move to the third.
    pub(super) fn build_for_moving() -> Result<Lab> {
        Lab::with(Duration::ZERO, true)
    }

    fn with(rtt: Duration, is_for_moving: bool) -> Result<Lab> {
        let directory = tempfile::Builder::new().prefix("shunt-lab-").tempdir()?;
        let (shunt, own) = (find::shunt()?, find::own()?);
        let (server, client) = two_cpus()?;
        let mut hosts = vec![Host::new("client", 1, client)?, Host::new("server", 2, server)?];
        let mut lab = Lab { directory, shunt, own, hosts: Vec::new(), _wire: None, _switch: None };
        if is_for_moving {
            hosts.push(Host::new("other", 3, server)?);
            lab._switch = Some(moving::switch(&hosts)?);
        } else {
            lab._wire = connect(&hosts, rtt)?;
        }
        lab.hosts = hosts;
        for host in &lab.hosts {
            host.net.words(&format!("ip address add {}/24 dev wire", host.address))?;
            host.net.words("ip link set wire up")?;
            host.overlay(&lab.hosts)?;
        }
        lab.shunt(&["overlay", "new-key", &lab.path("key").display().to_string()])?;
        await_answer(&lab.host(Role::Client).container, lab.server(Side::Vxlan))?;
        Ok(lab)
    }

    /// Returns the path of a file in the lab's directory.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the path of an empty directory in the lab's directory.
    pub(super) fn directory(&self, name: &str) -> Result<PathBuf> {
        let path = self.path(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(path)
    }

    /// Returns the processors of the server's and the client's hosts.
    pub(super) fn cpus(&self) -> (usize, usize) {
        (self.host(Role::Server).cpu, self.host(Role::Client).cpu)
    }

    /// Returns the server's address.
    pub(super) fn server(&self, side: Side) -> Ipv4Addr {
        let server = self.host(Role::Server);
        if side == Side::Host { server.address } else { server.container_address }
    }

    /// Returns a command that runs a program in its role.
    pub(super) fn command(&self, side: Side, role: Role, program: impl AsRef<OsStr>) -> Command {
        let host = self.host(role);
        self.command_in(host.net(side), host, side.is_shunt(), program)
    }

    fn command_in(
        &self,
        net: &Namespace,
        host: &Host,
        is_shunt: bool,
        program: impl AsRef<OsStr>,
    ) -> Command {
        let mut command = net.command("taskset");
        command.args(["--cpu-list", &host.cpu.to_string()]);
        if is_shunt {
            command.arg(&self.shunt).args(["overlay", "run", "--router"]).arg(self.socket(host)).arg("--");
        }
        command.arg(program).current_dir(self.directory.path()).env_remove("LD_PRELOAD");
        command
    }

    /// Adds another container to the client's host.
    pub(super) fn guest(&self) -> Result<Namespace> {
        let (host, guest) = (self.host(Role::Client), Namespace::new()?);
        host.join(&guest, "guest", GUEST)?;
        Ok(guest)
    }

    /// Returns the command of a synthetic load in that container.
    pub(super) fn guest_worker(&self, guest: &Namespace) -> Command {
        self.worker_in(guest, self.host(Role::Client), true)
    }

    fn worker_in(&self, net: &Namespace, host: &Host, is_shunt: bool) -> Command {
        let mut command = self.command_in(net, host, is_shunt, &self.own);
        command.arg("bench-worker");
        command
    }

    /// Adds a class of this rate (Mbit/s) to the queueing discipline of the client's host, as 1:20,
    /// until the result is dropped.
    pub(super) fn class(&self, megabits: u64) -> Result<Class<'_>> {
        let class = Class(&self.host(Role::Client).net);
        class.0.words("tc qdisc add dev wire root handle 1: htb default 10")?;
        class.0.words("tc class add dev wire parent 1: classid 1:10 htb rate 100gbit")?;
        class.0.words(&format!("tc class add dev wire parent 1: classid 1:20 htb rate {megabits}mbit"))?;
        Ok(class)
    }

    /// Returns the command of a synthetic load.
    pub(super) fn worker(&self, side: Side, role: Role) -> Command {
        let mut command = self.command(side, role, &self.own);
        command.arg("bench-worker");
        command
    }

    /// Waits until the server listens on a port.
    pub(super) fn await_server(&self, side: Side, port: u16) -> Result<()> {
        let net = self.host(Role::Server).net(side);
        wait_until(PATIENCE, || net.listens_at(port), || format!("nothing listens at port {port}"))
    }

    /// Returns the names in /proc of all hosts' and containers' namespaces.
    pub(super) fn namespaces(&self) -> Result<Vec<PathBuf>> {
        let all = self.hosts.iter().flat_map(|host| [&host.net, &host.container]);
        all.map(|net| std::fs::read_link(net.path()).context("a network namespace")).collect()
    }

    /// Runs the routers until the result is dropped.
    pub(super) fn route(&self, side: Side, brief: Brief) -> Result<Routers<'_>> {
        self.start_routers(Routing { is_secure: side == Side::Secure, brief, map: &Map::File })
    }

    /// Runs the routers of a lab with a moving container, in secure mode.
    pub(super) fn route_moving(&self, map: &Map) -> Result<Routers<'_>> {
        self.start_routers(Routing::moving(map))
    }

    fn start_routers(&self, routing: Routing<'_>) -> Result<Routers<'_>> {
        let start = |host: &Host| -> Result<Process> {
            let config = self.write_config(host, routing, Moving::Before)?;
            let mut command = host.net.command("taskset");
            command.args(["--cpu-list", &host.cpu.to_string()]).arg(&self.shunt);
            command.args(["overlay", "router", "--config"]).arg(config).env("SHUNT_LOG", "warn");
            Process::spawn(command.stdout(Stdio::null()), "a router")
        };
        let running = self.hosts.iter().map(start).collect::<Result<_>>()?;
        let routers = Routers { lab: self, running };
        for host in &self.hosts {
            wait_until(
                PATIENCE,
                || Ok(routers.status(host).is_ok_and(|status| has_lines(&status))),
                || format!("the {}'s router does not answer, or has no line to the other", host.name),
            )?;
        }
        Ok(routers)
    }

    fn write_config(&self, own: &Host, routing: Routing<'_>, moving: Moving) -> Result<PathBuf> {
        let path = self.path(&format!("{}.toml", own.name));
        std::fs::write(&path, self.config(own, routing, moving)).context("overlay.toml")?;
        Ok(path)
    }

    fn config(&self, own: &Host, Routing { is_secure, brief, map }: Routing<'_>, moving: Moving) -> String {
        let mut text = format!(
            "name = '{}'\nkey = '{}'\nprefixes = ['10.50.0.0/16']\nask-ms = {LIMIT_MS}\npatience-ms = {LIMIT_MS}\n\
             socket = '{}'\ncontrol = '{}'\nsecure = {}\nmove-brief = {}\n",
            own.name,
            self.path("key").display(),
            self.socket(own).display(),
            self.control(own).display(),
            is_secure,
            brief == Brief::Move,
        );
        if let Map::Etcd { prefix } = map {
            text += &format!("[etcd]\nendpoints = ['{}']\nprefix = '{prefix}'\n", self.etcd());
        }
        for (index, Host { name, address, container_address, .. }) in self.hosts.iter().enumerate() {
            let mut containers = format!("'{container_address}/24'");
            if *map == Map::File && index == moving.host() {
                containers += &format!(", '{}'", Lab::MOVING);
            }
            text += &format!(
                "[[host]]\nname = '{name}'\naddress = '{address}:7450'\ncontainers = [{containers}]\n"
            );
        }
        text
    }

    fn host(&self, role: Role) -> &Host {
        match role {
            Role::Client => &self.hosts[0],
            Role::Server => &self.hosts[1],
        }
    }

    fn socket(&self, host: &Host) -> PathBuf {
        self.path(&format!("{}-router.sock", host.name))
    }

    fn control(&self, host: &Host) -> PathBuf {
        self.path(&format!("{}-control.sock", host.name))
    }

    /// Runs this program with these arguments and returns its output.
    fn shunt(&self, words: &[&str]) -> Result<String> {
        run(Command::new(&self.shunt).args(words))
    }
}

impl Host {
    fn new(name: &'static str, number: u8, cpu: usize) -> Result<Host> {
        let host = Host {
            name,
            address: Ipv4Addr::new(192, 168, 77, number),
            container_address: Ipv4Addr::new(10, 50, number, 2),
            net: Namespace::new()?,
            container: Namespace::new()?,
            cpu,
        };
        for net in [&host.net, &host.container] {
            net.inside(|| Ok(std::fs::write(Path::new("/proc/sys/net/ipv4/ip_local_port_range"), PORTS)?))?;
        }
        Ok(host)
    }

    fn net(&self, side: Side) -> &Namespace {
        if side == Side::Host { &self.net } else { &self.container }
    }

    /// Sets up the overlay to all other hosts.
    fn overlay(&self, hosts: &[Host]) -> Result<()> {
        let own = self.address;
        self.net.words("ip link add bridge type bridge")?;
        self.net.words(&format!("ip link add vxlan type vxlan id 42 local {own} dstport 4789 dev wire"))?;
        for other in hosts.iter().map(|host| host.address).filter(|address| *address != own) {
            self.net.words(&format!("bridge fdb append 00:00:00:00:00:00 dev vxlan dst {other}"))?;
        }
        self.net.words("ip link set vxlan master bridge up")?;
        self.net.words("ip link set bridge up")?;
        self.join(&self.container, "port", self.container_address)
    }

    /// Attaches a container to the bridge, with a device of this name.
    fn join(&self, container: &Namespace, port: &str, address: Ipv4Addr) -> Result<()> {
        let path = container.path();
        self.net.words(&format!("ip link add {port} type veth peer name eth0 netns {}", path.display()))?;
        self.net.words(&format!("ip link set {port} master bridge up"))?;
        // Derive the hardware address from the IP address, as container engines do, so that it
        // moves with it.
        let [_, _, high, low] = address.octets();
        container.words(&format!("ip link set eth0 mtu 1450 address 02:00:0a:32:{high:02x}:{low:02x}"))?;
        container.words(&format!("ip address add {address}/16 dev eth0"))?;
        container.words("ip link set eth0 up")
    }
}

/// Joins two hosts with a wire.
fn connect(hosts: &[Host], rtt: Duration) -> Result<Option<Link>> {
    let [client, server] = hosts else { bail!("a wire has two ends") };
    if rtt.is_zero() {
        let peer = server.net.path();
        client.net.words(&format!("ip link add wire type veth peer name wire netns {}", peer.display()))?;
        return Ok(None);
    }
    let end = |host: &Host| host.net.inside(|| Ok(Tun::open("wire", MTU)?));
    let config = Config {
        delay: rtt / 2,
        bits_per_second: BITS_PER_SECOND,
        queue_bytes: usize::MAX,
        loss: 0.0,
        seed: 0,
    };
    Ok(Some(Link::start(config, end(client)?, end(server)?)?))
}

/// Returns true if a router is connected to all others.
fn has_lines(status: &Value) -> bool {
    let to = status["now"]["lines"]["to"].as_object();
    to.is_some_and(|to| !to.is_empty() && to.values().all(|is_up| *is_up == true))
}

/// A class of [`Lab::class`].
pub(super) struct Class<'a>(&'a Namespace);

impl Drop for Class<'_> {
    fn drop(&mut self) {
        // On failure it is removed together with the lab.
        let _ = self.0.words("tc qdisc del dev wire root");
    }
}

/// All routers, until this is dropped.
pub(super) struct Routers<'a> {
    lab: &'a Lab,
    running: Vec<Process>,
}

/// The paths of the connections, as counted by the client's router.
#[derive(Clone, Debug, Default)]
pub(super) struct Paths {
    pub(super) host: u64,
    /// Connections that stayed on the overlay, by reason.
    pub(super) overlay: BTreeMap<String, u64>,
}

impl Routers<'_> {
    pub(super) fn paths(&self) -> Result<Paths> {
        let status = self.status(self.lab.host(Role::Client))?;
        let counted = &status["connections"]["client"];
        let overlay = counted["overlay"].as_object().into_iter().flatten();
        Ok(Paths {
            host: counted["host"].as_u64().context("a number of connections")?,
            overlay: overlay.map(|(reason, count)| (reason.clone(), count.as_u64().unwrap_or(0))).collect(),
        })
    }

    /// Applies another policy on the client's host.
    pub(super) fn apply(&self, policy: &str) -> Result<()> {
        let path = self.lab.path("policy.toml");
        std::fs::write(&path, policy).context("policy.toml")?;
        let control = self.lab.control(self.lab.host(Role::Client)).display().to_string();
        let file = path.display().to_string();
        self.lab.shunt(&["overlay", "policy", "apply", &file, "--control", &control]).map(drop)
    }

    fn status(&self, host: &Host) -> Result<Value> {
        let control = self.lab.control(host).display().to_string();
        let said = self.lab.shunt(&["overlay", "status", "--json", "--control", &control])?;
        serde_json::from_str(&said).context("a router's answer")
    }
}

/// Waits until the bridges between a container and another address forward packets.
fn await_answer(container: &Namespace, other: Ipv4Addr) -> Result<()> {
    let ping = || {
        let mut ping = container.command("ping");
        Ok(run(ping.args(["-c", "1", "-W", "1", &other.to_string()])).is_ok())
    };
    wait_until(PATIENCE, ping, || "the overlay does not carry anything".to_owned())
}
