//! How much a connection is used, as the kernel counts it. What the shim has not told of is either hardly used yet, or used past the shim,
//! and only the kernel can say which.

use shunt_sys::{other, tcp};

/// Segments with data that the socket of a process has received after which its shim would have told of it: it does after a few operations,
/// or after 64 where the connections of the process end soon, and one operation may take several segments.
const TOLD_AFTER: u32 = 8;
const TOLD_LATE_AFTER: u32 = 256;

/// How much a connection is used that the shim has not told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// So little that there is nothing to tell yet.
    Little,
    /// So much that the shim does not see it.
    Unseen,
    /// The kernel does not let us look at the socket.
    Unknown,
}

impl Use {
    /// Returns how much the socket `fd` of a process is used. `is_first`: its shim has told of no other either.
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
