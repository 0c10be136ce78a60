//! Reports TCP connections that have ended in a network namespace, and how much they carried.
//!
//! The kernel multicasts a message for each socket that it destroys (NETLINK_SOCK_DIAG). At that
//! point no process uses the socket, so its lock is free. A query about a live socket would wait
//! for that lock.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{RecvFlags, bind, recv, sockopt};

use crate::peer::{COOKIE, HEADER, SOCK_DIAG_BY_FAMILY};
use crate::{Errno, Result, peer};

/// `SKNLGRP_INET_TCP_DESTROY` and `SKNLGRP_INET6_TCP_DESTROY`, as bits.
const GROUPS: u32 = 1 << 0 | 1 << 2;
const INET_DIAG_INFO: u16 = 2;
/// Bytes of `struct inet_diag_msg`, which follows the header and precedes the attributes.
const MESSAGE: usize = 72;
/// Offsets of `tcpi_snd_mss`, `tcpi_bytes_acked`, `tcpi_bytes_received`, `tcpi_data_segs_in` and
/// `tcpi_data_segs_out` in `struct tcp_info`.
const SEGMENT: usize = 16;
const ACKED: usize = 120;
const RECEIVED: usize = 128;
const SEGMENTS_IN: usize = 152;
const SEGMENTS_OUT: usize = 156;
/// Bytes of the receive buffer. The kernel drops notifications that do not fit.
const BUFFER: usize = 4 << 20;

/// A connection that has ended, or an attempt to connect that has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// SO_COOKIE.
    pub cookie: u64,
    /// Bytes of both directions together.
    pub bytes: u64,
    /// Segments with data, both directions together.
    pub segments: u32,
    /// Bytes that one segment could carry.
    pub segment: u32,
}

/// Returns a socket that receives a message for each connection that ends from now on in the
/// network namespace of this thread. Needs CAP_NET_ADMIN.
pub fn watch() -> Result<OwnedFd> {
    let told = peer::open()?;
    sockopt::set_socket_recv_buffer_size_force(&told, BUFFER)?;
    bind(&told, &SocketAddrNetlink::new(0, GROUPS))?;
    Ok(told)
}

/// Returns the next connection, or `None` if no message is queued.
pub fn next(told: BorrowedFd<'_>) -> Option<Ended> {
    let mut message = [0; 2048];
    loop {
        match recv(told, &mut message, RecvFlags::DONTWAIT) {
            Ok((len, _)) => {
                if let Some(ended) = read(&message[..len]) {
                    return Some(ended);
                }
            }
            // NOBUFS: the kernel has dropped some notifications.
            Err(Errno::NOBUFS | Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// Parses one message. Returns `None` if it does not describe a socket.
fn read(message: &[u8]) -> Option<Ended> {
    if number::<2>(message, 4).map(u16::from_ne_bytes)? != SOCK_DIAG_BY_FAMILY {
        return None;
    }
    let mut at = HEADER + MESSAGE;
    let info = loop {
        let len = usize::from(number(message, at).map(u16::from_ne_bytes)?);
        let kind = number(message, at + 2).map(u16::from_ne_bytes)?;
        let attribute = message.get(at + 4..at + len)?;
        if kind == INET_DIAG_INFO {
            break attribute;
        }
        at += len.next_multiple_of(4);
    };
    let small = |at| number(info, at).map(u32::from_ne_bytes);
    let large = |at| number(info, at).map(u64::from_ne_bytes);
    Some(Ended {
        cookie: number(message, COOKIE).map(u64::from_ne_bytes)?,
        bytes: large(ACKED)?.saturating_add(large(RECEIVED)?),
        segments: small(SEGMENTS_IN)?.saturating_add(small(SEGMENTS_OUT)?),
        segment: small(SEGMENT)?,
    })
}

fn number<const LENGTH: usize>(bytes: &[u8], at: usize) -> Option<[u8; LENGTH]> {
    bytes.get(at..at + LENGTH)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    /// Needs root.
    #[test]
    fn a_connection_that_has_ended_is_told_of_with_what_it_carried() {
        let told = watch().unwrap();
        for listen in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(listen).unwrap();
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let mut server = listener.accept().unwrap().0;
            let cookie = sockopt::socket_cookie(&client).unwrap();
            for _ in 0..20 {
                client.write_all(&[1; 100]).unwrap();
                server.read_exact(&mut [0; 100]).unwrap();
                server.write_all(&[1; 50]).unwrap();
                client.read_exact(&mut [0; 50]).unwrap();
            }
            drop((client, server));
            let deadline = Instant::now() + Duration::from_secs(20);
            let ended = loop {
                match next(told.as_fd()) {
                    Some(ended) if ended.cookie == cookie => break ended,
                    Some(_) => {}
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
                assert!(Instant::now() < deadline, "nothing was told of {listen}");
            };
            // The kernel may count the SYN and the FIN as bytes.
            assert!((3000..=3004).contains(&ended.bytes), "{ended:?}");
            assert_eq!(ended.segments, 40);
            assert!(ended.segment > 1000, "{ended:?}");
        }
    }

    #[test]
    fn what_is_cut_off_is_no_connection() {
        let mut message = vec![0; HEADER + MESSAGE + 4 + 200];
        message[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        message[HEADER + MESSAGE..][..4].copy_from_slice(&[204, 0, 2, 0]);
        assert!(read(&message).is_some());
        for len in 0..message.len() {
            assert_eq!(read(&message[..len]), None, "{len}");
        }
        // An attribute without a length has no end.
        message[HEADER + MESSAGE..][..4].copy_from_slice(&[0, 0, 9, 0]);
        assert_eq!(read(&message), None);
    }
}
