//! The paper's four hosts, as network namespaces with delayed links between them:
//!
//! ```text
//! client ── 32.7 ms ── R_C ── 215 ms ── R_S ── 26 ms ── server
//!    └───────────────────── 273.7 ms ─────────────────────┘
//! ```
//!
//! The lower link is the direct path. It has the sum of the three delays and the same rate, so that
//! the comparison shows TCP's behaviour rather than different networks. R_C and R_S are routers.
//!
//! The hosts have the kernel's default settings except two. Senders on legs that face the internet
//! use cubic, like ordinary hosts, whatever the kernel's default is. No connection uses metrics of
//! earlier ones. The congestion control between the relays is the kernel's or the relay's choice.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use shunt_wan::{Config, Link, Tun};
use tempfile::TempDir;

use crate::find;
use crate::interrupt::wait_until;
use crate::namespace::Namespace;

/// One of the four hosts.
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

/// The properties of the links.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Settings {
    /// The rate of every link.
    pub(super) bits_per_second: u64,
    /// The loss rate on every link.
    pub(super) loss: f64,
}

/// The four hosts and their links.
pub(super) struct Lab {
    settings: Settings,
    directory: TempDir,
    shunt: PathBuf,
    /// This program, which runs the synthetic loads.
    own: PathBuf,
    hosts: [Namespace; 4],
    _links: Vec<Link>,
}

/// A link and its two ends.
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

/// The addresses of the server, through the relays and directly, and of the relays, each as reached
/// from the host on its side.
pub(super) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 3, 0, 2);
pub(super) const SERVER_DIRECT: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
pub(super) const EDGE: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
pub(super) const EXIT: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
/// The server's port.
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

/// Returns the names of the links, which are also those of their devices, and their ends.
pub(super) fn links() -> [(&'static str, [Host; 2]); 4] {
    LEGS.each_ref().map(|leg| (leg.name, leg.ends.map(|(host, _)| host)))
}

/// How long a program may take to listen.
const PATIENCE: Duration = Duration::from_secs(10);

impl Lab {
    /// Builds the lab. Needs root.
    pub(super) fn build(settings: Settings) -> Result<Lab> {
        let directory = tempfile::Builder::new().prefix("shunt-lab-").tempdir()?;
        let (shunt, own) = (find::shunt()?, find::own()?);
        let hosts = [Namespace::new()?, Namespace::new()?, Namespace::new()?, Namespace::new()?];
        let mut lab = Lab { settings, directory, shunt, own, hosts, _links: Vec::new() };
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

    /// Returns the path of a file in the lab's directory.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a file in the lab's directory.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.path(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// Returns the path of `shunt`.
    pub(super) fn shunt(&self) -> &Path {
        &self.shunt
    }

    /// Returns a command that runs a program on a host.
    pub(super) fn command(&self, host: Host, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.hosts[host as usize].command(program);
        command.current_dir(self.directory.path()).env_remove("LD_PRELOAD");
        command
    }

    /// Returns the command of a synthetic load.
    pub(super) fn worker(&self, host: Host, load: &str) -> Command {
        let mut command = self.command(host, &self.own);
        command.args(["bench-worker", load]);
        command
    }

    /// Runs `work` in a host's namespace.
    pub(super) fn inside<T: Send>(&self, host: Host, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        self.hosts[host as usize].inside(work)
    }

    /// Runs a command line on a host, split at spaces.
    pub(super) fn words(&self, host: Host, line: &str) -> Result<()> {
        self.hosts[host as usize].words(line)
    }

    /// Sets an IPv4 sysctl of a host.
    pub(super) fn set(&self, host: Host, name: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/net/ipv4/{name}");
        let set = || std::fs::write(&path, value).with_context(|| format!("setting {path} to {value}"));
        self.hosts[host as usize].inside(set)
    }

    /// Returns an IPv4 sysctl of a host.
    pub(super) fn setting(&self, host: Host, name: &str) -> Result<String> {
        let path = format!("/proc/sys/net/ipv4/{name}");
        let read = || std::fs::read_to_string(&path).with_context(|| format!("reading {path}"));
        Ok(self.hosts[host as usize].inside(read)?.trim().to_owned())
    }

    /// Waits until a program that logs to the file `log` listens on an IPv4 port of a host.
    pub(super) fn await_listener(&self, host: Host, port: u16, log: &Path) -> Result<()> {
        let said = || std::fs::read_to_string(log).unwrap_or_default();
        let complaint = || format!("nothing listens at port {port} of {host}: {}", said().trim());
        wait_until(PATIENCE, || self.hosts[host as usize].listens_at(port), complaint)
    }

    /// Returns the bandwidth-delay product of the leg between the relays, in bytes.
    pub(super) fn middle_bytes(&self) -> u64 {
        bytes_under_way(self.settings.bits_per_second, MIDDLE_RTT)
    }

    /// Creates a link whose queue holds its bandwidth-delay product.
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
                // In a namespace only a route can select it: the default is restricted to
                // algorithms that the initial namespace allows.
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

/// Returns the server's address through the relays' network.
pub(super) fn server() -> SocketAddr {
    (SERVER, PORT).into()
}

fn bytes_under_way(bits_per_second: u64, rtt: Duration) -> u64 {
    (bits_per_second as f64 / 8.0 * rtt.as_secs_f64()) as u64
}
