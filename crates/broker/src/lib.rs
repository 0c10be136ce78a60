//! The broker: one process per host or per user that pairs the two ends of a connection and hands both a
//! link (docs/local-path.md). It believes what the kernel says of a descriptor and nothing that it is told
//! (L3), never blocks, and may die at any time (L6).
//!
//! Inner shape: [`Config`]; `control` is one client's connection; `state` is what all of them
//! share; `offers` decides what becomes of a socket that was shown; `pairing` and `links` are its
//! two pure halves; `setup` is the state machine of a link that is being made, `making` carries out
//! what it decides; `namespaces` and `diag` ask the kernel, `tracking` what it knows of firewalls;
//! `status` and `metrics` report; `capture` lets others read along; `overlay` knows the overlay's
//! policy, `sweep` gives memory back, `expiry` ends offers of dead sockets. `principal` says for
//! whom all of this is done and how much of it each may have, `turns` when what takes long is done,
//! `errands` does what may block.

#![forbid(unsafe_code)]

mod allowance;
mod capture;
mod complaints;
mod config;
mod control;
mod diag;
mod disposal;
mod errands;
mod expiry;
mod links;
mod listener;
mod making;
mod metrics;
mod namespaces;
mod notifier;
mod offers;
mod orphans;
mod outbox;
mod overlay;
mod pairing;
mod paths;
mod place;
mod present;
mod principal;
mod privileges;
mod server;
mod setup;
mod state;
mod status;
mod sweep;
mod taken;
mod tracking;
mod turns;
mod watch;

pub use config::{Config, Limits, Mode, OVERLAY_POLICY};
pub use listener::ListenError;
pub use paths::{PathError, SYSTEM_SOCKET, socket_candidates, user_socket};
pub use server::{Error, run};
pub use status::{Report, StatusError, report, status};
