//! Bounds on a conversation's memory, so that a backend that does not read makes only its own
//! clients wait.
//!
//! In user space, a conversation holds at most:
//!
//! - from the client: one read of [`READ`] bytes and one incomplete message,
//! - to the client and to each backend: [`BUFFER`] bytes and one message,
//! - early answers: [`KEPT`] bytes, or [`JOINED`] bytes of answers to the parts of one message,
//! - pending messages: [`WAITING`].
//!
//! In the kernel, [`bound`] limits each socket. All conversations together may hold [`QUEUED`]
//! bytes in user space, and those of a thread its share of that; beyond it, the thread reads from
//! no client.

use std::os::fd::AsFd;

use rustix::io::Result;
use rustix::net::sockopt;
use shunt_sys::tuning;

/// Bytes of one read.
pub(crate) const READ: usize = 64 * 1024;
/// Bytes in an output buffer at which no more input is taken for it.
pub(crate) const BUFFER: usize = 64 * 1024;
/// The most messages without an answer.
pub(crate) const WAITING: usize = 1024;
/// The most parts of a split message.
pub(crate) const PARTS: usize = 1024;
/// The most bytes of the answers to all parts of a message.
pub(crate) const JOINED: usize = 2 << 20;
/// The most bytes of messages that are kept until they are answered.
pub(crate) const KEPT: usize = 256 * 1024;
/// Bytes from other connections that a client has not read, at which it is closed.
pub(crate) const PUSHED: usize = 1 << 20;
/// The most topics of a connection.
pub(crate) const TOPICS: usize = 1024;
/// The most bytes in user space for all conversations of a service.
pub(crate) const QUEUED: i64 = 32 << 20;
/// Socket buffer size of each direction. The kernel doubles it for its own overhead.
const SOCKET: u32 = 256 * 1024;

/// Sets the buffer sizes and TCP_NODELAY of a socket. Call it before connect or listen.
pub(crate) fn bound(socket: impl AsFd) -> Result<()> {
    bound_buffers(&socket)?;
    sockopt::set_tcp_nodelay(&socket, true)
}

/// Sets the buffer sizes of a Unix socket.
pub(crate) fn bound_buffers(socket: impl AsFd) -> Result<()> {
    tuning::set_receive_buffer(&socket, SOCKET)?;
    tuning::set_send_buffer(&socket, SOCKET)
}
