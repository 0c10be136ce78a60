//! Arguments of `shunt overlay`.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Which router of the overlay is asked as well, where there is one.
#[derive(Debug, Args)]
pub(crate) struct OverlayControl {
    /// Ask the overlay's router at this control socket as well
    #[arg(long, value_name = "SOCKET", default_value = shunt_overlay::DEFAULT_CONTROL)]
    pub(crate) control: PathBuf,
}

/// The parts of an overlay (see docs/overlay.md).
#[derive(Debug, Subcommand)]
pub(crate) enum Overlay {
    /// Run the router of this host, in the foreground and in the host's network namespace; for root
    Router {
        /// The overlay's addresses, and which host has which of them
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// The name of this host, instead of the configuration's: all hosts can then have one file
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// This host's own address, instead of the configuration's [default port: 7450]
        #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = router)]
        address: Option<SocketAddr>,
    },
    /// Run a program in a container, of any kind, static ones included
    #[command(
        override_usage = "shunt overlay run [OPTIONS] [--] CMD [ARG]...",
        after_help = "CMD replaces shunt: its exit code and its signals are its own. A supervisor beside it is shown the calls that make \
            connections. Without a router CMD runs all the same, on the overlay, and one line on standard error says so.\n\n\
            Exit codes of shunt itself: 2 wrong flags, 126 CMD cannot be executed, 127 CMD not found."
    )]
    Run(OverlayRunArgs),
    /// Supervise a program that a router has looked at; the router runs this
    #[command(hide = true)]
    Supervisor {
        /// Where the router is asked, if one is
        #[arg(long, value_name = "SOCKET")]
        router: Option<PathBuf>,
        /// The program
        #[arg(long, value_name = "PID", default_value_t = 0)]
        process: u32,
        /// The record of a killed supervisor, which this one succeeds
        #[arg(long, value_name = "FD", conflicts_with_all = ["router", "process"])]
        take_over: Option<i32>,
    },
    /// Show what the router of this host knows, and which transport connections have taken and why
    Status {
        /// The control socket of the router
        #[arg(long, value_name = "SOCKET", default_value = shunt_overlay::DEFAULT_CONTROL)]
        control: PathBuf,
        /// Print everything it says as JSON
        #[arg(long)]
        json: bool,
    },
    /// Say which connections may be, and how they are treated: check a policy, have it hold, or
    /// show which one does
    #[command(subcommand)]
    Policy(OverlayPolicy),
    /// Write a new key, which all routers of an overlay then share, to a file, or change the one
    /// that is there step by step
    NewKey {
        /// Write another key beside the one that is there: routers understand both, and speak by
        /// the first
        #[arg(long, conflicts_with_all = ["use_next", "retire"])]
        next: bool,
        /// Have routers speak by the other one, when all have it
        #[arg(long, conflicts_with = "retire")]
        use_next: bool,
        /// Forget the former one, when all speak by the other
        #[arg(long)]
        retire: bool,
        /// Without these flags it must not exist yet
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

/// What can be done with a policy.
#[derive(Debug, Subcommand)]
pub(crate) enum OverlayPolicy {
    /// Say what is wrong with a file, and where; no router is needed
    Check {
        /// As docs/overlay.md describes it
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Have it hold from now on, until the router ends: connections that it forbids end now, others
    /// notice nothing
    Apply {
        /// As docs/overlay.md describes it
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// The control socket of the router
        #[arg(long, value_name = "SOCKET", default_value = shunt_overlay::DEFAULT_CONTROL)]
        control: PathBuf,
    },
    /// Make a policy file of Kubernetes NetworkPolicies and print it; no router is needed
    Import {
        /// YAML or JSON, as manifests or `kubectl get networkpolicies -A -o yaml` have it
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
        /// The namespace of policies that name none
        #[arg(long, value_name = "NAME", default_value = "")]
        namespace: String,
        /// Print the policy file and the notes as JSON
        #[arg(long)]
        json: bool,
    },
    /// Say what the policy that holds decides about a connection, and by which rules
    Decide {
        /// The client's address, with its port if source-ports matter
        #[arg(value_name = "CLIENT", value_parser = client)]
        client: (IpAddr, Option<u16>),
        /// The server's address and port
        #[arg(value_name = "SERVER:PORT")]
        server: SocketAddr,
        /// The control socket of the router
        #[arg(long, value_name = "SOCKET", default_value = shunt_overlay::DEFAULT_CONTROL)]
        control: PathBuf,
        /// Print everything it says as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the rules that hold, and how many connections are by which
    Show {
        /// The control socket of the router
        #[arg(long, value_name = "SOCKET", default_value = shunt_overlay::DEFAULT_CONTROL)]
        control: PathBuf,
        /// Print everything it says as JSON
        #[arg(long)]
        json: bool,
    },
}

/// Parses a router's address, which has a port or the default one.
fn router(text: &str) -> Result<SocketAddr, String> {
    match (text.parse::<SocketAddr>(), text.parse::<IpAddr>()) {
        (Ok(address), _) => Ok(address),
        (_, Ok(address)) => Ok((address, shunt_overlay::DEFAULT_PORT).into()),
        _ => Err("expected an address, as 192.168.0.1, or one with a port, as 192.168.0.1:7450".to_owned()),
    }
}

/// Parses an address with or without a port.
fn client(text: &str) -> Result<(IpAddr, Option<u16>), String> {
    match (text.parse::<SocketAddr>(), text.parse::<IpAddr>()) {
        (Ok(client), _) => Ok((client.ip(), Some(client.port()))),
        (_, Ok(address)) => Ok((address, None)),
        _ => Err("expected an address, as 10.50.1.2, or one with a port, as 10.50.1.2:40000".to_owned()),
    }
}

#[derive(Debug, Args)]
pub(crate) struct OverlayRunArgs {
    /// The socket of the host's router
    #[arg(long, value_name = "SOCKET", default_value = shunt_overlay::DEFAULT_SOCKET)]
    pub(crate) router: PathBuf,

    /// The program and its arguments
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true, allow_hyphen_values = false)]
    pub(crate) command: Vec<OsString>,
}
