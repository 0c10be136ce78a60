//! Services: one C file each, compiled twice. Its native half runs in the user-space engine, its BPF half in the kernel.
//!
//! `include/shunt/service.h` is what a service is written against, [`service::Service`] what an engine sees of it.

#![deny(unsafe_code)]

pub mod engine;
pub mod hash;
pub mod service;
pub mod workshop;
