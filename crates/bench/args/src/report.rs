//! `shunt report`

use std::path::PathBuf;

use clap::Args;

use crate::parse_seconds;

/// `shunt report`
#[derive(Debug, Args)]
#[command(
    after_help = "CMD is a line for sh, run where you are. With a load that runs for a fixed time, say by --metric which of the \
    figures that it prints counts. A second group of REGEX is the unit, as in 'Transfer/sec: +([0-9.]+)([A-Za-z]+)'.\n\n\
    Exits with 0 if both sides worked, whatever shunt gains or loses; else with 1."
)]
pub struct Arguments {
    /// The server, started anew for every turn and ended by SIGTERM
    #[arg(long, value_name = "CMD", requires = "load")]
    pub program: Option<String>,

    /// What loads it; it ends by itself, and with 0
    #[arg(long, value_name = "CMD", requires = "program")]
    pub load: Option<String>,

    /// The server is ready when it listens at this port [default: when it listens at any]
    #[arg(long, value_name = "PORT", requires = "load", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,

    /// Compare with the figures of the papers that shunt comes from
    #[arg(long, conflicts_with_all = ["program", "load"])]
    pub papers: bool,

    /// Only figures of which this regular expression names the paper, the number or what they show
    #[arg(long, value_name = "REGEX", requires = "papers")]
    pub only: Option<String>,

    /// How often each side has its turn [default: 5, with --papers 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..1000))]
    pub rounds: Option<u32>,

    /// Compare the number in the brackets of this regular expression, as the load prints it last, instead of the load's time
    #[arg(long, value_name = "REGEX", requires = "load")]
    pub metric: Option<String>,

    /// The lower the number the better
    #[arg(long, requires = "metric")]
    pub lower_is_better: bool,

    /// End the load by SIGINT after so long, if it does not end by itself
    #[arg(long, value_name = "SECS", value_parser = parse_seconds, requires = "metric")]
    pub seconds: Option<f64>,

    /// How long the server may take until it listens
    #[arg(long, value_name = "SECS", default_value_t = 60.0, value_parser = parse_seconds)]
    pub wait: f64,

    /// How long the load may take
    #[arg(long, value_name = "SECS", default_value_t = 300.0, value_parser = parse_seconds)]
    pub timeout: f64,

    /// Where the page is written; what is there is replaced
    #[arg(long, value_name = "FILE", default_value = "shunt-report.html")]
    pub out: PathBuf,

    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

impl Arguments {
    /// Returns the number of rounds.
    pub fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.papers { 3 } else { 5 })
    }
}
