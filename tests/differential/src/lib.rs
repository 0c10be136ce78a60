//! What the tester and its actors share: the words of a sequence, and the actor itself.
//!
//! The actor is a program of its own, so that its executable has no system call but those of libc: the
//! shim keeps a process on TCP that may make others (L11 in docs/architecture.md). Calls past libc come
//! from code that becomes executable later (`actor/past.rs`).

#[doc(hidden)]
pub mod actor;
#[doc(hidden)]
pub mod script;
