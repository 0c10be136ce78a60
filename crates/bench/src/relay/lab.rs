//! The paper's four hosts, as network namespaces with links of their delay between them:
//!
//! ```text
//! client ── 32.7 ms ── R_C ── 215 ms ── R_S ── 26 ms ── server
//!    └───────────────────── 273.7 ms ─────────────────────┘
//! ```
//!
//! The link below is the direct path: the sum of the three delays and the same rate, so that what is compared is how TCP
//! behaves, and not two networks. R_C and R_S are routers. Hosts have the kernel's own settings, but for two: on legs that face
//! the internet senders use cubic, as ordinary hosts do, whatever the kernel was built with; and no connection remembers an
//! earlier one. Which congestion control the leg between the relays has is the kernel's or the relay's choice.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use shunt_wan::{Config, Link, Tun};
use tempfile::TempDir;

use crate::interrupt;
use crate::namespace::Namespace;

/// One of the four.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Host {
    Client = 0,
    /// The relay near the client.
    Edge = 1,
    /// The relay near the server.
    Exit = 2,
    Server = 3,
}

/// What the links are like.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Settings {
    /// Of every link.
    pub(super) bits_per_second: u64,
    /// Of every packet on every link.
    pub(super) loss: f64,
}

/// See the module.
pub(super) struct Lab {
    settings: Settings,
    directory: TempDir,
    shunt: PathBuf,
    hosts: [Namespace; 4],
    _links: Vec<Link>,
}

/// A link, as a host sees it.
struct Leg {
    name: &'static str,
    faces_internet: bool,
    rtt: Duration,
    ends: [(Host, Ipv4Addr); 2],
}

pub(super) const CLIENT_RTT: Duration = Duration::from_micros(32_700);
pub(super) const MIDDLE_RTT: Duration = Duration::from_micros(215_000);
pub(super) const SERVER_RTT: Duration = Duration::from_micros(26_000);
const MTU: u16 = 1_500;
const SEED: u64 = 20_260;

/// The server, by way of the relays and directly; and the relays, as the host on their side of the world reaches them.
pub(super) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 3, 0, 2);
pub(super) const SERVER_DIRECT: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
pub(super) const EDGE: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
pub(super) const EXIT: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
/// Where the server listens.
pub(super) const PORT: u16 = 80;

const LEGS: [Leg; 4] = [
    Leg {
        name: "access",
        faces_internet: true,
        rtt: CLIENT_RTT,
        ends: [(Host::Client, Ipv4Addr::new(10, 1, 0, 1)), (Host::Edge, EDGE)],
    },
    Leg {
        name: "middle",
        faces_internet: false,
        rtt: MIDDLE_RTT,
        ends: [(Host::Edge, Ipv4Addr::new(10, 2, 0, 1)), (Host::Exit, EXIT)],
    },
    Leg {
        name: "site",
        faces_internet: true,
        rtt: SERVER_RTT,
        ends: [(Host::Exit, Ipv4Addr::new(10, 3, 0, 1)), (Host::Server, SERVER)],
    },
    Leg {
        name: "direct",
        faces_internet: true,
        rtt: Duration::from_micros(32_700 + 215_000 + 26_000),
        ends: [(Host::Client, Ipv4Addr::new(10, 9, 0, 1)), (Host::Server, SERVER_DIRECT)],
    },
];

const ROUTES: [(Host, &str); 4] = [
    (Host::Client, "default via 10.1.0.2 congctl cubic"),
    (Host::Edge, "10.3.0.0/24 via 10.2.0.2"),
    (Host::Exit, "10.1.0.0/24 via 10.2.0.1"),
    (Host::Server, "default via 10.3.0.1 congctl cubic"),
];

/// The links' names, which are their devices' at both ends, and what they are between.
pub(super) fn links() -> [(&'static str, [Host; 2]); 4] {
    LEGS.each_ref().map(|leg| (leg.name, leg.ends.map(|(host, _)| host)))
}

/// How long a program may take to listen.
const PATIENCE: Duration = Duration::from_secs(10);

impl Lab {
    /// Needs root.
    pub(super) fn build(settings: Settings) -> Result<Lab> {
        let directory = tempfile::Builder::new().prefix("shunt-lab-").tempdir()?;
        let shunt = std::env::current_exe().context("finding this program")?;
        let hosts = [Namespace::new()?, Namespace::new()?, Namespace::new()?, Namespace::new()?];
        let mut lab = Lab { settings, directory, shunt, hosts, _links: Vec::new() };
        for host in [Host::Client, Host::Edge, Host::Exit, Host::Server] {
            lab.set(host, "tcp_no_metrics_save", "1")?;
        }
        for leg in &LEGS {
            let link = lab.link(leg).with_context(|| format!("the link {}", leg.name))?;
            lab._links.push(link);
        }
        for (host, route) in ROUTES {
            lab.words(host, &format!("ip route add {route}"))?;
        }
        for relay in [Host::Edge, Host::Exit] {
            lab.set(relay, "ip_forward", "1")?;
        }
        Ok(lab)
    }

    pub(super) fn settings(&self) -> Settings {
        self.settings
    }

    /// A file of the lab's own.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes one.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.path(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// This program.
    pub(super) fn shunt(&self) -> &Path {
        &self.shunt
    }

    /// A command that runs a program on a host.
    pub(super) fn command(&self, host: Host, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.hosts[host as usize].command(program);
        command.current_dir(self.directory.path()).env_remove("LD_PRELOAD");
        command
    }

    /// The command that is one of our own loads.
    pub(super) fn worker(&self, host: Host, load: &str) -> Command {
        let mut command = self.command(host, &self.shunt);
        command.args(["bench-worker", load]);
        command
    }

    /// Does something where a host is.
    pub(super) fn inside<T: Send>(&self, host: Host, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        self.hosts[host as usize].inside(work)
    }

    /// Runs a line of words on a host.
    pub(super) fn words(&self, host: Host, line: &str) -> Result<()> {
        self.hosts[host as usize].words(line)
    }

    /// Sets one of a host's settings of IPv4.
    pub(super) fn set(&self, host: Host, name: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/net/ipv4/{name}");
        let set = || std::fs::write(&path, value).with_context(|| format!("setting {path} to {value}"));
        self.hosts[host as usize].inside(set)
    }

    /// One of a host's settings of IPv4.
    pub(super) fn setting(&self, host: Host, name: &str) -> Result<String> {
        let path = format!("/proc/sys/net/ipv4/{name}");
        let read = || std::fs::read_to_string(&path).with_context(|| format!("reading {path}"));
        Ok(self.hosts[host as usize].inside(read)?.trim().to_owned())
    }

    /// Waits until a program that logs to the file `log` listens on a host at a port of IPv4.
    pub(super) fn await_listener(&self, host: Host, port: u16, log: &Path) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !self.hosts[host as usize].listens_at(port)? {
            let said = || std::fs::read_to_string(log).unwrap_or_default();
            ensure!(Instant::now() < end, "nothing listens at port {port} of {host}: {}", said().trim());
            interrupt::pause(Duration::from_millis(20))?;
        }
        Ok(())
    }

    /// How many bytes are under way when the leg between the relays is full.
    pub(super) fn middle_bytes(&self) -> u64 {
        bytes_under_way(self.settings.bits_per_second, MIDDLE_RTT)
    }

    /// Its queue has room for as much as is under way.
    fn link(&self, leg: &Leg) -> Result<Link> {
        let config = Config {
            delay: leg.rtt / 2,
            bits_per_second: self.settings.bits_per_second,
            queue_bytes: bytes_under_way(self.settings.bits_per_second, leg.rtt) as usize,
            loss: self.settings.loss,
            seed: SEED,
        };
        let end = |(host, address): (Host, Ipv4Addr)| {
            let name = leg.name;
            let tun = self.hosts[host as usize].inside(|| Ok(Tun::open(name, MTU)?))?;
            self.words(host, &format!("ip address add {address}/24 dev {name}"))?;
            if leg.faces_internet {
                // In a namespace only the route can say so: the default is for the kernel's first namespace to allow.
                let [a, b, c, _] = address.octets();
                let route = format!("{a}.{b}.{c}.0/24 dev {name} proto kernel scope link src {address}");
                self.words(host, &format!("ip route replace {route} congctl cubic"))?;
            }
            anyhow::Ok(tun)
        };
        Ok(Link::start(config, end(leg.ends[0])?, end(leg.ends[1])?)?)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Host::Client => "the client",
            Host::Edge => "R_C",
            Host::Exit => "R_S",
            Host::Server => "the server",
        })
    }
}

/// Where the server is reached, through the relays' network.
pub(super) fn server() -> SocketAddr {
    (SERVER, PORT).into()
}

fn bytes_under_way(bits_per_second: u64, rtt: Duration) -> u64 {
    (bits_per_second as f64 / 8.0 * rtt.as_secs_f64()) as u64
}
