//! `shunt bench overlay`

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::{Output, parse_seconds};

/// `shunt bench overlay`
#[derive(Debug, Args)]
#[command(mut_arg("repeats", |repeats| repeats.default_value("7")))]
pub struct Arguments {
    /// See `Output`.
    #[command(flatten)]
    pub output: Output,

    /// Write the plots to this directory, as throughput.svg, cpu.svg, round-trip.svg and policy.svg
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,

    /// How long one turn is measured
    #[arg(long, value_name = "SECS", default_value_t = 1.0, value_parser = parse_seconds)]
    pub seconds: f64,

    /// What a round trip between the hosts takes: with much, set-up is counted in round trips, however busy this machine is
    #[arg(long, value_name = "MS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..1000))]
    pub rtt: u64,

    /// Only these measurements [default: all]
    #[arg(value_enum, value_name = "WHAT")]
    pub only: Vec<Group>,
}

/// What can be asked for by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// One connection, as much as goes through, by size of message
    Throughput,
    /// One message there and back, by size
    RoundTrip,
    /// Connections, one after the other, each until its first byte is answered
    SetUp,
    /// Connections that are over soon, one after the other, by how often bytes go there and back
    Short,
    /// memcached under our own load
    Memcached,
    /// nginx with wrk
    Nginx,
    /// Two connections over time, while the policy for one of them changes
    Policy,
    /// A container that stops, and starts with its address on another host
    Migration,
    /// What a policy with 5, 500 and 5,000 rules costs the router
    Rules,
}

impl Arguments {
    /// Returns the length of a turn.
    pub fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// Returns true if this is measured.
    pub fn wants(&self, group: Group) -> bool {
        self.only.is_empty() || self.only.contains(&group)
    }
}
