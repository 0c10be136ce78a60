//! The engines: a service is run by [`run`], each client's conversation either in user space (`conversation`, `link`,
//! `waiting`) or in the kernel (`kernel`, include/shunt/engine.bpf.h), and `place` and `calm` move it. docs/serve-protocol.md
//! has the moves and why nothing is lost in them.
//!
//! Inner shape: `backends` and `choose` know where messages go; a `worker` is a thread with conversations; `shared` is
//! what all threads know; `counts` and `metrics` tell; `server` is the life of it all.

mod backends;
mod buffer;
mod calm;
mod choose;
mod conversation;
mod counts;
mod kernel;
mod limits;
mod linger;
mod link;
mod metrics;
mod place;
mod server;
mod shared;
mod waiting;
mod worker;

pub use backends::BackendsError;
pub use choose::Hashing;
pub use server::{DEFAULT_CONTROL, Error, Options, Request, ask, run, try_kernel};
pub use shared::Engine;
