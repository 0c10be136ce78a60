//! Addresses of IPv4, also as IPv6 sockets write them, in another process's memory and about sockets.

use std::net::{Ipv6Addr, SocketAddr, SocketAddrV4};
use std::os::fd::AsFd;

use rustix::net::{SocketAddrAny, connect, getpeername, getsockname};
use shunt_sys::{Errno, identity, other};

use super::Call;

/// `struct sockaddr_in` and `struct sockaddr_in6`.
const V4: usize = 16;
const V6: usize = 28;
/// No length of an address is larger for the kernel.
const LONGEST: u64 = 128;

/// Where a program connects to, copied from its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) v4: SocketAddrV4,
    /// As the program wrote it.
    pub(super) given: SocketAddr,
}

impl Address {
    /// The second and third argument of connect, if they are an address of IPv4.
    pub(super) fn of_connect(call: &Call) -> Option<Address> {
        let [_, at, len, ..] = call.notification.arguments;
        // The kernel takes an int.
        let len = len & u64::from(u32::MAX);
        if !(V4 as u64..=LONGEST).contains(&len) {
            return None;
        }
        let mut bytes = [0; V6];
        let len = (len as usize).min(V6);
        other::read(call.thread(), at, &mut bytes[..len]).ok()?;
        if !call.waits() {
            return None;
        }
        Address::parse(&bytes[..len])
    }

    fn parse(bytes: &[u8]) -> Option<Address> {
        let family = i32::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
        let port = u16::from_be_bytes([bytes[2], bytes[3]]);
        let given = match family {
            libc::AF_INET => {
                let octets: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
                SocketAddr::new(octets.into(), port)
            }
            libc::AF_INET6 => {
                let octets: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
                SocketAddr::new(Ipv6Addr::from(octets).into(), port)
            }
            _ => return None,
        };
        match identity::normalise(given) {
            SocketAddr::V4(v4) => Some(Address { v4, given }),
            SocketAddr::V6(_) => None,
        }
    }

    /// Connects a socket there.
    pub(super) fn connect(&self, socket: impl AsFd) -> Result<(), Errno> {
        connect(socket, &self.given)
    }

    /// A socket's own; `::` is any.
    pub(super) fn of_socket(socket: impl AsFd) -> Option<SocketAddrV4> {
        let address = SocketAddr::try_from(getsockname(socket).ok()?).ok()?;
        match identity::normalise(address) {
            SocketAddr::V4(v4) => Some(v4),
            SocketAddr::V6(v6) if v6.ip().is_unspecified() => {
                Some(SocketAddrV4::new(std::net::Ipv4Addr::UNSPECIFIED, v6.port()))
            }
            SocketAddr::V6(_) => None,
        }
    }
}

/// Of whom a socket is connected to.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) v4: Option<SocketAddrV4>,
    /// As the kernel writes it.
    raw: SocketAddrAny,
}

impl Peer {
    pub(super) fn of(socket: impl AsFd) -> Option<Peer> {
        let raw = getpeername(socket).ok()??;
        let v4 = match identity::normalise(SocketAddr::try_from(raw.clone()).ok()?) {
            SocketAddr::V4(v4) => Some(v4),
            SocketAddr::V6(_) => None,
        };
        Some(Peer { v4, raw })
    }

    /// Writes it where accept's arguments say, as the kernel does.
    pub(super) fn tell(&self, call: &Call) -> Result<(), Errno> {
        let [_, at, len_at, ..] = call.notification.arguments;
        if at == 0 {
            return Ok(());
        }
        let mut room = [0; 4];
        other::read(call.thread(), len_at, &mut room)?;
        let room = usize::try_from(i32::from_ne_bytes(room)).map_err(|_| Errno::INVAL)?;
        let bytes = self.bytes();
        other::write(call.thread(), at, &bytes[..room.min(bytes.len())])?;
        other::write(call.thread(), len_at, &(bytes.len() as u32).to_ne_bytes())
    }

    fn bytes(&self) -> Vec<u8> {
        match SocketAddr::try_from(self.raw.clone()) {
            Ok(SocketAddr::V4(v4)) => {
                let mut bytes = vec![0; V4];
                bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
                bytes[2..4].copy_from_slice(&v4.port().to_be_bytes());
                bytes[4..8].copy_from_slice(&v4.ip().octets());
                bytes
            }
            Ok(SocketAddr::V6(v6)) => {
                let mut bytes = vec![0; V6];
                bytes[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
                bytes[2..4].copy_from_slice(&v6.port().to_be_bytes());
                bytes[4..8].copy_from_slice(&v6.flowinfo().to_be_bytes());
                bytes[8..24].copy_from_slice(&v6.ip().octets());
                bytes[24..].copy_from_slice(&v6.scope_id().to_ne_bytes());
                bytes
            }
            Err(_) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn an_address_is_read_as_the_kernel_writes_it() {
        for host in ["127.0.0.1:0", "[::ffff:127.0.0.1]:0"] {
            let listener = TcpListener::bind(host).unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let peer = Peer::of(&client).unwrap();
            let address = Address::parse(&peer.bytes()).unwrap();
            assert_eq!(address.given, listener.local_addr().unwrap());
            assert_eq!(Some(address.v4), peer.v4);
            assert!(address.v4.ip().is_loopback());
        }
    }

    #[test]
    fn other_families_are_nobodys_business() {
        let mut unix = [0; V6];
        unix[0] = libc::AF_UNIX as u8;
        assert_eq!(Address::parse(&unix), None);
        let mut v6 = [0; V6];
        v6[0] = libc::AF_INET6 as u8;
        v6[8] = 0xfd;
        assert_eq!(Address::parse(&v6), None);
        assert_eq!(Address::parse(&v6[..V4]), None, "cut short");
    }
}
