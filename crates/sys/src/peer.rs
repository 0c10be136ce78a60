//! Whether anybody still holds the socket at the other end of a connection, if that is in the same network namespace: the kernel
//! goes on with a connection that nobody has any more (NETLINK_SOCK_DIAG, exact look-up).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, getpeername, getsockname, netlink, recv,
    send, socket_with,
};

use crate::identity::{namespace, normalise};
use crate::{Errno, Result};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
pub(crate) const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
pub(crate) const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const TCP_LISTEN: u8 = 10;
const IPPROTO_TCP: u8 = 6;
/// `struct nlmsghdr`.
pub(crate) const HEADER: usize = 16;
/// That and `struct inet_diag_req_v2`.
const QUESTION: usize = HEADER + 56;
/// Where `idiag_state`, `idiag_inode` and the cookie stand in `struct inet_diag_msg`, behind the header.
const STATE: usize = HEADER + 1;
const INODE: usize = HEADER + 68;
const COOKIE: usize = HEADER + 44;
/// Where the addresses stand in it; the ports are before them.
const SOURCE: usize = HEADER + 8;
const DESTINATION: usize = HEADER + 24;
/// The states of a connection: all but LISTEN, TIME_WAIT and CLOSE.
const CONNECTIONS: u32 = 0xfff & !(1 << TCP_LISTEN | 1 << 6 | 1 << 7);

/// What can ask.
pub fn open() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(netlink::SOCK_DIAG))
}

/// Whether a process holds the other end of `socket`, by `asker`, which [`open`] has made. `None`: that cannot be told, since it is in
/// another namespace, or gone altogether.
///
/// Neither waits nor takes a lock of the socket's, which a stranger may hold: nothing is asked about it but what it is.
pub fn is_held(asker: &OwnedFd, socket: BorrowedFd<'_>) -> Result<Option<bool>> {
    if namespace(asker.as_fd())? != namespace(socket)? {
        return Ok(None);
    }
    let local = normalise(SocketAddr::try_from(getsockname(socket)?)?);
    let remote = normalise(SocketAddr::try_from(getpeername(socket)?.ok_or(Errno::NOTCONN)?)?);
    let found = find(asker, remote, local)?.filter(|found| !found.listens);
    Ok(found.map(|found| found.held))
}

/// A socket that was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// SO_COOKIE. A connection that nobody has accepted yet has it already.
    pub cookie: u64,
    /// It waits for connections: there was none with both addresses.
    pub listens: bool,
    /// A process has it.
    pub held: bool,
}

/// The socket to which a segment from `remote` to `local` would go in the network namespace of `asker`, which [`open`] has made there.
pub fn find(asker: &OwnedFd, local: SocketAddr, remote: SocketAddr) -> Result<Option<Found>> {
    // The kernel answers inside the send. No cookie: whichever socket it is.
    let question = question(SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, (local, remote), u64::MAX);
    send(asker, &question, SendFlags::DONTWAIT)?;
    let mut answer = [0; 512];
    let (len, _) = recv(asker, &mut answer, RecvFlags::DONTWAIT)?;
    let kind = u16::from_ne_bytes([answer[4], answer[5]]);
    if len < INODE + 4 || kind != SOCK_DIAG_BY_FAMILY {
        return Ok(None);
    }
    let cookie = answer[COOKIE..COOKIE + 8].try_into().map_err(|_| Errno::IO)?;
    Ok(Some(Found {
        cookie: u64::from_ne_bytes(cookie),
        listens: answer[STATE] == TCP_LISTEN,
        held: answer[INODE..INODE + 4] != [0; 4],
    }))
}

/// A connection that was come across.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// SO_COOKIE.
    pub cookie: u64,
    /// Its own address; IPv4-mapped addresses as IPv4.
    pub local: SocketAddr,
    /// Its peer's.
    pub remote: SocketAddr,
}

/// All TCP connections in the network namespace of `asker` that are more than a memory (TIME_WAIT), of both families. One that nobody has
/// asked for its cookie gets one.
pub fn list(asker: &OwnedFd) -> Result<Vec<Listed>> {
    let mut listed = Vec::new();
    for family in [AddressFamily::INET, AddressFamily::INET6] {
        let any = SocketAddr::new(
            if family == AddressFamily::INET {
                Ipv4Addr::UNSPECIFIED.into()
            } else {
                Ipv6Addr::UNSPECIFIED.into()
            },
            0,
        );
        let mut question = question(SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, (any, any), u64::MAX);
        question[HEADER + 4..HEADER + 8].copy_from_slice(&CONNECTIONS.to_ne_bytes());
        send(asker, &question, SendFlags::DONTWAIT)?;
        let mut buffer = vec![0; 32 * 1024];
        loop {
            let (len, _) = recv(asker, &mut buffer, RecvFlags::DONTWAIT)?;
            if !parts(&buffer[..len], &mut listed)? {
                break;
            }
        }
    }
    Ok(listed)
}

/// Reads what is in an answer; whether there is more to come.
fn parts(mut bytes: &[u8], listed: &mut Vec<Listed>) -> Result<bool> {
    while bytes.len() >= HEADER {
        let len = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        match u16::from_ne_bytes([bytes[4], bytes[5]]) {
            NLMSG_DONE => return Ok(false),
            NLMSG_ERROR => return Err(Errno::IO),
            _ => listed.extend(bytes.get(..len).and_then(one)),
        }
        bytes = bytes.get(len.next_multiple_of(4).max(HEADER)..).unwrap_or_default();
    }
    Ok(true)
}

fn one(message: &[u8]) -> Option<Listed> {
    let cookie = message.get(COOKIE..COOKIE + 8)?.try_into().ok()?;
    let is_v4 = i32::from(*message.get(HEADER)?) == i32::from(AddressFamily::INET.as_raw());
    let address = |address: usize, port: usize| {
        let octets: [u8; 16] = message.get(address..address + 16)?.try_into().ok()?;
        let ip = match is_v4 {
            true => IpAddr::from([octets[0], octets[1], octets[2], octets[3]]),
            false => IpAddr::from(octets),
        };
        let port = u16::from_be_bytes(message.get(port..port + 2)?.try_into().ok()?);
        Some(normalise(SocketAddr::new(ip, port)))
    };
    Some(Listed {
        cookie: u64::from_ne_bytes(cookie),
        local: address(SOURCE, HEADER + 4)?,
        remote: address(DESTINATION, HEADER + 6)?,
    })
}

/// About the TCP socket with these addresses and this cookie.
pub(crate) fn question(
    kind: u16,
    flags: u16,
    (local, remote): (SocketAddr, SocketAddr),
    cookie: u64,
) -> [u8; QUESTION] {
    let mut bytes = [0; QUESTION];
    let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
    put(0, &(QUESTION as u32).to_ne_bytes());
    put(4, &kind.to_ne_bytes());
    put(6, &flags.to_ne_bytes());
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    put(HEADER, &[family.as_raw() as u8, IPPROTO_TCP, 0, 0]);
    put(HEADER + 4, &u32::MAX.to_ne_bytes());
    put(HEADER + 8, &local.port().to_be_bytes());
    put(HEADER + 10, &remote.port().to_be_bytes());
    for (at, address) in [(HEADER + 12, local), (HEADER + 28, remote)] {
        match address.ip() {
            IpAddr::V4(v4) => put(at, &v4.octets()),
            IpAddr::V6(v6) => put(at, &v6.octets()),
        }
    }
    put(HEADER + 48, &cookie.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Shutdown, TcpListener, TcpStream};

    #[test]
    fn a_connection_whose_other_end_has_no_holder_is_known() {
        let asker = open().unwrap();
        for (listen, connect) in [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1"), ("[::]:0", "127.0.0.1")] {
            let listener = TcpListener::bind(listen).unwrap();
            let client = TcpStream::connect((connect, listener.local_addr().unwrap().port())).unwrap();
            let server = listener.accept().unwrap().0;
            let held = |socket: &TcpStream| is_held(&asker, socket.as_fd());
            assert_eq!((held(&client), held(&server)), (Ok(Some(true)), Ok(Some(true))));
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(held(&server), Ok(Some(true)), "it has only finished");
            let copy = client.try_clone().unwrap();
            drop(client);
            assert_eq!(held(&server), Ok(Some(true)));
            drop(copy);
            assert_eq!(held(&server), Ok(Some(false)));
        }
    }

    #[test]
    fn a_connection_has_its_cookie_before_it_is_accepted() {
        let asker = open().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (at, nobody) = (listener.local_addr().unwrap(), "127.0.0.1:1".parse().unwrap());
        let cookie = |socket: BorrowedFd<'_>| rustix::net::sockopt::socket_cookie(socket).unwrap();
        let found = find(&asker, at, nobody).unwrap();
        assert_eq!(found, Some(Found { cookie: cookie(listener.as_fd()), listens: true, held: true }));
        let client = TcpStream::connect(at).unwrap();
        let waiting = find(&asker, at, client.local_addr().unwrap()).unwrap().unwrap();
        assert!(!waiting.listens && !waiting.held);
        let server = listener.accept().unwrap().0;
        assert_eq!(waiting.cookie, cookie(server.as_fd()));
        drop(listener);
        assert_eq!(find(&asker, at, nobody), Ok(None));
    }

    #[test]
    fn connections_are_listed_with_what_finds_them() {
        let asker = open().unwrap();
        for host in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let listener = TcpListener::bind(host).unwrap();
            let open: Vec<TcpStream> =
                (0..20).map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap()).collect();
            let listed = list(&asker).unwrap();
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
    fn what_is_no_connection_has_no_answer() {
        let asker = open().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(is_held(&asker, listener.as_fd()).is_err());
    }
}
