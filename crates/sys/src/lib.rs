//! Small wrappers over system calls, shared by the broker, the shim, the overlay and the link emulator.
//!
//! The shim lives inside other programs, where libc's `read`, `close` and the rest are its own hooks. So
//! nothing here calls them: system calls are made directly (rustix's Linux backend), nothing allocates, and
//! nothing touches errno. The one exception is the drop of an `OwnedFd`, which ends in libc's `close`: the
//! shim's hook knows its own descriptors. `apart` is not for the shim.

pub mod accounted;
pub mod addresses;
pub mod apart;
pub mod attach;
pub mod beside;
pub mod capabilities;
pub mod clock;
pub mod destroy;
pub mod ended;
pub mod eventfd;
pub mod guard;
pub mod guarded;
pub mod heap;
pub mod identity;
pub mod interest;
pub mod limits;
pub mod listed;
pub mod mapping;
pub mod memfd;
pub mod memory;
pub mod netns;
pub mod options;
pub mod other;
pub mod peer;
pub mod pidfd;
pub mod raw;
pub mod realtime;
pub mod seccomp;
pub mod seqpacket;
pub mod spare_memory;
pub mod standing;
pub mod tcp;
pub mod tun;
pub mod tuning;
pub mod uring;
pub mod view;

mod ready;
mod sockopt;

/// The error number and result of a system call made without libc.
pub use rustix::io::{Errno, Result};
