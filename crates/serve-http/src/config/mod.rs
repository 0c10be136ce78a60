//! The file of pools and routes.

mod file;
mod routes;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use shunt_config::Fault;

pub use routes::Routes;

use crate::engine::backends::{Backend, Pool};

/// A configuration. It does not change; a reload makes another.
#[derive(Debug)]
pub struct Config {
    /// The pools, in the order of the file.
    pub pools: Vec<Arc<Pool>>,
    /// Which pool serves a request, by its position in `pools`.
    pub routes: Routes,
    /// Bounds on memory.
    pub limits: Limits,
    /// Bounds on time.
    pub timeouts: Timeouts,
    /// Fields that are added to requests.
    pub forwarding: Forwarding,
    /// The access log.
    pub log: Option<Log>,
}

impl Config {
    /// Reads a configuration. Backends that `before` has too keep their counters and their health.
    pub fn read(path: &Path, before: Option<&Config>) -> Result<Config, Fault> {
        let file = shunt_config::read(path)?;
        file::check(file, before).map_err(|why| Fault::of(path, why))
    }

    /// Returns all backends, each once for each pool that has it.
    pub fn backends(&self) -> impl Iterator<Item = (&Arc<Pool>, &Arc<Backend>)> {
        self.pools.iter().flat_map(|pool| pool.backends.iter().map(move |backend| (pool, backend)))
    }
}

/// Bounds on memory.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Limits {
    /// The most bytes of the head of a request or reply.
    pub head: usize,
    /// The most clients at a time, of all threads.
    pub clients: usize,
    /// The most requests of one connection.
    pub requests: u64,
    /// The most bytes of a request's body; 0 is no limit.
    pub body: u64,
    /// The most unused connections to a backend that a thread keeps.
    pub idle_connections: usize,
    /// The most requests of a thread that wait for a connection to one pool.
    pub waiting: usize,
    /// The slowest permitted body of a request, in bytes a second.
    pub body_rate: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            head: 16 * 1024,
            clients: 20_000,
            requests: 100_000,
            body: 0,
            idle_connections: 64,
            waiting: 1024,
            body_rate: 100,
        }
    }
}

/// Bounds on time, in seconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Timeouts {
    /// For the head of a request, from its first byte.
    pub head: f64,
    /// Between two requests.
    pub idle: f64,
    /// Between two parts of a body, in either direction, and for a client to take a part.
    pub body: f64,
    /// For a connection to a backend.
    pub connect: f64,
    /// For a backend to begin its reply.
    pub reply: f64,
    /// For a place at a backend whose connections are all in use.
    pub queue: f64,
    /// For a connection without traffic after an upgrade.
    pub tunnel: f64,
    /// For an unused connection to a backend.
    pub backend_idle: f64,
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts {
            head: 10.0,
            idle: 60.0,
            body: 30.0,
            connect: 2.0,
            reply: 60.0,
            queue: 5.0,
            tunnel: 3600.0,
            backend_idle: 30.0,
        }
    }
}

/// Returns a duration of a configuration that was checked.
pub fn duration(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// Fields that are added to requests, and the protocols that may be switched to.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Forwarding {
    /// Write X-Forwarded-For, X-Forwarded-Host and X-Forwarded-Proto.
    pub x_forwarded: bool,
    /// Write Forwarded.
    pub forwarded: bool,
    /// The name in Via.
    pub via: Option<String>,
    /// Clients are proxies whose fields are true: add to them instead of replacing them.
    pub trust_clients: bool,
    /// The protocols of Upgrade that are forwarded.
    pub upgrades: Vec<String>,
}

impl Default for Forwarding {
    fn default() -> Forwarding {
        Forwarding {
            x_forwarded: true,
            forwarded: false,
            via: None,
            trust_clients: false,
            upgrades: vec!["websocket".to_owned()],
        }
    }
}

/// The access log.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Log {
    /// The file, to which lines are appended.
    pub file: PathBuf,
    /// The form of its lines.
    #[serde(default)]
    pub format: Format,
}

/// The form of the log's lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// NCSA's common log format.
    Common,
    /// The common format with Referer and User-Agent.
    #[default]
    Combined,
    /// An object of JSON for each request.
    Json,
}
