//! Containers under shunt with nothing but `docker run --runtime=shunt`: what stands between an engine and its OCI runtime adds the
//! shim, the broker's directory and LD_PRELOAD to the configuration of each container that can have them, and leaves every other one
//! as it is. Where the host has a router of the overlay, it is said whether a container's programs may have a supervisor, and which.

#![forbid(unsafe_code)]

mod bundle;
mod daemon_json;
mod image;
mod invocation;
mod mounts;
mod overlay;
mod refusal;
mod replace;
mod rootfs;
mod settings;
mod spec;
mod text;
mod words;

pub use bundle::{enter, follow, let_go, supervise, supervision};
pub use daemon_json::{Change, NAME, RegisterError, find, register, unregister};
pub use invocation::{Doubt, Invocation, Operation};
pub use overlay::Supervision;
pub use refusal::Refusal;
pub use settings::{DEFAULT_SETTINGS, Settings, SettingsError};
pub use spec::Host;
