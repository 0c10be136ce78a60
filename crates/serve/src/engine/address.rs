//! Addresses of clients and backends: of TCP, or of a Unix socket.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::{Deserialize, Deserializer};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio::net::{TcpStream, UnixStream as AsyncUnixStream};

use super::limits;

/// The address of a listener or of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `ADDRESS:PORT`
    Tcp(SocketAddr),
    /// `unix:PATH`
    Unix(PathBuf),
}

const UNIX: &str = "unix:";
/// The length of the queue of clients that are not accepted yet.
const BACKLOG: i32 = 4096;

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(formatter),
            Address::Unix(path) => write!(formatter, "{UNIX}{}", path.display()),
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        match text.strip_prefix(UNIX) {
            // The kernel's limit, with the zero byte at the end.
            Some(path) if path.is_empty() || path.len() > 107 => {
                Err("the path of a Unix socket has 1 to 107 bytes".to_owned())
            }
            Some(path) => Ok(Address::Unix(path.into())),
            None => text
                .parse()
                .map(Address::Tcp)
                .map_err(|_| format!("the address {text} is no ADDRESS:PORT, and no unix:PATH")),
        }
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Address, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Address {
    pub(crate) fn is_unix(&self) -> bool {
        matches!(self, Address::Unix(_))
    }

    /// Starts a non-blocking connect.
    pub(crate) fn connect(&self) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, connected) = match self {
            Address::Tcp(address) => {
                let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                let socket = socket_with(family, SocketType::STREAM, flags, None)?;
                limits::bound(&socket)?;
                let connected = connect(&socket, address);
                (socket, connected)
            }
            Address::Unix(path) => {
                let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
                limits::bound_buffers(&socket)?;
                let connected = connect(&socket, &SocketAddrUnix::new(path)?);
                (socket, connected)
            }
        };
        match connected {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
            Err(error) => Err(error.into()),
        }
    }

    /// Connects for a health check.
    pub(crate) async fn try_connect(&self) -> io::Result<()> {
        match self {
            Address::Tcp(address) => TcpStream::connect(address).await.map(drop),
            Address::Unix(path) => AsyncUnixStream::connect(path).await.map(drop),
        }
    }

    /// Opens a listener for each of `count` threads. TCP has a listener for each, among which the
    /// kernel distributes the clients. A Unix socket is shared.
    pub(crate) fn listen(&self, count: usize) -> io::Result<Listeners> {
        match self {
            Address::Tcp(address) => {
                let sockets = (0..count).map(|_| listen_tcp(*address)).collect::<io::Result<_>>()?;
                Ok(Listeners { sockets, path: None })
            }
            Address::Unix(path) => {
                remove_stale(path)?;
                let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
                limits::bound_buffers(&socket)?;
                socket.bind(&SockAddr::unix(path)?)?;
                let path = Some(Bound(path.clone()));
                socket.listen(BACKLOG)?;
                let socket: OwnedFd = socket.into();
                let sockets = (0..count).map(|_| socket.try_clone()).collect::<io::Result<_>>()?;
                Ok(Listeners { sockets, path })
            }
        }
    }
}

/// The listeners of an address, one for each thread.
#[derive(Debug)]
pub(crate) struct Listeners {
    pub(crate) sockets: Vec<OwnedFd>,
    pub(crate) path: Option<Bound>,
}

/// The path of a Unix socket, which is removed when this value is dropped.
#[derive(Debug)]
pub(crate) struct Bound(PathBuf);

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn listen_tcp(address: SocketAddr) -> io::Result<OwnedFd> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    limits::bound(&socket)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Removes a socket at which nothing listens, as a killed service leaves it. Other files stay.
fn remove_stale(path: &Path) -> io::Result<()> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    let refuses =
        || UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    if is_socket && refuses() { std::fs::remove_file(path) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for text in ["127.0.0.1:80", "[::1]:80", "unix:/run/some.sock"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["127.0.0.1", "unix:", "/run/some.sock", &format!("unix:/{}", "x".repeat(107))] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn only_a_stale_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let address = Address::Unix(path.clone());
        let first = address.listen(2).unwrap();
        assert_eq!(first.sockets.len(), 2);
        assert_eq!(address.listen(1).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        // As a killed process leaves it.
        drop(first.sockets);
        let second = address.listen(1).unwrap();
        drop(second);
        assert!(!path.exists());
        std::fs::write(&path, "a file").unwrap();
        assert!(address.listen(1).is_err() && path.exists());
        std::mem::forget(first.path);
    }
}
