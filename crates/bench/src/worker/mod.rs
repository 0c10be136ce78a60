//! The synthetic loads: plain programs that use sockets through libc and are unaware of shunt. The
//! command runs itself as one of them, natively or under shunt.
//!
//! A server prints `ready ADDRESS` and serves until its standard input ends. A client prints
//! `begin` once it is warm, and later one JSON object. It keeps its connections until its standard
//! input ends, so that the caller can inspect them.

mod cache;
mod calls;
mod compute;
mod download;
mod echo;
mod flow;
mod forward;
mod ipc;
mod many;
mod probe;
mod reach;
mod round_trip;
mod short;
mod socket;
mod stream;
mod switch;
mod timed;

use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand, ValueEnum};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::{Deserialize, Serialize};

pub(crate) use cache::Cache;
pub(crate) use calls::Call;
pub(crate) use download::Download;
pub(crate) use flow::now;
pub(crate) use ipc::fan_out::FanOutEnd;
pub(crate) use ipc::{Ipc, IpcMeasured};
pub(crate) use probe::Copying;
use socket::Address;

/// One load.
#[derive(Debug, Subcommand)]
pub(crate) enum Worker {
    /// Sends back what it receives, message by message
    Echo {
        /// See `Server`.
        #[command(flatten)]
        server: Server,
        /// How it waits
        #[arg(long, value_enum, default_value_t = Style::Epoll)]
        style: Style,
    },
    /// Reads everything, and says how much at the end
    Sink {
        /// See `Server`.
        #[command(flatten)]
        server: Server,
    },
    /// One message there and back at a time
    RoundTrip {
        /// See `Client`.
        #[command(flatten)]
        client: Client,
        /// How it waits
        #[arg(long, value_enum, default_value_t = Style::Blocking)]
        style: Style,
        /// As many threads at once, a connection each
        #[arg(long, default_value_t = 1)]
        threads: usize,
    },
    /// Messages in one direction, as fast as they go
    Stream {
        /// See `Client`.
        #[command(flatten)]
        client: Client,
    },
    /// Passes on what it receives, both ways
    Forward(forward::Forward),
    /// Sends as fast as it goes, and says from time to time how much that was
    Flow {
        /// Where the server is
        #[arg(long)]
        to: SocketAddr,
        /// In how many seconds it says so once
        #[arg(long)]
        every: f64,
    },
    /// Connects until it is answered, once for each line that it reads
    Reach {
        /// Where the server is
        #[arg(long)]
        to: SocketAddr,
    },
    /// Many connections in one epoll set, each with requests under way
    Many {
        /// See `Client`.
        #[command(flatten)]
        client: Client,
        /// How many
        #[arg(long)]
        connections: usize,
        /// Requests under way on each
        #[arg(long, default_value_t = 1)]
        depth: usize,
    },
    /// Connections that end after a few requests
    Short {
        /// See `Client`.
        #[command(flatten)]
        client: Client,
        /// Requests on each
        #[arg(long, default_value_t = 1)]
        exchanges: usize,
    },
    /// Requests to a cache over many connections
    Cache {
        /// See `Client`.
        #[command(flatten)]
        client: Client,
        /// Which
        #[arg(long, value_enum)]
        kind: Cache,
        /// How many connections
        #[arg(long)]
        connections: usize,
    },
    /// Sends as many bytes as each request asks for
    Serve {
        /// Where to listen
        #[arg(long)]
        at: SocketAddr,
    },
    /// Downloads, each over a connection of its own, all at once
    Fetch {
        /// Where the server is
        #[arg(long)]
        from: SocketAddr,
        /// Bytes of each
        #[arg(long)]
        size: u64,
        /// How many
        #[arg(long, default_value_t = 1)]
        connections: usize,
    },
    /// Connections that have been used and are kept
    Hold {
        /// Where the server is
        #[arg(long)]
        from: SocketAddr,
        /// How many
        #[arg(long)]
        connections: usize,
    },
    /// Sends so many messages by one way
    IpcSend(Ipc),
    /// Receives them
    IpcReceive(Ipc),
    /// Sends every message to several receivers
    FanOutSend(FanOutEnd),
    /// Is one of these receivers
    FanOutReceive(FanOutEnd),
    /// Begins sessions of five messages, each of which is sent when the one before has come
    IpcAsk(Ipc),
    /// The other end of those
    IpcAnswer(Ipc),
    /// Threads that do nothing but compute
    Compute {
        /// How many
        #[arg(long)]
        threads: usize,
    },
    /// Two threads that copy through one ring
    Probe(probe::Probe),
    /// Another program, which is timed; its output is discarded
    Timed {
        /// The program and its arguments
        #[arg(required = true, trailing_var_arg = true)]
        command: Vec<std::ffi::OsString>,
    },
    /// System calls that have nothing to do with connections
    Calls {
        /// Which
        #[arg(value_enum)]
        call: Call,
        /// How long to measure
        #[arg(long, default_value_t = 0.5)]
        seconds: f64,
    },
}

/// What every server needs to know.
#[derive(Debug, Args)]
pub(crate) struct Server {
    /// Where to listen: an address with port 0, or the path of a Unix socket
    #[arg(long)]
    at: Address,
    /// Bytes of a message
    #[arg(long)]
    size: usize,
    /// Sets TCP_NODELAY
    #[arg(long)]
    nodelay: bool,
}

/// What every client needs to know.
#[derive(Debug, Args)]
pub(crate) struct Client {
    /// Where the server is
    #[arg(long)]
    to: Address,
    /// Bytes of a message
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Sets TCP_NODELAY
    #[arg(long)]
    nodelay: bool,
    /// How long to measure
    #[arg(long)]
    seconds: f64,
    /// How long to run before that
    #[arg(long, default_value_t = 0.2)]
    warm: f64,
    /// Measure so many operations instead, from when a line is read
    #[arg(long)]
    operations: Option<u64>,
}

/// How a thread waits for a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Style {
    /// In the call itself, a thread for each connection
    Blocking,
    /// In epoll_wait, one thread for all
    Epoll,
}

/// Returns a value's name on the command line.
pub(crate) fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().expect("none is hidden").get_name().to_owned()
}

/// The results of a client.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// The number of messages, requests or calls.
    pub(crate) operations: u64,
    /// Their duration in seconds.
    pub(crate) seconds: f64,
    /// Median latency in microseconds; 0 if it cannot be measured.
    pub(crate) p50_us: f64,
    /// The 99th percentile of the latency.
    pub(crate) p99_us: f64,
}

impl Measured {
    /// Returns the operations per second.
    pub(crate) fn rate(&self) -> f64 {
        self.operations as f64 / self.seconds
    }

    /// Returns the microseconds of an operation, if all of them took this time.
    pub(crate) fn each(&self, all: Duration) -> f64 {
        all.as_secs_f64() * 1e6 / self.operations.max(1) as f64
    }
}

/// A report of a connection that only sends.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Flowed {
    /// The bytes sent so far, at this time of the shared monotonic clock.
    Sent { at: f64, bytes: u64 },
    /// The connection ended with this error.
    Ended(String),
}

/// Runs a load, which ends with the program that has started it.
pub(crate) fn run(worker: &Worker) -> Result<()> {
    // Also if that is killed. Its standard input does not show it: the caller may close that early.
    set_parent_process_death_signal(Some(Signal::KILL)).context("watching the parent")?;
    match worker {
        Worker::Echo { server, style: Style::Blocking } => echo::blocking(server),
        Worker::Echo { server, style: Style::Epoll } => echo::epoll(server),
        Worker::Sink { server } => stream::sink(server),
        Worker::RoundTrip { client, style: Style::Blocking, threads } => {
            round_trip::blocking(client, *threads)
        }
        Worker::RoundTrip { client, style: Style::Epoll, .. } => many::run(client, 1, 1),
        Worker::Stream { client } => stream::source(client),
        Worker::Forward(forward) => forward::run(forward),
        Worker::Flow { to, every } => flow::run(*to, Duration::from_secs_f64(*every)),
        Worker::Reach { to } => reach::run(*to),
        Worker::Many { client, connections, depth } => many::run(client, *connections, *depth),
        Worker::Short { client, exchanges } => short::run(client, *exchanges),
        Worker::Cache { client, kind, connections } => cache::run(client, *kind, *connections),
        Worker::Serve { at } => download::serve(*at),
        Worker::Fetch { from, size, connections } => download::fetch(*from, *size, *connections),
        Worker::Hold { from, connections } => download::hold(*from, *connections),
        Worker::IpcSend(ipc) => ipc::send(ipc),
        Worker::IpcReceive(ipc) => ipc::receive(ipc),
        Worker::FanOutSend(end) => ipc::fan_out::send(end),
        Worker::FanOutReceive(end) => ipc::fan_out::receive(end),
        Worker::IpcAsk(ipc) => ipc::session(ipc, true),
        Worker::IpcAnswer(ipc) => ipc::session(ipc, false),
        Worker::Probe(probe) => probe::run(probe),
        Worker::Timed { command } => timed::run(command),
        Worker::Compute { threads } => compute::run(*threads),
        Worker::Calls { call, seconds } => calls::run(*call, Duration::from_secs_f64(*seconds)),
    }
}

/// The line that ends a client's warm-up.
pub(crate) const BEGIN: &str = "begin";
/// The word before a server's address.
pub(crate) const READY: &str = "ready";

/// The time-out of an answer, in milliseconds.
const PATIENCE_MS: u16 = 20_000;

/// Pins this thread, and everything it starts, to a processor.
fn stay_on(processor: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(processor);
    sched_setaffinity(None, &set).context("choosing a processor")
}

fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// Waits for the end of standard input.
fn wait_for_end() {
    let mut line = String::new();
    while std::io::stdin().lock().read_line(&mut line).is_ok_and(|count| count > 0) {
        line.clear();
    }
}

/// Waits for a line, which the caller writes after it has read the clocks.
fn wait_for_word() -> Result<()> {
    let count = std::io::stdin().lock().read_line(&mut String::new())?;
    ensure!(count > 0, "nobody is there any more who measures");
    Ok(())
}

fn finish(measured: &Measured) -> Result<()> {
    say(&serde_json::to_string(measured)?)?;
    wait_for_end();
    Ok(())
}

/// The warm-up and the measurement of a client.
#[derive(Debug)]
struct Clock {
    begin: Instant,
    end: Instant,
    /// If set, measures this many operations instead of a duration.
    operations: Option<u64>,
    begun: bool,
}

/// The phase of an operation that has just ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Warm,
    Measured,
    Over,
}

impl Clock {
    fn start(client: &Client) -> Clock {
        let begin = Instant::now() + Duration::from_secs_f64(client.warm);
        let end = begin + Duration::from_secs_f64(client.seconds);
        Clock { begin, end, operations: client.operations, begun: false }
    }

    /// Returns the phase at `now`, after `operations` measured ones. Prints `begin` once.
    fn phase(&mut self, now: Instant, operations: u64) -> Result<Phase> {
        if !self.begun {
            if now < self.begin {
                return Ok(Phase::Warm);
            }
            self.begun = true;
            say(BEGIN)?;
            if self.operations.is_some() {
                wait_for_word()?;
            }
            // Exclude the time that printing took.
            let late = self.begin.elapsed();
            self.begin += late;
            self.end += late;
        }
        let is_over = self.operations.map_or(now >= self.end, |all| operations >= all);
        Ok(if is_over { Phase::Over } else { Phase::Measured })
    }

    fn seconds(&self, now: Instant) -> f64 {
        (now - self.begin).as_secs_f64()
    }
}
