//! The sides of a comparison: the transports and configurations that it compares.

use clap::ValueEnum;
use serde::Serialize;

/// One way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// Loopback TCP as it comes, with Nagle's algorithm.
    Tcp,
    /// The same with TCP_NODELAY.
    TcpNodelay,
    /// That once more in each round: what two turns of the same differ by.
    TcpAgain,
    /// TCP_NODELAY where the kernel itself takes the bytes from one socket's queue to the other's:
    /// sockmap redirect.
    Sockmap,
    /// A Unix stream socket.
    Unix,
    /// The same again in each round: the control of comparisons with Unix sockets.
    UnixAgain,
    /// No sockets: two threads that copy through one ring, plainly. The most that a stream can get.
    ProbePlain,
    /// The two threads of the probe, of which the writer copies past the caches.
    ProbeStreaming,
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

/// One of the two programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The server.
    Server,
    /// The client.
    Client,
}

impl Side {
    /// The transports that the shared-memory transport is compared with, in the order of the
    /// columns.
    pub const TRANSPORTS: &[Side] =
        &[Side::Tcp, Side::TcpNodelay, Side::Sockmap, Side::Unix, Side::ShuntSleep, Side::Shunt];
    /// For streams. Sockmap redirect has no backpressure, and would only fill the kernel's memory.
    pub const BACKPRESSURE: &[Side] =
        &[Side::Tcp, Side::TcpNodelay, Side::Unix, Side::ShuntSleep, Side::Shunt];
    /// For bulk data, with TCP twice as a control.
    pub const BULK: &[Side] = &[Side::TcpNodelay, Side::TcpAgain, Side::Unix, Side::ShuntSleep, Side::Shunt];
    /// The sides of bulk data, with Unix sockets twice, and the probe.
    pub const BULK_PROBED: &[Side] = &[
        Side::TcpNodelay,
        Side::TcpAgain,
        Side::Unix,
        Side::UnixAgain,
        Side::ProbePlain,
        Side::ProbeStreaming,
        Side::ShuntSleep,
        Side::Shunt,
    ];
    /// The two methods of the probe.
    pub const PROBES: &[Side] = &[Side::ProbePlain, Side::ProbeStreaming];
    /// For whole programs that move bulk data.
    pub const BULK_PROGRAM: &[Side] = &[Side::Tcp, Side::TcpAgain, Side::ShuntSleep, Side::Shunt];
    /// For programs that set TCP_NODELAY themselves.
    pub const PROGRAM: &[Side] = &[Side::Tcp, Side::Unix, Side::ShuntSleep, Side::Shunt];
    /// The ways to wait, for tests where other threads need the processors.
    pub const SPINS: &[Side] = &[Side::Tcp, Side::Unix, Side::ShuntSleep, Side::Shunt, Side::ShuntFixed];
    /// For tests where only one program runs under shunt, which cannot help then.
    pub const ONE_SIDED: &[Side] = &[Side::TcpNodelay, Side::ServerOnly, Side::TcpAgain, Side::ClientOnly];
    /// For tests of operations that shunt does not accelerate.
    pub const WITH_AND_WITHOUT: &[Side] = &[Side::TcpNodelay, Side::Shunt];

    /// Returns the title of its column.
    pub fn label(self) -> &'static str {
        match self {
            Side::Tcp => "TCP",
            Side::TcpNodelay => "TCP nodelay",
            Side::TcpAgain => "TCP again",
            Side::Sockmap => "sockmap",
            Side::Unix => "Unix",
            Side::UnixAgain => "Unix again",
            Side::ProbePlain => "probe plain",
            Side::ProbeStreaming => "probe stream",
            Side::ShuntSleep => "shunt, no spin",
            Side::Shunt => "shunt",
            Side::ShuntFixed => "shunt, 20 us",
            Side::ServerOnly => "server only",
            Side::ClientOnly => "client only",
        }
    }

    /// Returns the argument of `shunt run --spin`, or `None` if the program runs without shunt.
    pub fn spin(self, role: Role) -> Option<&'static str> {
        match (self, role) {
            (Side::Shunt, _) | (Side::ServerOnly, Role::Server) | (Side::ClientOnly, Role::Client) => {
                Some("auto")
            }
            (Side::ShuntSleep, _) => Some("off"),
            (Side::ShuntFixed, _) => Some("20"),
            _ => None,
        }
    }

    /// Returns true if the synthetic loads set TCP_NODELAY. Under shunt they do.
    pub fn nodelay(self) -> bool {
        self != Side::Tcp && !self.is_unix()
    }

    /// Returns true if connections are Unix sockets.
    pub fn is_unix(self) -> bool {
        matches!(self, Side::Unix | Side::UnixAgain)
    }

    /// Returns true if both directions should use shared memory.
    pub fn is_under_shunt(self) -> bool {
        matches!(self, Side::Shunt | Side::ShuntSleep | Side::ShuntFixed)
    }
}
