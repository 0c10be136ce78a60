//! The C functions that programs call instead of libc's. A hook only translates its arguments and
//! result: `crate::ops` decides.
//!
//! Each hook ends in one of three ways: it has handled the call, it fails with an errno, or it
//! calls the real function. It calls the real function if the descriptor means nothing to the shim,
//! or its connection is on TCP. See `docs/hooks.md`.

#![expect(unreachable_pub, reason = "the symbols are exported to C programs, not to Rust")]

mod aio;
mod alias;
mod data_call;
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
mod transfer;
