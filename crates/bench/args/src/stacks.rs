//! `shunt bench stacks`

use std::time::Duration;

use clap::Args;

use crate::parse_seconds;

/// The names of all stacks, in the order of the report.
pub const NAMES: [&str; 16] = [
    "web-gunicorn",
    "web-uvicorn",
    "mariadb-select",
    "mariadb-write",
    "node",
    "puma",
    "tomcat",
    "tomcat-virtual",
    "php",
    "haproxy",
    "varnish",
    "twemproxy",
    "rabbitmq",
    "celery",
    "kafka",
    "grpc",
];

/// `shunt bench stacks`
#[derive(Debug, Args)]
pub struct Arguments {
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,

    /// How often each side has its turn
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..1000))]
    pub rounds: u32,

    /// How long one turn is measured; the loads count whole seconds
    #[arg(long, value_name = "SECS", default_value_t = 2.0, value_parser = parse_seconds)]
    pub seconds: f64,

    /// Connections, or threads, of the load
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        default_value = "1,8,64",
        value_parser = clap::value_parser!(u32).range(1..=400)
    )]
    pub connections: Vec<u32>,

    /// Under shunt no program spins, as with `shunt run --spin off`
    #[arg(long)]
    pub no_spin: bool,

    /// Only this stack, and others that are named so [default: all]
    #[arg(long = "stack", value_name = "NAME", value_parser = NAMES)]
    pub stacks: Vec<String>,
}

impl Arguments {
    /// Returns the length of a turn.
    pub fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}
