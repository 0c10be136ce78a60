//! What a relay can be asked while it runs.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shunt_control::AskError;

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// How it is.
    Status,
    /// One value of the configuration is another from now on.
    Set(String),
    /// The file is read again.
    Reload,
    /// No connection is taken any more; when the last has ended, or after so many seconds, the relay ends.
    Drain(u64),
}

/// Asks the relay whose control socket this is.
pub fn ask(path: &Path, request: &Request) -> Result<Value, AskError> {
    shunt_control::ask(RELAY, path, request)
}

/// What runs, in messages.
pub(crate) const RELAY: &str = "relay";
