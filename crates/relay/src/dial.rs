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
use crate::leg;
use crate::shared::Shared;
use crate::socket;
use crate::wire::{Parked, Wire};

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
        let wire = match pool.take().map(Parked::resume) {
            Some(Ok(wire)) => wire,
            _ => pool.make().await.map_err(|error| {
                tracing::warn!(peer = name, %error, "the next relay cannot be reached");
                Verdict::NoRelay
            })?,
        };
        let open = Open { hops, ..self.open }.encode();
        wire.write_all(&[&open[..], first].concat()).await.map_err(|_| Verdict::NoRelay)?;
        Ok(wire)
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
