//! The reasons why a connection, or one direction of it, is on TCP. One enum feeds logs, metrics,
//! `shunt status`, `shunt explain` and the docs.

use serde::{Deserialize, Serialize};

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $label:literal, $text:literal,
       $advice:literal;)*) => {
        /// A named reason for staying on TCP or for falling back to it.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[repr(u16)]
        pub enum Reason {
            $(#[doc = $text] $(#[$doc])* $name = $code,)*
        }

        impl Reason {
            /// Every reason, in the order of its code.
            pub const ALL: &[Reason] = &[$(Reason::$name,)*];

            /// Returns the name used in logs, metrics and `--json`.
            pub fn label(self) -> &'static str {
                match self { $(Reason::$name => $label,)* }
            }

            /// Returns one sentence that explains the reason to a person.
            pub fn explanation(self) -> &'static str {
                match self { $(Reason::$name => $text,)* }
            }

            /// Returns one sentence of advice.
            pub fn advice(self) -> &'static str {
                match self { $(Reason::$name => $advice,)* }
            }

            /// Returns the reason with this code.
            pub fn parse(code: u16) -> Option<Reason> {
                match code { $($code => Some(Reason::$name),)* _ => None }
            }
        }
    };
}

reasons! {
    #[default]
    None = 0, "none", "Nothing stands against shared memory.",
        "No action needed.";
    TooFewOperations = 1, "too_few_operations", "The connection has had too little traffic to be offered.",
        "No action needed: it is offered after a few reads and writes.";
    NoBroker = 2, "no_broker", "No broker could be reached; the shim tries again from time to time.",
        "If `shunt status` finds no broker, start one: `shunt daemon --detach`.";
    Policy = 3, "policy", "The program was started with --transport tcp, the configuration says so, or `shunt detach` has ended shunt's work in it.",
        "Start it without --transport tcp and SHUNT_TRANSPORT=tcp; `shunt config show` with its name shows the configuration.";
    RemotePeer = 4, "remote_peer", "The peer's address is not one of this host.",
        "Nothing can be done: hosts share no memory.";
    PeerNotOffered = 5, "peer_not_offered", "The other end has not been offered: its program is not under shunt, uses it past shunt (as by io_uring), or has been idle.",
        "Ask `shunt explain` with the name of that program what keeps it out. If it is not under shunt, start it with `shunt run`.";
    SelfConnected = 6, "self_connected", "The socket is connected to itself.",
        "Nothing can be done: such a socket has no other end.";
    BoundToDevice = 7, "bound_to_device", "The socket is bound to a device or VRF, where addresses can repeat.",
        "Do not bind it to a device, if the program can.";
    ForeignNamespace = 8, "foreign_namespace", "The broker cannot verify sockets of this network namespace.",
        "Use the host's broker (`shunt daemon --system`) for both programs, or one in their network namespace.";
    NotTcp = 9, "not_tcp", "The descriptor shown to the broker is no established TCP socket.",
        "Nothing can be done: only TCP over IPv4 and IPv6 can take shared memory.";
    Stale = 10, "stale", "One end was closed after its offer, before it was paired.",
        "No action needed: the connection has ended.";
    BrokerLimit = 11, "broker_limit", "The broker has no room for another link or offer, in all or of this user or container.",
        "Let the user or container have fewer processes; if all are affected, raise the broker's limit of open files (`ulimit -n`).";
    DescriptorLimit = 12, "descriptor_limit", "The process has no descriptors left for a link.",
        "Raise the program's limit of open files (`ulimit -n`).";
    NoMemory = 13, "no_memory", "The link could not be mapped, or /dev/shm is full.",
        "Free memory, or raise the program's limit of address space (`ulimit -v`).";
    OffsetUnclear = 14, "offset_unclear", "The kernel's counts of the stream did not agree; the direction stayed on TCP.",
        "Connect again, if the connection is to last.";
    Fork = 15, "fork", "The process forked while it held the connection.",
        "No action needed: it is offered again when only one process holds it.";
    Shared = 16, "shared", "More than one process holds the socket, or an epoll instance that it is in.",
        "Let the process that does not use it close it.";
    Exec = 17, "exec", "The process replaced its program, or started one that inherits the connection.",
        "Mark the socket close-on-exec, if the started program does not need it.";
    OutOfBand = 18, "out_of_band", "Urgent data was sent or asked for.",
        "Turn urgent data off, if the program can.";
    ControlData = 19, "control_data", "A message carried or asked for control data.",
        "Turn off what asks for it (for example time stamps), if the program can.";
    SocketOption = 20, "socket_option", "An option was set that shared memory does not emulate.",
        "Turn the option off, if the program can.";
    Ioctl = 21, "ioctl", "An ioctl was made that shared memory does not emulate.",
        "Avoid the ioctl, if the program can.";
    AsyncIo = 22, "async_io", "Signal-driven or asynchronous I/O was asked for.",
        "Choose another I/O method, such as epoll, if the program can.";
    NestedEpoll = 23, "nested_epoll", "The socket is in an epoll instance that is itself watched.",
        "Watch sockets directly, if the program can: Java's virtual threads do with -Djdk.pollerMode=1.";
    ExclusiveEpoll = 24, "exclusive_epoll", "The socket has been registered with EPOLLEXCLUSIVE since before a fork or an exec.",
        "Turn EPOLLEXCLUSIVE off, if the program can.";
    UnknownEpoll = 25, "unknown_epoll", "The socket is in an epoll instance whose creation shunt did not see.",
        "Let the program create it, not inherit or receive it.";
    Stdio = 26, "stdio", "The descriptor was given to stdio, whose calls cannot be seen.",
        "Use the socket without stdio, if the program can.";
    PassedOn = 27, "passed_on", "The descriptor was sent to another process.",
        "Nothing can be done: the receiving process uses TCP.";
    Splice = 28, "splice", "A call moved data between the socket and a pipe inside the kernel.",
        "Turn splice off, if the program can.";
    ZeroCopy = 29, "zero_copy", "MSG_ZEROCOPY was used.",
        "Turn zero copy off: shared memory copies less.";
    FastOpen = 30, "fast_open", "TCP Fast Open was used.",
        "Turn TCP Fast Open off: between programs of one host it saves nothing.";
    Stalled = 31, "stalled", "The receiver did not read for a while: TCP's larger buffers took over.",
        "No action needed: it is offered again after some use.";
    PeerWentBack = 32, "peer_went_back", "The other end went back to TCP.",
        "Ask `shunt explain` why the other end went back.";
    PeerMisbehaved = 33, "peer_misbehaved", "The other end wrote something impossible to shared memory.",
        "Restart the program at the other end; if it happens again, report it.";
    PeerDied = 34, "peer_died", "The other end's process ended.",
        "No action needed: the connection has ended.";
    ShutDown = 35, "shut_down", "The program shut this direction down.",
        "No action needed: this direction has ended.";
    UnsupportedFlag = 36, "unsupported_flag", "A flag was used that shared memory does not emulate.",
        "Avoid the flag, if the program can.";
    BrokerVersion = 37, "broker_version", "The broker speaks another version of the protocol.",
        "Restart the older one: broker or program.";
    Disconnected = 38, "disconnected", "The connection was dissolved by connect(AF_UNSPEC).",
        "No action needed: the connection has ended.";
    LowWater = 39, "low_water", "SO_RCVLOWAT is above one byte.",
        "Leave SO_RCVLOWAT at one byte, if the program can.";
    Idle = 40, "idle", "Paired and ready; the next bytes in this direction go through shared memory.",
        "No action needed.";
    LeftBehind = 41, "left_behind", "The reader changed while an ended lane held bytes, which could not be returned.",
        "Read what has arrived before passing the connection on.";
    IoUring = 42, "io_uring", "The program uses io_uring, whose reads and writes cannot be seen.",
        "Choose another I/O method, such as epoll, if the program can.";
    OwnTable = 43, "own_table", "A thread of the program has a descriptor table of its own.",
        "Avoid unshare(CLONE_FILES), if the program can.";
    Ambiguous = 44, "ambiguous", "More than one socket could be the other end.",
        "Connect again: another connection has matching sequence numbers.";
    Rewritten = 45, "rewritten", "Something between the two ends changes the bytes of the stream, or their sequence numbers.",
        "Turn off what changes the stream (for example a helper of the firewall), if you can.";
    NoWaiter = 46, "no_waiter", "All waiters of the process are taken: 64 threads and epoll instances can sleep on shared memory at a time.",
        "No action needed. Fewer threads, or one epoll instance for many connections, gain more.";
    BrokerSilent = 47, "broker_silent", "The broker does not answer: it is stopped, or hangs.",
        "Continue it (`kill -CONT`), or end it and start another: `shunt daemon --detach`.";
    Sandboxed = 48, "sandboxed", "The program has installed a seccomp filter, which could forbid what shared memory needs.",
        "Turn the sandbox off, if the program can and its connections are worth more.";
    Duplicated = 49, "duplicated", "The socket had a duplicate before it was connected.",
        "Connect the socket before duplicating it.";
    UnseenWait = 50, "unseen_wait", "The program waits for its connections by system calls of its own, which cannot be seen.",
        "Wait by functions of libc, if the program can.";
    Unread = 51, "unread", "The other end left bytes unread without waiting for them: they were sent again by TCP.",
        "No action needed: it is offered again after some use.";
    Unused = 52, "unused", "Nothing was moved for a while, and the connection's memory was freed.",
        "No action needed: it is offered again when it is used.";
    ClosedInEpoll = 53, "closed_in_epoll", "A descriptor of the socket was closed while in an epoll instance, and the socket has another.",
        "Remove a descriptor from epoll instances (EPOLL_CTL_DEL) before closing it.";
    EpollClosed = 54, "epoll_closed", "An epoll instance was closed while a thread waited in it for the socket.",
        "End all waits in an epoll instance before closing it.";
    SpecialFile = 55, "special_file", "sendfile read from a special file, such as a device or one of /proc.",
        "Use read and write for such files, if the program can.";
    OverlayPolicy = 56, "overlay_policy", "The overlay's policy keeps the connection on TCP, where packets are inspected or limited, or forbids it.",
        "If that is not meant, change the rule: `shunt overlay policy show` lists them in order.";
    OverlayUnclear = 57, "overlay_unclear", "The broker cannot read the overlay's policy, so connections between network namespaces stay on TCP.",
        "Read in the broker's log what is wrong with /run/shunt/overlay.policy, and restart the overlay's router, which writes it.";
    OwnCalls = 58, "own_calls", "Code of the program or of a library in it can make system calls by itself, which cannot be seen.",
        "Start it directly with `shunt run -- PROGRAM`. If that does not help, make its calls by functions of libc, or add `--own-calls trust` if you know that they concern none of its connections.";
    NewCode = 59, "new_code", "New code has not been judged yet: it could make system calls that cannot be seen.",
        "No action needed: it is offered again when the code has been judged.";
    Sanitizer = 60, "sanitizer", "A sanitizer's runtime must see all reads and writes, and shunt comes before it.",
        "Start the program directly with `shunt run`, not by a shell or /etc/ld.so.preload: then the runtime comes first.";
    MemoryBudget = 61, "memory_budget", "The memory for rings is used up: the program's --ring-memory, or what its control group leaves free.",
        "Raise --ring-memory or the control group's memory limit; `ring_bytes` in `shunt status --json` is what the rings have.";
    LinkNotMade = 62, "link_not_made", "One of the programs did not map the memory to share, or a program of one of their users prevented its sealing.",
        "No action needed: it is offered again after some use. If it recurs, restart the program at the other end.";
    LinkRetired = 63, "link_retired", "The connection's link held much unused memory, and was freed.",
        "No action needed: it is offered again when it is used.";
    EarlierCall = 64, "earlier_call", "A read, write or wait on the connection may still be under way from before shunt counted them.",
        "No action needed: it is offered after some use, when each thread that was in such a call has come back from it.";
}

impl Reason {
    /// Returns whether a refusal of an offer for this reason also ends the pair that the offer has
    /// led to.
    pub fn ends_pairs(self) -> bool {
        matches!(self, Reason::OverlayPolicy | Reason::OverlayUnclear)
    }
}

/// The transport of one direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Transport {
    /// The kernel's TCP.
    Tcp = 0,
    /// A lane in shared memory.
    Shm = 1,
}

impl Transport {
    /// Returns the name used in tables and `--json`.
    pub fn label(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Shm => "shm",
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
