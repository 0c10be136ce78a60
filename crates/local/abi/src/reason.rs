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
        "Nothing needs to be done.";
    TooFewOperations = 1, "too_few_operations", "The connection has not shown enough traffic to be worth offering.",
        "Nothing needs to be done: it is offered after a few reads and writes.";
    NoBroker = 2, "no_broker", "No broker could be reached; it is tried again from time to time.",
        "Look with `shunt status` whether a broker runs, and start one with `shunt daemon --detach`.";
    Policy = 3, "policy", "The program was started with --transport tcp, or the configuration says so.",
        "Start the program without --transport tcp and without SHUNT_TRANSPORT=tcp; `shunt config show` with its name says what the configuration has.";
    RemotePeer = 4, "remote_peer", "The peer's address is not one of this host.",
        "Nothing can be done: memory cannot be shared with another host.";
    PeerNotOffered = 5, "peer_not_offered", "The other end has not been offered: it does not run under shunt, has been idle, or is on another host.",
        "Start the program at the other end with `shunt run` too; `shunt explain` with its name says what keeps it out.";
    SelfConnected = 6, "self_connected", "The socket is connected to itself.",
        "Nothing can be done: such a socket has no other end.";
    BoundToDevice = 7, "bound_to_device", "The socket is bound to a device or VRF, where addresses can repeat.",
        "Do not bind the socket to a device, if the program has an option for that.";
    ForeignNamespace = 8, "foreign_namespace", "The broker cannot verify sockets of this network namespace.",
        "Let both programs use a broker that root runs on the host (`shunt daemon --system`), or one that runs in their network namespace.";
    NotTcp = 9, "not_tcp", "The descriptor shown to the broker is no established TCP socket.",
        "Nothing can be done: only TCP over IPv4 and IPv6 can take shared memory.";
    Stale = 10, "stale", "One end was closed between being offered and being paired.",
        "Nothing needs to be done: the connection has ended.";
    BrokerLimit = 11, "broker_limit", "The broker has no room for another link or offer, or none for more of this user's or container's.",
        "Let the user or container have fewer processes; if it concerns all, start the broker with a higher limit of open files (`ulimit -n`).";
    DescriptorLimit = 12, "descriptor_limit", "The process has no descriptors left for a link.",
        "Start the program with a higher limit of open files (`ulimit -n`).";
    NoMemory = 13, "no_memory", "The link could not be mapped, or /dev/shm is full.",
        "Free memory, or raise the program's limit of address space (`ulimit -v`).";
    OffsetUnclear = 14, "offset_unclear", "The kernel's counts of the stream did not agree; the direction stayed on TCP.",
        "Connect again, if the connection is to last.";
    Fork = 15, "fork", "The process forked while it held the connection.",
        "Nothing needs to be done: it is offered again when only one process holds it.";
    Shared = 16, "shared", "More than one process holds the socket, or an epoll set that it is in.",
        "Let the process that does not use the connection close it, or the set.";
    Exec = 17, "exec", "The process replaced its program, or started one that inherits the connection.",
        "Let the program mark the socket close-on-exec, if what it starts does not need it.";
    OutOfBand = 18, "out_of_band", "Urgent data was sent or asked for.",
        "Turn urgent data off, if the program has an option for that.";
    ControlData = 19, "control_data", "A message carried or asked for control data.",
        "Turn off what asks for control data (time stamps, for example), if the program has an option for that.";
    SocketOption = 20, "socket_option", "An option was set that shared memory does not emulate.",
        "Turn the option off, if the program can do without.";
    Ioctl = 21, "ioctl", "An ioctl was made that shared memory does not emulate.",
        "Nothing can be done, unless the program can do without the ioctl.";
    AsyncIo = 22, "async_io", "Signal-driven or asynchronous I/O was asked for.",
        "Choose another I/O method of the program's, such as epoll.";
    NestedEpoll = 23, "nested_epoll", "The socket is in an epoll set that is itself watched.",
        "Have the program watch its sockets directly, if it can: Java's virtual threads do with -Djdk.pollerMode=1.";
    ExclusiveEpoll = 24, "exclusive_epoll", "The socket is in an epoll set with EPOLLEXCLUSIVE, and was when the process was forked or became this program.",
        "Turn EPOLLEXCLUSIVE off, if the program has an option for that.";
    UnknownEpoll = 25, "unknown_epoll", "The socket is in an epoll set that shunt did not see being made.",
        "Let the program make its epoll set itself instead of inheriting or receiving it.";
    Stdio = 26, "stdio", "The descriptor was given to stdio, whose calls cannot be seen.",
        "Nothing can be done, unless the program can read and write the socket without stdio.";
    PassedOn = 27, "passed_on", "The descriptor was sent to another process.",
        "Nothing can be done: the process that has received it goes on by TCP.";
    Splice = 28, "splice", "A call moved data between the socket and a pipe inside the kernel.",
        "Turn splice off, if the program has an option for that.";
    ZeroCopy = 29, "zero_copy", "MSG_ZEROCOPY was used.",
        "Turn zero copy off: shared memory copies less.";
    FastOpen = 30, "fast_open", "TCP Fast Open was used.",
        "Turn TCP Fast Open off: between programs of one host it saves nothing.";
    Stalled = 31, "stalled", "The receiver did not read for a while: TCP's larger buffers took over.",
        "Nothing needs to be done: it is offered again when it has been used for a while.";
    PeerWentBack = 32, "peer_went_back", "The other end went back to TCP.",
        "Ask `shunt explain` why the other end went back.";
    PeerMisbehaved = 33, "peer_misbehaved", "The other end wrote something impossible to shared memory.",
        "Restart the program at the other end; if it happens again, report it.";
    PeerDied = 34, "peer_died", "The other end's process ended.",
        "Nothing needs to be done: the connection has ended.";
    ShutDown = 35, "shut_down", "The program shut this direction down.",
        "Nothing needs to be done: nothing more is sent in this direction.";
    UnsupportedFlag = 36, "unsupported_flag", "A flag was used that shared memory does not emulate.",
        "Nothing can be done, unless the program can do without the flag.";
    BrokerVersion = 37, "broker_version", "The broker speaks another version of the protocol.",
        "Restart whichever is older: the broker or the program.";
    Disconnected = 38, "disconnected", "The connection was dissolved by connect(AF_UNSPEC).",
        "Nothing needs to be done: the connection has ended.";
    LowWater = 39, "low_water", "SO_RCVLOWAT is above one byte.",
        "Let the program leave SO_RCVLOWAT at one byte.";
    Idle = 40, "idle", "Paired and ready; the next bytes in this direction go through shared memory.",
        "Nothing needs to be done.";
    LeftBehind = 41, "left_behind", "The reader changed while an ended lane still held bytes: they could not be given back.",
        "Let the program read what has come before it hands the connection on.";
    IoUring = 42, "io_uring", "The program uses io_uring, whose reads and writes cannot be seen.",
        "Choose another I/O method of the program's, such as epoll.";
    OwnTable = 43, "own_table", "A thread of the program has a descriptor table of its own.",
        "Nothing can be done, unless the program can do without unshare(CLONE_FILES).";
    Ambiguous = 44, "ambiguous", "More than one socket could be the other end, so none is taken for it.",
        "Connect again: the sequence numbers of another connection look like those of this one.";
    Rewritten = 45, "rewritten", "Something between the two ends changes the stream: what one has sent, or how its bytes are numbered, is not what the other has received.",
        "Nothing can be done, unless what changes the stream (a helper of the firewall, for example) can be turned off.";
    NoWaiter = 46, "no_waiter", "Every waiter of the process is taken: 64 threads and epoll instances can sleep on shared memory at a time.",
        "Nothing needs to be done; programs with fewer threads, or one epoll instance for many connections, gain more.";
    BrokerSilent = 47, "broker_silent", "The broker does not answer: it is stopped, or hangs.",
        "Let it go on (`kill -CONT`), or end it and start another with `shunt daemon --detach`.";
    Sandboxed = 48, "sandboxed", "The program has put itself under a seccomp filter, which could forbid it what shared memory needs.",
        "Turn the sandbox off, if the program has an option for that and its connections are worth more.";
    Duplicated = 49, "duplicated", "The socket had a duplicate before it was connected.",
        "Let the program connect the socket before it duplicates it.";
    UnseenWait = 50, "unseen_wait", "The program waits for its connections by system calls of its own, which cannot be seen.",
        "Nothing can be done, unless the program can wait by the functions of libc.";
    Unread = 51, "unread", "The other end left bytes unread for a while without waiting for them: they were sent again by TCP.",
        "Nothing needs to be done: it is offered again when it has been used for a while.";
    Unused = 52, "unused", "Nothing was moved for a while, and the memory of the connection was given back.",
        "Nothing needs to be done: it is offered again when it is used.";
    ClosedInEpoll = 53, "closed_in_epoll", "A descriptor of the socket was closed while it was in an epoll instance, and the socket has another one.",
        "Have the program remove a descriptor from its epoll instances (EPOLL_CTL_DEL) before it closes it.";
    EpollClosed = 54, "epoll_closed", "An epoll instance was closed while a thread waited in it for the socket.",
        "Have the program end the waits of its threads before it closes an epoll instance.";
    SpecialFile = 55, "special_file", "sendfile read from something that is no ordinary file, such as a device or a file of /proc.",
        "Nothing can be done, unless the program can read such a file and write what it has read.";
    OverlayPolicy = 56, "overlay_policy", "The overlay's policy keeps the connection on TCP: its packets are to be seen or limited, or it is not to be.",
        "Nothing needs to be done if that is meant; else change the rule: `shunt overlay policy show` names them in their order.";
    OverlayUnclear = 57, "overlay_unclear", "The broker cannot read the overlay's policy, so connections between network namespaces stay on TCP.",
        "Look into the broker's log for what is wrong with /run/shunt/overlay.policy, and start the overlay's router anew, which writes it.";
    OwnCalls = 58, "own_calls", "Code of the program, or of a library that it has loaded, can make system calls by itself, which cannot be seen.",
        "Start it itself with `shunt run -- PROGRAM`. If that changes nothing, and you know that these calls concern none of its connections, say `shunt run --own-calls trust`; else have it make its calls by the functions of libc.";
    NewCode = 59, "new_code", "Code has been loaded that has not been looked at yet: it could make system calls that cannot be seen.",
        "Nothing needs to be done: it is offered again when the code has been looked at.";
    Sanitizer = 60, "sanitizer", "The program has a sanitizer's runtime that must see all its reads and writes, and shunt comes before it.",
        "Start the program with `shunt run` itself, and not by a shell or by /etc/ld.so.preload: then the runtime comes first.";
    MemoryBudget = 61, "memory_budget", "The memory for rings is used up: the program's budget (--ring-memory), or what the limit of its control group leaves free.",
        "Raise --ring-memory, or the memory limit of the control group; `ring_bytes` in `shunt status --json` says how much the program's rings have.";
    LinkNotMade = 62, "link_not_made", "The two programs did not both map the memory that they were to share, or a program of one of their users kept such memory from being sealed.",
        "Nothing needs to be done: it is offered again when it has been used for a while. If it happens again and again, restart the program at the other end.";
    LinkRetired = 63, "link_retired", "The memory that the connection was in was mostly unused, and was released.",
        "Nothing needs to be done: it is offered again when it is used.";
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
