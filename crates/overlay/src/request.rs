//! What a router can be asked while it runs.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shunt_control::AskError;

use crate::policy::Policy;

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// How it is.
    Status,
    /// Which connections the supervised programs of its host have now, on which road, and why.
    Connections,
    /// Which policy holds.
    Policy,
    /// This one is to hold.
    Apply(Policy),
}

/// Asks the router whose control socket this is.
pub fn ask(path: &Path, request: &Request) -> Result<Value, AskError> {
    shunt_control::ask(ROUTER, path, request)
}

/// What runs, in messages.
pub(crate) const ROUTER: &str = "router";
