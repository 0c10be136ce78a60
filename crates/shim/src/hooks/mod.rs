//! The C functions that programs meet instead of libc's. They only translate: `crate::ops` decides.
//!
//! Every one of them ends in one of three ways: handled, failed with errno, or given to the real function because the
//! descriptor is none of ours or its connection is on TCP. See `docs/hooks.md`.

#![expect(unreachable_pub, reason = "the symbols are exported to C programs, not to Rust")]

mod alias;
mod descriptor;
mod epoll;
mod io;
mod loading;
pub(crate) mod memory;
mod message;
mod process;
pub(crate) mod raw;
mod readiness;
mod ring;
mod sanitizer;
mod signal;
mod socket;
mod stdio;
mod trampoline;
mod unseen;
