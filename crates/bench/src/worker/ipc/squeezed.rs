//! Messages as compressed datagrams.

use std::io::{IoSlice, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use anyhow::Result;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

use super::sockets::{self, Datagrams};
use super::{Ipc, Receive, Send};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codec {
    /// zstd at level 1, the fastest.
    Zstd,
    /// gzip at level 6, its default.
    Gzip,
}

pub(super) struct Sending {
    socket: UnixDatagram,
    codec: Codec,
}

impl Sending {
    pub(super) fn new(path: &Path, codec: Codec) -> Result<Sending> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        Ok(Sending { socket, codec })
    }
}

impl Send for Sending {
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let squeezed = match self.codec {
            Codec::Zstd => zstd::bulk::compress(bytes, 1)?,
            Codec::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::new(6));
                encoder.write_all(bytes)?;
                encoder.finish()?
            }
        };
        sockets::send(&self.socket, &[IoSlice::new(&squeezed)], fds)?;
        Ok(())
    }
}

pub(super) struct Receiving {
    socket: Datagrams,
    codec: Codec,
    squeezed: Vec<u8>,
}

/// The most that a header and incompressible data add.
const SLACK: usize = 4096;

impl Receiving {
    pub(super) fn bind(ipc: &Ipc, codec: Codec) -> Result<Receiving> {
        let squeezed = vec![0; ipc.size + ipc.size / 8 + SLACK];
        Ok(Receiving { socket: Datagrams::bind(&ipc.at)?, codec, squeezed })
    }
}

impl Receive for Receiving {
    fn receive(&mut self, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> Result<usize> {
        let len = self.socket.receive(&mut self.squeezed, fds)?;
        let squeezed = &self.squeezed[..len];
        match self.codec {
            Codec::Zstd => Ok(zstd::bulk::decompress_to_buffer(squeezed, &mut buffer[..])?),
            Codec::Gzip => {
                let len = buffer.len();
                GzDecoder::new(squeezed).read_exact(&mut buffer[..])?;
                Ok(len)
            }
        }
    }
}
