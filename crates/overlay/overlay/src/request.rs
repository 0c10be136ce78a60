//! The requests that a running router answers on its control socket.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shunt_control::AskError;

use crate::policy::Policy;

/// A request to a router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Returns the router's state and counters.
    Status,
    /// Returns the current connections of supervised programs, each with its path and its reason.
    Connections,
    /// Returns the current policy.
    Policy,
    /// Returns the verdict about a connection, and the rules that decide. Without the client's port, it
    /// may be any.
    Decide {
        /// The client's address.
        client: IpAddr,
        /// The client's port.
        #[serde(default)]
        port: Option<u16>,
        /// The server's address and port.
        server: SocketAddr,
    },
    /// Applies this policy.
    Apply(Policy),
}

/// Sends a request to the router with that control socket.
pub fn ask(path: &Path, request: &Request) -> Result<Value, AskError> {
    shunt_control::ask(ROUTER, path, request)
}

/// The name of this kind of daemon in messages.
pub(crate) const ROUTER: &str = "router";
