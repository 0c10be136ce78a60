//! How much a connection is used, by the kernel's counters.
//!
//! A connection that the shim has not reported is either hardly used yet, or used in a way that
//! bypasses the shim. Only the kernel's counters distinguish the two.

use shunt_sys::{other, tcp};

/// The received data segments after which the shim would have reported the connection.
///
/// The shim reports after a few operations, or after 64 if the connections of the process are
/// short-lived (`TOLD_LATE_AFTER`). One operation may take several segments.
const TOLD_AFTER: u32 = 8;
const TOLD_LATE_AFTER: u32 = 256;

/// How much a connection is used that the shim has not reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// So little that the shim reports nothing yet.
    Little,
    /// So much that its use must bypass the shim.
    Unseen,
    /// The kernel denies access to the socket.
    Unknown,
}

impl Use {
    /// Returns how much the socket `fd` of a process is used. `is_first` is set if the shim has not
    /// reported any other connection either.
    pub(super) fn of(pid: u32, fd: Option<i32>, is_first: bool) -> Use {
        let socket = fd.and_then(|fd| other::descriptor(pid, fd).ok());
        let segments = socket.and_then(|socket| tcp::segments(socket).ok());
        segments.map_or(Use::Unknown, |(received, _)| Use::judge(received, is_first))
    }

    fn judge(segments: u32, is_first: bool) -> Use {
        let most = if is_first { TOLD_AFTER } else { TOLD_LATE_AFTER };
        if segments < most { Use::Little } else { Use::Unseen }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    #[test]
    fn a_connection_is_unseen_once_its_shim_would_have_told_of_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_nodelay(true).unwrap();
        let mut server = listener.accept().unwrap().0;
        let fd = Some(server.as_raw_fd());
        let pid = std::process::id();
        assert_eq!(Use::of(pid, fd, true), Use::Little);
        for _ in 0..TOLD_AFTER {
            client.write_all(b"x").unwrap();
            server.read_exact(&mut [0]).unwrap();
        }
        assert_eq!(Use::of(pid, fd, true), Use::Unseen);
        assert_eq!(Use::of(pid, fd, false), Use::Little, "its connections may end soon");
        assert_eq!(Use::judge(TOLD_LATE_AFTER, false), Use::Unseen);
        assert_eq!(Use::of(pid, Some(-1), true), Use::Unknown);
        assert_eq!(Use::of(pid, None, true), Use::Unknown);
    }
}
