//! The requests to a running relay.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shunt_control::AskError;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Returns the status.
    Status,
    /// Replaces one value of the configuration.
    Set(String),
    /// Reads the configuration file again.
    Reload,
    /// Stops accepting connections. The relay ends when the last connection has ended, or after
    /// this many seconds.
    Drain(u64),
}

/// Sends a request to the relay that has this control socket.
pub fn ask(path: &Path, request: &Request) -> Result<Value, AskError> {
    shunt_control::ask(RELAY, path, request)
}

/// The name of the service in messages.
pub(crate) const RELAY: &str = "relay";
