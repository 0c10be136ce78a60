//! The command lines of `shunt bench` and `shunt report`, as data.
//!
//! Two programs parse them. `shunt` prints their help, manual pages and completions, rejects wrong
//! arguments, and then executes `shunt-bench` with the same arguments. `shunt-bench` measures. This
//! crate has no code that measures, so `shunt` does not link to it.

#![forbid(unsafe_code)]

pub mod ipc;
pub mod local;
mod output;
pub mod overlay;
pub mod relay;
pub mod report;
pub mod serve;
pub mod side;
pub mod stacks;

use clap::Subcommand;

pub use output::{Output, parse_seconds};

/// What can be compared.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// The local path against TCP and Unix sockets: our own loads, and real programs as far as they are installed
    Local(local::Arguments),
    /// Relays between two far sites against what else there is, over links of hundreds of milliseconds; for root
    Relay(relay::Arguments),
    /// Services in the kernel and in user space against plain programs: an echo, a forwarder of
    /// Thrift messages, a cache and an HTTP proxy; for root
    Serve(serve::Arguments),
    /// Containers of two hosts, on a VXLAN overlay and under shunt, against programs on the hosts themselves; for root
    Overlay(overlay::Arguments),
    /// The message channel against sockets, files and queues: messages with descriptors between two processes
    Ipc(ipc::Arguments),
    /// Whole stacks of web servers, interpreters and databases, as far as they are installed, with everything under shunt and
    /// with nothing
    Stacks(stacks::Arguments),
}
