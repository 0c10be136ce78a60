//! The messages between supervisors and their router: one JSON object in each, with descriptors as
//! ancillary data. Both sides check what they receive, since the sender may be hostile. See
//! docs/overlay-protocol.md for the order of messages.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ipnet::IpNet;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use shunt_sys::{Errno, seqpacket};
use thiserror::Error;

use crate::config::MAX_MS;
use crate::policy::Denial;
use crate::reason::Reason;

/// The version of this protocol.
pub(crate) const VERSION: u32 = 7;
/// A number that no router has.
pub(crate) const NO_NUMBER: u64 = 1;
/// The largest length of a message in bytes.
const LENGTH: usize = 8192;

/// A message of a supervisor, or of a program that wants one, to the router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Request {
    /// A program wants a supervisor, and passes a socket of its network namespace. The number is
    /// the [`VERSION`].
    Enter(u32),
    /// The program is under the filter, and passes the filter's listener.
    Guard,
    /// A supervisor opens the connection that stays. `guards`: its program is under the filter for
    /// programs that are not trusted. `listeners` is the number of listening sockets that a former
    /// router knew and that follow.
    Hello {
        version: u32,
        guards: bool,
        #[serde(default)]
        listeners: usize,
        /// The supervisor holds promised connections, by [`Answer::Hold`].
        #[serde(default)]
        holds: bool,
    },
    /// The supervisor will ask about each connection that is accepted from this listening socket.
    Listen,
    /// Withdraws all listening sockets that were shown before.
    Withdraw,
    /// The program wants to connect this socket, which may be bound to an address.
    /// `starts`: the supervisor sends [`Request::Started`] after [`Answer::Start`].
    Connect {
        to: SocketAddr,
        from: Option<IpAddr>,
        #[serde(default)]
        starts: bool,
    },
    /// The overlay's SYN has been sent, from this local address.
    Started { local: SocketAddr },
    /// The connect is under way, with this local address. With `waits` the program is blocked, and
    /// the connection is established.
    Begun { local: SocketAddr, waits: bool },
    /// The program asks for the result of its connect now, so this is the last moment to replace
    /// its socket.
    Moment,
    /// The Commit was sent, and the program has the host connection.
    Taken,
    /// The connection stays on the overlay after all.
    Stay(Reason),
    /// The program has accepted this connection. With `held` a former router had promised it, and
    /// the host connection is passed too.
    Accepted {
        local: SocketAddr,
        remote: SocketAddr,
        /// The router that the supervisor means. Another one, which has come meanwhile, closes the
        /// conversation: it does not know what that has promised.
        #[serde(default)]
        router: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        held: Option<Held>,
    },
    /// The supervisor is done with this connection.
    Done,
}

/// An answer of the router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    /// The program starts its supervisor itself.
    Open,
    /// The program has to install the filter for programs that are not trusted.
    Secure,
    /// The program's supervisor waits for a call of the program.
    Probe,
    /// The program is supervised.
    Guarded,
    /// Accepts a supervisor.
    Welcome(Welcome),
    /// The other end would take the connection.
    Go,
    /// Where the connection leads is known only when it is under way.
    Start,
    /// To the client: the host connection, and the Commit that the supervisor has to send on it. If
    /// sending it succeeds, the connection is the program's.
    Commit(Vec<u8>),
    /// To the server: the host connection, which is the program's now.
    Take,
    /// The connection stays on the overlay.
    Stay,
    /// The policy denies the connection. The program gets the denial's error.
    Deny(Denial),
    /// The router has closed all descriptors of this connection. The next one can begin.
    Done,
    /// Passes a host connection that is about to be promised to the process that accepts the socket
    /// with that cookie. So it outlives the router.
    Hold { cookie: u64, held: Held },
    /// The connection is not promised any more.
    Release { cookie: u64 },
}

/// What another router needs to know about a promised host connection.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Held {
    /// The key of the ticket, which seals the Commit.
    pub(crate) key: [u8; 32],
    /// The version of the line of the Ask.
    pub(crate) version: u8,
    /// The client's first sequence numbers: sent and received.
    pub(crate) origin: (u32, u32),
    /// Its addresses on the host network: this host's and the other's.
    pub(crate) host: (SocketAddr, SocketAddr),
    /// The client's own address, if the connection arrives from that of a node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) source: Option<IpAddr>,
}

impl fmt::Debug for Held {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Held")
    }
}

/// The configuration that a supervisor needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Welcome {
    /// The addresses of the overlay.
    pub(crate) prefixes: Vec<IpNet>,
    /// The time that another router may take to answer.
    pub(crate) ask_ms: u64,
    /// The time that one end waits for the other end's program.
    pub(crate) patience_ms: u64,
    /// The time that connect waits for a program that does not block.
    pub(crate) hold_ms: u64,
    /// A random number of this router.
    #[serde(default)]
    pub(crate) router: u64,
}

impl Welcome {
    /// Returns `true` if its times are ones that a router can have. Another process may listen at
    /// the router's path, and must not make a program wait for longer.
    pub(crate) fn is_sound(&self) -> bool {
        [self.ask_ms, self.patience_ms, self.hold_ms].iter().all(|time| *time <= MAX_MS)
    }
}

/// The reason for which no message was received.
#[derive(Debug, Error)]
pub(crate) enum MessageError {
    /// The other side has closed the connection.
    #[error("the other side has closed the connection")]
    Closed,
    /// It is no message of this version.
    #[error("this is no message: {0}")]
    Malformed(serde_json::Error),
    /// The system call failed.
    #[error("{0}")]
    Kernel(#[from] Errno),
}

/// Sends a message, with or without a descriptor, and never blocks.
pub(crate) fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    send_all(socket, message, fd.as_slice())
}

/// Sends a message with these descriptors, and never blocks.
pub(crate) fn send_all(
    socket: impl AsFd,
    message: &impl Serialize,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let bytes = serde_json::to_vec(message).expect("it has no maps with odd keys");
    seqpacket::send(socket, &bytes, fds)
}

/// Receives a message and the first descriptor passed with it. Never blocks (EAGAIN).
pub(crate) fn receive<T: DeserializeOwned>(socket: impl AsFd) -> Result<(T, Option<OwnedFd>), MessageError> {
    let mut first = None;
    let message = receive_each(socket, |fd| first = first.take().or(Some(fd)))?;
    Ok((message, first))
}

/// Receives a message and passes every descriptor to `sink`, even if the message is invalid.
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

    /// A supervisor runs on while its router is updated, and the other way round.
    #[test]
    fn messages_of_the_former_version_are_understood() {
        let parsed = |text: &str| serde_json::from_str::<Request>(text).unwrap();
        let to: SocketAddr = "10.96.0.10:80".parse().unwrap();
        assert_eq!(
            parsed(r#"{"connect":{"to":"10.96.0.10:80","from":null}}"#),
            Request::Connect { to, from: None, starts: false }
        );
        // A later version may add members.
        assert_eq!(
            parsed(r#"{"connect":{"to":"10.96.0.10:80","from":null,"starts":true,"later":1}}"#),
            Request::Connect { to, from: None, starts: true }
        );
        let held = Held { key: [7; 32], version: 7, origin: (1, 2), host: (to, to), source: None };
        let written = serde_json::to_string(&held).unwrap();
        assert!(!written.contains("source"), "{written}");
        assert_eq!(serde_json::from_str::<Held>(&written).unwrap(), held);
    }

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
        let sent = Request::Connect { to: "10.0.0.1:80".parse().unwrap(), from: None, starts: true };
        send(&one, &sent, Some(one.as_fd())).unwrap();
        let (received, fd) = receive::<Request>(&two).unwrap();
        assert_eq!((received, fd.is_some()), (sent, true));
        drop((one, fd));
        assert!(matches!(receive::<Request>(&two), Err(MessageError::Closed)));
    }
}
