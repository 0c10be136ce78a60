//! Messages through a pipe. vmsplice(2) puts the sender's pages into it, so that only the receiver
//! copies. The sender must not change a message before it was read, which this comparison leaves to
//! the program. An empty datagram has the descriptors.

use std::fs::{File, OpenOptions};
use std::io::{IoSlice, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use anyhow::Result;
use nix::fcntl::{SpliceFFlags, vmsplice};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use rustix::pipe::fcntl_setpipe_size;

use super::sockets::{self, Datagrams};
use super::{Receive, Send, beside};

/// The requested size of the pipe, the most that a user may have.
const PIPE: usize = 1 << 20;

pub(super) struct Sending {
    socket: UnixDatagram,
    pipe: File,
}

impl Sending {
    pub(super) fn connect(path: &Path) -> Result<Sending> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        let pipe = OpenOptions::new().write(true).open(beside(path, "pipe"))?;
        Ok(Sending { socket, pipe })
    }
}

impl Send for Sending {
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        if !fds.is_empty() || bytes.is_empty() {
            sockets::send(&self.socket, &[IoSlice::new(&[])], fds)?;
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let count = vmsplice(self.pipe.as_fd(), &[IoSlice::new(rest)], SpliceFFlags::empty())?;
            rest = &rest[count..];
        }
        Ok(())
    }
}

pub(super) struct Receiving {
    socket: Datagrams,
    pipe: File,
    /// Descriptors of a message.
    descriptors: usize,
}

impl Receiving {
    pub(super) fn listen(ipc: &super::Ipc) -> Result<Receiving> {
        let path = beside(&ipc.at, "pipe");
        mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR)?;
        // Also for writing, so that opening does not wait for the sender.
        let pipe = OpenOptions::new().read(true).write(true).open(path)?;
        fcntl_setpipe_size(&pipe, PIPE)?;
        Ok(Receiving { socket: Datagrams::bind(&ipc.at)?, pipe, descriptors: ipc.descriptors })
    }
}

impl Receive for Receiving {
    fn receive(&mut self, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> Result<usize> {
        let len = buffer.len();
        if self.descriptors > 0 || len == 0 {
            self.socket.receive(&mut Vec::new(), fds)?;
        }
        self.pipe.read_exact(&mut buffer[..len])?;
        Ok(len)
    }
}
