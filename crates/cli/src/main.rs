//! The command `shunt`. Parses the command line and calls the module of the subcommand.
//!
//! Errors end here as one line on standard error and exit code 1. If the program is called
//! `shunt-runtime`, it acts as an OCI runtime instead.

#![forbid(unsafe_code)]

mod args;
mod attach;
mod bench;
mod broker;
mod bugreport;
mod capture;
mod config;
mod daemon;
mod doctor;
mod elf;
mod exec;
mod explain;
mod filter;
mod generate;
mod intercept;
mod library;
mod obstacle;
mod overlay;
mod relay;
mod run;
mod runtime;
mod sanitizer;
mod screen;
mod serve;
mod service;
mod status;
mod table;
mod top;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
// Provides the versions of glibc's functions that this program links to.
use shunt_glibc as _;

use args::{Cli, Command, DoctorArgs};

fn main() -> ExitCode {
    if runtime::stand_in::is_asked_for() {
        return runtime::stand_in::run();
    }
    let command = Cli::parse().command;
    if !matches!(
        command,
        Command::Daemon(_)
            | Command::Doctor(DoctorArgs { live: true, .. })
            | Command::Run(_)
            | Command::Relay(_)
            | Command::Serve(_)
            | Command::Overlay(_)
    ) {
        // With the default SIGPIPE, `shunt status | head` ends like any other filter. Brokers,
        // relays and services ignore it, because they outlive their clients. So does what removes
        // the programs that it has started.
        sigpipe::reset();
    }
    let done = match command {
        Command::Run(args) => return run::run(&args),
        Command::Intercept(args) => return intercept::run(&args),
        Command::Attach(args) => attach::attach(&args),
        Command::Detach(args) => attach::detach(&args),
        Command::Daemon(args) => daemon::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Capture(args) => capture::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Doctor(args) => match doctor::run(&args) {
            Ok(true) => Ok(()),
            Ok(false) => return ExitCode::FAILURE,
            Err(error) => Err(error),
        },
        Command::Bugreport(args) => bugreport::run(&args),
        Command::Config(command) => config::run(&command),
        Command::Relay(args) => relay::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Overlay(part) => match overlay::run(&part) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Runtime(part) => runtime::run(&part),
        Command::Service(part) => service::run(&part),
        Command::Bench(_) | Command::Report(_) => return bench::run(),
        Command::Man { directory } => generate::man(&directory),
        Command::Completions { shell } => generate::completions(shell),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "shunt: {error:#}");
            ExitCode::FAILURE
        }
    }
}
