//! Queries the kernel whether a socket is alive, by its addresses and its cookie
//! (NETLINK_SOCK_DIAG, exact look-up).
//!
//! The queries request nothing for which the kernel would take the socket's lock, such as `struct
//! tcp_info`. A thread inside a call on the socket can hold that lock for as long as it likes. The
//! cookie is part of each query, so false addresses do not lead to another socket. Before Linux
//! 6.9, however, the queries of all processes are serialised.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};
use shunt_sys::{Errno, identity};
use zerocopy::byteorder::network_endian::U16 as BigU16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const IPPROTO_TCP: u8 = 6;

/// A netlink socket for the socket table of the network namespace in which it was opened.
#[derive(Debug)]
pub(crate) struct Diag {
    socket: OwnedFd,
    netns: u64,
    sequence: u32,
}

impl AsFd for Diag {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct MessageHeader {
    len: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    port: u32,
}

/// `struct inet_diag_sockid`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct SocketId {
    local_port: BigU16,
    remote_port: BigU16,
    local: [u8; 16],
    remote: [u8; 16],
    interface: u32,
    cookie: [u32; 2],
}

/// A netlink header and `struct inet_diag_req_v2`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Question {
    header: MessageHeader,
    family: u8,
    protocol: u8,
    extensions: u8,
    pad: u8,
    states: u32,
    id: SocketId,
}

/// `struct inet_diag_msg`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Answer {
    family: u8,
    state: u8,
    timer: u8,
    retransmits: u8,
    id: SocketId,
    rest: [u32; 4],
    inode: u32,
}

const _: () = assert!(size_of::<Question>() == 72 && size_of::<Answer>() == 72);

/// A live socket that the kernel found by its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The TCP state.
    pub(crate) state: u8,
    /// Whether a process holds the socket. The kernel continues a connection that no process holds.
    pub(crate) is_held: bool,
}

impl Diag {
    pub(crate) fn open() -> Result<Diag, Errno> {
        let protocol = Some(netlink::SOCK_DIAG);
        let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, protocol)?;
        let netns = identity::namespace(socket.as_fd())?;
        Ok(Diag { socket, netns, sequence: 0 })
    }

    /// Returns the network namespace whose sockets can be queried.
    pub(crate) fn netns(&self) -> u64 {
        self.netns
    }

    /// Returns the live TCP socket from `local` to `remote`, if it has this SO_COOKIE. Both
    /// addresses must be of one family.
    pub(crate) fn find(
        &mut self,
        local: SocketAddr,
        remote: SocketAddr,
        cookie: u64,
    ) -> Result<Option<Found>, Errno> {
        self.sequence = self.sequence.wrapping_add(1);
        let question = question(self.sequence, local, remote, cookie);
        // The kernel answers during the send, so the receive does not wait.
        send(&self.socket, question.as_bytes(), SendFlags::DONTWAIT)?;
        let mut buffer = [0; 2048];
        loop {
            let (len, _) = recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT)?;
            let Ok((header, body)) = MessageHeader::read_from_prefix(&buffer[..len]) else {
                return Err(Errno::PROTO);
            };
            // Skips an answer to an earlier query that failed.
            if header.sequence != self.sequence {
                continue;
            }
            return match header.kind {
                SOCK_DIAG_BY_FAMILY => {
                    let (answer, _) = Answer::read_from_prefix(body).map_err(|_| Errno::PROTO)?;
                    Ok(Some(Found { state: answer.state, is_held: answer.inode != 0 }))
                }
                NLMSG_ERROR => {
                    let (code, _) = i32::read_from_prefix(body).map_err(|_| Errno::PROTO)?;
                    match Errno::from_raw_os_error(code.wrapping_neg()) {
                        // No socket has the addresses, or another one does, such as a listener to
                        // which the look-up falls back.
                        Errno::NOENT | Errno::STALE => Ok(None),
                        error => Err(error),
                    }
                }
                _ => Err(Errno::PROTO),
            };
        }
    }
}

fn question(sequence: u32, local: SocketAddr, remote: SocketAddr, cookie: u64) -> Question {
    let octets = |ip: IpAddr| {
        let mut bytes = [0; 16];
        match ip {
            IpAddr::V4(v4) => bytes[..4].copy_from_slice(&v4.octets()),
            IpAddr::V6(v6) => bytes = v6.octets(),
        }
        bytes
    };
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    Question {
        header: MessageHeader {
            len: size_of::<Question>() as u32,
            kind: SOCK_DIAG_BY_FAMILY,
            flags: NLM_F_REQUEST,
            sequence,
            port: 0,
        },
        family: family.as_raw() as u8,
        protocol: IPPROTO_TCP,
        extensions: 0,
        pad: 0,
        states: u32::MAX,
        id: SocketId {
            local_port: local.port().into(),
            remote_port: remote.port().into(),
            local: octets(local.ip()),
            remote: octets(remote.ip()),
            interface: 0,
            cookie: [cookie as u32, (cookie >> 32) as u32],
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    use shunt_sys::tcp;

    fn found(diag: &mut Diag, socket: &TcpStream) -> Option<Found> {
        let (local, remote) = (socket.local_addr().unwrap(), socket.peer_addr().unwrap());
        let (local, remote) = (identity::normalise(local), identity::normalise(remote));
        diag.find(local, remote, identity::shown(socket).unwrap().cookie).unwrap()
    }

    #[test]
    fn a_live_connection_is_found_from_both_ends() {
        let mut diag = Diag::open().unwrap();
        for (listen, connect) in [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1"), ("[::]:0", "127.0.0.1")] {
            let listener = TcpListener::bind(listen).unwrap();
            let port = listener.local_addr().unwrap().port();
            let client = TcpStream::connect((connect, port)).unwrap();
            let server = listener.accept().unwrap().0;
            for socket in [&client, &server] {
                let expected = Found { state: tcp::ESTABLISHED, is_held: true };
                assert_eq!(found(&mut diag, socket), Some(expected));
            }
        }
    }

    #[test]
    fn a_connection_may_live_longer_than_its_holders() {
        let mut diag = Diag::open().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_server, shown) = (listener.accept().unwrap(), identity::identify(&client).unwrap());
        let copy = client.try_clone().unwrap();
        drop(client);
        assert!(found(&mut diag, &copy).unwrap().is_held);
        drop(copy);
        let found = diag.find(shown.local, shown.remote, shown.cookie).unwrap().unwrap();
        assert_eq!((found.state == tcp::ESTABLISHED, found.is_held), (false, false));
    }

    #[test]
    fn another_socket_with_these_addresses_is_not_it() {
        let mut diag = Diag::open().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        let (one, other) = (identity::identify(&client).unwrap(), identity::identify(&server).unwrap());
        assert_eq!(diag.find(one.local, one.remote, other.cookie), Ok(None));
        assert_eq!(diag.find(one.local, one.remote, 0), Ok(None));
        // No socket has these addresses, or the listener is found instead.
        let nobody = "127.0.0.1:9".parse().unwrap();
        assert_eq!(diag.find(one.local, nobody, one.cookie), Ok(None));
        assert_eq!(diag.find(listener.local_addr().unwrap(), nobody, one.cookie), Ok(None));
        let cookie = identity::shown(&listener).unwrap().cookie;
        let found = diag.find(listener.local_addr().unwrap(), nobody, cookie).unwrap().unwrap();
        assert_ne!(found.state, tcp::ESTABLISHED);
    }
}
