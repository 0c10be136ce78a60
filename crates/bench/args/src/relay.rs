//! `shunt bench relay`

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::Output;

/// `shunt bench relay`
#[derive(Debug, Args)]
pub struct Arguments {
    /// See `Output`.
    #[command(flatten)]
    pub output: Output,

    /// Write the plots to this directory, as first-byte.svg, total.svg and time-lines.svg
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,

    /// What is downloaded: bytes, or as many thousand (k) or million (m)
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', default_value = "10k,50k,100k,1m,10m,50m", value_parser = parse_size)]
    pub sizes: Vec<u64>,

    /// The rate of every link
    #[arg(long, value_name = "N(k|m|g)bit", default_value = "500mbit", value_parser = parse_rate)]
    pub bandwidth: u64,

    /// The share of packets that every link loses
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0, value_parser = parse_percent)]
    pub loss: f64,

    /// Only these ways [default: all]
    #[arg(long, value_enum, value_name = "WAY,...", value_delimiter = ',')]
    pub ways: Vec<Name>,

    /// Only these measurements [default: all]
    #[arg(value_enum, value_name = "WHAT")]
    pub only: Vec<Group>,
}

/// What can be asked for by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Group {
    /// Who sends what when in a download of 50 KB
    TimeLines,
    /// Time to first byte and in all, by size
    Downloads,
    /// 200 new connections at once against a single one
    Burst,
    /// Processor time by volume
    Cpu,
    /// Memory of 1,000 idle connections
    Idle,
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Name {
    /// The direct path, without relays
    Direct,
    /// Through the relays as routers
    Routed,
    /// ssh's port forwarding between the relays
    Ssh,
    /// HAProxy on both relays, with splice
    Haproxy,
    /// The same with large windows between the relays
    HaproxyWindow,
    /// shunt relay with everything switched off
    Relay,
    /// The same with early SYN
    RelayEarly,
    /// The same with warm connections as well
    RelayPool,
    /// The same with turbo start as well: all of shunt relay
    RelayTurbo,
    /// All of it, with an encrypted leg
    RelayEncrypted,
}

impl Name {
    /// Returns the label of its row.
    pub fn label(self) -> &'static str {
        match self {
            Name::Direct => "direct, end to end",
            Name::Routed => "routed, not split",
            Name::Ssh => "ssh forwarding",
            Name::Haproxy => "HAProxy, splice",
            Name::HaproxyWindow => "HAProxy, splice, large window",
            Name::Relay => "shunt relay, plain",
            Name::RelayEarly => "  + early SYN",
            Name::RelayPool => "  + warm connections",
            Name::RelayTurbo => "  + turbo start",
            Name::RelayEncrypted => "  + an encrypted leg",
        }
    }
}

impl Arguments {
    /// Returns the selected ways.
    pub fn ways(&self) -> Vec<Name> {
        let all = Name::value_variants().iter().copied();
        all.filter(|name| self.ways.is_empty() || self.ways.contains(name)).collect()
    }

    /// Returns true if this is measured.
    pub fn wants(&self, group: Group) -> bool {
        self.only.is_empty() || self.only.contains(&group)
    }
}

fn parse_size(text: &str) -> Result<u64, String> {
    let size = scaled(&text.to_ascii_lowercase()).filter(|size| (1..=1_000_000_000).contains(size));
    size.ok_or_else(|| "expected bytes, from 1 to 1000m".to_owned())
}

fn parse_rate(text: &str) -> Result<u64, String> {
    let text = text.to_ascii_lowercase();
    let rate = text.strip_suffix("bit").and_then(scaled);
    let rate = rate.filter(|rate| (100_000..=10_000_000_000).contains(rate));
    rate.ok_or_else(|| "expected a rate such as 500mbit, from 100kbit to 10gbit".to_owned())
}

fn parse_percent(text: &str) -> Result<f64, String> {
    let percent = text.parse().ok().filter(|percent| (0.0..=50.0).contains(percent));
    percent.ok_or_else(|| "expected percent, from 0 to 50".to_owned())
}

/// Parses a number that may end in k, m or g.
fn scaled(text: &str) -> Option<u64> {
    let scales = [('k', 1_000), ('m', 1_000_000), ('g', 1_000_000_000)];
    let scale = scales.into_iter().find_map(|(letter, scale)| Some((text.strip_suffix(letter)?, scale)));
    let (number, scale) = scale.unwrap_or((text, 1));
    number.parse::<u64>().ok()?.checked_mul(scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_rates_are_of_thousands() {
        assert_eq!(parse_size("10k"), Ok(10_000));
        assert_eq!(parse_size("50M"), Ok(50_000_000));
        assert_eq!(parse_size("7"), Ok(7));
        assert_eq!(parse_rate("500mbit"), Ok(500_000_000));
        for bad in ["", "0", "k", "-1", "1.5m", "2g", "99999999999999999999"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        for bad in ["500", "mbit", "1kbit", "100gbit", "500mb"] {
            assert!(parse_rate(bad).is_err(), "{bad}");
        }
        for bad in ["-1", "51", "nan", ""] {
            assert!(parse_percent(bad).is_err(), "{bad}");
        }
    }
}
