//! A host with hostile users. It runs the system broker as a separate process, programs that the
//! broker serves all the time, and strangers that attack the broker meanwhile. The service for the
//! programs must not suffer.
//!
//! `broker` starts the broker. `victims` are the programs that it serves, and `server` is one that
//! a stranger connects to. `strangers` starts the attacks, and `attack` contains them; the program
//! of that name runs in the stranger's process.

pub mod attack;
mod broker;
mod client;
mod punch;
mod server;
mod strangers;
mod victims;

pub use broker::Broker;
pub use server::{Met, Server};
pub use strangers::{Stranger, Who};
pub use victims::{Served, Victims};
