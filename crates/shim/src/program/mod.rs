//! The program as a whole: what goes with it into another, and what it may still do under a filter of system calls.

pub(crate) mod handover;
pub(crate) mod sandbox;
