//! Small wrappers over system calls, shared by the broker, the shim, the overlay and the link
//! emulator.
//!
//! The shim is loaded into other programs, where libc's `read`, `close` and so on are its own
//! hooks. Therefore this crate makes system calls directly (rustix's Linux backend), does not
//! allocate and does not change errno. Dropping an `OwnedFd` is the one exception: it calls libc's
//! `close`, and the shim's hook recognises its own descriptors.
//!
//! Modules that the shim does not use are free of these rules: `apart`, for example, calls libc's
//! `fork`.

pub mod accounted;
pub mod addresses;
pub mod attach;
pub mod blocking_pool;
pub mod capabilities;
pub mod clock;
pub mod conntrack;
pub mod daemonize;
pub mod descriptors;
pub mod destroy;
pub mod ended;
pub mod eventfd;
pub mod guard;
pub mod guarded;
pub mod heap;
pub mod identity;
pub mod interest;
pub mod keeper;
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
pub mod proc;
pub mod process_access;
pub mod raw;
pub mod realtime;
pub mod seccomp;
pub mod seqpacket;
pub mod spare_memory;
pub mod spawn;
pub mod tcp;
pub mod trace;
pub mod tun;
pub mod tuning;
pub mod uring;
pub mod view;
#[cfg(target_arch = "x86_64")]
pub mod xstate;

mod ready;
mod sockopt;

/// The error number and the result of a system call that was made without libc.
pub use rustix::io::{Errno, Result};
