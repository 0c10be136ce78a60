//! Copies the options that a program may have set from one TCP socket to another that replaces it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::{Errno, Result, raw};

/// Bytes of the longest option that is copied.
const LENGTH: usize = 16;
const SO_BUF_LOCK: i32 = 72;
const SNDBUF_LOCK: u32 = 1;
const RCVBUF_LOCK: u32 = 2;
const TCP_INQ: i32 = 36;
const TCP: i32 = libc::IPPROTO_TCP;

/// The options that are copied. IPV6_V6ONLY is not one of them: the kernel refuses it for a bound
/// socket, and it has no effect on a connected one.
const COPIED: [(i32, i32); 29] = [
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP),
    (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE),
    (libc::SOL_SOCKET, libc::SO_ZEROCOPY),
    (TCP, libc::TCP_NODELAY),
    (TCP, libc::TCP_CORK),
    (TCP, libc::TCP_KEEPIDLE),
    (TCP, libc::TCP_KEEPINTVL),
    (TCP, libc::TCP_KEEPCNT),
    (TCP, libc::TCP_SYNCNT),
    (TCP, libc::TCP_LINGER2),
    (TCP, libc::TCP_USER_TIMEOUT),
    (TCP, libc::TCP_NOTSENT_LOWAT),
    (TCP, libc::TCP_CONGESTION),
    (TCP, TCP_INQ),
    (libc::IPPROTO_IP, libc::IP_TOS),
    // Setting IP_TOS sets the priority as well, so the priority follows it.
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::IPPROTO_IP, libc::IP_TTL),
    (libc::IPPROTO_IP, libc::IP_RECVERR),
    (libc::IPPROTO_IP, libc::IP_FREEBIND),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
];

/// Options that affect more than the connection itself: how its packets are treated, and what the
/// socket reports about them.
const NOT_HARMLESS: [(i32, i32); 9] = [
    (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::SOL_SOCKET, libc::SO_ZEROCOPY),
    (libc::IPPROTO_IP, libc::IP_TOS),
    (libc::IPPROTO_IP, libc::IP_TTL),
    (libc::IPPROTO_IP, libc::IP_RECVERR),
    (libc::IPPROTO_IP, libc::IP_FREEBIND),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
];

/// The options to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// All options that this module knows.
    All,
    /// The options with which an untrusted program can harm only itself.
    Harmless,
}

/// Sets the options of `to` to those of `from`. Fails at the first option that `to` does not
/// accept, and with EOPNOTSUPP if `from` has a packet filter.
pub fn copy(from: impl AsFd, to: impl AsFd, which: Copied) -> Result<()> {
    let (from, to) = (from.as_fd(), to.as_fd());
    if has_filter(from)? {
        return Err(Errno::OPNOTSUPP);
    }
    for (level, option) in COPIED {
        if which == Copied::Harmless && NOT_HARMLESS.contains(&(level, option)) {
            continue;
        }
        // An IPv4 socket has no IPv6 options.
        let Ok(wanted) = read(from, level, option) else { continue };
        if read(to, level, option).as_ref() != Ok(&wanted) {
            write(to, level, option, &wanted)?;
        }
    }
    buffers(from, to)
}

/// Copies buffer sizes that the program has set. Otherwise the kernel chooses them for each socket.
fn buffers(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<()> {
    let locked = number(from, SO_BUF_LOCK)?;
    for (lock, option) in [(SNDBUF_LOCK, libc::SO_SNDBUF), (RCVBUF_LOCK, libc::SO_RCVBUF)] {
        if locked & lock == 0 {
            continue;
        }
        let wanted = number(from, option)?;
        // The kernel doubles the value that is set.
        write(to, libc::SOL_SOCKET, option, &Value::of(wanted / 2))?;
        if number(to, option)? != wanted {
            return Err(Errno::NOBUFS);
        }
    }
    Ok(())
}

/// Returns `true` if a packet filter is attached to the socket. It cannot always be read back, so
/// it cannot be copied.
fn has_filter(socket: BorrowedFd<'_>) -> Result<bool> {
    let mut len: libc::socklen_t = 0;
    let arguments = [
        socket.as_raw_fd() as usize,
        libc::SOL_SOCKET as usize,
        libc::SO_GET_FILTER as usize,
        0,
        &raw mut len as usize,
        0,
    ];
    // SAFETY: with a length of 0 the kernel only reports the filter's length; `len` outlives the
    // call.
    let instructions = match unsafe { raw::call(libc::SYS_getsockopt, arguments) } {
        Ok(_) => len as usize,
        // An eBPF filter, which SO_GET_FILTER cannot report.
        Err(_) => 1,
    };
    Ok(instructions != 0)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Value {
    bytes: [u8; LENGTH],
    len: usize,
}

impl Value {
    fn of(number: u32) -> Value {
        let mut bytes = [0; LENGTH];
        bytes[..4].copy_from_slice(&number.to_ne_bytes());
        Value { bytes, len: 4 }
    }
}

fn number(socket: BorrowedFd<'_>, option: i32) -> Result<u32> {
    let value = read(socket, libc::SOL_SOCKET, option)?;
    Ok(u32::from_ne_bytes([value.bytes[0], value.bytes[1], value.bytes[2], value.bytes[3]]))
}

fn read(socket: BorrowedFd<'_>, level: i32, option: i32) -> Result<Value> {
    let mut bytes = [0; LENGTH];
    let mut len = LENGTH as libc::socklen_t;
    let (bytes_at, len_at) = (bytes.as_mut_ptr() as usize, &raw mut len as usize);
    let arguments = [socket.as_raw_fd() as usize, level as usize, option as usize, bytes_at, len_at, 0];
    // SAFETY: the kernel writes at most `len` bytes to `bytes` and four to `len`; both outlive the
    // call.
    unsafe { raw::call(libc::SYS_getsockopt, arguments)? };
    Ok(Value { bytes, len: (len as usize).min(LENGTH) })
}

fn write(socket: BorrowedFd<'_>, level: i32, option: i32, value: &Value) -> Result<()> {
    let bytes_at = value.bytes.as_ptr() as usize;
    let arguments = [socket.as_raw_fd() as usize, level as usize, option as usize, bytes_at, value.len, 0];
    // SAFETY: the kernel reads `len` bytes of the value, which outlives the call.
    unsafe { raw::call(libc::SYS_setsockopt, arguments) }.map(drop)
}

/// Returns TCP_FASTOPEN_CONNECT. With it, connect returns without sending anything, and the SYN
/// carries the first bytes.
pub fn connects_with_data(socket: impl AsFd) -> Result<bool> {
    let value = read(socket.as_fd(), TCP, libc::TCP_FASTOPEN_CONNECT)?;
    Ok(value.bytes[0] != 0)
}

/// Sets IP_BIND_ADDRESS_NO_PORT: a socket bound to an address gets its port only when it connects.
/// It can share that port with connections to other destinations.
pub fn choose_port_late(socket: impl AsFd) -> Result<()> {
    write(socket.as_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, &Value::of(1))
}

/// Sets IPV6_ADDRFORM: a connected IPv6 socket with IPv4-mapped addresses becomes an IPv4 socket.
pub fn become_ipv4(socket: impl AsFd) -> Result<()> {
    const IPV6_ADDRFORM: i32 = 1;
    write(socket.as_fd(), libc::IPPROTO_IPV6, IPV6_ADDRFORM, &Value::of(libc::AF_INET as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, SockRef, Socket, TcpKeepalive, Type};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    #[test]
    fn what_a_program_has_set_is_taken_over() {
        for domain in [Domain::IPV4, Domain::IPV6] {
            let [from, to] = [(); 2].map(|()| Socket::new(domain, Type::STREAM, None).unwrap());
            from.set_tcp_nodelay(true).unwrap();
            from.set_linger(Some(Duration::from_secs(3))).unwrap();
            from.set_read_timeout(Some(Duration::from_millis(70))).unwrap();
            from.set_tcp_keepalive(&TcpKeepalive::new().with_time(Duration::from_secs(9))).unwrap();
            from.set_recv_buffer_size(50_000).unwrap();
            from.set_reuse_port(true).unwrap();
            for (level, option, value) in
                [(libc::IPPROTO_IP, libc::IP_TOS, 0x10), (libc::SOL_SOCKET, libc::SO_PRIORITY, 3)]
            {
                write(from.as_fd(), level, option, &Value::of(value)).unwrap();
            }
            copy(&from, &to, Copied::Harmless).unwrap();
            assert!(!to.reuse_port().unwrap());
            copy(&from, &to, Copied::All).unwrap();
            assert!(to.reuse_port().unwrap());
            assert_eq!(number(to.as_fd(), libc::SO_PRIORITY), Ok(3));
            assert!(to.tcp_nodelay().unwrap() && to.keepalive().unwrap());
            assert_eq!(to.linger().unwrap(), Some(Duration::from_secs(3)));
            assert_eq!(to.read_timeout().unwrap(), from.read_timeout().unwrap());
            assert_eq!(to.tcp_keepalive_time().unwrap(), Duration::from_secs(9));
            assert_eq!(to.recv_buffer_size().unwrap(), from.recv_buffer_size().unwrap());
            assert_eq!(
                to.send_buffer_size().unwrap(),
                Socket::new(domain, Type::STREAM, None).unwrap().send_buffer_size().unwrap()
            );
        }
    }

    #[test]
    fn a_mapped_socket_becomes_ipv4() {
        let listener = TcpListener::bind("[::]:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let _client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        become_ipv4(&accepted).unwrap();
        assert_eq!(SockRef::from(&accepted).domain().unwrap(), Domain::IPV4);
        assert_eq!(accepted.local_addr().unwrap(), format!("127.0.0.1:{port}").parse().unwrap());
    }
}
