//! The sides of a comparison: ways for the bytes to go.

use clap::ValueEnum;
use serde::Serialize;

use crate::stage::Role;

/// One way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Side {
    /// Loopback TCP as it comes, with Nagle's algorithm.
    Tcp,
    /// The same with TCP_NODELAY.
    TcpNodelay,
    /// That once more in each round: what two turns of the same differ by.
    TcpAgain,
    /// TCP_NODELAY where the kernel itself takes the bytes from one socket's queue to the other's: sockmap redirect.
    Sockmap,
    /// A Unix stream socket.
    Unix,
    /// Both programs under shunt, which never spins.
    ShuntSleep,
    /// Both programs under shunt, as `shunt run` does it.
    Shunt,
    /// The same with spins of 20 us, whether they pay or not.
    ShuntFixed,
    /// Only the server under shunt: nothing can be gained.
    ServerOnly,
    /// Only the client under shunt.
    ClientOnly,
}

impl Side {
    /// What the local path is compared with, in the order of the columns.
    pub(crate) const ROADS: &[Side] =
        &[Side::Tcp, Side::TcpNodelay, Side::Sockmap, Side::Unix, Side::ShuntSleep, Side::Shunt];
    /// For streams: sockmap redirect holds no sender back, and is not measured filling the kernel's memory.
    pub(crate) const BACKPRESSURE: &[Side] =
        &[Side::Tcp, Side::TcpNodelay, Side::Unix, Side::ShuntSleep, Side::Shunt];
    /// For programs that choose TCP_NODELAY by themselves.
    pub(crate) const PROGRAM: &[Side] = &[Side::Tcp, Side::Unix, Side::ShuntSleep, Side::Shunt];
    /// The ways to wait, where others want the processors.
    pub(crate) const SPINS: &[Side] =
        &[Side::Tcp, Side::Unix, Side::ShuntSleep, Side::Shunt, Side::ShuntFixed];
    /// Where shunt cannot help because one side is not under it.
    pub(crate) const ONE_SIDED: &[Side] =
        &[Side::TcpNodelay, Side::ServerOnly, Side::TcpAgain, Side::ClientOnly];
    /// What shunt does to what it has nothing to do with.
    pub(crate) const WITH_AND_WITHOUT: &[Side] = &[Side::TcpNodelay, Side::Shunt];

    /// The title of its column.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Side::Tcp => "TCP",
            Side::TcpNodelay => "TCP nodelay",
            Side::TcpAgain => "TCP again",
            Side::Sockmap => "sockmap",
            Side::Unix => "Unix",
            Side::ShuntSleep => "shunt, no spin",
            Side::Shunt => "shunt",
            Side::ShuntFixed => "shunt, 20 us",
            Side::ServerOnly => "server only",
            Side::ClientOnly => "client only",
        }
    }

    /// What `shunt run --spin` is given; nothing for a program that runs without shunt.
    pub(crate) fn spin(self, role: Role) -> Option<&'static str> {
        match (self, role) {
            (Side::Shunt, _) | (Side::ServerOnly, Role::Server) | (Side::ClientOnly, Role::Client) => {
                Some("auto")
            }
            (Side::ShuntSleep, _) => Some("off"),
            (Side::ShuntFixed, _) => Some("20"),
            _ => None,
        }
    }

    /// Whether our own loads set TCP_NODELAY. Under shunt they are those of the TCP_NODELAY side.
    pub(crate) fn nodelay(self) -> bool {
        !matches!(self, Side::Tcp | Side::Unix)
    }

    /// Whether both directions are expected on shared memory.
    pub(crate) fn is_short_road(self) -> bool {
        matches!(self, Side::Shunt | Side::ShuntSleep | Side::ShuntFixed)
    }
}
