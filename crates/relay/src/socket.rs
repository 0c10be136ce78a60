//! Sockets of the relay before they connect or listen.

use std::io;
use std::net::SocketAddr;

use socket2::{Domain, Protocol, Socket, Type};

/// Returns a socket for connections to or at this address.
pub(crate) fn new(address: SocketAddr) -> io::Result<Socket> {
    Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))
}

/// Allows the socket to use addresses that are not this host's; needs CAP_NET_ADMIN. `address` only
/// selects the address family.
pub(crate) fn make_transparent(socket: &Socket, address: SocketAddr) -> io::Result<()> {
    match address {
        SocketAddr::V4(_) => socket.set_ip_transparent_v4(true),
        SocketAddr::V6(_) => socket.set_ip_transparent_v6(true),
    }
}
