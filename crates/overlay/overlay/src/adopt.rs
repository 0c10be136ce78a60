//! Adopts the host connections of an earlier router on this host. They continue, and this router
//! applies its policy to them. They are found by the overlay addresses that are stored with their
//! sockets in the kernel.

use shunt_kernel::names::{self, Named};

use crate::config::Host;
use crate::connections::{Connection, Place};
use crate::metrics::End;
use crate::options::Options;
use crate::policy::Flow;
use crate::shared::Shared;

/// Adds the existing connections to the table.
pub(crate) fn connections(shared: &Shared) {
    match names::all() {
        Ok(named) => shared.connections.adopt(named.into_iter().filter_map(|named| of(shared, named))),
        Err(error) => {
            tracing::warn!(%error, "connections that were made by the router before are under no policy");
        }
    }
}

/// Describes a named socket as a connection. Returns `None` if it is not this overlay's.
fn of(shared: &Shared, Named { socket, local, remote }: Named) -> Option<Connection> {
    let loaded = shared.loaded();
    let mut routers = loaded.config.hosts.iter().flat_map(Host::addresses);
    // In-band discovery has not found this host again yet.
    let may_be_found = || {
        shared.in_band.as_ref().is_some_and(|in_band| in_band.permits(socket.remote.ip()))
            && loaded.config.prefixes.iter().any(|prefix| prefix.contains(&remote.ip()))
    };
    let (end, client, server) = if loaded.host().addresses().any(|own| own == socket.local) {
        (End::Server, remote, local)
    } else if routers.any(|router| router == socket.remote) || may_be_found() {
        (End::Client, local, remote)
    } else {
        return None;
    };
    Some(Connection {
        end,
        namespace: 0,
        place: Place::new(socket.cookie, socket.local, socket.remote),
        flow: Flow::of(client, server),
        own: Options::unset(socket.local.is_ipv6()),
        _overlay: None,
    })
}
