//! How much a conversation may take, so that a backend that does not read makes its clients wait and nothing else.
//!
//! In user space: a read of [`READ`] bytes and the message before it of the client; [`BUFFER`] bytes and one message more
//! to each backend, and to the client; as many of answers that came early, or [`JOINED`] bytes of those to the parts of a
//! message; [`WAITING`] messages. In the kernel: what
//! [`bound`] allows each socket. All conversations together: [`QUEUED`] bytes in user space, beyond which no client is read
//! from.

use std::os::fd::AsFd;

use rustix::io::Result;
use rustix::net::sockopt;
use shunt_sys::tuning;

/// Bytes of one read.
pub(crate) const READ: usize = 64 * 1024;
/// Bytes that wait to be written, before more are taken.
pub(crate) const BUFFER: usize = 64 * 1024;
/// Messages that wait for an answer.
pub(crate) const WAITING: usize = 1024;
/// Messages that one is split into.
pub(crate) const PARTS: usize = 1024;
/// Bytes of the answers to all of them.
pub(crate) const JOINED: usize = 2 << 20;
/// Bytes of messages that are kept until they are answered.
pub(crate) const KEPT: usize = 256 * 1024;
/// Bytes in user space, of all conversations.
pub(crate) const QUEUED: i64 = 32 << 20;
/// Bytes of each direction of a socket; the kernel allows itself twice as much.
const SOCKET: u32 = 256 * 1024;

/// For a socket, before it is connected or listens.
pub(crate) fn bound(socket: impl AsFd) -> Result<()> {
    tuning::set_receive_buffer(&socket, SOCKET)?;
    tuning::set_send_buffer(&socket, SOCKET)?;
    sockopt::set_tcp_nodelay(&socket, true)
}
