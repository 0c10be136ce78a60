//! What supervisors and their router say to each other: one JSON object in each message, descriptors beside it. Both sides take what they
//! get for a stranger's.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ipnet::IpNet;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use shunt_sys::{Errno, seqpacket};
use thiserror::Error;

use crate::policy::Denial;
use crate::reason::Reason;

/// Of this protocol.
pub(crate) const VERSION: u32 = 7;
/// Bytes of a message at most.
const LENGTH: usize = 8192;

/// A supervisor to its router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Request {
    /// Here is a program that is to have a supervisor, and a socket of its network namespace.
    Enter(u32),
    /// It is under the filter, and this is its listener.
    Guard,
    /// Here is a supervisor; its connection stays open. Its program is under the filter for programs that are not trusted, or is not.
    Hello { version: u32, guards: bool },
    /// Whoever accepts from this listening socket will ask first.
    Listen,
    /// None of the sockets that were shown before is meant any more.
    Withdraw,
    /// The program wants to connect this socket, which is bound to an address or to none.
    Connect { to: SocketAddr, from: Option<IpAddr> },
    /// It is being connected, and has this address. If the program waits for that, it has been connected.
    Begun { local: SocketAddr, waits: bool },
    /// The program looks now whether it is connected: now or never.
    Moment,
    /// The last message has been said on the host connection, which is the program's.
    Taken,
    /// The connection stays on the overlay after all.
    Stay(Reason),
    /// This connection has been accepted.
    Accepted { local: SocketAddr, remote: SocketAddr },
    /// That is all about this connection.
    Done,
}

/// The router's answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    /// It starts its supervisor itself.
    Open,
    /// It has to be under the filter for programs that are not trusted.
    Secure,
    /// Its supervisor waits for a call of it.
    Probe,
    /// It is supervised.
    Guarded,
    /// Here is a router.
    Welcome(Welcome),
    /// The other end would take it.
    Go,
    /// Client: the host connection, and what has to be said on it. It is the program's if that can be said.
    Commit(Vec<u8>),
    /// Server: the host connection, which is the program's now.
    Take,
    /// The connection is the overlay's.
    Stay,
    /// There is to be no connection, and so the program is told.
    Deny(Denial),
    /// Whatever was shown or given is closed here: the next connection can be talked about.
    Done,
}

/// What a supervisor has to know of the overlay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Welcome {
    /// Its addresses.
    pub(crate) prefixes: Vec<IpNet>,
    /// How long another router may take to answer.
    pub(crate) ask_ms: u64,
    /// How long one end waits for the other end's program.
    pub(crate) patience_ms: u64,
    /// How long connect waits for a program that does not block.
    pub(crate) hold_ms: u64,
}

/// Why there is no message.
#[derive(Debug, Error)]
pub(crate) enum MessageError {
    /// The other side has gone.
    #[error("the other side has closed the connection")]
    Closed,
    /// It is no message of this version.
    #[error("this is no message: {0}")]
    Malformed(serde_json::Error),
    /// Not now, or not any more.
    #[error("{0}")]
    Kernel(#[from] Errno),
}

/// Sends one, with a descriptor or without; never waits.
pub(crate) fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let bytes = serde_json::to_vec(message).expect("it has no maps with odd keys");
    seqpacket::send(socket, &bytes, fd.as_slice())
}

/// Receives one, with the first descriptor that came; never waits (EAGAIN).
pub(crate) fn receive<T: DeserializeOwned>(socket: impl AsFd) -> Result<(T, Option<OwnedFd>), MessageError> {
    let mut first = None;
    let message = receive_each(socket, |fd| first = first.take().or(Some(fd)))?;
    Ok((message, first))
}

/// The same, with every descriptor, whatever the message is.
pub(crate) fn receive_each<T: DeserializeOwned>(
    socket: impl AsFd,
    sink: impl FnMut(OwnedFd),
) -> Result<T, MessageError> {
    let mut buffer = [0; LENGTH];
    let received = seqpacket::receive_each(socket, &mut buffer, sink)?;
    match received.len {
        0 => Err(MessageError::Closed),
        _ if received.truncated => Err(MessageError::Kernel(Errno::MSGSIZE)),
        len => serde_json::from_slice(&buffer[..len]).map_err(MessageError::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn what_is_no_message_is_said_to_be_none() {
        let (one, two) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        for bytes in [&b"{"[..], b"\"go\"", b"{\"connect\":\"10.0.0.1\"}", b"\xff", b"{\"stay\":\"because\"}"]
        {
            seqpacket::send(&one, bytes, &[]).unwrap();
            assert!(matches!(receive::<Request>(&two), Err(MessageError::Malformed(_))));
        }
        seqpacket::send(&one, &[b' '; LENGTH + 1], &[]).unwrap();
        assert!(matches!(receive::<Request>(&two), Err(MessageError::Kernel(Errno::MSGSIZE))));
        let sent = Request::Connect { to: "10.0.0.1:80".parse().unwrap(), from: None };
        send(&one, &sent, Some(one.as_fd())).unwrap();
        let (received, fd) = receive::<Request>(&two).unwrap();
        assert_eq!((received, fd.is_some()), (sent, true));
        drop((one, fd));
        assert!(matches!(receive::<Request>(&two), Err(MessageError::Closed)));
    }
}
