//! `shunt bench serve`

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::Output;

/// `shunt bench serve`
#[derive(Debug, Args)]
pub struct Arguments {
    /// See `Output`.
    #[command(flatten)]
    pub output: Output,

    /// Write the plots to this directory, as echo.svg and forward.svg
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,

    /// Seconds of a turn
    #[arg(long, value_name = "SECS", default_value_t = 0.3)]
    pub seconds: f64,

    /// Bytes of messages of the echo
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', default_value = "32,1024,16384")]
    pub sizes: Vec<usize>,

    /// Bytes of payloads of the forwarder, 32 at least
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', default_value = "32,1024")]
    pub payloads: Vec<usize>,

    /// Measure next to this many programs that only compute: a busy machine has three for each
    /// processor
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub busy: usize,

    /// Only these measurements [default: all]
    #[arg(value_enum, value_name = "WHAT")]
    pub only: Vec<Group>,
}

/// What can be asked for by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Group {
    /// 8 clients, each with one message under way
    Echo,
    /// The same with 16
    EchoMany,
    /// 8 clients, 20 sinks, as much as goes through
    Forward,
    /// One client that sends a message each millisecond: how long it takes
    Sparse,
    /// 50 connections that read items of 100 bytes, from memcached, from builtin:cache, or from a floor: a
    /// program that only receives and sends
    Cache,
    /// 50 connections that fetch files of 1 KiB and 1 MiB, through builtin:http-proxy, nginx, HAProxy or a
    /// floor
    Proxy,
    /// 50 connections that fetch a file of 1 KiB: from nginx, its proxy_cache, the cache of
    /// builtin:http-proxy or a floor
    Static,
    /// The time from the start of each builtin service to its first client
    Start,
}

impl Arguments {
    /// Returns the length of a turn.
    pub fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.clamp(0.05, 600.0))
    }
}
