//! The TCP sockets of this host, as /proc shows them, in every network namespace that some process
//! is in.

use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use shunt_sys::identity::normalise;
use shunt_sys::proc::pids;

use super::process;

/// One TCP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Socket {
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    pub(super) state: State,
    pub(super) uid: u32,
    pub(super) inode: u64,
    /// Its network namespace.
    namespace: PathBuf,
}

/// The state of a TCP socket, by the kernel's number for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State(u8);

impl State {
    pub(super) const LISTEN: State = State(10);
    pub(super) const ESTABLISHED: State = State(1);

    pub(super) fn label(self) -> &'static str {
        const NAMES: [&str; 13] = [
            "unknown",
            "established",
            "syn_sent",
            "syn_recv",
            "fin_wait1",
            "fin_wait2",
            "time_wait",
            "close",
            "close_wait",
            "last_ack",
            "listen",
            "closing",
            "new_syn_recv",
        ];
        NAMES.get(usize::from(self.0)).unwrap_or(&NAMES[0])
    }
}

/// All TCP sockets, and the processes that hold them, as far as this user can see them.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    all: Vec<Socket>,
    owners: HashMap<u64, Vec<u32>>,
}

impl Sockets {
    /// Reads the sockets of every process.
    pub(super) fn look() -> Sockets {
        let mut sockets = Sockets::default();
        let mut seen = HashMap::new();
        for pid in pids() {
            for inode in process::descriptors(pid).0.into_keys() {
                sockets.owners.entry(inode).or_default().push(pid);
            }
            // A process that may not be inspected is mostly in this process's network namespace.
            let Ok(namespace) = fs::read_link(format!("/proc/{pid}/ns/net")) else { continue };
            if seen.insert(namespace.clone(), ()).is_none() {
                for table in ["tcp", "tcp6"] {
                    let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
                    sockets.all.extend(text.lines().skip(1).filter_map(|line| parse(line, &namespace)));
                }
            }
        }
        sockets
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Socket> {
        self.all.iter()
    }

    /// Returns the processes that hold the socket.
    pub(super) fn owners(&self, socket: &Socket) -> &[u32] {
        self.owners.get(&socket.inode).map_or(&[], Vec::as_slice)
    }

    /// Returns the other end. A match in the socket's own network namespace is preferred to one in
    /// another.
    pub(super) fn peer(&self, socket: &Socket) -> Option<&Socket> {
        let mirrors = |other: &&Socket| (other.local, other.remote) == (socket.remote, socket.local);
        let near = self.all.iter().filter(|other| other.namespace == socket.namespace).find(mirrors);
        near.or_else(|| self.all.iter().find(mirrors))
    }
}

/// Parses a line of /proc/net/tcp.
fn parse(line: &str, namespace: &std::path::Path) -> Option<Socket> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    Some(Socket {
        local: address(fields.get(1)?)?,
        remote: address(fields.get(2)?)?,
        state: State(u8::from_str_radix(fields.get(3)?, 16).ok()?),
        uid: fields.get(7)?.parse().ok()?,
        inode: fields.get(9)?.parse().ok()?,
        namespace: namespace.to_owned(),
    })
}

/// Parses an address. The kernel prints it as hexadecimal words in the byte order of the machine.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(ip.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip = if ip.len() == 8 {
        IpAddr::V4(Ipv4Addr::from(word(0)?))
    } else {
        let mut bytes = [0; 16];
        for (index, chunk) in bytes.chunks_exact_mut(4).enumerate() {
            chunk.copy_from_slice(&word(index * 8)?);
        }
        IpAddr::V6(Ipv6Addr::from(bytes))
    };
    Some(normalise(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn both_ends_of_a_connection_are_found() {
        for (listen, connect) in [("127.0.0.1:0", "127.0.0.1"), ("[::]:0", "127.0.0.1"), ("[::1]:0", "::1")] {
            let listener = TcpListener::bind(listen).unwrap();
            let port = listener.local_addr().unwrap().port();
            let client = TcpStream::connect((connect, port)).unwrap();
            let _server = listener.accept().unwrap();
            let sockets = Sockets::look();
            let ends = (client.local_addr().unwrap(), client.peer_addr().unwrap());
            // An earlier connection from this port may still be in TIME_WAIT.
            let own = sockets.iter().find(|socket| (socket.local, socket.remote) == ends);
            let own = own.expect("the client's end");
            assert_eq!(own.state, State::ESTABLISHED);
            assert!(sockets.owners(own).contains(&std::process::id()));
            let peer = sockets.peer(own).expect("the server's end");
            assert_eq!((peer.local, peer.remote), (own.remote, own.local));
            let listening =
                sockets.iter().find(|socket| socket.local.port() == port && socket.state == State::LISTEN);
            assert!(listening.is_some());
        }
    }

    #[test]
    fn rubbish_is_no_socket() {
        for line in ["", "0: x", "0: 0100007F:0016 0100007F:zz 01 0:0 0:0 0 0 0 5"] {
            assert_eq!(parse(line, "ns".as_ref()), None, "{line}");
        }
    }
}
