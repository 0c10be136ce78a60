//! Host connections that a router of this host made which has ended since: they go on, and are under the policy of this one. What they are
//! is known by the names that they were given, which belong to their sockets.

use shunt_kernel::names::{self, Named};

use crate::connections::{Connection, Place};
use crate::errand::ALL;
use crate::metrics::End;
use crate::options::Options;
use crate::policy::Flow;
use crate::shared::Shared;

/// Enters those that there are.
pub(crate) fn connections(shared: &Shared) {
    match names::all() {
        Ok(named) => shared.connections.adopt(named.into_iter().filter_map(|named| of(shared, named))),
        Err(error) => {
            tracing::warn!(%error, "connections that were made by the router before are under no policy");
        }
    }
}

/// None: it is another's, of whatever else gives names.
fn of(shared: &Shared, Named { socket, local, remote }: Named) -> Option<Connection> {
    let loaded = shared.loaded();
    let router = loaded.host().address;
    let mut routers = loaded.config.hosts.iter().map(|host| host.address);
    let (end, client, server) = if socket.local == router {
        (End::Server, remote, local)
    } else if routers.any(|router| router == socket.remote) {
        (End::Client, local, remote)
    } else {
        return None;
    };
    Some(Connection {
        end,
        namespace: ALL,
        place: Place::new(socket.cookie, socket.local, socket.remote),
        flow: Flow { source: client.ip(), destination: server },
        own: Options::unset(socket.local.is_ipv6()),
        _overlay: None,
    })
}
