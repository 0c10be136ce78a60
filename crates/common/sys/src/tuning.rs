//! Limits on the rate, priority and buffers of a TCP socket.

use std::os::fd::{AsFd, BorrowedFd};

use libc::{
    SO_MAX_PACING_RATE, SO_PRIORITY, SO_RCVBUF, SO_RCVBUFFORCE, SO_RCVLOWAT, SO_SNDBUF, SO_SNDBUFFORCE,
    SOL_SOCKET,
};

use crate::{Errno, Result, sockopt};

/// Limits the rate at which the socket sends, in bytes per second, whatever its window allows.
pub fn set_max_pacing_rate(fd: impl AsFd, bytes_per_second: u64) -> Result<()> {
    sockopt::write(fd.as_fd(), SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_second)
}

/// Returns the maximum pacing rate; `u64::MAX` means no limit.
pub fn max_pacing_rate(fd: impl AsFd) -> Result<u64> {
    let (rate, filled) = sockopt::read::<u64>(fd.as_fd(), SOL_SOCKET, SO_MAX_PACING_RATE)?;
    // A 32-bit kernel fills only 32 bits.
    let no_limit = filled == size_of::<u32>() && rate == u64::from(u32::MAX);
    Ok(if no_limit { u64::MAX } else { rate })
}

/// Sets the priority of the socket's packets for queueing disciplines. A priority above 6 needs
/// CAP_NET_ADMIN.
pub fn set_priority(fd: impl AsFd, priority: u32) -> Result<()> {
    sockopt::write(fd.as_fd(), SOL_SOCKET, SO_PRIORITY, priority)
}

/// Returns the priority of the socket's packets.
pub fn priority(fd: impl AsFd) -> Result<u32> {
    Ok(sockopt::read(fd.as_fd(), SOL_SOCKET, SO_PRIORITY)?.0)
}

/// Sets the size of the receive buffer. Without CAP_NET_ADMIN, `net.core.rmem_max` limits it.
pub fn set_receive_buffer(fd: impl AsFd, bytes: u32) -> Result<()> {
    set_buffer(fd.as_fd(), SO_RCVBUFFORCE, SO_RCVBUF, bytes)
}

/// Sets the size of the send buffer. Without CAP_NET_ADMIN, `net.core.wmem_max` limits it.
pub fn set_send_buffer(fd: impl AsFd, bytes: u32) -> Result<()> {
    set_buffer(fd.as_fd(), SO_SNDBUFFORCE, SO_SNDBUF, bytes)
}

/// Sets how many bytes must have arrived before the socket is readable. The kernel checks
/// immediately, and wakes waiting threads.
pub fn set_receive_low_water(fd: impl AsFd, bytes: u32) -> Result<()> {
    sockopt::write(fd.as_fd(), SOL_SOCKET, SO_RCVLOWAT, bytes)
}

fn set_buffer(fd: BorrowedFd<'_>, forced: i32, usual: i32, bytes: u32) -> Result<()> {
    match sockopt::write(fd, SOL_SOCKET, forced, bytes) {
        Err(Errno::PERM) => sockopt::write(fd, SOL_SOCKET, usual, bytes),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use rustix::net::sockopt::{socket_recv_buffer_size, socket_send_buffer_size};

    use super::*;

    #[test]
    fn buffers_grow_and_a_rate_is_taken() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        // Sizes that every user may set. The kernel doubles them for its bookkeeping.
        set_receive_buffer(&socket, 65_536).unwrap();
        set_send_buffer(&socket, 32_768).unwrap();
        assert_eq!(socket_recv_buffer_size(&socket), Ok(131_072));
        assert_eq!(socket_send_buffer_size(&socket), Ok(65_536));
        set_max_pacing_rate(&socket, 62_500_000).unwrap();
    }
}
