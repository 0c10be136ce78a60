//! The program as a whole: the handover to the next program, the start of programs without a
//! dynamic linker, sandboxes, and sanitizers.

#[cfg(target_arch = "x86_64")]
pub(crate) mod earlier_connections;
pub(crate) mod handover;
pub(crate) mod ptrace_helper;
pub(crate) mod sandbox;
pub(crate) mod sanitizer;
