//! The broker: one process per host or per user that pairs the two ends of a connection and gives
//! both a link in shared memory (docs/local-path.md). It trusts the kernel's report about a
//! descriptor and not the client's (L3), never blocks, and may die at any time (L6).
//!
//! The main modules:
//! - Clients: `server` accepts, `control` handles one client's connection, `outbox` its messages,
//!   `state` is shared by all of them.
//! - Pairing: `offers` decides about an offered socket, with the pure modules `pairing` and
//!   `links`. `setup` is the state machine of a link that is being made, and `making` runs it.
//! - The kernel: `namespaces` and `diag` query sockets, `tracking` the timeouts of firewalls.
//! - Limits: `principal` has the budgets of each user, `allowance` limits processor time,
//!   `fair_limiter` schedules slow requests, and `blocking_pool` runs calls that may block.
//! - Clean-up: `sweep` frees memory, `expiry` ends offers of dead sockets, `unowned_sockets` follows
//!   sockets of processes that have ended.
//! - Reports: `status` and `metrics`; `latency_wishes` ends measurements; `capture` lets tools read
//!   connections; `overlay` applies the overlay's policy.

#![forbid(unsafe_code)]

mod ack_watermark;
mod allowance;
mod blocking_pool;
mod capture;
mod config;
mod control;
mod diag;
mod ended_processes;
mod expiry;
mod fair_limiter;
mod given_up;
mod latency_wishes;
mod links;
mod listener;
mod making;
mod metrics;
mod namespaces;
mod notifier;
mod offers;
mod outbox;
mod overlay;
mod pairing;
mod paths;
mod place;
mod present;
mod principal;
mod privileges;
mod rate_limited_log;
mod remainders;
mod server;
mod setup;
mod state;
mod status;
mod sweep;
mod tracking;
mod unowned_sockets;
mod watch;

pub use config::{Config, Limits, Mode, OVERLAY_POLICY};
pub use listener::{ListenError, lock_holder};
pub use paths::{PathError, SYSTEM_SOCKET, make_user_socket, socket_candidates, user_socket};
pub use server::{Error, run};
pub use status::{Report, StatusError, report, status, status_with_latency};
