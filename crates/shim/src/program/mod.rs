//! The program as a whole: what goes with it into another, how another is entered, and what it may still do under a filter of system calls.

pub(crate) mod beside;
pub(crate) mod handover;
pub(crate) mod sandbox;
pub(crate) mod sanitizer;
