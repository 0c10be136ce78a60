//! The structures that cross a process boundary in shunt: control messages, the geometry of a link,
//! and the page that a process shares with the broker. It also defines the one vocabulary of
//! transports and bypass reasons.
//!
//! The shim, the broker and the command are built at different times and meet at run time, so
//! `VERSION` fixes every layout here. A side that does not understand the other stays on TCP.

#![forbid(unsafe_code)]

pub mod address;
pub mod control;
pub mod geometry;
pub mod handover;
pub mod intercept;
pub mod latency;
pub mod local_policy;
pub mod option;
pub mod page;
pub mod plan;
pub mod reason;
pub mod rules;
pub mod shown;
pub mod status;

/// Version of the control protocol and of the shared layouts. A different version is refused, never
/// guessed.
pub const VERSION: u16 = 20;

/// Environment variables shared by `shunt run` and the shim.
pub mod env {
    /// Path of the broker's socket.
    pub const BROKER: &str = "SHUNT_BROKER";
    /// `auto`, `shm` or `tcp`: see `shunt run --transport`.
    pub const TRANSPORT: &str = "SHUNT_TRANSPORT";
    /// `auto`, `off` or a number of microseconds: see `shunt run --spin`.
    pub const SPIN: &str = "SHUNT_SPIN";
    /// `used` or `at-once`: see `shunt run --offer`.
    pub const OFFER: &str = "SHUNT_OFFER";
    /// `avoid` or `trust`: see `shunt run --own-calls`.
    pub const OWN_CALLS: &str = "SHUNT_OWN_CALLS";
    /// The runtimes of sanitizers that `shunt run` has put before the shim in LD_PRELOAD. They are
    /// for the program itself and not for the programs that it starts. The shim removes them from
    /// the list, and clears this variable.
    pub const FIRST: &str = "SHUNT_FIRST";
    /// `auto` or a number of MiB: see `shunt run --ring-memory`.
    pub const RING_MEMORY: &str = "SHUNT_RING_MEMORY";
    /// Path of the single configuration file; if empty, there is no file.
    pub const CONFIG: &str = "SHUNT_CONFIG";
    /// The configuration's settings for programs: see [`crate::rules`]. The variables above take
    /// precedence.
    pub const RULES: &str = "SHUNT_RULES";
    /// Path of the command. Programs that have the shim run it to start programs without a dynamic
    /// linker.
    pub const INTERCEPT: &str = "SHUNT_INTERCEPT";
}
