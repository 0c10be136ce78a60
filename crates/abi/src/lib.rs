//! What crosses a process boundary in shunt, and nothing else: control messages, the geometry of a link,
//! the page a process shares with the broker, and the one vocabulary of roads and bypass reasons.
//!
//! The shim, the broker and the command are built at different times and meet at run time, so every layout
//! here is fixed by `VERSION`; whichever side does not understand the other stays on TCP.

#![forbid(unsafe_code)]

pub mod address;
pub mod control;
pub mod door;
pub mod geometry;
pub mod handover;
pub mod local_policy;
pub mod option;
pub mod page;
pub mod reason;
pub mod rules;
pub mod shown;
pub mod status;

/// Version of the control protocol and of the shared layouts. A different version is refused, never guessed.
pub const VERSION: u16 = 15;

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
    /// What `shunt run` has put before the shim in LD_PRELOAD, for the program itself and nothing
    /// that it starts: the runtime of a sanitizer. The shim takes it out of the list, and makes
    /// this empty.
    pub const FIRST: &str = "SHUNT_FIRST";
    /// `auto` or a number of MiB: see `shunt run --ring-memory`.
    pub const RING_MEMORY: &str = "SHUNT_RING_MEMORY";
    /// Path of the one file of the configuration; empty, there is none.
    pub const CONFIG: &str = "SHUNT_CONFIG";
    /// What the configuration says of programs: see [`crate::rules`]. The variables above go before it.
    pub const RULES: &str = "SHUNT_RULES";
    /// Path of the command, which programs that have the shim start for those that they start and that have no dynamic linker.
    pub const DOOR: &str = "SHUNT_DOOR";
}
