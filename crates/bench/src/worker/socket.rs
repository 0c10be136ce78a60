//! Stream sockets of TCP or Unix.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use socket2::SockRef;

/// A server's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Address, Self::Err> {
        Ok(text.parse().map_or_else(|_| Address::Unix(text.into()), Address::Tcp))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(f, "{address}"),
            Address::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// The backlog, which is enough for a burst of clients.
const BACKLOG: i32 = 8192;

pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    pub(super) fn bind(address: &Address) -> Result<Listener> {
        let listener = match address {
            Address::Tcp(address) => TcpListener::bind(address).map(Listener::Tcp),
            Address::Unix(path) => UnixListener::bind(path).map(Listener::Unix),
        };
        let listener = listener.with_context(|| format!("listening at {address}"))?;
        // A second listen(2) replaces std's backlog.
        SockRef::from(&listener).listen(BACKLOG)?;
        Ok(listener)
    }

    pub(super) fn address(&self) -> Result<Address> {
        Ok(match self {
            Listener::Tcp(listener) => Address::Tcp(listener.local_addr()?),
            Listener::Unix(listener) => {
                let address = listener.local_addr()?;
                Address::Unix(address.as_pathname().context("bound to a path")?.to_owned())
            }
        })
    }

    pub(super) fn accept(&self, nodelay: bool) -> io::Result<Socket> {
        match self {
            Listener::Tcp(listener) => {
                let stream = listener.accept()?.0;
                stream.set_nodelay(nodelay)?;
                Ok(Socket::Tcp(stream))
            }
            Listener::Unix(listener) => Ok(Socket::Unix(listener.accept()?.0)),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        }
    }
}

#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// How long to retry a Unix connect: a full backlog refuses it immediately, where TCP would retry.
const PATIENCE: Duration = Duration::from_secs(5);

impl Socket {
    pub(super) fn connect(address: &Address, nodelay: bool) -> Result<Socket> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let connected = match address {
                Address::Tcp(address) => TcpStream::connect(address).map(Socket::Tcp),
                Address::Unix(path) => UnixStream::connect(path).map(Socket::Unix),
            };
            match connected {
                Ok(socket) => {
                    if let Socket::Tcp(stream) = &socket {
                        stream.set_nodelay(nodelay)?;
                    }
                    return Ok(socket);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error).with_context(|| format!("connecting to {address}")),
            }
        }
    }

    /// Makes close(2) reset the connection, which frees its port immediately.
    pub(super) fn set_abortive(&self) -> io::Result<()> {
        SockRef::from(self).set_linger(Some(Duration::ZERO))
    }

    pub(super) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Socket::Tcp(stream) => stream.set_nonblocking(true),
            Socket::Unix(stream) => stream.set_nonblocking(true),
        }
    }

    pub(super) fn finish_sending(&self) -> io::Result<()> {
        match self {
            Socket::Tcp(stream) => stream.shutdown(std::net::Shutdown::Write),
            Socket::Unix(stream) => stream.shutdown(std::net::Shutdown::Write),
        }
    }

    pub(super) fn key(&self) -> u64 {
        self.as_raw_fd() as u64
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.read(buffer),
            Socket::Unix(stream) => stream.read(buffer),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.write(buffer),
            Socket::Unix(stream) => stream.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Tcp(stream) => stream.as_fd(),
            Socket::Unix(stream) => stream.as_fd(),
        }
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// Converts EAGAIN to `None`.
pub(super) fn unless_blocked(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.raw_os_error() == Some(Errno::EAGAIN as i32) => Ok(None),
        Err(error) => Err(error),
    }
}
