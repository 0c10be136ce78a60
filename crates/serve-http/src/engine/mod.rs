//! The threads and connections of the proxy.
//!
//! A [`worker`] has its own listener, clients and connections to backends, and shares only
//! counters, health and the configuration with other threads. `connection` has the states of a
//! client. The steps are in `head` (a request's head), `dispatch` (its backend), `exchange` and
//! `forward` (body and reply), `caching` (stored replies), `tunnel` (after an upgrade) and `ending`.
//! `timers` has the time limits. `server` starts and stops everything.

mod answers;
pub(crate) mod backends;
mod caching;
mod connection;
mod counts;
mod dispatch;
mod ending;
mod exchange;
mod forward;
mod head;
mod health;
mod log;
mod metrics;
mod server;
mod shared;
mod socket;
mod timers;
mod tunnel;
mod worker;

pub use server::{Error, Options, SERVICE, run};
