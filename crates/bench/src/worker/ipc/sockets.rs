//! Messages over each kind of Unix socket, with the message and its descriptors in one call.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::{Result, bail, ensure};
use nix::sys::select::{FdSet, select};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, sendmsg, socket_with, sockopt,
};

use super::{Receive, Send};

/// The most descriptors of a message here.
const MOST: usize = 253;
/// The requested buffer size, which the kernel limits. The article's program does the same.
const BUFFER: usize = 64 << 20;
/// Bytes of the length before a message in a stream.
const PREFIX: usize = 8;

fn socket(kind: SocketType) -> Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_send_buffer_size(&socket, BUFFER)?;
    Ok(socket)
}

/// Sends as many of these bytes as the socket takes, with these descriptors.
pub(super) fn send(socket: impl AsFd, bytes: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    sendmsg(socket, bytes, &mut control, SendFlags::NOSIGNAL)
}

/// Receives a message, or the available bytes of a stream, with the descriptors.
pub(super) fn receive(socket: impl AsFd, into: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            fds.extend(passed);
        }
    }
    ensure!(!received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC), "a message is cut off");
    Ok(received.bytes)
}

pub(super) struct Sending {
    socket: OwnedFd,
    is_stream: bool,
}

/// Returns a connected socket.
pub(super) fn connect_to(kind: SocketType, path: &Path) -> Result<OwnedFd> {
    let socket = socket(kind)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

impl Sending {
    pub(super) fn connect(kind: SocketType, path: &Path) -> Result<Sending> {
        let socket = connect_to(kind, path)?;
        Ok(Sending { socket, is_stream: kind == SocketType::STREAM })
    }
}

impl Send for Sending {
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        if !self.is_stream {
            send(&self.socket, &[IoSlice::new(bytes)], fds)?;
            return Ok(());
        }
        let prefix = (bytes.len() as u64).to_ne_bytes();
        let mut sent = send(&self.socket, &[IoSlice::new(&prefix), IoSlice::new(bytes)], fds)?;
        ensure!(sent >= PREFIX, "a few bytes only");
        while sent < PREFIX + bytes.len() {
            sent += send(&self.socket, &[IoSlice::new(&bytes[sent - PREFIX..])], &[])?;
        }
        Ok(())
    }
}

pub(super) struct Datagrams(OwnedFd);

impl Datagrams {
    pub(super) fn bind(path: &Path) -> Result<Datagrams> {
        let socket = socket(SocketType::DGRAM)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Datagrams(socket))
    }
}

impl Receive for Datagrams {
    fn receive(&mut self, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> Result<usize> {
        receive(&self.0, buffer, fds)
    }
}

/// Datagrams, where the receiver waits in select(2) before each.
pub(super) struct Selected(pub(super) Datagrams);

impl Receive for Selected {
    fn receive(&mut self, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> Result<usize> {
        let mut set = FdSet::new();
        set.insert(self.0.0.as_fd());
        select(None, &mut set, None, None, None)?;
        self.0.receive(buffer, fds)
    }
}

/// Listens at `path`, calls `ready`, and returns the first connection.
pub(super) fn accept_one(
    kind: SocketType,
    path: &Path,
    ready: impl FnOnce() -> Result<()>,
) -> Result<OwnedFd> {
    let listener = socket(kind)?;
    bind(&listener, &SocketAddrUnix::new(path)?)?;
    listen(&listener, 1)?;
    ready()?;
    Ok(accept_with(&listener, SocketFlags::CLOEXEC)?)
}

/// A connection, which is accepted when the first message is requested.
pub(super) struct Connection {
    listener: OwnedFd,
    socket: Option<OwnedFd>,
    is_stream: bool,
}

impl Connection {
    pub(super) fn listen(kind: SocketType, path: &Path) -> Result<Connection> {
        let listener = socket(kind)?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        listen(&listener, 1)?;
        Ok(Connection { listener, socket: None, is_stream: kind == SocketType::STREAM })
    }

    pub(super) fn socket(&mut self) -> Result<&OwnedFd> {
        if self.socket.is_none() {
            self.socket = Some(accept_with(&self.listener, SocketFlags::CLOEXEC)?);
        }
        Ok(self.socket.as_ref().expect("accepted"))
    }
}

impl Receive for Connection {
    fn receive(&mut self, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> Result<usize> {
        let is_stream = self.is_stream;
        let socket = self.socket()?;
        if !is_stream {
            return receive(socket, buffer, fds);
        }
        // Two calls, because the length must be known before any byte of the next message is read.
        let mut prefix = [0; PREFIX];
        fill(socket, &mut prefix, fds)?;
        let len = u64::from_ne_bytes(prefix) as usize;
        ensure!(len <= buffer.len(), "a message that is longer than any");
        fill(socket, &mut buffer[..len], fds)?;
        Ok(len)
    }
}

fn fill(socket: &OwnedFd, into: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<()> {
    let mut filled = 0;
    while filled < into.len() {
        match receive(socket, &mut into[filled..], fds)? {
            0 => bail!("the stream has ended"),
            count => filled += count,
        }
    }
    Ok(())
}
