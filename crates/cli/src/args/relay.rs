//! Arguments of `shunt relay`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    override_usage = "shunt relay --config FILE\n       shunt relay <COMMAND>",
    after_help = "It runs in the foreground. SIGHUP reads the file again; SIGTERM ends it with all its connections, `drain` without."
)]
pub(crate) struct RelayArgs {
    /// Its listeners, trusted peers and routes (see docs/relay.md)
    #[arg(long, value_name = "FILE", required = true)]
    pub(crate) config: Option<PathBuf>,

    #[command(subcommand)]
    pub(crate) action: Option<RelayAction>,
}

/// Commands to a running relay, and those that prepare one.
#[derive(Debug, Subcommand)]
pub(crate) enum RelayAction {
    /// Show its connections, its pools and what it has counted
    Status {
        #[command(flatten)]
        control: RelayControl,
        /// Print everything it says as JSON
        #[arg(long)]
        json: bool,
    },
    /// Change values of its configuration until it reads its file again, as in
    /// peer.mumbai.pool.low=32
    Set {
        #[command(flatten)]
        control: RelayControl,
        /// Which value is what from now on; parts of a list are named by their `name` or counted
        /// from 0
        #[arg(value_name = "NAME=VALUE", required = true)]
        assignments: Vec<String>,
    },
    /// Have it read its file again; connections go on
    Reload {
        #[command(flatten)]
        control: RelayControl,
    },
    /// Have it take no more connections, and end with the last
    Drain {
        #[command(flatten)]
        control: RelayControl,
        /// End after so many seconds even if there are connections
        #[arg(long, value_name = "SECS", default_value_t = 3600)]
        timeout: u64,
    },
    /// Say whether a configuration is sound
    Check {
        /// The file
        #[arg(value_name = "FILE")]
        config: PathBuf,
    },
    /// Write a new key, which two relays then share, to a file
    NewKey {
        /// It must not exist yet
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct RelayControl {
    /// The control socket of the relay
    #[arg(long, value_name = "SOCKET", default_value = shunt_relay::DEFAULT_CONTROL)]
    pub(crate) control: PathBuf,
}
