//! Looks up TCP sockets by address (NETLINK_SOCK_DIAG, exact look-up). In particular, this reports
//! whether any process still holds the socket at the other end of a connection in the same network
//! namespace. The kernel keeps a connection going after the last process has closed it.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, getpeername, getsockname, netlink, recv,
    send, socket_with,
};

use crate::identity::{namespace, normalise};
use crate::{Errno, Result, tcp};

pub(crate) const SOCK_DIAG_BY_FAMILY: u16 = 20;
pub(crate) const NLM_F_REQUEST: u16 = 1;
pub(crate) const NLMSG_ERROR: u16 = 2;
pub(crate) const TCP_LISTEN: u8 = 10;
const IPPROTO_TCP: u8 = 6;
/// Bytes of `struct nlmsghdr`.
pub(crate) const HEADER: usize = 16;
/// Bytes of a request: the header and `struct inet_diag_req_v2`.
pub(crate) const QUESTION: usize = HEADER + 56;
/// Offsets of `idiag_family`, `idiag_state`, `idiag_inode` and the cookie in `struct
/// inet_diag_msg`, including the header.
const FAMILY: usize = HEADER;
const STATE: usize = HEADER + 1;
const INODE: usize = HEADER + 68;
pub(crate) const COOKIE: usize = HEADER + 44;

/// Opens a netlink socket for the functions of this module.
pub fn open() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(netlink::SOCK_DIAG))
}

/// Returns whether any process holds the other end of `socket`. `asker` comes from [`open`].
/// Returns `None` if the other end is in another namespace, or is gone.
///
/// Never blocks, and takes no socket lock, which an untrusted process may hold. The kernel is asked
/// for nothing but the identity of the socket.
pub fn is_held(asker: &OwnedFd, socket: BorrowedFd<'_>) -> Result<Option<bool>> {
    if namespace(asker.as_fd())? != namespace(socket)? {
        return Ok(None);
    }
    let local = normalise(SocketAddr::try_from(getsockname(socket)?)?);
    let remote = normalise(SocketAddr::try_from(getpeername(socket)?.ok_or(Errno::NOTCONN)?)?);
    let found = find(asker, remote, local)?.filter(|found| !found.listens);
    Ok(found.map(|found| found.held))
}

/// A socket found by [`find`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// SO_COOKIE. A connection that waits to be accepted has it already.
    pub cookie: u64,
    /// The socket is a listener: no connection has both addresses.
    pub listens: bool,
    /// The connection is established: neither end has sent a FIN.
    pub is_established: bool,
    /// At least one process holds the socket.
    pub held: bool,
    /// The family is IPv4. An IPv6 socket may have IPv4-mapped addresses.
    pub is_ipv4: bool,
}

/// Finds the socket that would receive a segment from `remote` to `local`, in the network namespace
/// in which [`open`] created `asker`.
pub fn find(asker: &OwnedFd, local: SocketAddr, remote: SocketAddr) -> Result<Option<Found>> {
    // The kernel answers inside the send. The cookie u64::MAX matches any socket.
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
        is_established: answer[STATE] == tcp::ESTABLISHED,
        held: answer[INODE..INODE + 4] != [0; 4],
        is_ipv4: answer[FAMILY] == AddressFamily::INET.as_raw() as u8,
    }))
}

/// Builds a request about the TCP socket with these addresses and this cookie.
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
            let ends = [server.local_addr().unwrap(), server.peer_addr().unwrap()].map(normalise);
            let found = find(&asker, ends[0], ends[1]).unwrap().unwrap();
            assert_eq!(found.is_ipv4, listen.starts_with("127"));
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
        assert_eq!(
            found,
            Some(Found {
                cookie: cookie(listener.as_fd()),
                listens: true,
                is_established: false,
                held: true,
                is_ipv4: true,
            })
        );
        let client = TcpStream::connect(at).unwrap();
        let waiting = find(&asker, at, client.local_addr().unwrap()).unwrap().unwrap();
        assert!(!waiting.listens && waiting.is_established && !waiting.held);
        let server = listener.accept().unwrap().0;
        assert_eq!(waiting.cookie, cookie(server.as_fd()));
        drop(listener);
        assert_eq!(find(&asker, at, nobody), Ok(None));
    }

    #[test]
    fn what_is_no_connection_has_no_answer() {
        let asker = open().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(is_held(&asker, listener.as_fd()).is_err());
    }
}
