//! Computes how much stack each function of libshunt.so takes, including its callees, from the code
//! of the built library. x86_64 only.

pub mod frame;
pub mod graph;
pub mod library;
pub mod sources;
