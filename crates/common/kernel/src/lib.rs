//! The BPF programs that shunt loads into the kernel, each with one job, and their user-space side.
//! The sources are `bpf/*.bpf.c`. The objects are embedded in the executable and fit any kernel
//! with type information (BTF).
//!
//! A program stays attached until the value that loaded it is dropped, except those of `names` and
//! `secure`, which stay as long as a socket with a name or a tag. Nothing is pinned. `quota` loads
//! no program: it creates a control group for measured programs.

#![forbid(unsafe_code)]

pub mod calls;
mod cgroup;
pub mod delay;
pub mod hint;
mod load;
mod lsm;
mod mount;
pub mod names;
pub mod quota;
pub mod redirect;
pub mod secure;
pub mod sequence;
pub mod shape;
pub mod window;

pub use load::{LoadError, visit_sockets};
