//! The demo: memcached and Redis under real load with 50 connections, by plain TCP, by Unix sockets and under
//! shunt, side by side. Run by `make demo`.
//!
//! All three variants of a server run all the time, idle but for their turn. In each round every variant has one
//! turn, and the order rotates. The server is pinned to one CPU and the client to another, in all three alike.

mod load;
mod measure;
mod report;

use anyhow::Result;
use clap::{Parser, Subcommand};
use measure::{Case, Transport};
use shunt_compat::{Ground, Host, Mode};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

#[derive(Parser)]
#[command(about = "memcached and Redis by TCP, by Unix sockets and under shunt, side by side")]
struct Arguments {
    /// Rounds; each variant has one turn in each.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds that a turn takes by plain TCP; the number of requests is the same for all three.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Connections of the client.
    #[arg(long, default_value_t = 50)]
    connections: usize,
    /// Print one JSON object instead of the tables.
    #[arg(long)]
    json: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Subcommand)]
enum Role {
    /// The load on memcached; the demo starts itself in this role.
    #[command(hide = true)]
    Load {
        #[arg(long)]
        tcp: Option<SocketAddr>,
        #[arg(long)]
        unix: Option<PathBuf>,
        #[arg(long)]
        requests: u64,
    },
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(Role::Load { tcp, unix, requests }) = arguments.role {
        let target = match (tcp, unix) {
            (Some(address), _) => load::Target::Tcp(address),
            (None, Some(path)) => load::Target::Unix(path),
            (None, None) => anyhow::bail!("one of --tcp and --unix is needed"),
        };
        return load::run(&target, arguments.connections, requests);
    }

    let start = Instant::now();
    let host = Host::new(Mode::Shunt, Arc::new(Ground::enter()));
    let pins = measure::pins();
    let mut cases = vec![
        Case::memcached(&host, arguments.connections, pins),
        Case::redis(&host, arguments.connections, pins),
    ];
    for case in &mut cases {
        case.choose_requests(&host, arguments.seconds)?;
    }
    for round in 0..arguments.rounds {
        for case in &mut cases {
            for turn in 0..Transport::ALL.len() {
                let transport = Transport::ALL[(round + turn) % Transport::ALL.len()];
                let run = case.run(&host, transport)?;
                eprintln!(
                    "round {}/{}  {:9}  {:11}  {:>9.0} requests/s",
                    round + 1,
                    arguments.rounds,
                    case.name,
                    transport.label(),
                    run.rate()
                );
                case.runs[transport as usize].push(run);
            }
        }
    }
    let report = report::Report::new(&cases, arguments.connections, pins, start.elapsed());
    drop(cases);
    host.finish();
    if arguments.json {
        report.print_json()
    } else {
        report.print()
    }
    Ok(())
}
