//! What the kernel says a socket is (L3). Nothing here is told by the socket's owner.

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
    /// Its own address; IPv4-mapped addresses as IPv4, so that a v6 socket meets its v4 peer.
    pub local: SocketAddr,
    /// Its peer's address, the same way.
    pub remote: SocketAddr,
    /// Bound to a device or VRF, where addresses can repeat within one namespace.
    pub bound_device: bool,
}

/// What the kernel says of a TCP socket without its lock, which its owner can hold for as long as it likes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    /// SO_COOKIE: unique for the life of the kernel.
    pub cookie: u64,
    /// SO_NETNS_COOKIE: the network namespace.
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
    /// The kernel could not say, or lacks an option (SO_NETNS_COOKIE needs Linux 5.14).
    #[error("the kernel did not describe the socket: {0}")]
    Kernel(Errno),
}

/// Asks the kernel what `fd` is. It waits for the socket's lock, and so for whoever is inside a call on it: for sockets of
/// one's own only.
pub fn identify(fd: impl AsFd) -> std::result::Result<Identity, IdentifyError> {
    let fd = fd.as_fd();
    let Shown { cookie, netns, bound_device } = shown(fd)?;
    let state = tcp::state(fd).map_err(IdentifyError::Kernel)?;
    if state != tcp::ESTABLISHED {
        return Err(IdentifyError::NotEstablished(state));
    }
    let address = |address: Result<rustix::net::SocketAddrAny>| match address {
        Ok(address) => SocketAddr::try_from(address).map(normalise).map_err(IdentifyError::Kernel),
        // It was reset since its state was read.
        Err(Errno::NOTCONN | Errno::INVAL) => Err(IdentifyError::NotEstablished(tcp::CLOSE)),
        Err(error) => Err(IdentifyError::Kernel(error)),
    };
    let local = address(getsockname(fd))?;
    let remote = address(getpeername(fd).and_then(|peer| peer.ok_or(Errno::NOTCONN)))?;
    Ok(Identity { cookie, netns, local, remote, bound_device })
}

/// Asks what `fd` is as far as no lock is in the way: which TCP socket. Waits for nobody, whatever `fd` is.
pub fn shown(fd: impl AsFd) -> std::result::Result<Shown, IdentifyError> {
    let fd = fd.as_fd();
    match sockopt::socket_domain(fd) {
        Ok(AddressFamily::INET | AddressFamily::INET6) => {}
        Ok(_) => return Err(IdentifyError::NotTcp),
        // EBADF is an O_PATH descriptor.
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

/// The cookie of the network namespace that a socket of any kind of IP lives in.
pub fn namespace(fd: BorrowedFd<'_>) -> Result<u64> {
    raw::read::<u64>(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE).map(|(cookie, _)| cookie)
}

/// IPv4-mapped as IPv4; flow label and scope dropped. A link-local peer binds the socket to its device, so no
/// scope is lost that `bound_device` does not tell.
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
