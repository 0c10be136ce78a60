//! Services, each a C file that is compiled twice: its native half runs in the user-space engine,
//! its BPF half in the kernel.
//!
//! `include/shunt/service.h` is the interface for services, [`service::Service`] the interface
//! between a service and an engine.

#![deny(unsafe_code)]

pub mod cache;
pub mod engine;
pub mod hash;
mod per_thread;
pub mod pubsub;
pub mod service;
pub mod workshop;
