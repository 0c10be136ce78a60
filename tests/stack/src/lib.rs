//! How much stack each function of libshunt.so takes, with all that it calls, read from the code of the built library.
//! x86_64 only.

pub mod frame;
pub mod graph;
pub mod library;
