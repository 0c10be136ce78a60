//! The frames that two relays exchange on a connection (docs/relay-protocol.md).
//!
//! All numbers are in network byte order, and all frames have a fixed length:
//!
//! ```text
//! hello    105 bytes   "shuntrly", version, name padded with zeros (64), nonce (32)
//! open      39 bytes   1, flags, hops, target and client: address (16) and port (2) each
//! verdict    2 bytes   2, code
//! ```
//!
//! The caller and the listener exchange hellos and proofs (`handshake`). Then the caller sends an
//! open frame and the stream. The listener answers with a verdict and the stream. For example, a
//! verdict of the bytes 2 and 1 means that the target has refused.
//!
//! The frames may come from an attacker, so every field is checked before it is used.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::config::{MAX_NAME, Source};

/// The first bytes of every connection. They distinguish a relay from anything else.
pub(crate) const MAGIC: [u8; 8] = *b"shuntrly";
/// The version of all frames. Relays of different versions do not communicate.
pub(crate) const VERSION: u8 = 1;

/// An error in a received frame.
#[derive(Debug, Error)]
pub(crate) enum FrameError {
    #[error("the connection ended or failed: {0}")]
    Io(#[from] io::Error),
    #[error("it is no relay")]
    NotARelay,
    #[error("it speaks version {0} of the protocol, and this relay version {VERSION}")]
    Version(u8),
    #[error("it says what has no meaning ({0})")]
    Nonsense(&'static str),
    #[error("it does not know the key")]
    Stranger,
    #[error("it turned this relay away")]
    TurnedAway,
}

/// The largest number of relays that a connection may pass.
pub(crate) const MAX_HOPS: u8 = 8;

/// The purpose of the stream that follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Open {
    pub(crate) target: SocketAddr,
    pub(crate) client: SocketAddr,
    pub(crate) source: Source,
    /// The number of relays that it may still pass.
    pub(crate) hops: u8,
}

/// The length of an [`Open`] frame: kind, flags, hops, two addresses.
const OPEN: usize = 3 + 2 * ADDRESS;
/// The length of an address, IPv6 or IPv4-mapped, and a port.
const ADDRESS: usize = 18;
const KIND_OPEN: u8 = 1;
const FLAG_SOURCE_CLIENT: u8 = 1;

impl Open {
    pub(crate) fn encode(&self) -> [u8; OPEN] {
        let mut frame = [0; OPEN];
        frame[0] = KIND_OPEN;
        frame[1] = if self.source == Source::Client { FLAG_SOURCE_CLIENT } else { 0 };
        frame[2] = self.hops;
        frame[3..3 + ADDRESS].copy_from_slice(&encode_address(self.target));
        frame[3 + ADDRESS..].copy_from_slice(&encode_address(self.client));
        frame
    }

    pub(crate) async fn read(from: &mut (impl AsyncRead + Unpin)) -> Result<Open, FrameError> {
        let mut frame = [0; OPEN];
        from.read_exact(&mut frame).await?;
        Open::decode(&frame)
    }

    fn decode(frame: &[u8; OPEN]) -> Result<Open, FrameError> {
        if frame[0] != KIND_OPEN {
            return Err(FrameError::Nonsense("a frame of unknown kind"));
        }
        let source = match frame[1] {
            0 => Source::Relay,
            FLAG_SOURCE_CLIENT => Source::Client,
            _ => return Err(FrameError::Nonsense("unknown flags")),
        };
        if frame[2] > MAX_HOPS {
            return Err(FrameError::Nonsense("too many hops"));
        }
        let (target, client) =
            (decode_address(&frame[3..3 + ADDRESS]), decode_address(&frame[3 + ADDRESS..]));
        if target.port() == 0 || target.ip().is_unspecified() || target.ip().is_multicast() {
            return Err(FrameError::Nonsense("a target that is no address"));
        }
        Ok(Open { target, client, source, hops: frame[2] })
    }
}

/// The answer to an [`Open`] frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Verdict {
    Connected = 0,
    /// The target's host has refused.
    Refused = 1,
    /// The target cannot be reached.
    Unreachable = 2,
    /// The target does not answer.
    TimedOut = 3,
    /// The listening relay does not allow the caller to reach this target.
    Denied = 4,
    /// A relay on the path has reached its limit of connections, or is draining.
    Full = 5,
    /// The path contains a loop.
    Circle = 6,
    /// The next relay cannot be reached.
    NoRelay = 7,
}

impl Verdict {
    pub(crate) const ALL: [Verdict; 8] = [
        Verdict::Connected,
        Verdict::Refused,
        Verdict::Unreachable,
        Verdict::TimedOut,
        Verdict::Denied,
        Verdict::Full,
        Verdict::Circle,
        Verdict::NoRelay,
    ];

    /// Returns the name in metrics and logs.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Verdict::Connected => "connected",
            Verdict::Refused => "refused",
            Verdict::Unreachable => "unreachable",
            Verdict::TimedOut => "timed-out",
            Verdict::Denied => "denied",
            Verdict::Full => "full",
            Verdict::Circle => "circle",
            Verdict::NoRelay => "no-relay",
        }
    }

    /// Returns the verdict for an error of `connect`.
    pub(crate) fn of(error: &io::Error) -> Verdict {
        match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset => Verdict::Refused,
            io::ErrorKind::TimedOut => Verdict::TimedOut,
            _ => Verdict::Unreachable,
        }
    }
}

/// The length of a verdict frame.
pub(crate) const REPLY: usize = 2;
const KIND_REPLY: u8 = 2;

pub(crate) fn encode_reply(verdict: Verdict) -> [u8; REPLY] {
    [KIND_REPLY, verdict as u8]
}

pub(crate) fn decode_reply(frame: [u8; REPLY]) -> Result<Verdict, FrameError> {
    let known = Verdict::ALL.into_iter().find(|verdict| *verdict as u8 == frame[1]);
    known.filter(|_| frame[0] == KIND_REPLY).ok_or(FrameError::Nonsense("an unknown verdict"))
}

/// The name that a relay claims, and its nonce. Nothing of it is authenticated yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) name: String,
    pub(crate) nonce: [u8; NONCE],
}

pub(crate) const NONCE: usize = 32;
/// The length of a hello frame: magic, version, a name padded with zeros, a nonce.
pub(crate) const HELLO: usize = MAGIC.len() + 1 + MAX_NAME + NONCE;

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO] {
        let mut frame = [0; HELLO];
        frame[..8].copy_from_slice(&MAGIC);
        frame[8] = VERSION;
        frame[9..9 + self.name.len()].copy_from_slice(self.name.as_bytes());
        frame[HELLO - NONCE..].copy_from_slice(&self.nonce);
        frame
    }

    /// Reads a hello frame. Fails at the first byte that no relay would send, without waiting for
    /// the rest of the frame.
    pub(crate) async fn read(
        from: &mut (impl AsyncRead + Unpin),
    ) -> Result<([u8; HELLO], Hello), FrameError> {
        let mut frame = [0; HELLO];
        from.read_exact(&mut frame[..1]).await?;
        if frame[0] != MAGIC[0] {
            return Err(FrameError::NotARelay);
        }
        from.read_exact(&mut frame[1..9]).await?;
        if frame[..8] != MAGIC {
            return Err(FrameError::NotARelay);
        }
        if frame[8] != VERSION {
            return Err(FrameError::Version(frame[8]));
        }
        from.read_exact(&mut frame[9..]).await?;
        let name = &frame[9..9 + MAX_NAME];
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(MAX_NAME);
        let name =
            str::from_utf8(&name[..end]).map_err(|_| FrameError::Nonsense("a name that is no text"))?;
        let name = name.to_owned();
        let nonce = frame[HELLO - NONCE..].try_into().expect("the last bytes");
        Ok((frame, Hello { name, nonce }))
    }
}

fn encode_address(address: SocketAddr) -> [u8; ADDRESS] {
    let mut bytes = [0; ADDRESS];
    let ip = match address.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    bytes[..16].copy_from_slice(&ip.octets());
    bytes[16..].copy_from_slice(&address.port().to_be_bytes());
    bytes
}

fn decode_address(bytes: &[u8]) -> SocketAddr {
    let ip: [u8; 16] = bytes[..16].try_into().expect("of this length");
    SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), u16::from_be_bytes([bytes[16], bytes[17]]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at_once<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    #[test]
    fn an_open_is_read_as_it_was_written() {
        for (target, client) in [("10.0.0.1:80", "10.9.0.1:4000"), ("[fd00::1]:443", "10.9.0.1:4000")] {
            let (target, client) = (target.parse().unwrap(), client.parse().unwrap());
            for source in [Source::Relay, Source::Client] {
                let open = Open { target, client, source, hops: 3 };
                assert_eq!(at_once(Open::read(&mut &open.encode()[..])).unwrap(), open);
            }
        }
    }

    #[test]
    fn a_verdict_is_read_as_it_was_written() {
        for verdict in Verdict::ALL {
            assert_eq!(decode_reply(encode_reply(verdict)).unwrap(), verdict);
        }
        assert!(decode_reply([KIND_REPLY, 99]).is_err());
        assert!(decode_reply([KIND_OPEN, 0]).is_err());
    }

    #[test]
    fn a_hello_is_read_as_it_was_written() {
        for name in ["a", &"n".repeat(MAX_NAME)] {
            let hello = Hello { name: name.to_owned(), nonce: [7; NONCE] };
            assert_eq!(at_once(Hello::read(&mut &hello.encode()[..])).unwrap().1, hello);
        }
    }

    #[test]
    fn a_stranger_is_known_by_its_first_byte() {
        assert!(matches!(at_once(Hello::read(&mut &b"G"[..])), Err(FrameError::NotARelay)));
        assert!(matches!(at_once(Hello::read(&mut &b"shuntrlx\x01"[..])), Err(FrameError::NotARelay)));
        assert!(matches!(at_once(Hello::read(&mut &b"shuntrly\x09"[..])), Err(FrameError::Version(9))));
    }

    proptest! {
        #[test]
        fn only_a_hello_is_taken_for_one(bytes: Vec<u8>) {
            prop_assert!(at_once(Hello::read(&mut &bytes[..])).is_err());
        }

        #[test]
        fn an_open_that_is_taken_is_written_the_same(mut frame in prop::array::uniform32(any::<u8>()), rest: [u8; OPEN - 32]) {
            (frame[0], frame[1], frame[2]) = (KIND_OPEN, frame[1] & 3, frame[2] & 15);
            let bytes: [u8; OPEN] = [&frame[..], &rest].concat().try_into().unwrap();
            if let Ok(open) = Open::decode(&bytes) {
                prop_assert_eq!(open.encode(), bytes);
            }
        }
    }
}
