//! Why a connection, or one direction of it, is on TCP. One enum feeds logs, metrics, `shunt status`,
//! `shunt explain` and the docs.

use serde::{Deserialize, Serialize};

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $label:literal, $text:literal;)*) => {
        /// A named reason for staying on TCP or for going back to it.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[repr(u16)]
        pub enum Reason {
            $(#[doc = $text] $(#[$doc])* $name = $code,)*
        }

        impl Reason {
            /// Every reason, in order of its code.
            pub const ALL: &[Reason] = &[$(Reason::$name,)*];

            /// The name used in logs, metrics and `--json`.
            pub fn label(self) -> &'static str {
                match self { $(Reason::$name => $label,)* }
            }

            /// One sentence for a person.
            pub fn explanation(self) -> &'static str {
                match self { $(Reason::$name => $text,)* }
            }

            /// The reason with this code.
            pub fn parse(code: u16) -> Option<Reason> {
                match code { $($code => Some(Reason::$name),)* _ => None }
            }
        }
    };
}

reasons! {
    #[default]
    None = 0, "none", "Nothing stands against shared memory.";
    TooFewOperations = 1, "too_few_operations", "The connection has not shown enough traffic to be worth offering.";
    NoBroker = 2, "no_broker", "No broker could be reached; it is tried again from time to time.";
    Policy = 3, "policy", "The program was started with --transport tcp.";
    RemotePeer = 4, "remote_peer", "The peer's address is not one of this host.";
    PeerNotOffered = 5, "peer_not_offered", "The other end has not been offered: it does not run under shunt, or has been idle.";
    SelfConnected = 6, "self_connected", "The socket is connected to itself.";
    BoundToDevice = 7, "bound_to_device", "The socket is bound to a device or VRF, where addresses can repeat.";
    ForeignNamespace = 8, "foreign_namespace", "The broker cannot verify sockets of this network namespace.";
    NotTcp = 9, "not_tcp", "The descriptor shown to the broker is no established TCP socket.";
    Stale = 10, "stale", "One end was closed between being offered and being paired.";
    BrokerLimit = 11, "broker_limit", "The broker has no room for another link.";
    DescriptorLimit = 12, "descriptor_limit", "The process has no descriptors left for a link.";
    NoMemory = 13, "no_memory", "The link could not be mapped, or /dev/shm is full.";
    OffsetUnclear = 14, "offset_unclear", "The kernel's counts of the stream did not agree; the direction stayed on TCP.";
    Fork = 15, "fork", "The process forked while it held the connection.";
    Shared = 16, "shared", "More than one process holds the socket.";
    Exec = 17, "exec", "The process replaced its program.";
    OutOfBand = 18, "out_of_band", "Urgent data was sent or asked for.";
    ControlData = 19, "control_data", "A message carried or asked for control data.";
    SocketOption = 20, "socket_option", "An option was set that shared memory does not emulate.";
    Ioctl = 21, "ioctl", "An ioctl was made that shared memory does not emulate.";
    AsyncIo = 22, "async_io", "Signal-driven or asynchronous I/O was asked for.";
    NestedEpoll = 23, "nested_epoll", "The socket is in an epoll set that is itself watched.";
    ExclusiveEpoll = 24, "exclusive_epoll", "The socket is in an epoll set with EPOLLEXCLUSIVE.";
    UnknownEpoll = 25, "unknown_epoll", "The socket is in an epoll set that shunt did not see being made.";
    Stdio = 26, "stdio", "The descriptor was given to stdio, whose calls cannot be seen.";
    PassedOn = 27, "passed_on", "The descriptor was sent to another process.";
    Splice = 28, "splice", "A call moved data between the socket and a pipe inside the kernel.";
    ZeroCopy = 29, "zero_copy", "MSG_ZEROCOPY was used.";
    FastOpen = 30, "fast_open", "TCP Fast Open was used.";
    Stalled = 31, "stalled", "The receiver did not read for a while: TCP's larger buffers took over.";
    PeerWentBack = 32, "peer_went_back", "The other end went back to TCP.";
    PeerMisbehaved = 33, "peer_misbehaved", "The other end wrote something impossible to shared memory.";
    PeerDied = 34, "peer_died", "The other end's process ended.";
    ShutDown = 35, "shut_down", "The program shut this direction down.";
    UnsupportedFlag = 36, "unsupported_flag", "A flag was used that shared memory does not emulate.";
    BrokerVersion = 37, "broker_version", "The broker speaks another version of the protocol.";
    Disconnected = 38, "disconnected", "The connection was dissolved by connect(AF_UNSPEC).";
    LowWater = 39, "low_water", "SO_RCVLOWAT is above one byte.";
    Idle = 40, "idle", "Paired and ready; the next bytes in this direction go through shared memory.";
    LeftBehind = 41, "left_behind", "The reader changed while an ended lane still held bytes: they could not be given back.";
    IoUring = 42, "io_uring", "The program uses io_uring, whose reads and writes cannot be seen.";
    OwnTable = 43, "own_table", "A thread of the program has a descriptor table of its own.";
}

/// The road one direction of a connection takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Road {
    /// The kernel's TCP.
    Tcp = 0,
    /// A lane in shared memory.
    Shm = 1,
}

impl Road {
    /// The name used in tables and `--json`.
    pub fn label(self) -> &'static str {
        match self {
            Road::Tcp => "tcp",
            Road::Shm => "shm",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn codes_are_dense_and_labels_unique() {
        let labels: HashSet<_> = Reason::ALL.iter().map(|reason| reason.label()).collect();
        assert_eq!(labels.len(), Reason::ALL.len());
        for (code, reason) in Reason::ALL.iter().enumerate() {
            assert_eq!(Reason::parse(code as u16), Some(*reason));
        }
        assert_eq!(Reason::parse(Reason::ALL.len() as u16), None);
    }
}
