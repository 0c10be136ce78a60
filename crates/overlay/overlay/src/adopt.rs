//! Adopts the host connections of an earlier router on this host. They continue, and this router
//! applies its policy to them. They are found by the overlay addresses that are stored with their
//! sockets in the kernel. These also decide whose they are: the other host need not be known yet, since
//! etcd or the Kubernetes API may name it later.

use shunt_kernel::names::{self, Named};

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
fn of(shared: &Shared, Named { socket, ends: (local, remote), .. }: Named) -> Option<Connection> {
    let loaded = shared.loaded();
    let (end, client, server) = if loaded.host().addresses().any(|own| own == socket.local) {
        (End::Server, remote, local)
    } else if loaded.host().address.ip() == socket.local.ip() && loaded.config.is_overlays(remote.ip()) {
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
        port: None,
    })
}
