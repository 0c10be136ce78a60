//! The registry of subcommands and flags. The parser, the help, the manual pages and the
//! completions are all generated from it.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Parser, Subcommand};
use shunt_bench_args::Bench;

mod observe;
mod overlay;
mod relay;
mod run;
mod serve;
mod system;

pub(crate) use observe::{BugreportArgs, CaptureArgs, DoctorArgs, ExplainArgs, StatusArgs, TopArgs};
pub(crate) use overlay::{Overlay, OverlayPolicy, OverlayRunArgs};
pub(crate) use relay::{RelayAction, RelayArgs};
pub(crate) use run::{
    AttachArgs, DaemonArgs, DetachArgs, InterceptArgs, Offer, OwnCalls, RunArgs, Transport, WaitsFor,
    parse_idle_exit, parse_ring_bytes, parse_ring_memory, parse_spin,
};
pub(crate) use serve::{ServeAction, ServeArgs, ServeEngine, ServeHash};
pub(crate) use system::{Config, DaemonJson, Runtime, Service, ServiceDisable, ServiceEnable, ServicePlace};

/// Takes TCP connections off the general path: unmodified programs, the same addresses, shared
/// memory beneath
#[derive(Debug, Parser)]
#[command(name = "shunt", version, arg_required_else_help = true, max_term_width = 100)]
#[command(after_help = "Start with: shunt run -- PROGRAM, once for the server and once for the client.\n\
    `shunt status` shows which transport each connection takes, `shunt explain` why, and `shunt doctor` what this \
    machine supports.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a program under shunt
    Run(RunArgs),
    /// Enter a program that runs already: its new connections may use shared memory
    Attach(AttachArgs),
    /// End shunt's work in a running program: its connections go on by TCP
    Detach(DetachArgs),
    /// Run the broker, in the foreground by default
    Daemon(DaemonArgs),
    /// Show live connections: their programs, their transports, and why some are on TCP
    Status(StatusArgs),
    /// Show live what programs move, and by which transport
    Top(TopArgs),
    /// Write down what goes by shared memory as packets, for Wireshark and tshark
    Capture(CaptureArgs),
    /// Say why a process, a connection or a program is or is not on shared memory, and what to do
    /// about it
    Explain(ExplainArgs),
    /// Say what this machine supports, what it lacks and what to do about it
    Doctor(DoctorArgs),
    /// Write one file with what others need to look into a problem
    Bugreport(BugreportArgs),
    /// Show what is configured and where that stands, or check a file
    #[command(subcommand)]
    Config(Config),
    /// Run a relay between two sites, or talk to one that runs
    Relay(RelayArgs),
    /// Run a service in the kernel or in user space, or make one, or talk to one that runs
    Serve(ServeArgs),
    /// Connect containers of two hosts over the host network, under their overlay addresses
    #[command(subcommand)]
    Overlay(Overlay),
    /// Have Docker start containers under shunt: docker run --runtime=shunt
    #[command(subcommand)]
    Runtime(Runtime),
    /// Have a service of systemd run under shunt, or no longer
    #[command(subcommand)]
    Service(Service),
    /// Compare the transports side by side, with what each gives and costs
    #[command(subcommand)]
    Bench(Bench),
    /// Write a page about what shunt gains here: for a server and a load of yours, or for programs
    /// that many use
    Report(shunt_bench_args::report::Arguments),
    /// Put libshunt.so into a program without a dynamic linker: for `shunt run`, and for
    /// libshunt.so
    #[command(hide = true)]
    Intercept(InterceptArgs),
    /// Write the manual pages to a directory
    Man {
        /// Where to write them; it is created if it does not exist
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
    /// Print the completions of a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

/// The filter of the log, as in `info` or `shunt_broker=debug`.
pub(crate) const LOG: &str = "SHUNT_LOG";

/// Where the broker's log goes.
pub(crate) const LOG_FILE: &str = "SHUNT_LOG_FILE";

pub(crate) fn parse_metrics(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "expected an address with a port, as 127.0.0.1:9441".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_registry_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_follows_the_command_is_the_commands() {
        let cli = Cli::try_parse_from(["shunt", "run", "--spin", "off", "ls", "-l", "--", "--json"]).unwrap();
        let Command::Run(run) = cli.command else { panic!("not a run") };
        assert_eq!(run.command, ["ls", "-l", "--", "--json"]);
        assert_eq!(run.spin.as_deref(), Some("off"));
    }

    #[test]
    fn spin_is_a_word_or_microseconds() {
        for good in ["auto", "off", "0", "50", "1000000"] {
            assert!(parse_spin(good).is_ok(), "{good}");
        }
        for bad in ["", "on", "-1", "1.5", "10us", "1000001"] {
            assert!(parse_spin(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ring_memory_is_a_word_or_mebibytes() {
        for good in ["auto", "0", "64", "1048576"] {
            assert!(parse_ring_memory(good).is_ok(), "{good}");
        }
        for bad in ["", "off", "-1", "64M", "1.5", "1048577"] {
            assert!(parse_ring_memory(bad).is_err(), "{bad}");
        }
    }

    /// Every command of `shunt` in a code block of a document has arguments that exist.
    #[test]
    fn the_commands_of_the_documents_are_understood() {
        let documents = shunt_documents::files()
            .into_iter()
            .filter(|path| path.extension().is_some_and(|it| it == "md") && !path.ends_with("CHANGELOG.md"));
        let mut failures = Vec::new();
        let mut understood = 0;
        for document in documents {
            for found in shunt_documents::shell::commands(&shunt_documents::read(&document)) {
                if found.words[0] != "shunt" && !found.words[0].ends_with("/bin/shunt") {
                    continue;
                }
                match Cli::try_parse_from(&found.words) {
                    Ok(_) => understood += 1,
                    Err(error) => {
                        failures.push(format!("{}:{}: {error}", document.display(), found.line));
                    }
                }
            }
        }
        assert!(failures.is_empty(), "{} commands:\n{}", failures.len(), failures.join("\n"));
        assert!(understood > 80, "only {understood} commands were found");
    }

    #[test]
    fn rings_are_powers_of_two() {
        assert_eq!(parse_ring_bytes("65536"), Ok(65536));
        for bad in ["", "0", "4095", "65537", "33554432", "64k"] {
            assert!(parse_ring_bytes(bad).is_err(), "{bad}");
        }
    }
}
