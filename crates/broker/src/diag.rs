//! Asks the kernel which live socket has a pair of addresses, and what has passed it (NETLINK_SOCK_DIAG, exact
//! look-up).

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};
use shunt_sys::{Errno, identity};
use zerocopy::byteorder::network_endian::U16 as BigU16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const TCP_LISTEN: u8 = 10;
const IPPROTO_TCP: u8 = 6;
/// The attribute that holds `struct tcp_info`.
const INET_DIAG_INFO: u16 = 2;

/// A socket to the kernel's socket table of the network namespace that it was opened in.
#[derive(Debug)]
pub(crate) struct Diag {
    socket: OwnedFd,
    netns: u64,
    sequence: u32,
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

/// A live connection, as the kernel finds it by its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// SO_COOKIE.
    pub(crate) cookie: u64,
    /// Whether a process has it: the kernel goes on with a connection that nobody has any more.
    pub(crate) is_held: bool,
    /// What has passed it.
    pub(crate) counts: Counts,
}

/// How much has passed a socket, in the kernel's counts: each may have a SYN or a FIN in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) acked: u64,
    pub(crate) received: u64,
    /// Everything sent, also what was sent again.
    pub(crate) sent: u64,
}

impl Diag {
    pub(crate) fn open() -> Result<Diag, Errno> {
        let protocol = Some(netlink::SOCK_DIAG);
        let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, protocol)?;
        let netns = identity::namespace(socket.as_fd())?;
        Ok(Diag { socket, netns, sequence: 0 })
    }

    /// The one network namespace whose sockets can be asked about.
    pub(crate) fn netns(&self) -> u64 {
        self.netns
    }

    /// The live TCP connection from `local` to `remote`, if there is one.
    pub(crate) fn find(&mut self, local: SocketAddr, remote: SocketAddr) -> Result<Option<Found>, Errno> {
        self.sequence = self.sequence.wrapping_add(1);
        let question = question(self.sequence, local, remote);
        // The kernel answers inside the send, so nothing here waits.
        send(&self.socket, question.as_bytes(), SendFlags::DONTWAIT)?;
        let mut buffer = [0; 2048];
        loop {
            let (len, _) = recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT)?;
            let Ok((header, body)) = MessageHeader::read_from_prefix(&buffer[..len]) else {
                return Err(Errno::PROTO);
            };
            // What is left over from a question that failed half way.
            if header.sequence != self.sequence {
                continue;
            }
            return match header.kind {
                SOCK_DIAG_BY_FAMILY => {
                    let (answer, attributes) = Answer::read_from_prefix(body).map_err(|_| Errno::PROTO)?;
                    let [low, high] = answer.id.cookie.map(u64::from);
                    // The look-up falls back to a listener where no connection is.
                    let connected = answer.state != TCP_LISTEN;
                    let counts = counts(attributes).unwrap_or_default();
                    let is_held = answer.inode != 0;
                    Ok(connected.then_some(Found { cookie: low | high << 32, is_held, counts }))
                }
                NLMSG_ERROR => {
                    let (code, _) = i32::read_from_prefix(body).map_err(|_| Errno::PROTO)?;
                    match Errno::from_raw_os_error(code.wrapping_neg()) {
                        Errno::NOENT => Ok(None),
                        error => Err(error),
                    }
                }
                _ => Err(Errno::PROTO),
            };
        }
    }
}

/// What `struct tcp_info` says, if it is among the attributes. A time-wait socket has none.
fn counts(mut attributes: &[u8]) -> Option<Counts> {
    while let Some((&[len, len_high, kind, kind_high], _)) = attributes.split_first_chunk() {
        let len = usize::from(u16::from_ne_bytes([len, len_high]));
        let value = attributes.get(4..len)?;
        if u16::from_ne_bytes([kind, kind_high]) == INET_DIAG_INFO {
            let count = |at: usize| u64::read_from_bytes(value.get(at..at + 8)?).ok();
            return Some(Counts { acked: count(120)?, received: count(128)?, sent: count(200)? });
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
    None
}

fn question(sequence: u32, local: SocketAddr, remote: SocketAddr) -> Question {
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
        extensions: 1 << (INET_DIAG_INFO - 1),
        pad: 0,
        states: u32::MAX,
        id: SocketId {
            local_port: local.port().into(),
            remote_port: remote.port().into(),
            local: octets(local.ip()),
            remote: octets(remote.ip()),
            interface: 0,
            // No cookie: whichever socket it is.
            cookie: [u32::MAX; 2],
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_live_connection_is_found_from_both_ends() {
        let mut diag = Diag::open().unwrap();
        for (listen, connect) in [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1"), ("[::]:0", "127.0.0.1")] {
            let listener = TcpListener::bind(listen).unwrap();
            let port = listener.local_addr().unwrap().port();
            let client = TcpStream::connect((connect, port)).unwrap();
            let server = listener.accept().unwrap().0;
            for socket in [&client, &server] {
                let shown = identity::identify(socket).unwrap();
                assert_eq!(shown.netns, diag.netns());
                let found = diag.find(shown.local, shown.remote).unwrap().unwrap();
                assert_eq!(found.cookie, shown.cookie);
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
        assert!(diag.find(shown.local, shown.remote).unwrap().unwrap().is_held);
        drop(copy);
        let found = diag.find(shown.local, shown.remote).unwrap().unwrap();
        assert_eq!((found.cookie, found.is_held), (shown.cookie, false));
    }

    #[test]
    fn what_has_passed_is_counted() {
        let mut diag = Diag::open().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        client.write_all(&[1; 1000]).unwrap();
        server.read_exact(&mut [0; 1000]).unwrap();
        let mut counts = |socket: &TcpStream| {
            let shown = identity::identify(socket).unwrap();
            diag.find(shown.local, shown.remote).unwrap().unwrap().counts
        };
        // The opener's SYN is among what was acknowledged.
        assert_eq!(counts(&client), Counts { acked: 1001, received: 0, sent: 1000 });
        assert_eq!(counts(&server), Counts { acked: 0, received: 1000, sent: 0 });
    }

    #[test]
    fn a_listener_or_nothing_is_no_connection() {
        let mut diag = Diag::open().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (local, remote) = (listener.local_addr().unwrap(), "127.0.0.1:9".parse().unwrap());
        assert_eq!(diag.find(local, remote), Ok(None));
        drop(listener);
        assert_eq!(diag.find(local, remote), Ok(None));
    }
}
