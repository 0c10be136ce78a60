//! A host on which not everybody is a friend: the system's broker as a process of its own, programs that it serves all the
//! time, and strangers that attack it meanwhile. What the programs are served must not show that there are strangers.
//!
//! `broker` starts the broker, `victims` are those whom it serves, `server` is one that a stranger
//! connects to, `strangers` start the attacks, and `attack` is what the strangers run: the program
//! of the same name.

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
