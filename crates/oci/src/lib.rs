//! Containers under shunt with nothing but `docker run --runtime=shunt`: what stands between an engine and its OCI runtime adds the
//! shim, the broker's directory and LD_PRELOAD to the configuration of each container that can have them, and leaves every other one
//! as it is. Where the host has a router of the overlay, the container's program is started under a supervisor as well.

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

pub use bundle::{enter, follow, is_supervised, supervise, supervise_another};
pub use daemon_json::{Change, NAME, RegisterError, find, register, unregister};
pub use invocation::{Invocation, Operation};
pub use overlay::LAUNCHER;
pub use refusal::Refusal;
pub use settings::{DEFAULT_SETTINGS, Settings, SettingsError};
pub use spec::Host;
