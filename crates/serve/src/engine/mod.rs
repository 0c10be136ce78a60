//! The two engines that run a service. [`run`] serves each client's conversation either in user
//! space (`conversation`, `link`, `waiting`) or in the kernel (`kernel`,
//! include/shunt/engine.bpf.h). `calm` decides when a conversation moves, `contest` measures
//! whether that is faster, and `place` moves it. `events` has its timers (in a `wheel`) and the
//! bytes that other connections send to it (by the `hub`). docs/serve-protocol.md describes the
//! moves, and why no byte is lost in them.
//!
//! `backends` and `choose` map keys to backends. A `worker` is a thread with its conversations.
//! `shared` is the state that all threads use, `half` loads their kernel engines, and `drain` ends
//! them. `files` fills content stores. `registrar` has the changes of backends that a service asks
//! for. `counts` and `metrics` report. `server` starts and stops the service.

mod address;
mod backends;
mod buffer;
mod calm;
mod choose;
mod contest;
mod conversation;
mod counts;
mod delays;
mod drain;
mod events;
mod files;
mod half;
mod hub;
mod inboxes;
mod kernel;
mod limiter;
mod limits;
mod linger;
mod link;
mod metrics;
mod place;
mod registrar;
mod server;
mod shared;
mod waiting;
mod wheel;
mod worker;

pub use address::Address;
pub use choose::Hashing;
pub use drain::Drain;
pub use files::Files;
pub use inboxes::Inboxes;
pub use limiter::Limit;
pub use server::{DEFAULT_CONTROL, Error, Options, Request, ask, run, try_kernel};
pub use shared::Engine;
pub use wheel::{Timer, Wheel};
