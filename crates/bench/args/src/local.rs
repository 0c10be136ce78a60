//! `shunt bench local`

use clap::{Args, ValueEnum};

use crate::side::Side;
use crate::{Output, parse_seconds};

/// `shunt bench local`
#[derive(Debug, Args)]
#[command(mut_arg("repeats", |repeats| repeats
    .help("How often every side has its turn; if nothing else is said, 31 times where one-sided is named, and 10 times where bulk is")
    .default_value_ifs([("only", "one-sided", "31"), ("only", "bulk", "10")])))]
pub struct Arguments {
    /// See `Output`.
    #[command(flatten)]
    pub output: Output,

    /// How long one turn is measured
    #[arg(long, value_name = "SECS", default_value_t = 0.5, value_parser = parse_seconds)]
    pub seconds: f64,

    /// Only these sides [default: all]
    #[arg(long, value_enum, value_name = "SIDE,...", value_delimiter = ',')]
    pub sides: Vec<Side>,

    /// Only lines whose names have this in them; may be given again
    #[arg(long = "line", value_name = "TEXT")]
    pub lines: Vec<String>,

    /// Only these [default: all]
    #[arg(value_enum, value_name = "WHAT")]
    pub only: Vec<Group>,
}

/// What can be asked for by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Group {
    /// One message there and back, by size
    RoundTrip,
    /// One message there and back between two containers of Docker, by size
    Containers,
    /// Messages in one direction, by size
    Stream,
    /// Bulk data by size, on two processors, unpinned and on one; next to what two threads move through a ring
    Bulk,
    /// Bulk data of whole programs: iperf3, nginx, curl, Samba, Redis, rsync, PostgreSQL
    BulkPrograms,
    /// Many connections to one server, by number
    Connections,
    /// memcached under our own load
    Memcached,
    /// Redis with redis-benchmark
    Redis,
    /// nginx with wrk
    Nginx,
    /// PostgreSQL with pgbench
    Postgres,
    /// The same by the size of its database
    PostgresScales,
    /// Java, Node.js and Python
    Runtimes,
    /// Go without cgo and with it: plain messages, and net/http with its own client and with wrk
    Go,
    /// One server in C with glibc and with musl, dynamic and static
    Musl,
    /// What shunt costs where it cannot help
    Cost,
    /// What shunt costs where only one side is under it: is it less than a percent? memcached, Redis and our own loads
    OneSided,
    /// More threads than processors
    Crowd,
    /// Ways to spin and to sleep where others want the processors: beside threads that compute, with half a processor, on one
    Busy,
    /// What a relay with a thread for each connection pays, and its buffers; shunt has no part in it
    Relaying,
}

impl Arguments {
    /// Returns true if this side is measured.
    pub fn wants(&self, side: Side) -> bool {
        self.sides.is_empty() || self.sides.contains(&side)
    }
}
