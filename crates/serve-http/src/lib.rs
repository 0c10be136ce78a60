//! An HTTP/1.1 reverse proxy in user space, `shunt serve builtin:http-proxy`.
//!
//! - [`message`]: how the bytes of requests and replies are read, and which of them are forwarded.
//!   Pure functions and small state machines, without sockets.
//! - [`config`]: the file of pools and routes, and the choice of a pool for a request.
//! - [`cache`]: stored replies of routes with static content.
//! - [`engine`]: threads, connections, health checks, log and metrics.
//!
//! docs/http-proxy.md describes the states of a connection and their transitions.

#![forbid(unsafe_code)]

pub mod cache;
pub mod config;
pub mod engine;
pub mod message;
