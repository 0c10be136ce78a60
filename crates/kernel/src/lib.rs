//! The programs that shunt loads into the kernel, each with one job, and how to talk to them. The sources are
//! `bpf/*.bpf.c`; the objects are part of the executable and fit any kernel that describes its own types (BTF).
//!
//! A program lives, and stays attached, as long as the value that loaded it; those of `names` and `secure` as long as a socket that has one, or a tag. Nothing
//! is pinned. `quota` loads none: it is a control group for programs that are measured.

#![forbid(unsafe_code)]

pub mod calls;
mod cgroup;
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

pub use load::LoadError;
