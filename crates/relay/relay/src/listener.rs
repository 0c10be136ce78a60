//! A listening socket that can be closed without a reset for the clients that have connected.
//!
//! The kernel completes handshakes by itself, and queues the connections until they are accepted.
//! A close resets those in the queue, whose clients may have sent requests already. So a listener
//! is stopped in two steps:
//!
//! ```text
//! listening ──► Stop ──► new SYNs are dropped, the queue is served ──► linger is over ──► closed
//! ```
//!
//! Within the linger time, handshakes that had begun before complete. A client whose SYN was
//! dropped repeats it after a second, and finds what listens there by then.

use std::io;
use std::net::{SocketAddr, TcpStream as StdStream};
use std::time::Duration;

use socket2::{SockFilter, SockRef, Socket};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

/// A listening socket.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: TcpListener,
    state: State,
}

#[derive(Debug)]
enum State {
    Listening(oneshot::Receiver<Duration>),
    /// Closed at that time.
    Stopped(Instant),
}

/// Stops a [`Listener`].
#[derive(Debug)]
pub(crate) struct Stop(oneshot::Sender<Duration>);

impl Stop {
    /// Stops the listener. It is closed after `linger`.
    pub(crate) fn after(self, linger: Duration) {
        // A listener whose task has ended is closed already.
        let _ = self.0.send(linger);
    }
}

impl Listener {
    /// Wraps a socket that listens and does not block.
    pub(crate) fn new(socket: Socket) -> io::Result<(Listener, Stop)> {
        let (stop, stopped) = oneshot::channel();
        let socket = TcpListener::from_std(socket.into())?;
        Ok((Listener { socket, state: State::Listening(stopped) }, Stop(stop)))
    }

    /// Accepts the next connection, as a socket that is not registered with any runtime: the worker
    /// that gets it has its own event loop. Errors such as a lack of descriptors or memory are
    /// retried. Returns `None` when the listener is to be closed.
    pub(crate) async fn accept(&mut self) -> Option<(StdStream, SocketAddr)> {
        loop {
            let accepted = match &mut self.state {
                State::Listening(stopped) => tokio::select! {
                    accepted = self.socket.accept() => accepted,
                    linger = stopped => {
                        drop_syns(&self.socket);
                        self.state = State::Stopped(Instant::now() + linger.unwrap_or_default());
                        continue;
                    }
                },
                State::Stopped(until) => match timeout_at(*until, self.socket.accept()).await {
                    Ok(accepted) => accepted,
                    // The event loop may not have reported the last ones yet.
                    Err(_) => return last(&self.socket),
                },
            };
            match accepted.and_then(|(stream, peer)| Ok((stream.into_std()?, peer))) {
                Ok(accepted) => return Some(accepted),
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, "a connection cannot be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

/// Accepts a connection without the event loop.
fn last(listener: &TcpListener) -> Option<(StdStream, SocketAddr)> {
    loop {
        match SockRef::from(listener).accept() {
            Ok((socket, peer)) => {
                socket.set_nonblocking(true).ok()?;
                return Some((socket.into(), peer.as_socket()?));
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
            Err(error) => {
                tracing::warn!(%error, "connections that wait to be accepted are reset");
                return None;
            }
        }
    }
}

/// Makes the kernel drop each SYN to the socket. Segments that complete a handshake still arrive.
fn drop_syns(listener: &TcpListener) {
    const FLAGS: u32 = 13;
    const SYN: u32 = 0x02;
    const SYN_AND_ACK: u32 = 0x12;
    let (load, and, equal, give) = (0x30, 0x54, 0x15, 0x06);
    let filter = [
        SockFilter::new(load, 0, 0, FLAGS),
        SockFilter::new(and, 0, 0, SYN_AND_ACK),
        SockFilter::new(equal, 0, 1, SYN),
        SockFilter::new(give, 0, 0, 0),
        SockFilter::new(give, 0, 0, u32::MAX),
    ];
    if let Err(error) = SockRef::from(listener).attach_filter(&filter) {
        tracing::debug!(%error, "clients that connect now may be reset");
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};

    use socket2::{Domain, Type};
    use tokio::time::timeout;

    use super::*;

    fn listen() -> (SocketAddr, Listener, Stop) {
        let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        socket.listen(128).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        let (listener, stop) = Listener::new(socket).unwrap();
        (address, listener, stop)
    }

    #[tokio::test]
    async fn connections_that_wait_when_it_is_stopped_are_accepted() {
        for linger in [Duration::ZERO, Duration::from_millis(50)] {
            let (address, mut listener, stop) = listen();
            let clients: Vec<_> = (0..50).map(|_| StdStream::connect(address).unwrap()).collect();
            stop.after(linger);
            let mut accepted = Vec::new();
            while let Some((mut stream, _)) = listener.accept().await {
                stream.write_all(b"served").unwrap();
                accepted.push(stream);
            }
            drop((listener, accepted));
            for mut client in clients {
                let mut answer = String::new();
                client.read_to_string(&mut answer).unwrap();
                assert_eq!(answer, "served");
            }
        }
    }

    #[tokio::test]
    async fn a_stopped_listener_lets_nobody_connect() {
        let (address, mut listener, stop) = listen();
        stop.after(Duration::from_secs(600));
        let limit = Duration::from_millis(50);
        assert!(timeout(limit, listener.accept()).await.is_err(), "it lingers");
        let dropped = StdStream::connect_timeout(&address, limit).unwrap_err();
        assert_eq!(dropped.kind(), ErrorKind::TimedOut);
        drop(listener);
        assert_eq!(StdStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
}
