//! Runs containers under shunt with `docker run --runtime=shunt`.
//!
//! `shunt-runtime` stands between a container engine and its OCI runtime. This crate changes a
//! container's configuration for it: it adds the shim, the broker's directory and LD_PRELOAD, if
//! the image supports them. Otherwise the configuration remains unchanged. On a host with an
//! overlay's router, this crate also decides whether and how the container's programs are
//! supervised, and stores for the router what the container's annotations say.

#![forbid(unsafe_code)]

mod annotations;
mod bundle;
mod daemon_json;
mod image;
mod invocation;
mod mounts;
mod network;
mod overlay;
mod refusal;
mod replace;
mod rootfs;
mod settings;
mod spec;
mod text;
mod words;

pub use bundle::{describe, enter, follow, let_go, supervise, supervision};
pub use daemon_json::{Change, NAME, RegisterError, find, register, unregister};
pub use invocation::{Doubt, Invocation, Operation};
pub use overlay::Supervision;
pub use refusal::Refusal;
pub use settings::{DEFAULT_SETTINGS, Settings};
pub use spec::Host;
