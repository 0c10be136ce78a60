//! The control protocol between a process and the broker: one message per SOCK_SEQPACKET datagram.
//!
//! Every message is a [`Header`] and a fixed body; descriptors travel beside it by SCM_RIGHTS, and each kind
//! says how many. A message of another length, version or kind is an error of its sender: the broker counts
//! it, logs it and hangs up; the shim drops the broker and stays on TCP.

use std::net::SocketAddr;

use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::VERSION;
use crate::address::{from_octets, to_octets};
use crate::geometry::Side;

/// The first word of every message: "SHNT".
pub const MAGIC: u32 = u32::from_le_bytes(*b"SHNT");
/// The largest message, and so the receive buffer each side needs.
pub const MAX_MESSAGE: usize = 256;

/// Bytes of JSON in each datagram of a status.
pub const STATUS_PART: usize = 16 * 1024;

/// What every message begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    magic: u32,
    version: u16,
    kind: u16,
}

/// Why a datagram is no message of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// Shorter or longer than its kind, or not even a header.
    #[error("message of {0} bytes: truncated, or not of its kind's length")]
    Length(usize),
    /// Not our protocol.
    #[error("message does not begin with SHNT")]
    Magic,
    /// Another version.
    #[error("protocol version {0}, this side speaks {VERSION}: restart the programs or the broker")]
    Version(u16),
    /// A kind this direction does not have.
    #[error("unknown message kind {0}")]
    Kind(u16),
    /// Descriptors missing or too many.
    #[error("message came with {0} descriptors")]
    Descriptors(usize),
    /// A field outside its range.
    #[error("field {0} out of range")]
    Field(&'static str),
}

macro_rules! messages {
    ($(#[$outer:meta])* $set:ident { $($(#[$doc:meta])* $name:ident = $kind:literal, fds $fds:literal { $($(#[$fdoc:meta])* $field:ident: $ty:ty,)* })* }) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
            #[repr(C)]
            pub struct $name { $($(#[$fdoc])* pub $field: $ty,)* }
        )*

        $(#[$outer])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $set { $($(#[$doc])* $name($name),)* }

        impl $set {
            /// The datagram for this message.
            pub fn encode(&self) -> Datagram {
                match self { $($set::$name(body) => Datagram::new($kind, body.as_bytes()),)* }
            }

            /// How many descriptors travel with it.
            pub fn descriptors(&self) -> usize {
                match self { $($set::$name(_) => $fds,)* }
            }

            /// Parses a datagram that came with `fds` descriptors.
            pub fn decode(bytes: &[u8], fds: usize) -> Result<$set, DecodeError> {
                let (header, body) =
                    Header::read_from_prefix(bytes).map_err(|_| DecodeError::Length(bytes.len()))?;
                if header.magic != MAGIC { return Err(DecodeError::Magic); }
                if header.version != VERSION { return Err(DecodeError::Version(header.version)); }
                let message = match header.kind {
                    $($kind => $set::$name($name::read_from_bytes(body).map_err(|_| DecodeError::Length(bytes.len()))?),)*
                    other => return Err(DecodeError::Kind(other)),
                };
                if message.descriptors() != fds { return Err(DecodeError::Descriptors(fds)); }
                Ok(message)
            }
        }
        $(
            impl From<$name> for $set { fn from(body: $name) -> $set { $set::$name(body) } }
            const _: () = assert!(size_of::<Header>() + size_of::<$name>() <= MAX_MESSAGE);
        )*
    };
}

messages! {
    /// What a process or the command says to the broker.
    Request {
        /// First message of a process; with its page (see [`crate::page`]), a memfd that is sealed for good: nobody can shrink it,
        /// punch holes into it or map it for writing any more.
        Hello = 1, fds 1 {
            /// The program's name, as in /proc/PID/comm, padded with zeros.
            program: [u8; 32],
        }
        /// Offers an endpoint for pairing, with the socket itself. The broker closes it before it answers. The addresses say
        /// which socket to ask the kernel about: what has others is none that was shown. See [`Offer::new`].
        Offer = 2, fds 1 {
            /// The shim's own name for the endpoint, echoed in the answer.
            ticket: u64,
            /// Its own address, as [`crate::address`] has it.
            local: [u8; 16],
            /// Its peer's.
            remote: [u8; 16],
            /// Its own port.
            local_port: u16,
            /// Its peer's.
            remote_port: u16,
            /// Zero.
            pad: u32,
        }
        /// Takes an offer back: the endpoint is closed or no longer eligible.
        Withdraw = 3, fds 0 {
            /// The ticket of the offer.
            ticket: u64,
        }
        /// This process has left a connection of a link for good; the broker may give it out again once both have.
        Release = 4, fds 0 {
            /// The link.
            link: u64,
            /// The connection within it.
            conn: u32,
            /// Which side of it: a process connected to itself is both.
            side: u32,
        }
        /// Registers, or replaces, the doorbell of a waiter: an eventfd that the peers of this process ring as
        /// ADR 7 says.
        Doorbell = 5, fds 1 {
            /// The waiter, below [`crate::geometry::WAITERS`].
            slot: u32,
            /// Zero.
            pad: u32,
        }
        /// Says nothing but that it has been said: whether the broker takes it shows in [`crate::page::Board::taken`].
        Announce = 6, fds 0 {
            /// Zero.
            pad: u64,
        }
        /// This process has left a connection of a link, but others that have the memory from it may still drain the lanes:
        /// `Release` follows when none does. Until then they may offer the socket themselves.
        Leave = 7, fds 0 {
            /// The link.
            link: u64,
            /// The connection within it.
            conn: u32,
            /// Which side of it: a process connected to itself is both.
            side: u32,
        }
        /// Asks for the state of everything: see [`crate::status`]. Like `Capture` it needs no hello.
        Status = 16, fds 0 {
            /// Zero.
            pad: u64,
        }
        /// Asks to read along (docs/adr/0030). It needs no hello, and nothing may follow it.
        Capture = 17, fds 0 {
            /// Zero.
            pad: u64,
        }
    }
}

messages! {
    /// What the broker says.
    Reply {
        /// Answers a hello, with the process's board (see [`crate::page`]), a memfd sealed in the same way.
        Welcome = 1, fds 1 {
            /// The broker's name for this process.
            process: u64,
        }
        /// A link with another process, with its memfd.
        Link = 2, fds 1 {
            /// The broker's name for the link.
            link: u64,
            /// The process at the other side.
            peer: u64,
            /// Bytes of one ring: see [`crate::geometry::Geometry`].
            ring_bytes: u64,
            /// Which side the receiver of this message is.
            side: u32,
            /// Zero.
            pad: u32,
        }
        /// The doorbell of one waiter of a peer, with its eventfd. Replaces an earlier one of the same slot.
        PeerDoorbell = 3, fds 1 {
            /// The process whose waiter it is.
            peer: u64,
            /// The waiter.
            slot: u32,
            /// Zero.
            pad: u32,
        }
        /// The endpoint has found its other end. The link was announced before.
        Pair = 4, fds 0 {
            /// The ticket of the offer.
            ticket: u64,
            /// SO_COOKIE of the endpoint as the broker saw it.
            cookie: u64,
            /// The link.
            link: u64,
            /// The connection within it.
            conn: u32,
            /// Which side the receiver of this message is.
            side: u32,
            /// After how many seconds without a segment something on the way may forget the connection, so that TCP has to
            /// send a probe before; 0: nothing does.
            silence: u32,
            /// The same once one of the two ends has finished.
            silence_half_closed: u32,
        }
        /// The offer cannot be paired; or what came of it must end, for a reason for which connections on shared memory end
        /// ([`Reason::ends_pairs`](crate::reason::Reason::ends_pairs)).
        Refused = 5, fds 0 {
            /// The ticket of the offer.
            ticket: u64,
            /// A [`crate::reason::Reason`] code.
            reason: u32,
            /// Zero.
            pad: u32,
        }
        /// A process that this one had links with has ended.
        PeerGone = 6, fds 0 {
            /// The process.
            peer: u64,
        }
        /// Both processes of a link have released all of it, and it is no more: it is to be unmapped.
        Unlink = 7, fds 0 {
            /// The link.
            link: u64,
            /// Which side the receiver of this message is: a process connected to itself is told of both.
            side: u32,
            /// Zero.
            pad: u32,
        }
        /// Answers `Status`. What follows is a [`crate::status::Snapshot`] as JSON, in datagrams of [`STATUS_PART`] bytes, the last of
        /// what is left: memory that the broker would hand over could be kept for ever.
        StatusReply = 16, fds 0 {
            /// Bytes of JSON.
            bytes: u64,
        }
        /// Answers `Capture`: what is seen follows for as long as the connection lasts.
        Capturing = 17, fds 0 {
            /// 1: everything. 0: what belongs to the asker, at both ends.
            of_all: u32,
            /// Zero.
            pad: u32,
        }
        /// A link to read along, with its memfd, open for reading only. Its connections follow.
        SeenLink = 18, fds 1 {
            /// The link.
            link: u64,
            /// Bytes of one ring.
            ring_bytes: u64,
            /// Whose each side is.
            pids: [u32; 2],
            /// Their names, as in [`Hello`].
            programs: [[u8; 32]; 2],
        }
        /// A connection of a seen link. As long as somebody reads along, its place in the link is not given out again.
        SeenPair = 19, fds 0 {
            /// The link.
            link: u64,
            /// The connection within it.
            conn: u32,
            /// 1: it has just been paired, and nothing of it has been missed. 0: it was under way.
            fresh: u32,
            /// SO_COOKIE of the two endpoints.
            cookies: [u64; 2],
            /// For each side its own address and its peer's, as it sees them itself and as [`crate::address`] has them.
            addresses: [[[u8; 16]; 2]; 2],
            /// Their ports.
            ports: [[u16; 2]; 2],
            /// The sequence number of the first byte that each side sends, if [`known`](SeenPair::known).
            first: [u32; 2],
            /// 1: the sequence numbers are known.
            known: u64,
        }
        /// A connection of a seen link is no more: both its ends have left it.
        SeenEnd = 20, fds 0 {
            /// The link.
            link: u64,
            /// The connection within it.
            conn: u32,
            /// Zero.
            pad: u32,
        }
        /// A seen link is no more.
        SeenUnlink = 21, fds 0 {
            /// The link.
            link: u64,
        }
    }
}

impl SeenPair {
    /// The addresses of the two sides, as one of them sees them.
    pub fn seen_by(&self, side: Side) -> [SocketAddr; 2] {
        let (addresses, ports) = (self.addresses[side as usize], self.ports[side as usize]);
        let [own, other] = [0, 1].map(|end| SocketAddr::new(from_octets(addresses[end]), ports[end]));
        match side {
            Side::A => [own, other],
            Side::B => [other, own],
        }
    }
}

impl Offer {
    /// Offers the socket that has these addresses, under a ticket.
    pub fn new(ticket: u64, local: SocketAddr, remote: SocketAddr) -> Offer {
        Offer {
            ticket,
            local: to_octets(local.ip()),
            remote: to_octets(remote.ip()),
            local_port: local.port(),
            remote_port: remote.port(),
            pad: 0,
        }
    }

    /// The two addresses, its own first, if they are of one family.
    pub fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        let local = SocketAddr::new(from_octets(self.local), self.local_port);
        let remote = SocketAddr::new(from_octets(self.remote), self.remote_port);
        (local.is_ipv4() == remote.is_ipv4()).then_some((local, remote))
    }
}

/// One encoded message.
#[derive(Clone, Copy)]
pub struct Datagram {
    bytes: [u8; MAX_MESSAGE],
    len: usize,
}

impl Datagram {
    fn new(kind: u16, body: &[u8]) -> Datagram {
        let mut datagram = Datagram { bytes: [0; MAX_MESSAGE], len: size_of::<Header>() + body.len() };
        let header = Header { magic: MAGIC, version: VERSION, kind };
        datagram.bytes[..size_of::<Header>()].copy_from_slice(header.as_bytes());
        datagram.bytes[size_of::<Header>()..datagram.len].copy_from_slice(body);
        datagram
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_come_back_as_they_went() {
        let pair = Reply::Pair(Pair {
            ticket: 1,
            cookie: 2,
            link: 3,
            conn: 63,
            side: 1,
            silence: 60,
            silence_half_closed: 20,
        });
        assert_eq!(Reply::decode(pair.encode().as_bytes(), 0), Ok(pair));
        let hello = Request::Hello(Hello { program: [b'x'; 32] });
        assert_eq!(Request::decode(hello.encode().as_bytes(), 1), Ok(hello));
    }

    #[test]
    fn an_offer_has_two_addresses_of_one_family() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let offer = |local, remote| Offer::new(7, address(local), address(remote)).addresses();
        for (local, remote) in [("127.0.0.1:80", "127.0.0.1:999"), ("[2001:db8::1]:80", "[::1]:9")] {
            assert_eq!(offer(local, remote), Some((address(local), address(remote))));
        }
        let mapped = offer("[::ffff:10.0.0.1]:80", "10.0.0.2:81");
        assert_eq!(mapped, Some((address("10.0.0.1:80"), address("10.0.0.2:81"))));
        assert_eq!(offer("127.0.0.1:80", "[::1]:999"), None);
        assert_eq!(offer("[::1]:80", "127.0.0.1:999"), None);
    }

    #[test]
    fn each_kind_of_rubbish_has_its_own_error() {
        let datagram = Request::Withdraw(Withdraw { ticket: 5 }).encode();
        let bytes = datagram.as_bytes();
        assert_eq!(Request::decode(&bytes[..7], 0), Err(DecodeError::Length(7)));
        assert_eq!(Request::decode(&bytes[..15], 0), Err(DecodeError::Length(15)));
        assert_eq!(Request::decode(bytes, 1), Err(DecodeError::Descriptors(1)));
        let mut other = bytes.to_vec();
        other[4] = VERSION as u8 + 1;
        assert_eq!(Request::decode(&other, 0), Err(DecodeError::Version(VERSION + 1)));
        other[0] = 0;
        assert_eq!(Request::decode(&other, 0), Err(DecodeError::Magic));
        let mut unknown = bytes.to_vec();
        unknown[6] = 99;
        assert_eq!(Request::decode(&unknown, 0), Err(DecodeError::Kind(99)));
    }

    proptest! {
        #[test]
        fn decoding_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300), fds in 0usize..4) {
            let _ = Request::decode(&bytes, fds);
            let _ = Reply::decode(&bytes, fds);
        }
    }
}
