//! `shunt-bench`: compares the transports, their gains and their costs, within one run.
//!
//! `shunt bench` and `shunt report` execute this program with their own arguments (ADR 37). It
//! starts `shunt` for everything that is measured under it, and starts itself for the synthetic
//! loads.

#![cfg_attr(not(feature = "iceoryx2"), forbid(unsafe_code))]
#![deny(unsafe_code)]

mod bridge;
mod comparison;
mod coverage;
mod find;
mod interrupt;
mod ipc;
mod latency;
mod local;
mod machine;
mod namespace;
mod nginx;
mod output;
mod overlay;
mod process;
mod progress;
mod proof;
mod relay;
mod report;
mod serve;
mod stacks;
mod stage;
mod stats;
mod user;
mod worker;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use shunt_bench_args::{Bench, side};
// Provides the versions of glibc's functions that this program links to.
use shunt_glibc as _;

use comparison::Comparison;
use worker::Worker;

/// Compares the transports of shunt; `shunt bench` and `shunt report` start it
#[derive(Debug, Parser)]
#[command(name = "shunt-bench", bin_name = "shunt", version, arg_required_else_help = true)]
struct Cli {
    /// The shunt that is measured [default: the one beside this program, else the one in PATH]
    #[arg(long, value_name = "FILE", hide = true)]
    shunt: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Compare the transports side by side, with what each gives and costs
    #[command(subcommand)]
    Bench(Bench),
    /// Write a page about what shunt gains here: for a server and a load of yours, or for programs that many use
    Report(shunt_bench_args::report::Arguments),
    /// The loads of the comparisons
    #[command(subcommand, hide = true)]
    BenchWorker(Worker),
}

fn main() -> ExitCode {
    let cli = Cli::from_arg_matches(&command().get_matches()).unwrap_or_else(|error| error.exit());
    // With the default SIGPIPE, `shunt bench local | head` ends like any other filter.
    sigpipe::reset();
    let done = match cli.command {
        Command::BenchWorker(worker) => worker::run(&worker),
        Command::Bench(bench) => find::set_shunt(cli.shunt).and_then(|()| compare(&bench)),
        Command::Report(arguments) => find::set_shunt(cli.shunt).and_then(|()| proof::run(&arguments)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "shunt: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the command line. Regular expressions are checked here, because `shunt`, which parses
/// it too, does not link to an engine for them.
fn command() -> clap::Command {
    Cli::command().mut_subcommand("report", |report| {
        let report = report.mut_arg("metric", |metric| metric.value_parser(proof::check_metric));
        report.mut_arg("only", |only| only.value_parser(proof::check_only))
    })
}

fn compare(bench: &Bench) -> anyhow::Result<()> {
    match bench {
        Bench::Local(arguments) => arguments.run(local::compare),
        Bench::Relay(arguments) => arguments.run(relay::compare),
        Bench::Serve(arguments) => arguments.run(serve::compare),
        Bench::Overlay(arguments) => arguments.run(overlay::compare),
        Bench::Ipc(arguments) => arguments.run(ipc::compare),
        Bench::Stacks(arguments) => stacks::run(arguments),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    /// The crate of the arguments depends neither on the channel nor on the table of stacks.
    #[test]
    fn limits_and_names_are_those_of_what_is_measured() {
        use shunt_bench_args::{ipc as limits, stacks as names};
        assert_eq!(limits::MAX_MESSAGE, shunt_channel::MAX_MESSAGE);
        assert_eq!(limits::MAX_DESCRIPTORS, shunt_channel::MAX_DESCRIPTORS);
        assert_eq!(stacks::names(), names::NAMES);
    }
}
