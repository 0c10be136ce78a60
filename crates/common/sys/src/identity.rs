//! Identifies a socket by what the kernel reports about it (L3). Nothing here comes from the
//! socket's owner.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::{AddressFamily, SocketType, getpeername, getsockname, ipproto, sockopt};
use thiserror::Error;

use crate::{Errno, Result, sockopt as raw, tcp};

const SO_BINDTOIFINDEX: i32 = 62;
const SO_NETNS_COOKIE: i32 = 71;

/// An established TCP socket as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// SO_COOKIE: unique for the life of the kernel.
    pub cookie: u64,
    /// SO_NETNS_COOKIE: the network namespace.
    pub netns: u64,
    /// The local address. An IPv4-mapped address is stored as IPv4, so that it equals the peer's.
    pub local: SocketAddr,
    /// The peer's address, normalised like `local`.
    pub remote: SocketAddr,
    /// Bound to a device or VRF, where addresses can repeat within one namespace.
    pub bound_device: bool,
}

/// The properties of a TCP socket that the kernel reports without the socket lock. The owner of a
/// socket can hold its lock for as long as it likes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    /// SO_COOKIE: unique for the life of the kernel.
    pub cookie: u64,
    /// Why a descriptor cannot be an endpoint.
    pub netns: u64,
    /// Bound to a device or VRF, where addresses can repeat within one namespace.
    pub bound_device: bool,
}

/// Why a descriptor is no endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IdentifyError {
    /// Not a socket.
    #[error("the descriptor is not a socket")]
    NotASocket,
    /// A socket of another kind: Unix, UDP, MPTCP, raw.
    #[error("the socket does not speak TCP over IPv4 or IPv6")]
    NotTcp,
    /// Listening, connecting, closing or closed.
    #[error("the TCP socket is in state {0}, not established")]
    NotEstablished(u8),
    /// The kernel returned an error, or lacks an option (SO_NETNS_COOKIE needs Linux 5.14).
    #[error("the kernel did not describe the socket: {0}")]
    Kernel(Errno),
}

/// Asks the kernel which connection `fd` is. Waits for the socket lock, and so for any thread that
/// is inside a call on the socket. Use it only for sockets of this process.
pub fn identify(fd: impl AsFd) -> std::result::Result<Identity, IdentifyError> {
    let fd = fd.as_fd();
    let Shown { cookie, netns, bound_device } = shown(fd)?;
    let state = tcp::state(fd).map_err(IdentifyError::Kernel)?;
    if state != tcp::ESTABLISHED {
        return Err(IdentifyError::NotEstablished(state));
    }
    let address = |address: Result<rustix::net::SocketAddrAny>| match address {
        Ok(address) => SocketAddr::try_from(address).map(normalise).map_err(IdentifyError::Kernel),
        // The connection was reset after its state was read.
        Err(Errno::NOTCONN | Errno::INVAL) => Err(IdentifyError::NotEstablished(tcp::CLOSE)),
        Err(error) => Err(IdentifyError::Kernel(error)),
    };
    let local = address(getsockname(fd))?;
    let remote = address(getpeername(fd).and_then(|peer| peer.ok_or(Errno::NOTCONN)))?;
    Ok(Identity { cookie, netns, local, remote, bound_device })
}

/// Identifies a TCP socket without taking its lock. Never blocks, whatever `fd` is.
pub fn shown(fd: impl AsFd) -> std::result::Result<Shown, IdentifyError> {
    let fd = fd.as_fd();
    match sockopt::socket_domain(fd) {
        Ok(AddressFamily::INET | AddressFamily::INET6) => {}
        Ok(_) => return Err(IdentifyError::NotTcp),
        // An O_PATH descriptor is EBADF.
        Err(Errno::NOTSOCK | Errno::BADF) => return Err(IdentifyError::NotASocket),
        Err(error) => return Err(IdentifyError::Kernel(error)),
    }
    let stream = sockopt::socket_type(fd).map_err(IdentifyError::Kernel)? == SocketType::STREAM;
    let protocol = sockopt::socket_protocol(fd).map_err(IdentifyError::Kernel)?;
    if !stream || protocol != Some(ipproto::TCP) {
        return Err(IdentifyError::NotTcp);
    }
    let device = raw::read::<u32>(fd, libc::SOL_SOCKET, SO_BINDTOIFINDEX).map_err(IdentifyError::Kernel)?.0;
    Ok(Shown {
        cookie: sockopt::socket_cookie(fd).map_err(IdentifyError::Kernel)?,
        netns: namespace(fd).map_err(IdentifyError::Kernel)?,
        bound_device: device != 0,
    })
}

/// Returns the cookie of the network namespace of an IP socket.
pub fn namespace(fd: BorrowedFd<'_>) -> Result<u64> {
    raw::read::<u64>(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE).map(|(cookie, _)| cookie)
}

/// Converts an IPv4-mapped address to IPv4, and drops flow label and scope. A link-local peer binds
/// the socket to its device, so `bound_device` covers the scope.
pub fn normalise(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4),
        v4 => v4,
    };
    SocketAddr::new(ip, address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain as D, Protocol, Socket, Type};
    use std::net::{TcpListener, TcpStream, UdpSocket};

    fn loopback(listen: &str, connect: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(listen).unwrap();
        let port = listener.local_addr().unwrap().port();
        let client = TcpStream::connect((connect, port)).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn the_two_ends_of_a_connection_mirror_each_other() {
        for (listen, connect) in [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1"), ("[::]:0", "127.0.0.1")] {
            let (client, server) = loopback(listen, connect);
            let (one, two) = (identify(&client).unwrap(), identify(&server).unwrap());
            assert_eq!((one.local, one.remote, one.netns), (two.remote, two.local, two.netns));
            assert_ne!(one.cookie, two.cookie);
            assert_eq!(one.local, client.local_addr().unwrap());
            assert!(!one.bound_device && !two.bound_device);
        }
        let (_client, server) = loopback("[::]:0", "127.0.0.1");
        let server = identify(&server).unwrap();
        assert!(server.local.is_ipv4());
    }

    #[test]
    fn what_is_no_established_tcp_socket_is_named() {
        assert_eq!(identify(std::io::pipe().unwrap().0), Err(IdentifyError::NotASocket));
        let path = rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        assert_eq!(identify(path), Err(IdentifyError::NotASocket));
        assert_eq!(identify(UdpSocket::bind("127.0.0.1:0").unwrap()), Err(IdentifyError::NotTcp));
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(identify(unix), Err(IdentifyError::NotTcp));
        if let Ok(mptcp) = Socket::new(D::IPV4, Type::STREAM, Some(Protocol::from(262))) {
            assert_eq!(identify(mptcp), Err(IdentifyError::NotTcp));
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(identify(&listener), Err(IdentifyError::NotEstablished(10)));
        let fresh = Socket::new(D::IPV4, Type::STREAM, None).unwrap();
        assert_eq!(identify(fresh), Err(IdentifyError::NotEstablished(tcp::CLOSE)));
        let (client, server) = loopback("127.0.0.1:0", "127.0.0.1");
        drop(server);
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(matches!(identify(&client), Err(IdentifyError::NotEstablished(_))));
    }

    #[test]
    fn addresses_are_normalised() {
        let mapped: SocketAddr = "[::ffff:127.0.0.1]:80".parse().unwrap();
        assert_eq!(normalise(mapped), "127.0.0.1:80".parse().unwrap());
        let v6: SocketAddr = "[2001:db8::1]:80".parse().unwrap();
        assert_eq!(normalise(v6), v6);
    }
}
