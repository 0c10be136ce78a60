//! Lists the TCP connections of a network namespace by NETLINK_SOCK_DIAG, without a descriptor of
//! any of them. Can also return the values that a BPF socket storage map holds for them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, recv, send};

use crate::identity::normalise;
use crate::peer::{COOKIE, HEADER, NLM_F_REQUEST, NLMSG_ERROR, SOCK_DIAG_BY_FAMILY, TCP_LISTEN, question};
use crate::{Errno, Result};

const NLM_F_DUMP: u16 = 0x300;
const NLMSG_DONE: u16 = 3;
/// Offsets of the ports and addresses in `struct inet_diag_msg`, local first, then remote.
const PORTS: [usize; 2] = [HEADER + 4, HEADER + 6];
const ADDRESSES: [usize; 2] = [HEADER + 8, HEADER + 24];
/// Attributes follow the message. Each is a `struct nlattr` with its value; some are nested.
const ATTRIBUTES: usize = HEADER + 72;
const ATTRIBUTE: usize = 4;
const INET_DIAG_REQ_SK_BPF_STORAGES: u16 = 2;
const SK_DIAG_BPF_STORAGE_REQ_MAP_FD: u16 = 1;
const INET_DIAG_SK_BPF_STORAGES: u16 = 20;
const SK_DIAG_BPF_STORAGE: u16 = 1;
const SK_DIAG_BPF_STORAGE_MAP_VALUE: u16 = 3;
const LISTENING: u32 = 1 << TCP_LISTEN;
/// All states but TIME_WAIT, CLOSE and LISTEN.
const CONNECTED: u32 = 0xfff & !(LISTENING | 1 << 6 | 1 << 7);

/// A connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// SO_COOKIE.
    pub cookie: u64,
    /// The local address. An IPv4-mapped address is stored as IPv4.
    pub local: SocketAddr,
    /// The peer's address.
    pub remote: SocketAddr,
}

/// Lists the connections in the network namespace in which [`crate::peer::open`] created `asker`.
pub fn connections(asker: &OwnedFd) -> Result<Vec<Listed>> {
    let mut listed = Vec::new();
    each(asker, CONNECTED, 0, &[], |message| listed.extend(connection(message)))?;
    Ok(listed)
}

/// Lists the connections with that local port.
pub fn connections_from(asker: &OwnedFd, port: u16) -> Result<Vec<Listed>> {
    let mut listed = Vec::new();
    each(asker, CONNECTED, port, &[], |message| listed.extend(connection(message)))?;
    Ok(listed)
}

/// Lists the sockets that listen at `port` on any address. Their `remote` is unspecified.
pub fn listeners(asker: &OwnedFd, port: u16) -> Result<Vec<Listed>> {
    let mut listed = Vec::new();
    each(asker, LISTENING, port, &[], |message| listed.extend(connection(message)))?;
    Ok(listed)
}

/// Lists the connections for which `map` holds a value, with that value. Needs CAP_BPF and Linux
/// 5.7.
pub fn stored(asker: &OwnedFd, map: BorrowedFd<'_>) -> Result<Vec<(Listed, Vec<u8>)>> {
    let map = attribute(SK_DIAG_BPF_STORAGE_REQ_MAP_FD, &map.as_raw_fd().to_ne_bytes());
    let mut listed = Vec::new();
    each(asker, CONNECTED, 0, &attribute(INET_DIAG_REQ_SK_BPF_STORAGES, &map), |message| {
        let storages = message.get(ATTRIBUTES..).and_then(|all| value(all, INET_DIAG_SK_BPF_STORAGES));
        let storage = storages.and_then(|storages| value(storages, SK_DIAG_BPF_STORAGE));
        let stored = storage.and_then(|storage| value(storage, SK_DIAG_BPF_STORAGE_MAP_VALUE));
        listed.extend(connection(message).zip(stored.map(<[u8]>::to_vec)));
    })?;
    Ok(listed)
}

/// Requests the sockets in some states, and passes each answer to `take`. `port` is the local port,
/// or 0 for any. `attribute` is appended to the request. Never blocks.
fn each(
    asker: &OwnedFd,
    states: u32,
    port: u16,
    attribute: &[u8],
    mut take: impl FnMut(&[u8]),
) -> Result<()> {
    for any in [IpAddr::from(Ipv4Addr::UNSPECIFIED), Ipv6Addr::UNSPECIFIED.into()] {
        let ends = (SocketAddr::new(any, port), SocketAddr::new(any, 0));
        let question = question(SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, ends, u64::MAX);
        let mut question = [&question, attribute].concat();
        let len = question.len() as u32;
        question[..4].copy_from_slice(&len.to_ne_bytes());
        question[HEADER + 4..HEADER + 8].copy_from_slice(&states.to_ne_bytes());
        send(asker, &question, SendFlags::DONTWAIT)?;
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let (len, _) = recv(asker, &mut buffer, RecvFlags::DONTWAIT)?;
            if !parts(&buffer[..len], &mut take)? {
                break;
            }
        }
    }
    Ok(())
}

/// Passes the messages of one datagram to `take`. Returns `true` if more datagrams follow.
fn parts(mut bytes: &[u8], take: &mut impl FnMut(&[u8])) -> Result<bool> {
    while bytes.len() >= HEADER {
        let len = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        match u16::from_ne_bytes([bytes[4], bytes[5]]) {
            NLMSG_DONE => return Ok(false),
            NLMSG_ERROR => return Err(Errno::IO),
            _ => bytes.get(..len).into_iter().for_each(&mut *take),
        }
        bytes = bytes.get(len.next_multiple_of(4).max(HEADER)..).unwrap_or_default();
    }
    Ok(true)
}

fn connection(message: &[u8]) -> Option<Listed> {
    let cookie = message.get(COOKIE..COOKIE + 8)?.try_into().ok()?;
    let is_v4 = u16::from(*message.get(HEADER)?) == AddressFamily::INET.as_raw();
    let address = |which: usize| {
        let (address, port) = (ADDRESSES[which], PORTS[which]);
        let octets: [u8; 16] = message.get(address..address + 16)?.try_into().ok()?;
        let ip = match is_v4 {
            true => IpAddr::from([octets[0], octets[1], octets[2], octets[3]]),
            false => IpAddr::from(octets),
        };
        let port = u16::from_be_bytes(message.get(port..port + 2)?.try_into().ok()?);
        Some(normalise(SocketAddr::new(ip, port)))
    };
    Some(Listed { cookie: u64::from_ne_bytes(cookie), local: address(0)?, remote: address(1)? })
}

pub(crate) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = (ATTRIBUTE + value.len()) as u16;
    [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat()
}

/// Returns the value of the first attribute of this kind.
pub(crate) fn value(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    // The two highest bits are flags (NLA_F_NESTED, NLA_F_NET_BYTEORDER).
    const KIND: u16 = 0x3fff;
    while attributes.len() >= ATTRIBUTE {
        let len = usize::from(u16::from_ne_bytes([attributes[0], attributes[1]]));
        if u16::from_ne_bytes([attributes[2], attributes[3]]) & KIND == kind {
            return attributes.get(ATTRIBUTE..len);
        }
        attributes = attributes.get(len.next_multiple_of(4).max(ATTRIBUTE)..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn attributes_are_found_by_their_kind() {
        let one = attribute(1, &[7; 4]);
        let both = [one.clone(), attribute(2 | 0x8000, &one)].concat();
        assert_eq!(value(&both, 1), Some(&[7; 4][..]));
        assert_eq!(value(&both, 2).and_then(|inner| value(inner, 1)), Some(&[7; 4][..]));
        assert_eq!(value(&both, 3), None);
        assert_eq!(value(&[3, 0, 1, 0], 1), None, "shorter than itself");
    }

    #[test]
    fn connections_are_listed_with_what_finds_them() {
        let asker = crate::peer::open().unwrap();
        for host in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let listener = TcpListener::bind(host).unwrap();
            let open: Vec<TcpStream> =
                (0..20).map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap()).collect();
            let listed = connections(&asker).unwrap();
            for socket in &open {
                let wanted = Listed {
                    cookie: rustix::net::sockopt::socket_cookie(socket).unwrap(),
                    local: normalise(socket.local_addr().unwrap()),
                    remote: normalise(socket.peer_addr().unwrap()),
                };
                assert!(listed.contains(&wanted), "{wanted:?}");
            }
            let at = normalise(listener.local_addr().unwrap());
            assert!(listed.iter().all(|it| it.local != at || it.remote.port() != 0), "none listens");
        }
    }

    #[test]
    fn all_that_share_a_port_are_listed() {
        let asker = crate::peer::open().unwrap();
        for host in ["127.0.0.1", "::1", "::ffff:127.0.0.1", "::"] {
            let open = |port| {
                let at = SocketAddr::new(host.parse().unwrap(), port);
                let socket =
                    socket2::Socket::new(socket2::Domain::for_address(at), socket2::Type::STREAM, None);
                let socket = socket.unwrap();
                socket.set_reuse_port(true).unwrap();
                socket.bind(&at.into()).unwrap();
                socket.listen(1).unwrap();
                TcpListener::from(socket)
            };
            let first = open(0);
            let at = first.local_addr().unwrap();
            let sockets = [first, open(at.port()), open(at.port())];
            let mut wanted = sockets.each_ref().map(|it| rustix::net::sockopt::socket_cookie(it).unwrap());
            wanted.sort_unstable();
            let mut found = listeners(&asker, at.port()).unwrap();
            assert!(found.iter().all(|it| it.local == normalise(at)), "{found:?}");
            found.sort_by_key(|it| it.cookie);
            assert_eq!(found.iter().map(|it| it.cookie).collect::<Vec<_>>(), wanted);
            drop(sockets);
            assert_eq!(listeners(&asker, at.port()), Ok(Vec::new()));
        }
    }
}
