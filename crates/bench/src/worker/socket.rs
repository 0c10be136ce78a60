//! Stream sockets of TCP or Unix.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use socket2::{Domain, SockAddr, Type};

use super::{READY, say, wait_for_end};

/// A server's address.
#[derive(Clone, Debug)]
pub(super) struct Address(SockAddr);

impl FromStr for Address {
    type Err = io::Error;

    fn from_str(text: &str) -> Result<Address, Self::Err> {
        let tcp = text.parse::<SocketAddr>();
        Ok(Address(tcp.map_or_else(|_| SockAddr::unix(text), |address| Ok(address.into()))?))
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Address {
        Address(address.into())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.as_socket(), self.0.as_pathname()) {
            (Some(address), _) => write!(f, "{address}"),
            (None, path) => write!(f, "{}", path.unwrap_or("".as_ref()).display()),
        }
    }
}

/// The backlog, which is enough for a burst of clients.
const BACKLOG: i32 = 8192;

pub(super) struct Listener(socket2::Socket);

impl Listener {
    /// Listens at an address, and says so.
    pub(super) fn bind(address: &Address) -> Result<Listener> {
        let listen = || {
            let socket = socket2::Socket::new(address.0.domain(), Type::STREAM, None)?;
            if address.0.domain() != Domain::UNIX {
                socket.set_reuse_address(true)?;
            }
            socket.bind(&address.0)?;
            socket.listen(BACKLOG)?;
            io::Result::Ok(socket)
        };
        let socket = listen().with_context(|| format!("listening at {address}"))?;
        say(&format!("{READY} {}", Address(socket.local_addr()?)))?;
        Ok(Listener(socket))
    }

    pub(super) fn accept(&self, nodelay: bool) -> io::Result<Socket> {
        let (socket, address) = self.0.accept()?;
        Socket::new(socket, address.domain(), nodelay)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Serves every connection with a separate thread, until standard input ends.
pub(super) fn serve(
    address: &Address,
    nodelay: bool,
    answer: impl Fn(Socket) + Clone + Send + 'static,
) -> Result<()> {
    let listener = Listener::bind(address)?;
    std::thread::spawn(move || {
        while let Ok(socket) = listener.accept(nodelay) {
            let answer = answer.clone();
            std::thread::spawn(move || answer(socket));
        }
    });
    wait_for_end();
    Ok(())
}

#[derive(Debug)]
pub(super) struct Socket {
    socket: socket2::Socket,
    /// The events that an epoll instance watches for.
    watched: EpollFlags,
}

/// How long to retry a Unix connect: a full backlog refuses it immediately, where TCP would retry.
const PATIENCE: Duration = Duration::from_secs(5);

impl Socket {
    fn new(socket: socket2::Socket, domain: Domain, nodelay: bool) -> io::Result<Socket> {
        if domain != Domain::UNIX {
            socket.set_tcp_nodelay(nodelay)?;
        }
        Ok(Socket { socket, watched: EpollFlags::empty() })
    }

    pub(super) fn connect(address: &Address, nodelay: bool) -> Result<Socket> {
        let domain = address.0.domain();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let socket = socket2::Socket::new(domain, Type::STREAM, None)?;
            match socket.connect(&address.0) {
                Ok(()) => return Ok(Socket::new(socket, domain, nodelay)?),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error).with_context(|| format!("connecting to {address}")),
            }
        }
    }

    /// Makes close(2) reset the connection, which frees its port immediately.
    pub(super) fn set_abortive(&self) -> io::Result<()> {
        self.socket.set_linger(Some(Duration::ZERO))
    }

    pub(super) fn finish_sending(&self) -> io::Result<()> {
        self.socket.shutdown(std::net::Shutdown::Write)
    }

    pub(super) fn key(&self) -> u64 {
        self.socket.as_raw_fd() as u64
    }

    /// Makes an epoll instance watch for these events from now on, and calls no longer block.
    pub(super) fn watch(&mut self, epoll: &Epoll, wanted: EpollFlags) -> Result<()> {
        let mut event = EpollEvent::new(wanted, self.key());
        if self.watched.is_empty() {
            self.socket.set_nonblocking(true)?;
            epoll.add(&self.socket, event)?;
        } else if wanted != self.watched {
            epoll.modify(&self.socket, &mut event)?;
        }
        self.watched = wanted;
        Ok(())
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.read(buffer)
    }
}

impl Write for Socket {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.socket.send_with_flags(buffer, libc::MSG_NOSIGNAL)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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
