//! Arguments of the commands that show connections and machines: `status`, `top`, `capture`,
//! `explain`, `doctor`, `bugreport`.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

use super::overlay::OverlayControl;
use crate::filter::Filter;

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Count the connections of each program instead of listing them
    #[arg(long)]
    pub(crate) summary: bool,

    /// Have the programs measure for two seconds how long they wait for answers, and print that
    #[arg(long)]
    pub(crate) latency: bool,

    #[command(flatten)]
    pub(crate) filter: Filter,

    /// Print what is shown, and all that the broker has counted, as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Ask the broker at this socket [default: the user's, else the system's]
    #[arg(long, value_name = "SOCKET", env = shunt_abi::env::BROKER)]
    pub(crate) broker: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) control: OverlayControl,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Keys: Tab programs or connections, arrows select, Enter details, s sort, r reverse, / filter, l latency, \
        space pause, h help, q quit."
)]
pub(crate) struct TopArgs {
    /// What a row is of
    #[arg(long, value_enum, default_value = "programs")]
    pub(crate) rows: crate::top::Rows,

    /// What rows are sorted by
    #[arg(long, value_enum, default_value = "rate")]
    pub(crate) sort: crate::top::Sort,

    /// Sort in the opposite direction
    #[arg(long)]
    pub(crate) reverse: bool,

    /// Show only rows with this in a name, a pid, an address or a reason; capitals and small letters
    /// are the same
    #[arg(long, value_name = "TEXT")]
    pub(crate) filter: Option<String>,

    #[command(flatten)]
    pub(crate) only: Filter,

    /// Show the latency of connections from the start, as after the key l
    #[arg(long)]
    pub(crate) latency: bool,

    /// Look again after so many seconds
    #[arg(long, value_name = "SECS", default_value = "1", value_parser = parse_interval)]
    pub(crate) interval: f64,

    /// End after so many looks [default: never]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,

    /// Print each look as a line of JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Ask the broker at this socket [default: the user's, else the system's]
    #[arg(long, value_name = "SOCKET", env = shunt_abi::env::BROKER)]
    pub(crate) broker: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Of each kind of filter that is given, one must fit either end. It ends by Ctrl-C, and says what it has missed. Root of the \
    host sees everything, others what goes between programs of their own (see docs/capture.md)."
)]
pub(crate) struct CaptureArgs {
    /// Write to this file, in pcapng [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) write: Option<PathBuf>,

    /// Only connections with this port
    #[arg(long, value_name = "N")]
    pub(crate) port: Vec<u16>,

    /// Only connections with this address
    #[arg(long, value_name = "IP")]
    pub(crate) address: Vec<IpAddr>,

    /// Only connections of the process with this id
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Vec<u32>,

    /// Only connections of programs with this name, as `shunt status` shows it
    #[arg(long, value_name = "NAME")]
    pub(crate) program: Vec<String>,

    /// End after so many packets [default: never]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,

    /// End before the file has more bytes than this [default: never]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(100_000..))]
    pub(crate) bytes: Option<u64>,

    /// End after so many seconds [default: never]
    #[arg(long, value_name = "SECS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) seconds: Option<u64>,

    /// Keep so many bytes of each packet, with its headers [default: all]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(64..=65535))]
    pub(crate) snaplen: Option<u32>,

    /// Ask the broker at this socket [default: the user's, else the system's]
    #[arg(long, value_name = "SOCKET", env = shunt_abi::env::BROKER)]
    pub(crate) broker: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "An IPv6 address has brackets, as in [::1]:80. A process is described with all its TCP connections: who is at \
    the other end, which transport each direction takes, and why it is TCP. Other users' processes can be looked into by root only."
)]
pub(crate) struct ExplainArgs {
    /// A process id; the address of a connection, as in 127.0.0.1:80 or, for every address, :80; or
    /// a program
    #[arg(value_name = "PID|ADDRESS:PORT|PROGRAM", value_hint = clap::ValueHint::CommandName)]
    pub(crate) what: String,

    /// Describe only connections with this port at either end
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Vec<u16>,

    /// Print the answer as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Ask the broker at this socket [default: for each process, the one that it looks for]
    #[arg(long, value_name = "SOCKET")]
    pub(crate) broker: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) control: OverlayControl,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Exits with 0 if connections on this machine can take shared memory, with 1 if not. With --live, it exits with 0 \
    if each pair that could be tried used shared memory. It starts no broker, and leaves nothing behind."
)]
pub(crate) struct DoctorArgs {
    /// Start a server and a client of each kind, have them exchange data, and report which transport
    /// they used
    #[arg(long)]
    pub(crate) live: bool,

    /// With --live, try only this kind of pair
    #[arg(long, value_enum, requires = "live")]
    pub(crate) kind: Vec<crate::doctor::live::Kind>,

    /// Print the checks, or the pairs, as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// With --live, use the broker at this socket [default: the user's, else the system's]
    #[arg(long, value_name = "SOCKET", env = shunt_abi::env::BROKER)]
    pub(crate) broker: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) control: OverlayControl,
}

#[derive(Debug, Args)]
#[command(
    after_help = "The file has versions, what `shunt doctor`, `status` and `config show` print, shunt's variables, units and logs. It has no\n\
    data of connections, no arguments of programs, no keys, and no other variables. As root it covers all programs."
)]
pub(crate) struct BugreportArgs {
    /// Write to this file, which must not exist [default: shunt-bugreport-TIME.txt]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Replace addresses by names, but for those of this host only
    #[arg(long)]
    pub(crate) no_addresses: bool,
}

fn parse_interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("from 0.1 to 3600 seconds".to_owned()),
    }
}
