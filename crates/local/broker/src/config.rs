//! The configuration of a broker.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use shunt_abi::geometry::DEFAULT_RING_BYTES;

/// The path at which the overlay's router of this host publishes its policy by default.
pub const OVERLAY_POLICY: &str = "/run/shunt/overlay.policy";

/// The users that a broker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Its own user: the socket has mode 0600, and a directory made for it 0700.
    User,
    /// Every user of the host: the socket has mode 0666, and a directory made for it 0755.
    System,
}

/// The configuration of a broker.
#[derive(Debug)]
pub struct Config {
    /// The path of the control socket.
    pub socket: PathBuf,
    /// Time without any client after which the broker stops.
    pub idle_exit: Option<Duration>,
    /// Bytes of one ring, a power of two: see [`shunt_abi::geometry::Geometry`].
    pub ring_bytes: usize,
    /// The users that the broker serves.
    pub mode: Mode,
    /// A listening SOCK_SEQPACKET socket from socket activation. The broker then neither makes nor
    /// removes the file at `socket`.
    pub listener: Option<OwnedFd>,
    /// The address at which the broker serves its metrics over HTTP, at `/metrics`.
    pub metrics: Option<SocketAddr>,
    /// Whether the metrics have latencies. Programs then measure them from one scrape to the next.
    pub latency: bool,
    /// Limits on what clients can make the broker hold.
    pub limits: Limits,
    /// The path at which the overlay's router publishes its policy.
    pub overlay_policy: PathBuf,
}

impl Config {
    /// Returns the configuration of a broker at `socket` with defaults for everything else.
    pub fn new(socket: impl Into<PathBuf>, mode: Mode) -> Config {
        Config {
            socket: socket.into(),
            idle_exit: None,
            ring_bytes: DEFAULT_RING_BYTES,
            mode,
            listener: None,
            metrics: None,
            latency: false,
            limits: Limits::default(),
            overlay_policy: OVERLAY_POLICY.into(),
        }
    }
}

/// Limits on what clients can make the broker hold (L5). A request beyond a limit is refused and
/// counted, and the connection stays on TCP. Limits *in all* are shared: each user may take only a
/// part, except root and the broker's own user (docs/adr/0019).
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connected clients in all.
    pub clients: usize,
    /// Open offers of one process.
    pub offers: usize,
    /// Open offers in all.
    pub all_offers: usize,
    /// Messages queued for a process that does not read. One more, and the process is disconnected.
    pub queue: usize,
    /// Messages queued in all.
    pub all_queued: usize,
    /// Links in all.
    pub links: usize,
    /// Doorbells in all.
    pub doorbells: usize,
    /// Connections that one status lists, in all.
    pub status_rows: usize,
    /// Bytes of unread statuses in all.
    pub status_bytes: usize,
    /// Clients that capture, in all.
    pub captures: usize,
    /// Connections in all of which the broker has bytes that TCP has yet to take.
    pub remainders: usize,
    /// Time that a client has to send its hello.
    pub hello_within: Duration,
}

/// Number of descriptors that the default limits are made for.
pub(crate) const DESCRIPTORS: usize = 262_144;

impl Limits {
    /// Returns the limits for a process that can have this many descriptors. A client costs three:
    /// for itself, for its page during the hello, and for a netlink socket in its namespace.
    /// Doorbells and links cost one each, and remainders two. Three thirty-seconds are reserved for
    /// descriptors that are being closed.
    pub(crate) fn within(self, descriptors: usize) -> Limits {
        Limits {
            clients: self.clients.min(descriptors / 12),
            doorbells: self.doorbells.min(descriptors / 2),
            links: self.links.min(descriptors / 8),
            remainders: self.remainders.min(descriptors / 64),
            ..self
        }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            clients: 4096,
            offers: 65_536,
            all_offers: 131_072,
            queue: 65_536,
            all_queued: 1_048_576,
            links: 16_384,
            doorbells: 131_072,
            status_rows: 65_536,
            status_bytes: 192 << 20,
            captures: 32,
            remainders: 1024,
            hello_within: Duration::from_secs(10),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_is_taken_on_has_its_descriptors() {
        let usual = Limits::default();
        for descriptors in [64, 1024, 20_000, DESCRIPTORS, 1 << 20] {
            let Limits { clients, doorbells, links, remainders, .. } = usual.within(descriptors);
            let all = 3 * clients + doorbells + links + 2 * remainders;
            assert!(all <= descriptors / 32 * 29, "{descriptors}");
            let is_whole = (clients, doorbells, links) == (usual.clients, usual.doorbells, usual.links);
            assert_eq!(is_whole, descriptors >= DESCRIPTORS, "{descriptors}");
        }
    }

    /// Adds up the memory as in docs/adr/0019.
    #[test]
    fn limits_fit_into_the_memory_of_the_unit() {
        const KIB: usize = 1024;
        let limits = Limits::default();
        let clients = limits.clients * (64 + 4 + 8) * KIB;
        let queued = limits.all_queued * 112;
        let links = limits.links * (36 + 4) * KIB;
        let ends = limits.links * 128 * 220;
        let offers = limits.all_offers * 9 * KIB / 10;
        let statuses = limits.status_bytes + (50 << 20);
        let others = 50 << 20;
        let unit = include_str!("../../../../packaging/systemd/system/shunt.service");
        let given = unit.lines().find_map(|line| line.strip_prefix("MemoryMax=")?.strip_suffix('G'));
        let given: usize = given.expect("the unit has a limit in GiB").parse().expect("it is a number");
        assert!(clients + queued + links + ends + offers + statuses + others < given << 30);
    }
}
