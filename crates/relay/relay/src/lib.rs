//! The relay: splits each TCP connection between two distant sites into three (docs/relay.md).
//! Clients and servers are unchanged.
//!
//! The connections to the client and to the target have short round trips. The one between the
//! relays is set up in advance.
//!
//! - `config`: the configuration file.
//! - `edge` accepts clients. `intercept`, `queueing` and `syn` serve clients that do not know of a
//!   relay.
//! - `exit` accepts other relays, with `handshake`, `frame` and `seal`.
//! - `dial` connects onward, and uses a connection of the `pool` if there is one.
//! - `session` and `pump` move the bytes, over connections of type `wire`.
//! - `request` and `metrics` serve the control socket and Prometheus.
//! - `relay` starts and stops all of it.

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
mod listener;
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
