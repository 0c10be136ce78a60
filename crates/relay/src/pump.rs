//! Bytes from one socket to the other, as fast as the slower takes them. Nothing is kept in between but
//! what a pipe or one buffer holds.

use std::cell::RefCell;
use std::io;
use std::os::fd::AsFd;

use rustix::net::{RecvFlags, SendFlags, recv, send};
use tokio::io::Interest;
use tokio::net::TcpStream;

use crate::config::DataPath;
use crate::pipe::Pipe;
use crate::record::Flow;

/// Which of the two sockets failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    From,
    To,
}

/// Until the stream has ended, which is the caller's to pass on. `flow` counts the bytes.
pub(crate) async fn one_way(
    from: &TcpStream,
    to: &TcpStream,
    path: DataPath,
    flow: &Flow,
) -> Result<(), Broken> {
    let mut road = Road::first(path);
    loop {
        let count = match &mut road {
            Road::Copy { .. } => copy(from, to).await?,
            Road::Splice { pipe, .. } => splice(from, to, pipe).await?,
        };
        if count == 0 {
            return Ok(());
        }
        flow.note(count);
        road = road.after(count, path);
    }
}

/// A few bytes that are ours and not the stream's.
pub(crate) async fn read_exact<const N: usize>(from: &TcpStream) -> io::Result<[u8; N]> {
    let (mut bytes, mut have) = ([0; N], 0);
    while have < N {
        let count =
            from.async_io(Interest::READABLE, || Ok(recv(from, &mut bytes[have..], RecvFlags::DONTWAIT)?.0));
        match count.await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => have += count,
        }
    }
    Ok(bytes)
}

/// All of it, however long that takes.
pub(crate) async fn write_all(to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let sent = to.async_io(Interest::WRITABLE, || Ok(send(to, bytes, FLAGS)?)).await?;
        bytes = &bytes[sent..];
    }
    Ok(())
}

/// How the next bytes are moved, and what speaks for the other way.
enum Road {
    Copy { large: u32 },
    Splice { pipe: Pipe, small: u32 },
}

/// What one buffer holds.
const BUFFER: usize = 64 * 1024;
/// A piece from which on splicing is cheaper than copying.
const LARGE: usize = 16 * 1024;
/// After so many large pieces splicing begins.
const LARGE_ENOUGH: u32 = 2;
/// After so many small ones it ends.
const SMALL_ENOUGH: u32 = 16;

impl Road {
    fn first(path: DataPath) -> Road {
        match path {
            DataPath::Splice => Road::splice(),
            DataPath::Auto | DataPath::Copy => Road::Copy { large: 0 },
        }
    }

    /// Out of descriptors, everything can still be copied.
    fn splice() -> Road {
        Pipe::borrow().map_or(Road::Copy { large: 0 }, |pipe| Road::Splice { pipe, small: 0 })
    }

    fn after(self, count: usize, path: DataPath) -> Road {
        if path != DataPath::Auto {
            return self;
        }
        let is_large = count >= LARGE;
        match self {
            Road::Copy { large } if is_large && large + 1 >= LARGE_ENOUGH => Road::splice(),
            Road::Copy { large } => Road::Copy { large: if is_large { large + 1 } else { 0 } },
            Road::Splice { small, .. } if !is_large && small + 1 >= SMALL_ENOUGH => Road::Copy { large: 0 },
            Road::Splice { pipe, small } => {
                Road::Splice { pipe, small: if is_large { 0 } else { small + 1 } }
            }
        }
    }
}

thread_local! {
    static SHARED: RefCell<Box<[u8]>> = RefCell::new(vec![0; BUFFER].into());
}

/// One piece. 0: the stream has ended.
async fn copy(from: &TcpStream, to: &TcpStream) -> Result<usize, Broken> {
    let piece = from.async_io(Interest::READABLE, || {
        SHARED.with_borrow_mut(|buffer| {
            let count = recv(from, &mut buffer[..], RecvFlags::DONTWAIT)?.0;
            // What is not taken at once has to wait somewhere else: the buffer is everybody's.
            let taken = match send(to, &buffer[..count], FLAGS) {
                Ok(taken) => Ok(taken),
                Err(rustix::io::Errno::AGAIN) => Ok(0),
                Err(error) => Err(io::Error::from(error)),
            };
            Ok((count, taken.map(|taken| buffer[taken..count].to_vec())))
        })
    });
    let (count, rest) = piece.await.map_err(|_| Broken::From)?;
    let rest = rest.map_err(|_| Broken::To)?;
    write_all(to, &rest).await.map_err(|_| Broken::To)?;
    Ok(count)
}

const FLAGS: SendFlags = SendFlags::NOSIGNAL.union(SendFlags::DONTWAIT);

/// The same by way of a pipe.
async fn splice(from: &TcpStream, to: &TcpStream, pipe: &mut Pipe) -> Result<usize, Broken> {
    let filled = from.async_io(Interest::READABLE, || pipe.fill(from.as_fd()));
    let count = filled.await.map_err(|_| Broken::From)?;
    while pipe.held() > 0 {
        to.async_io(Interest::WRITABLE, || pipe.drain(to.as_fd())).await.map_err(|_| Broken::To)?;
    }
    Ok(count)
}
