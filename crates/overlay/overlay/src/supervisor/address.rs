//! Socket addresses of IPv4 and IPv6, read from and written to another process's memory.

use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::AsFd;

use rustix::net::{SocketAddrAny, connect, getpeername, getsockname};
use shunt_sys::{Errno, identity, other};

use super::Call;

/// The sizes of `struct sockaddr_in` and `struct sockaddr_in6`.
const V4: usize = 16;
const V6: usize = 28;
/// The longest address that the kernel accepts (`struct sockaddr_storage`).
const LONGEST: u64 = 128;

/// The destination of a connect call, copied from the program's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// The destination, with IPv4-mapped addresses as IPv4.
    pub(super) to: SocketAddr,
    /// The destination as the program wrote it.
    pub(super) given: SocketAddr,
}

impl Address {
    /// Reads the second and third argument of connect. Returns `None` if they are no IP address.
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
                let word = |at: usize| bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
                let flow = u32::from_be_bytes(word(4)?);
                // Early versions of the structure had no scope id.
                let scope = u32::from_ne_bytes(word(24).unwrap_or_default());
                SocketAddrV6::new(Ipv6Addr::from(octets), port, flow, scope).into()
            }
            _ => return None,
        };
        Some(Address { to: identity::normalise(given), given })
    }

    /// Connects a socket to the destination.
    pub(super) fn connect(&self, socket: impl AsFd) -> Result<(), Errno> {
        connect(socket, &self.given)
    }

    /// Returns the local address of a socket.
    pub(super) fn of_socket(socket: impl AsFd) -> Option<SocketAddr> {
        let address = SocketAddr::try_from(getsockname(socket).ok()?).ok()?;
        Some(identity::normalise(address))
    }
}

/// The address of a socket's peer.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    /// The address in the form in which the kernel returned it.
    raw: SocketAddrAny,
}

impl Peer {
    pub(super) fn of(socket: impl AsFd) -> Option<Peer> {
        let raw = getpeername(socket).ok()??;
        let address = identity::normalise(SocketAddr::try_from(raw.clone()).ok()?);
        Some(Peer { address, raw })
    }

    /// Writes the address to the place that accept's arguments give, as the kernel does.
    pub(super) fn report(&self, call: &Call) -> Result<(), Errno> {
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
        for host in ["127.0.0.1:0", "[::ffff:127.0.0.1]:0", "[::1]:0"] {
            let listener = TcpListener::bind(host).unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let peer = Peer::of(&client).unwrap();
            let address = Address::parse(&peer.bytes()).unwrap();
            assert_eq!(address.given, listener.local_addr().unwrap());
            assert_eq!(address.to, peer.address);
            assert!(address.to.ip().is_loopback());
        }
    }

    #[test]
    fn a_zone_and_a_flow_are_kept() {
        let given: SocketAddr = SocketAddrV6::new("fe80::1".parse().unwrap(), 80, 0x12345, 7).into();
        let bytes = Peer { address: given, raw: given.into() }.bytes();
        assert_eq!(Address::parse(&bytes).unwrap().given, given);
        assert_eq!(Address::parse(&bytes[..24]).unwrap().to.to_string(), "[fe80::1]:80", "of old");
    }

    #[test]
    fn other_families_are_nobodys_business() {
        let mut unix = [0; V6];
        unix[0] = libc::AF_UNIX as u8;
        assert_eq!(Address::parse(&unix), None);
        let mut v6 = [0; V6];
        v6[0] = libc::AF_INET6 as u8;
        assert_eq!(Address::parse(&v6[..V4]), None, "cut short");
    }
}
