//! Connects onward: to the target, or to the next relay. A relay receives the target's address and
//! the first bytes in one segment.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use socket2::Socket;
use tokio::net::TcpSocket;
use tokio::time::timeout;

use crate::config::Source;
use crate::frame::{MAX_HOPS, Open, Verdict};
use crate::leg::{self, LegError};
use crate::shared::Shared;
use crate::socket;
use crate::wire::Wire;

/// A connection to be made, and the next relay that it goes through.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) open: Open,
    /// The next relay.
    pub(crate) via: Option<String>,
}

/// A connection towards the target.
#[derive(Debug)]
pub(crate) enum Onward {
    /// A connection to the target.
    Target(Wire),
    /// A connection to a relay, which sends its verdict before any bytes of the stream.
    Relay(Wire),
}

impl Request {
    /// Returns a request for a client that is connected to this relay.
    pub(crate) fn new(
        client: SocketAddr,
        target: SocketAddr,
        source: Source,
        via: Option<String>,
    ) -> Request {
        let (client, target) = (canonical(client), canonical(target));
        Request { open: Open { target, client, source, hops: MAX_HOPS }, via }
    }

    /// Connects onward. If the next hop is a relay, `first` is sent with the request. To a target,
    /// nothing is sent before it has accepted.
    pub(crate) async fn dial(&self, shared: &Arc<Shared>, first: &[u8]) -> Result<Onward, Verdict> {
        match &self.via {
            Some(name) => self.to_relay(shared, name, first).await.map(Onward::Relay),
            None => self.to_target(shared).await.map(Onward::Target).map_err(|error| Verdict::of(&error)),
        }
    }

    async fn to_relay(&self, shared: &Arc<Shared>, name: &str, first: &[u8]) -> Result<Wire, Verdict> {
        let hops = self.open.hops.checked_sub(1).ok_or(Verdict::Circle)?;
        let pool = shared.pool(name).ok_or(Verdict::NoRelay)?;
        let open = Open { hops, ..self.open }.encode();
        let ready = pool.take().and_then(|parked| parked.resume().ok());
        send(ready, || pool.make(), &[&open[..], first].concat()).await.map_err(|error| {
            tracing::warn!(peer = name, %error, "the next relay cannot be reached");
            Verdict::NoRelay
        })
    }

    async fn to_target(&self, shared: &Arc<Shared>) -> io::Result<Wire> {
        let Open { target, client, source, .. } = self.open;
        let socket = socket::new(target)?;
        if source == Source::Client && client.is_ipv4() == target.is_ipv4() {
            bind_as(&socket, client)?;
        }
        let limit = shared.loaded().config.connect_timeout.0;
        let connecting = TcpSocket::from_std_stream(socket.into()).connect(target);
        let stream =
            timeout(limit, connecting).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        leg::watch_over_stranger(&stream)?;
        Ok(Wire::plain(stream))
    }
}

/// Sends a request over the ready connection, or over a new one if there is none or if it has died
/// meanwhile. Nothing else waits to be sent on a ready connection, so the kernel accepts a request
/// as a whole or not at all. The other relay gets it once.
async fn send<M: Future<Output = Result<Wire, LegError>>>(
    ready: Option<Wire>,
    make: impl FnOnce() -> M,
    bytes: &[u8],
) -> Result<Wire, LegError> {
    if let Some(wire) = ready
        && wire.write_all(bytes).await.is_ok()
    {
        return Ok(wire);
    }
    let wire = make().await?;
    wire.write_all(bytes).await?;
    Ok(wire)
}

/// Binds to the client's address; needs CAP_NET_ADMIN.
fn bind_as(socket: &Socket, client: SocketAddr) -> io::Result<()> {
    socket::make_transparent(socket, client)?;
    socket.set_reuse_address(true)?;
    // The client's port is taken if this host already has such a connection. Another port is used
    // then.
    socket.bind(&client.into()).or_else(|_| socket.bind(&SocketAddr::new(client.ip(), 0).into()))
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use rustix::net::Shutdown;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    async fn wires() -> (Wire, Wire) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Wire::plain(one), Wire::plain(listener.accept().await.unwrap().0))
    }

    #[tokio::test]
    async fn a_request_is_sent_again_when_the_ready_connection_has_died() {
        let ((dead, _other), (fresh, peer)) = (wires().await, wires().await);
        rustix::net::shutdown(dead.stream(), Shutdown::Write).unwrap();
        let _wire = send(Some(dead), || async { Ok(fresh) }, b"open").await.unwrap();
        assert_eq!(&peer.read_exact::<4>().await.unwrap(), b"open");
    }

    #[tokio::test]
    async fn a_new_connection_is_tried_once() {
        let (dead, _other) = wires().await;
        rustix::net::shutdown(dead.stream(), Shutdown::Write).unwrap();
        assert!(send(None, || async { Ok(dead) }, b"open").await.is_err());
    }
}
