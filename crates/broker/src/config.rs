//! What a broker is told when it starts.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use shunt_abi::geometry::DEFAULT_RING_BYTES;

/// Whom the broker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Its own user: the socket is 0600, and a directory made for it 0700.
    User,
    /// Every user of the host: the socket is 0666, and a directory made for it 0755.
    System,
}

/// How a broker is to run.
#[derive(Debug)]
pub struct Config {
    /// Where the control socket is, or is to be made.
    pub socket: PathBuf,
    /// Stop after this long without a single client.
    pub idle_exit: Option<Duration>,
    /// Bytes of one ring; a power of two: see [`shunt_abi::geometry::Geometry`].
    pub ring_bytes: usize,
    /// Whom it serves.
    pub mode: Mode,
    /// A listening SOCK_SEQPACKET socket from socket activation. The broker then neither makes nor removes
    /// the file at `socket`.
    pub listener: Option<OwnedFd>,
    /// How much it takes on.
    pub limits: Limits,
}

impl Config {
    /// A broker at `socket` with everything else as usual.
    pub fn new(socket: impl Into<PathBuf>, mode: Mode) -> Config {
        Config {
            socket: socket.into(),
            idle_exit: None,
            ring_bytes: DEFAULT_RING_BYTES,
            mode,
            listener: None,
            limits: Limits::default(),
        }
    }
}

/// Bounds on what clients can make the broker hold (L5). Beyond them: refused, counted, and TCP.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connected clients; one user may have half of them, unless it is root or the broker's own.
    pub clients: usize,
    /// Open offers of one process.
    pub offers: usize,
    /// Messages queued for a process that does not read; one more and it is dropped.
    pub queue: usize,
    /// Links in all.
    pub links: usize,
    /// How long a client may stay without a hello.
    pub hello_within: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            clients: 4096,
            offers: 65_536,
            queue: 65_536,
            links: 16_384,
            hello_within: Duration::from_secs(10),
        }
    }
}
