//! The parts that the tester and its actors share: the language of sequences, and the actor itself.
//!
//! The actor is a separate program, so that its executable makes system calls only through libc:
//! the shim keeps a process on TCP that may make others (L11 in docs/architecture.md). Calls past
//! libc come from code that becomes executable later (`actor/past.rs`).

#[doc(hidden)]
pub mod actor;
#[doc(hidden)]
pub mod script;
