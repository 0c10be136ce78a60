//! A client process of the broker: a control socket, a page, and messages. It returns errors
//! instead of panicking, because the victims count them and the attackers expect them.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shunt_abi::control::{Doorbell, Hello, Link, MAX_MESSAGE, Mapped, Offer, Pair, Release, Reply, Request};
use shunt_abi::page::PAGE_BYTES;
use shunt_sys::{Errno, memfd, seqpacket};
use socket2::SockRef;

/// A broker that has not answered for this long counts as stopped. The time is generous because the
/// machine runs other tests.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A client process.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) socket: OwnedFd,
}

/// Why a client has received no answer.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The broker closed or refused the connection.
    HungUp,
    /// The broker sent nothing in time.
    Silent,
}

impl Client {
    /// Connects and sends a hello with a new page. Does not wait for the answer.
    pub(crate) fn connect(broker: &Path) -> Result<Client, Trouble> {
        let (page, _) = memfd::create_sealed("shunt-page", PAGE_BYTES).map_err(|_| Trouble::HungUp)?;
        Client::connect_with(broker, page.as_fd())
    }

    /// Connects and sends a hello with an existing page.
    pub(crate) fn connect_with(broker: &Path, page: BorrowedFd<'_>) -> Result<Client, Trouble> {
        let client = Client::stranger(broker)?;
        let mut program = [0; 32];
        program[..7].copy_from_slice(b"hostile");
        client.say(Hello { program }, &[page])?;
        Ok(client)
    }

    /// Connects without a hello. Retries while the broker's backlog is full.
    pub(crate) fn stranger(broker: &Path) -> Result<Client, Trouble> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match seqpacket::connect(broker.as_os_str().as_encoded_bytes()) {
                Ok(socket) => return Ok(Client { socket }),
                Err(Errno::AGAIN) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1))
                }
                Err(Errno::AGAIN) => return Err(Trouble::Silent),
                Err(_) => return Err(Trouble::HungUp),
            }
        }
    }

    /// Sends a message, and waits while the socket is full.
    pub(crate) fn say(&self, request: impl Into<Request>, fds: &[BorrowedFd<'_>]) -> Result<(), Trouble> {
        self.send(request.into().encode().as_bytes(), fds)
    }

    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Trouble> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match seqpacket::send(&self.socket, bytes, fds) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN | Errno::NOBUFS) => self.wait(PollFlags::OUT, Duration::from_millis(20)),
                // Too many descriptors of this user are in flight.
                Err(Errno::TOOMANYREFS) => std::thread::sleep(Duration::from_millis(1)),
                Err(_) => return Err(Trouble::HungUp),
            }
            if Instant::now() > deadline {
                return Err(Trouble::Silent);
            }
        }
    }

    pub(crate) fn offer(&self, ticket: u64, socket: impl AsFd) -> Result<(), Trouble> {
        self.offer_as(ticket, socket.as_fd(), addresses(socket.as_fd()))
    }

    /// Offers a socket and states these addresses.
    pub(crate) fn offer_as(
        &self,
        ticket: u64,
        socket: BorrowedFd<'_>,
        (local, remote): (SocketAddr, SocketAddr),
    ) -> Result<(), Trouble> {
        self.say(Offer::new(ticket, local, remote), &[socket])
    }

    pub(crate) fn doorbell(&self, slot: u32, fd: impl AsFd) -> Result<(), Trouble> {
        self.say(Doorbell { slot, pad: 0 }, &[fd.as_fd()])
    }

    pub(crate) fn release(&self, pair: &Pair) -> Result<(), Trouble> {
        let Pair { link, conn, side, .. } = *pair;
        self.say(Release { link, conn, side }, &[])
    }

    /// Answers that a link is mapped, as an honest process does. This client does not use the
    /// memory.
    pub(crate) fn answer(&self, link: &Link) -> Result<(), Trouble> {
        self.say(Mapped { link: link.link, side: link.side, is_mapped: 1 }, &[])
    }

    /// Returns the next message with its descriptor.
    pub(crate) fn receive(&self, patience: Duration) -> Result<(Reply, Option<OwnedFd>), Trouble> {
        let mut buffer = [0; MAX_MESSAGE];
        let deadline = Instant::now() + patience;
        loop {
            match seqpacket::recv(&self.socket, &mut buffer) {
                Ok((0, _)) => return Err(Trouble::HungUp),
                Ok((len, mut fds)) => {
                    let reply = Reply::decode(&buffer[..len], fds.len()).map_err(|_| Trouble::HungUp)?;
                    return Ok((reply, fds.take_first()));
                }
                Err(Errno::AGAIN) if Instant::now() < deadline => {
                    self.wait(PollFlags::IN, Duration::from_millis(20).min(patience));
                }
                Err(Errno::AGAIN) => return Err(Trouble::Silent),
                Err(_) => return Err(Trouble::HungUp),
            }
        }
    }

    /// Returns the next message. Answers a link.
    pub(crate) fn next(&self, patience: Duration) -> Result<Reply, Trouble> {
        let (reply, _) = self.receive(patience)?;
        if let Reply::Link(link) = &reply {
            self.answer(link)?;
        }
        Ok(reply)
    }

    /// Returns the next link with its memory, without answering it.
    pub(crate) fn link(&self, patience: Duration) -> Result<(Link, OwnedFd), Trouble> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if let (Reply::Link(link), Some(memory)) = self.receive(left)? {
                return Ok((link, memory));
            }
        }
    }

    fn wait(&self, events: PollFlags, time: Duration) {
        let moment = Timespec { tv_sec: 0, tv_nsec: time.as_nanos() as i64 };
        let _ = poll(&mut [PollFd::new(&self.socket, events)], Some(&moment));
    }
}

/// Returns both ends of a connection on the loopback interface.
pub(crate) fn loopback() -> std::io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    pair_at(&listener)
}

/// Returns both ends of a connection to an existing listener.
pub(crate) fn pair_at(listener: &TcpListener) -> std::io::Result<(TcpStream, TcpStream)> {
    let client = TcpStream::connect(listener.local_addr()?)?;
    Ok((client, listener.accept()?.0))
}

/// Returns the addresses of a socket's two ends, or zeros for any other descriptor.
pub(crate) fn addresses(socket: BorrowedFd<'_>) -> (SocketAddr, SocketAddr) {
    let nobody = SocketAddr::from(([0, 0, 0, 0], 0));
    let socket = SockRef::from(&socket);
    let ends = [socket.local_addr(), socket.peer_addr()].map(|end| end.ok().and_then(|end| end.as_socket()));
    match ends {
        [Some(local), Some(remote)] => (local, remote),
        _ => (nobody, nobody),
    }
}
