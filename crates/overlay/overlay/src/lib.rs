//! The overlay: TCP connections between containers on two hosts cross the host network once, and
//! the containers keep their overlay addresses (docs/overlay.md, docs/overlay-protocol.md).
//!
//! The modules:
//!
//! - `router` runs a router, with its configuration in `config`. `shared` has the state that all
//!   its conversations use: `registry` has the supervisors, `promises` the connections that
//!   programs are about to accept, and `quotas` the bounds. `namespace` knows the containers'
//!   network namespaces, `keys` the key file, and `metrics` the counters. `blocking_pool` runs
//!   blocking work on other threads.
//! - `local` talks to supervisors, by way of `message` and `channel`. `client` and `server` are the
//!   two ends of a negotiation between routers, whose messages are in `wire`. Before it the routers
//!   ask each other on lines: `peers` has the outgoing ones, `guests` the incoming ones.
//!   `services` finds the containers behind service addresses, whose Asks `follows` awaits.
//!   `expected_gain` stops moving connections that are too short for it.
//! - `policy` decides which connections are permitted. `connections` has the current ones, with
//!   their socket `options`, and `enforce` applies another policy to them.
//!   `decide` explains its verdicts, and `cost` measures what they take.
//! - `map` says which host has a container. `discovery` keeps it current, by way of `etcd`, and
//!   `kubernetes` by way of the Kubernetes API, whose NetworkPolicies are one of the `layers` of the
//!   policy in effect. `in_band` finds what none of these has, by the connections themselves.
//! - `labels` reads the labels of containers from their sources, into `workloads`. `described` is the
//!   source of their annotations.
//! - `account` makes sockets for containers, `secure` tags them, `adopt` finds the connections that
//!   an earlier router made, and `listing` reports them. `unserved` has the containers without a supervisor.
//! - `supervise` puts a program under a supervisor, which is in `supervisor`. `admit` starts the
//!   supervisor on the host where programs are not trusted, and `stand_by` starts one for a
//!   container.

#![forbid(unsafe_code)]

mod account;
mod admit;
mod adopt;
mod blocking_pool;
mod channel;
mod client;
mod config;
mod connections;
mod cost;
mod decide;
mod described;
mod discovery;
mod encryption;
mod enforce;
mod etcd;
mod expected_gain;
mod external;
mod follows;
mod guests;
mod in_band;
mod keys;
mod kubernetes;
mod labels;
mod layers;
mod limits;
mod lines;
mod listing;
mod local;
mod lock;
mod map;
mod marks;
mod message;
mod metrics;
mod namespace;
mod options;
mod peers;
mod policy;
mod promises;
mod published;
mod quotas;
#[cfg(test)]
mod random;
mod reason;
mod registry;
mod request;
mod resume;
mod router;
mod secure;
mod server;
mod services;
mod shared;
mod stand_by;
mod supervise;
mod supervisor;
mod tools;
mod udp;
mod unserved;
mod wire;
mod workloads;

pub use admit::supervise_apart;
pub use config::{ConfigError, DEFAULT_CONTROL, DEFAULT_PORT, DEFAULT_SOCKET, Here};
pub use cost::{Cost, measure as measure_policy};
pub use described::described_beside;
pub use kubernetes::{Imported, import};
pub use policy::Policy;
pub use request::{Request, ask};
pub use router::{Error, run};
pub use shunt_control::AskError;
pub use shunt_key::{KeyError, Step, new_key, rotate};
pub use stand_by::stand_by;
pub use supervise::{SuperviseError, Supervised, supervise, trusts};
pub use supervisor::supervise_on;
