//! Arguments of the commands that change a system: `runtime`, `service`, `config`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// The runtime of containers under shunt (see docs/containers.md).
#[derive(Debug, Subcommand)]
pub(crate) enum Runtime {
    /// Add it to Docker's configuration; for root
    Register(DaemonJson),
    /// Take it out of there again, and change nothing else
    Unregister(DaemonJson),
    /// Show whether it is registered, and whether what it needs is on this host
    Status {
        #[command(flatten)]
        daemon_json: DaemonJson,
        /// Print the same as JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct DaemonJson {
    /// Docker's configuration
    #[arg(long = "daemon-json", value_name = "FILE", default_value = crate::runtime::DAEMON_JSON)]
    pub(crate) file: PathBuf,
}

/// Services of systemd under shunt (see docs/systemd.md).
#[derive(Debug, Subcommand)]
pub(crate) enum Service {
    /// Write a drop-in, with which the service runs under shunt from its next start on; for root
    #[command(
        after_help = "Nothing is restarted without --restart. `redis-server` stands for redis-server.service; `postgresql@` for all\n\
        instances of a template. A unit that cannot run under shunt is refused, with the reason."
    )]
    Enable(ServiceEnable),
    /// Remove the drop-in; for root
    Disable(ServiceDisable),
    /// Show whether the service is enabled, what runs under shunt, and by which transports it talks
    Status {
        /// The unit [default: all that are enabled]
        #[arg(value_name = "NAME")]
        name: Option<String>,
        /// Print the same as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        place: ServicePlace,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ServiceEnable {
    /// The unit
    #[arg(value_name = "NAME")]
    pub(crate) name: String,

    /// Restart it if it runs and is not under shunt
    #[arg(long)]
    pub(crate) restart: bool,

    /// Print the drop-in, and change nothing
    #[arg(long, conflicts_with_all = ["restart", "json"])]
    pub(crate) print: bool,

    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// The broker's socket [default: the system's]
    #[arg(long, value_name = "SOCKET")]
    pub(crate) broker: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) place: ServicePlace,
}

#[derive(Debug, Args)]
pub(crate) struct ServiceDisable {
    /// The unit
    #[arg(value_name = "NAME", required_unless_present = "all", conflicts_with = "all")]
    pub(crate) name: Option<String>,

    /// All that are enabled
    #[arg(long)]
    pub(crate) all: bool,

    /// Restart those that run under shunt
    #[arg(long)]
    pub(crate) restart: bool,

    /// Print a JSON document for each unit
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) place: ServicePlace,
}

/// Where drop-ins are.
#[derive(Debug, Args)]
pub(crate) struct ServicePlace {
    /// Only until the machine is started again
    #[arg(long)]
    runtime: bool,

    /// Another directory of units, for tests
    #[arg(long, value_name = "DIR", hide = true)]
    directory: Option<PathBuf>,
}

impl ServicePlace {
    pub(crate) fn directory(&self) -> &std::path::Path {
        let default = if self.runtime { "/run/systemd/system" } else { "/etc/systemd/system" };
        self.directory.as_deref().unwrap_or(std::path::Path::new(default))
    }
}

/// The configuration of `shunt run` and of brokers (see docs/configuration.md).
#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Show every value that holds, and where it comes from
    #[command(
        after_help = "The system's file is /etc/shunt/shunt.toml, a user's $XDG_CONFIG_HOME/shunt/shunt.toml or ~/.config/shunt/shunt.toml.\n\
        SHUNT_CONFIG names another in the place of both; if it is empty, none is read."
    )]
    Show {
        /// Only what holds for the program of this name, under `shunt run`
        #[arg(value_name = "PROGRAM")]
        program: Option<String>,
        /// Print the same as JSON
        #[arg(long)]
        json: bool,
    },
    /// Say what is wrong with a file, and where; without one, with those that are read
    #[command(after_help = "Exits with 0 if nothing is wrong, with 1 if something is.")]
    Check {
        /// The file
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
        /// Print what is wrong as JSON
        #[arg(long)]
        json: bool,
    },
}
