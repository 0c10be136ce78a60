//! The relay: between two sites with a long round trip, each TCP connection becomes three short ones that cost nothing to
//! set up (docs/relay.md). Clients and servers are untouched.
//!
//! Inner shape: `config`; `edge` takes clients in, `syn` and `intercept` those who do not know of a relay; `exit` takes
//! other relays in (`handshake`, `frame`, `seal`); `dial` goes onward, by a connection from the `pool` where there is one; `session`
//! and `pump` move the bytes over a `wire`; `request` and `metrics` tell; `relay` is the life of it all.

#![forbid(unsafe_code)]

mod config;
mod dial;
mod early;
mod edge;
mod exit;
mod frame;
mod handshake;
mod intercept;
mod leg;
mod metrics;
mod pipe;
mod pool;
pub mod probe;
mod pump;
mod queue;
mod queueing;
mod record;
mod relay;
mod request;
mod seal;
mod session;
mod shared;
mod socket;
mod syn;
mod tool;
mod wire;

pub use config::{ConfigError, DEFAULT_CONTROL};

pub use relay::{Error, check, run};
pub use request::{Request, ask};
pub use shunt_control::AskError;
pub use shunt_key::{KeyError, new_key};
pub use tool::ToolError;
