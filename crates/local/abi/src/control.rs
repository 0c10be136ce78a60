//! The control protocol between a process and the broker: one message per SOCK_SEQPACKET datagram.
//!
//! Every message is a [`Header`] and a fixed body. Descriptors travel with it by SCM_RIGHTS; each
//! kind has a fixed number of them. A message of another length, version or kind is an error of its
//! sender: the broker counts it, logs it and closes the connection; the shim drops the broker and
//! stays on TCP.

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

/// The beginning of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    magic: u32,
    version: u16,
    kind: u16,
}

/// The reason why a datagram is no message of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// It is shorter or longer than its kind, or shorter than a header.
    #[error("message of {0} bytes: truncated, or not of its kind's length")]
    Length(usize),
    /// It belongs to another protocol.
    #[error("message does not begin with SHNT")]
    Magic,
    /// It has another version.
    #[error("protocol version {0}, this side speaks {VERSION}: restart the programs or the broker")]
    Version(u16),
    /// Its kind does not exist in this direction.
    #[error("unknown message kind {0}")]
    Kind(u16),
    /// Descriptors are missing, or there are too many.
    #[error("message came with {0} descriptors")]
    Descriptors(usize),
    /// A field is outside its range.
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
            /// Returns the datagram of this message.
            pub fn encode(&self) -> Datagram {
                match self { $($set::$name(body) => Datagram::new($kind, body.as_bytes()),)* }
            }

            /// Returns how many descriptors travel with the message.
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
    /// A message from a process or the command to the broker.
    Request {
        /// The first message of a process, with its page (see [`crate::page`]): a memfd that is
        /// sealed for good. No process can shrink it, punch holes into it or map it for writing any
        /// more.
        Hello = 1, fds 1 {
            /// The program's name, as in /proc/PID/comm, padded with zeros.
            program: [u8; 32],
        }
        /// Offers an endpoint for pairing, with the socket itself. The broker closes the socket
        /// before it answers. The addresses name the socket that the broker asks the kernel about;
        /// a socket with other addresses does not count as shown. See [`Offer::new`].
        Offer = 2, fds 1 {
            /// The shim's identifier of the endpoint, which the answer repeats.
            ticket: u64,
            /// The socket's own address, in the form of [`crate::address`].
            local: [u8; 16],
            /// The address of its peer.
            remote: [u8; 16],
            /// The socket's own port.
            local_port: u16,
            /// The port of its peer.
            remote_port: u16,
            /// Zero.
            pad: u32,
        }
        /// Withdraws an offer: the endpoint is closed or no longer eligible.
        Withdraw = 3, fds 0 {
            /// The ticket of the offer.
            ticket: u64,
        }
        /// Reports that this process has left a connection of a link for good. The broker may
        /// assign the connection again once both processes have.
        Release = 4, fds 0 {
            /// The link.
            link: u64,
            /// The connection within it.
            conn: u32,
            /// The side of it: a process connected to itself is both.
            side: u32,
        }
        /// Registers, or replaces, the doorbell of a waiter: an eventfd that the peers of this
        /// process write to, as ADR 7 describes.
        Doorbell = 5, fds 1 {
            /// The waiter, below [`crate::geometry::WAITERS`].
            slot: u32,
            /// Zero.
            pad: u32,
        }
        /// Has no effect but to be counted: [`crate::page::Board::taken`] shows whether the broker
        /// has processed it.
        Announce = 6, fds 0 {
            /// Zero.
            pad: u64,
        }
        /// Reports that this process has left a connection of a link, while other processes that
        /// inherited its memory may still drain the lanes. `Release` follows when none does. Until
        /// then they may offer the socket themselves.
        Leave = 7, fds 0 {
            /// The link.
            link: u64,
            /// The connection within it.
            conn: u32,
            /// The side of it: a process connected to itself is both.
            side: u32,
        }
        /// This process has mapped its side of a link that was announced, has closed the
        /// descriptor, and will touch nothing of it before the first `Pair`. Or it could not.
        Mapped = 8, fds 0 {
            /// The link.
            link: u64,
            /// Which side of it: a process connected to itself answers for both.
            side: u32,
            /// 1: it has. 0: there was no room.
            is_mapped: u32,
        }
        /// Withdraws an offer that has found no other end in time. The endpoint stays on TCP. If the
        /// other end is offered later, `Wanted` reports that.
        GiveUp = 9, fds 0 {
            /// The ticket of the offer.
            ticket: u64,
        }
        /// Passes bytes that were in a lane and that TCP has yet to take: the socket, and a file with
        /// the bytes. The broker sends them once this process has ended, or at `SendKept`. Replaces
        /// an earlier message with the ticket.
        Keep = 10, fds 2 {
            /// The shim's identifier of the endpoint.
            ticket: u64,
            /// The position of the TCP stream at which the bytes begin, as the kernel counts it.
            position: u64,
            /// The number of the bytes.
            bytes: u64,
        }
        /// Asks the broker to send what `Keep` has passed. This process does not send it any more.
        SendKept = 11, fds 0 {
            /// The ticket of the `Keep`.
            ticket: u64,
            /// 1: a shutdown of the sending direction follows. 0: it does not.
            then_shut: u32,
            /// Zero.
            pad: u32,
        }
        /// TCP has all that `Keep` has passed, or the connection is over.
        DropKept = 12, fds 0 {
            /// The ticket of the `Keep`.
            ticket: u64,
        }
        /// Asks for the state of everything: see [`crate::status`]. Like `Capture` it needs no
        /// hello.
        Status = 16, fds 0 {
            /// Zero.
            pad: u64,
        }
        /// Asks all programs that the next `Status` shows to measure latencies for the next seconds.
        /// It needs no hello. See [`crate::latency`].
        Latency = 18, fds 0 {
            /// Zero.
            pad: u64,
        }
        /// Requests a capture (docs/adr/0030). It needs no hello, and no message may follow it.
        Capture = 17, fds 0 {
            /// Zero.
            pad: u64,
        }
    }
}

messages! {
    /// A message from the broker.
    Reply {
        /// Answers a hello, with the process's board (see [`crate::page`]), a memfd sealed in the
        /// same way.
        Welcome = 1, fds 1 {
            /// The broker's identifier of this process.
            process: u64,
        }
        /// Passes the memfd of a link with another process. The receiver maps it, and answers with
        /// `Mapped`. The memfd may not be sealed yet: a process that touches the memory before the
        /// first `Pair` could wait for holes that the other process punches.
        Link = 2, fds 1 {
            /// The broker's identifier of the link.
            link: u64,
            /// The process at the other side.
            peer: u64,
            /// Bytes of one ring: see [`crate::geometry::Geometry`].
            ring_bytes: u64,
            /// The side of the receiver of this message.
            side: u32,
            /// Zero.
            pad: u32,
        }
        /// The doorbell of one waiter of a peer, with its eventfd. Replaces an earlier one of that
        /// slot.
        PeerDoorbell = 3, fds 1 {
            /// The process whose waiter it is.
            peer: u64,
            /// The waiter.
            slot: u32,
            /// Zero.
            pad: u32,
        }
        /// The endpoint is paired with its other end. The link was announced before and is sealed
        /// now, so no process can punch holes into it.
        Pair = 4, fds 0 {
            /// The ticket of the offer.
            ticket: u64,
            /// SO_COOKIE of the endpoint as the broker saw it.
            cookie: u64,
            /// The link.
            link: u64,
            /// The connection within it.
            conn: u32,
            /// The side of the receiver of this message.
            side: u32,
            /// After this number of seconds without a segment, a device on the path may forget the
            /// connection, so TCP must send a probe before. 0: no device does.
            silence: u32,
            /// The number of seconds once one of the two ends has finished.
            silence_half_closed: u32,
        }
        /// Reports that the offer cannot be paired. A pair that it has led to must end as well, if
        /// the reason is one for which connections on shared memory end
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
        /// Reports that both processes have released all of a link, and that it no longer exists.
        /// The receiver unmaps it.
        Unlink = 7, fds 0 {
            /// The link.
            link: u64,
            /// The side of the receiver of this message. A process connected to itself gets one
            /// message for each side.
            side: u32,
            /// 1: the link can be unmapped. 0: it stays mapped, since it was never sealed, and
            /// munmap could wait for a process that punches holes into it.
            may_unmap: u32,
        }
        /// Asks for the end of a link that holds much unused memory, which is free only once the
        /// link has gone. Connections that still use it fall back to TCP, and may be offered again.
        Vacate = 8, fds 0 {
            /// The link.
            link: u64,
            /// Which side the receiver of this message is.
            side: u32,
            /// Zero.
            pad: u32,
        }
        /// The other end of an endpoint whose offer this process has given up is offered now. It is
        /// a hint: the endpoint may be offered again.
        Wanted = 9, fds 0 {
            /// The ticket of the offer that was given up.
            ticket: u64,
        }
        /// Reports that the broker keeps too much already, so that it does not send what a `Keep` has
        /// passed.
        NotKept = 10, fds 0 {
            /// The ticket of the `Keep`.
            ticket: u64,
        }
        /// Answers `Status`. A [`crate::status::Snapshot`] as JSON follows, in datagrams of
        /// [`STATUS_PART`] bytes; the last has the rest. It is not passed as a memfd, because the
        /// receiver could keep that memory for ever.
        StatusReply = 16, fds 0 {
            /// Bytes of JSON.
            bytes: u64,
        }
        /// Answers `Capture`: links and connections follow for as long as the control connection
        /// lasts.
        Capturing = 17, fds 0 {
            /// 1: everything. 0: connections both of whose ends belong to the user of the capture.
            of_all: u32,
            /// Zero.
            pad: u32,
        }
        /// Announces a link to capture, with its memfd, open for reading only. Its connections
        /// follow.
        SeenLink = 18, fds 1 {
            /// The link.
            link: u64,
            /// Bytes of one ring.
            ring_bytes: u64,
            /// The process of each side.
            pids: [u32; 2],
            /// Names of the two programs, as in [`Hello`].
            programs: [[u8; 32]; 2],
        }
        /// Announces a connection of a captured link. While a capture runs, its place in the link
        /// is not assigned again.
        SeenPair = 19, fds 0 {
            /// The link.
            link: u64,
            /// The connection within it.
            conn: u32,
            /// 1: it has just been paired, and the capture has all of it. 0: it was under way.
            fresh: u32,
            /// SO_COOKIE of the two endpoints.
            cookies: [u64; 2],
            /// For each side, its own address and its peer's, as that side sees them, in the form
            /// of [`crate::address`].
            addresses: [[[u8; 16]; 2]; 2],
            /// Their ports.
            ports: [[u16; 2]; 2],
            /// The sequence number of the first byte that each side sends, if
            /// [`known`](SeenPair::known).
            first: [u32; 2],
            /// 1: the sequence numbers are known.
            known: u64,
        }
        /// Reports that both ends of a connection of a captured link have left it.
        SeenEnd = 20, fds 0 {
            /// The link.
            link: u64,
            /// The connection within it.
            conn: u32,
            /// Zero.
            pad: u32,
        }
        /// Reports that a captured link no longer exists.
        SeenUnlink = 21, fds 0 {
            /// The link.
            link: u64,
        }
    }
}

impl SeenPair {
    /// Returns the addresses of the two sides, as one of them sees them.
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
    /// Returns an offer of the socket with these addresses, under a ticket.
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

    /// Returns the two addresses, the socket's own first, if they are of one family.
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

    /// Returns the bytes to send.
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
