//! `shunt bench`: compares the transports, their gains and their costs, within one run. The command
//! passes its arguments to this crate, which prints all results.

#![forbid(unsafe_code)]

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
mod options;
mod overlay;
mod process;
mod progress;
mod proof;
mod relay;
mod report;
mod serve;
mod side;
mod stacks;
mod stage;
mod stats;
mod user;
mod worker;

pub use ipc::{Arguments as IpcArguments, run as ipc};
pub use local::{Arguments as LocalArguments, run as local};
pub use overlay::{Arguments as OverlayArguments, run as overlay};
pub use proof::{Arguments as ReportArguments, run as report};
pub use relay::{Arguments as RelayArguments, run as relay};
pub use serve::{Arguments as ServeArguments, run as serve};
pub use stacks::{Arguments as StacksArguments, run as stacks};
pub use worker::{Way, Worker, run as worker};
