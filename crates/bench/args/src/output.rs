//! Flags that all comparisons share.

use std::path::PathBuf;

use clap::Args;

/// How often, and in which form the results are printed.
#[derive(Debug, Args)]
pub struct Output {
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,

    /// Write a page with plots as well
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,

    /// How often every side has its turn
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..1000))]
    pub repeats: u32,
}

/// Parses the length of a measurement.
pub fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.01..=600.0).contains(seconds));
    seconds.ok_or_else(|| "expected seconds, from 0.01 to 600".to_owned())
}
