//! Arguments of the commands that put programs under shunt: `run`, `attach`, `detach`, `intercept`,
//! `daemon`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use shunt_abi::geometry::{Geometry, MAX_RING_BYTES, MIN_RING_BYTES};

use super::{LOG_FILE, parse_metrics};

#[derive(Debug, Args)]
#[command(
    override_usage = "shunt run [OPTIONS] [--] CMD [ARG]...",
    after_help = "CMD replaces shunt: its exit code and its signals are its own. If it cannot be entered (32-bit, \
        setuid) or no broker can be had, it still runs, on TCP, and one line on standard error \
        says so.\n\n\
        Exit codes of shunt itself: 2 wrong flags, 126 CMD cannot be executed, 127 CMD not found."
)]
pub(crate) struct RunArgs {
    /// Which transport connections may take [default: what the configuration says, else auto]
    #[arg(long, value_enum, env = shunt_abi::env::TRANSPORT)]
    pub(crate) transport: Option<Transport>,

    /// How long a thread looks for work before it sleeps: auto, off, or microseconds [default: what
    /// the configuration says, else auto]
    #[arg(long, value_name = "auto|off|USECS", value_parser = parse_spin, env = shunt_abi::env::SPIN)]
    pub(crate) spin: Option<String>,

    /// When a connection is offered to the broker, to be put on shared memory [default: what the
    /// configuration says, else used]
    #[arg(long, value_enum, env = shunt_abi::env::OFFER)]
    pub(crate) offer: Option<Offer>,

    /// What to do where the program's code may make system calls past libc, which shunt does not
    /// see [default: what the configuration says, else avoid]
    #[arg(long, value_enum, env = shunt_abi::env::OWN_CALLS)]
    pub(crate) own_calls: Option<OwnCalls>,

    /// How much memory the rings may have that a program writes: auto, or MiB. Auto is an eighth of
    /// the machine's memory, 256 MiB at the most
    /// [default: what the configuration says, else auto]
    #[arg(long, value_name = "auto|MIB", value_parser = parse_ring_memory, env = shunt_abi::env::RING_MEMORY)]
    pub(crate) ring_memory: Option<String>,

    /// Use the broker at this socket and no other [default: the user's, else the system's, else one
    /// is started]
    #[arg(long, value_name = "SOCKET", env = shunt_abi::env::BROKER)]
    pub(crate) broker: Option<PathBuf>,

    /// The program and its arguments
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true, allow_hyphen_values = false)]
    #[arg(value_hint = clap::ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "All threads of the program are stopped for some milliseconds. Its connections, also those that it has\n\
        already, may use shared memory when the program at the other end is under shunt too. Processes that it\n\
        forks later are under shunt too; programs that it executes later are not.\n\n\
        It must be a program with glibc 2.34 or later, on x86-64, without a seccomp filter. You need the right\n\
        to trace it: run this as root, or as its user."
)]
pub(crate) struct AttachArgs {
    /// Use the broker at this socket and no other [default: the user's, else the system's, else one
    /// is started]
    #[arg(long, value_name = "SOCKET", env = shunt_abi::env::BROKER)]
    pub(crate) broker: Option<PathBuf>,

    /// The process id of the program
    #[arg(value_name = "PID")]
    pub(crate) pid: u32,
}

#[derive(Debug, Args)]
#[command(
    after_help = "It does not matter whether `shunt run` or `shunt attach` has put shunt into the program. shunt cannot\n\
        enter it again: restart it for that."
)]
pub(crate) struct DetachArgs {
    /// The process id of the program
    #[arg(value_name = "PID")]
    pub(crate) pid: u32,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct InterceptArgs {
    /// Who becomes the program, and is waited for; else another process does that, and this one
    /// ends
    #[arg(long, value_enum)]
    pub(crate) beside: Option<WaitsFor>,
    /// The thread that executes the program, or starts it
    pub(crate) thread: i32,
    /// Its process
    pub(crate) process: i32,
    /// The program's file
    pub(crate) program: PathBuf,
    /// libshunt.so
    pub(crate) library: PathBuf,
}

/// What `--beside` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WaitsFor {
    /// The thread itself
    Thread,
    /// The next child that it makes
    Child,
}

/// The transports that `--transport` allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// The shortest transport there is: shared memory where both ends can use it, TCP elsewhere
    Auto,
    /// Shared memory or TCP, and no transport that a later version may add to auto
    Shm,
    /// TCP only; no broker is needed
    Tcp,
}

impl Transport {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Shm => "shm",
            Transport::Tcp => "tcp",
        }
    }
}

/// The moments that `--offer` allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Offer {
    /// After a few operations, more where connections have been short or the peer may be far away
    Used,
    /// At its first use, however short it may be: for tests, as it costs more than short
    /// connections gain
    AtOnce,
}

impl Offer {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Offer::Used => "used",
            Offer::AtOnce => "at-once",
        }
    }
}

/// What `--own-calls` allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OwnCalls {
    /// The program stays on TCP: such a call could meet what shunt keeps in a socket or an epoll
    /// instance
    Avoid,
    /// You know that its own system calls concern none of its connections, nor what it waits for
    /// them with
    Trust,
}

impl OwnCalls {
    pub(crate) fn label(self) -> &'static str {
        match self {
            OwnCalls::Avoid => "avoid",
            OwnCalls::Trust => "trust",
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct DaemonArgs {
    /// Serve every user of this host, at the system's socket, instead of this user only
    #[arg(long)]
    pub(crate) system: bool,

    /// Listen here instead of at the default place
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// Exit after this many seconds without a program [default: what the configuration says, else
    /// never]
    #[arg(long, value_name = "SECS", value_parser = parse_idle_exit)]
    pub(crate) idle_exit: Option<u64>,

    /// Bytes of one direction's ring: a power of two, from a page to 16 MiB [default: what the
    /// configuration says, else 256 KiB]
    #[arg(long, value_name = "N", value_parser = parse_ring_bytes)]
    pub(crate) ring_bytes: Option<usize>,

    /// Serve what is counted for Prometheus here, at /metrics, as on 127.0.0.1:9441 [default: what
    /// the configuration says, else nowhere]
    #[arg(long, value_name = "ADDR", value_parser = parse_metrics)]
    pub(crate) metrics: Option<SocketAddr>,

    /// Let the metrics have the latency of requests. Programs measure it while the metrics are read,
    /// which takes time of them [default: what the configuration says, else they do not]
    #[arg(long)]
    pub(crate) latency: bool,

    /// Where the overlay's router publishes its policy, beside its control socket
    #[arg(long, value_name = "PATH", default_value = shunt_broker::OVERLAY_POLICY)]
    pub(crate) overlay_policy: PathBuf,

    /// Start in the background, and return when the broker accepts programs
    #[arg(long)]
    pub(crate) detach: bool,

    /// Append the log to this file instead of writing it to standard error
    #[arg(long, value_name = "PATH", env = LOG_FILE)]
    pub(crate) log_file: Option<PathBuf>,
}

/// A thread that looks for work longer than this has stopped being useful to anyone.
const MAX_SPIN_USECS: u32 = 1_000_000;

pub(crate) fn parse_spin(text: &str) -> Result<String, String> {
    let number = || text.parse().is_ok_and(|usecs: u32| usecs <= MAX_SPIN_USECS);
    if matches!(text, "auto" | "off") || number() {
        return Ok(text.to_owned());
    }
    Err(format!("expected auto, off, or microseconds from 0 to {MAX_SPIN_USECS}"))
}

/// A budget above this is none.
const MAX_RING_MEMORY_MIB: u32 = 1 << 20;

pub(crate) fn parse_ring_memory(text: &str) -> Result<String, String> {
    let number = || text.parse().is_ok_and(|mib: u32| mib <= MAX_RING_MEMORY_MIB);
    if text == "auto" || number() {
        return Ok(text.to_owned());
    }
    Err(format!("expected auto, or MiB from 0 to {MAX_RING_MEMORY_MIB}"))
}

pub(crate) fn parse_idle_exit(text: &str) -> Result<u64, String> {
    let seconds = text.parse().ok().filter(|seconds| *seconds > 0);
    seconds.ok_or_else(|| "expected seconds, 1 at least".to_owned())
}

pub(crate) fn parse_ring_bytes(text: &str) -> Result<usize, String> {
    let bytes = text.parse().ok().filter(|bytes| Geometry::new(*bytes).is_some());
    bytes.ok_or_else(|| format!("expected a power of two from {MIN_RING_BYTES} to {MAX_RING_BYTES}"))
}
