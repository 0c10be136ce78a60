//! Aborts one TCP connection of any process (SOCK_DESTROY). Its program gets ECONNABORTED and the
//! peer receives a reset.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::peer::{HEADER, NLM_F_REQUEST, NLMSG_ERROR, question};
use crate::{Errno, Result};

const SOCK_DESTROY: u16 = 21;
const NLM_F_ACK: u16 = 4;

/// Aborts the connection with these addresses and this SO_COOKIE in the network namespace in which
/// [`crate::peer::open`] created `asker`. Returns whether the connection existed. Needs
/// CAP_NET_ADMIN in that namespace.
///
/// The kernel takes the socket lock, so this waits for any thread that is inside a call on the
/// socket.
pub fn connection(asker: &OwnedFd, local: SocketAddr, remote: SocketAddr, cookie: u64) -> Result<bool> {
    let order = question(SOCK_DESTROY, NLM_F_REQUEST | NLM_F_ACK, (local, remote), cookie);
    // The kernel destroys the socket and answers inside the send.
    send(asker, &order, SendFlags::DONTWAIT)?;
    let mut answer = [0; 512];
    let (len, _) = recv(asker, &mut answer, RecvFlags::DONTWAIT)?;
    let kind = u16::from_ne_bytes([answer[4], answer[5]]);
    if len < HEADER + 4 || kind != NLMSG_ERROR {
        return Err(Errno::PROTO);
    }
    let code = answer[HEADER..HEADER + 4].try_into().map_err(|_| Errno::PROTO)?;
    match i32::from_ne_bytes(code) {
        0 => Ok(true),
        negative => match Errno::from_raw_os_error(-negative) {
            // The connection has ended, or other sockets have these addresses now.
            Errno::NOENT | Errno::STALE => Ok(false),
            error => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};

    /// Needs root.
    #[test]
    fn one_connection_ends_and_no_other() {
        let asker = crate::peer::open().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pair =
            || (TcpStream::connect(listener.local_addr().unwrap()).unwrap(), listener.accept().unwrap().0);
        let ((mut ended, mut peer), (mut other, mut other_peer)) = (pair(), pair());
        let (local, remote) = (ended.local_addr().unwrap(), ended.peer_addr().unwrap());
        let cookie = rustix::net::sockopt::socket_cookie(&ended).unwrap();
        assert_eq!(connection(&asker, local, remote, cookie + 1), Ok(false), "another socket");
        assert_eq!(connection(&asker, local, remote, cookie), Ok(true));
        assert_eq!(connection(&asker, local, remote, cookie), Ok(false), "it has ended");
        assert_eq!(ended.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionAborted);
        assert_eq!(peer.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        other.write_all(b"x").unwrap();
        assert_eq!(other_peer.read(&mut [0; 9]).unwrap(), 1);
    }
}
