//! The overlay: containers keep their overlay addresses, and their TCP connections between hosts cross the host network once
//! (docs/overlay.md, docs/overlay-protocol.md).
//!
//! Inner shape: `router` is the life of a router, with its `config`, what it shares between conversations in `shared`, the network
//! `namespace`s that it knows, its `keys`, its `errand`s to what strangers could hold up, and its `metrics`; `local` talks to supervisors (`message`, `channel`), `client` and `server` are the two
//! ends of a conversation between routers (`wire`), which have asked each other before (`peers`, `guests`), as far as that is `worth` it. `policy` says which connections may be; `connections` has those that there are under it,
//! with their `options`, and `enforce` brings another one about. Which host has a container is in the `map`, which `discovery` keeps by way of `etcd`. `account` makes sockets for containers,
//! `secure` has them tagged, and `adopt` finds the connections that a router before has made; `listing` is what it says of them. `supervise` puts a program under a supervisor, whose life is in `supervisor`;
//! `admit` gives it one where programs are not trusted, `stand_by` has one wait for a container.

#![forbid(unsafe_code)]

mod account;
mod admit;
mod adopt;
mod channel;
mod client;
mod config;
mod connections;
mod discovery;
mod enforce;
mod errand;
mod etcd;
mod guests;
mod keys;
mod listing;
mod local;
mod lock;
mod map;
mod message;
mod metrics;
mod namespace;
mod options;
mod peers;
mod policy;
mod published;
mod reason;
mod request;
mod router;
mod secure;
mod server;
mod shared;
mod stand_by;
mod supervise;
mod supervisor;
mod wire;
mod worth;

pub use admit::supervise_apart;
pub use config::{ConfigError, DEFAULT_CONTROL, DEFAULT_SOCKET};
pub use policy::{Policy, PolicyError};
pub use request::{Request, ask};
pub use router::{Error, run};
pub use shunt_control::AskError;
pub use shunt_key::{KeyError, Step, new_key, rotate};
pub use stand_by::stand_by;
pub use supervise::{SuperviseError, Supervised, supervise, trusts};
