//! Messages as files: an empty datagram passes the file's descriptor and the others. This is the
//! article's second mode, with the same system calls, and a variant with a file in memory.

use std::fs::{self, File};
use std::io::{IoSlice, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, memfd_create};

use super::sockets::{self, Datagrams};
use super::{Ipc, Receive, Send, beside};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Temporary,
    Memory,
}

pub(super) struct Sending {
    socket: std::os::unix::net::UnixDatagram,
    path: PathBuf,
    kind: Kind,
}

impl Sending {
    pub(super) fn new(path: &Path, kind: Kind) -> Result<Sending> {
        let socket = std::os::unix::net::UnixDatagram::unbound()?;
        socket.connect(path)?;
        Ok(Sending { socket, path: beside(path, "message"), kind })
    }

    fn file(&self) -> Result<File> {
        if self.kind == Kind::Memory {
            return Ok(memfd_create("message", MemfdFlags::CLOEXEC)?.into());
        }
        let file = File::options().read(true).write(true).create_new(true).open(&self.path)?;
        fs::remove_file(&self.path)?;
        Ok(file)
    }
}

impl Send for Sending {
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut file = self.file()?;
        file.write_all(bytes)?;
        let all: Vec<BorrowedFd<'_>> = std::iter::once(file.as_fd()).chain(fds.iter().copied()).collect();
        sockets::send(&self.socket, &[IoSlice::new(&[])], &all)?;
        Ok(())
    }
}

pub(super) struct Receiving(Datagrams);

impl Receiving {
    pub(super) fn bind(ipc: &Ipc) -> Result<Receiving> {
        Ok(Receiving(Datagrams::bind(&ipc.at)?))
    }
}

impl Receive for Receiving {
    fn receive(&mut self, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> Result<usize> {
        self.0.receive(&mut Vec::new(), fds)?;
        (!fds.is_empty()).then_some(()).context("a message without its file")?;
        let mut file = File::from(fds.remove(0));
        file.seek(SeekFrom::Start(0))?;
        let len = buffer.len();
        file.read_exact(&mut buffer[..len])?;
        Ok(len)
    }
}
