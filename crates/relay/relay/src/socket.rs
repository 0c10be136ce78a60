//! Sockets of the relay before they connect or listen.

use std::io;
use std::net::{Ipv6Addr, SocketAddr};

use rustix::io::Errno;
use socket2::{Domain, Protocol, Socket, Type};

/// Returns a socket for connections to or at this address.
pub(crate) fn new(address: SocketAddr) -> io::Result<Socket> {
    Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))
}

/// Returns false if the kernel has no IPv6 sockets, as with the boot parameter `ipv6.disable=1`. A
/// host that disables IPv6 by sysctl has them.
pub(crate) fn has_ipv6() -> bool {
    !lacks_family(&new((Ipv6Addr::UNSPECIFIED, 0).into()))
}

fn lacks_family<T>(made: &io::Result<T>) -> bool {
    let unsupported = Errno::AFNOSUPPORT.raw_os_error();
    made.as_ref().is_err_and(|error| error.raw_os_error() == Some(unsupported))
}

/// Allows the socket to use addresses that are not this host's; needs CAP_NET_ADMIN. `address` only
/// selects the address family.
pub(crate) fn make_transparent(socket: &Socket, address: SocketAddr) -> io::Result<()> {
    match address {
        SocketAddr::V4(_) => socket.set_ip_transparent_v4(true),
        SocketAddr::V6(_) => socket.set_ip_transparent_v6(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_unsupported_family_is_lacking() {
        let failed = |errno: Errno| lacks_family::<()>(&Err(errno.into()));
        assert!(failed(Errno::AFNOSUPPORT));
        assert!(!failed(Errno::MFILE) && !lacks_family(&Ok(())));
    }
}
