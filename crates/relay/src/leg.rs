//! Connections between two relays. Turbo start lets them fill the leg from the first byte on, and
//! keepalive detects soon that the other end is gone.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt;
use shunt_kernel::window::End;
use shunt_sys::tuning;
use socket2::{SockRef, Socket, TcpKeepalive};
use thiserror::Error;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::config::{AcceptedPeer, Leg, Loaded, Peer};
use crate::frame::FrameError;
use crate::handshake;
use crate::probe;
use crate::seal;
use crate::socket;
use crate::wire::Wire;
use shunt_key::Key;

/// Why there is no connection to a relay.
#[derive(Debug, Error)]
pub(crate) enum LegError {
    #[error("no connection: {0}")]
    Connect(#[from] io::Error),
    #[error(transparent)]
    Hello(#[from] FrameError),
}

/// Connects to a peer and authenticates both sides. `name` is this relay's name.
pub(crate) async fn connect(peer: &Peer, name: &str, key: &Key) -> Result<Wire, LegError> {
    let socket = socket::new(peer.address)?;
    prepare(&socket, std::slice::from_ref(&peer.leg).iter())?;
    let connecting = TcpSocket::from_std_stream(socket.into()).connect(peer.address);
    let limit = |_| io::Error::from(io::ErrorKind::TimedOut);
    let stream = timeout(CONNECT_LIMIT, connecting).await.map_err(limit)??;
    pace(&stream, &peer.leg)?;
    let mut wire = match peer.leg.encrypt {
        true => timeout(handshake::LIMIT, Wire::sealed(stream, seal::caller())).await.map_err(limit)??,
        false => Wire::plain(stream),
    };
    handshake::call(&mut wire, name, key).await?;
    Ok(wire)
}

/// Listens for peers.
pub(crate) fn listen(address: SocketAddr, peers: &[AcceptedPeer]) -> io::Result<TcpListener> {
    let socket = socket::new(address)?;
    socket.set_reuse_address(true)?;
    // The kernel negotiates the window scale before it is known which peer connects.
    prepare(&socket, peers.iter().map(|peer| &peer.leg))?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// Starts a connection that was accepted. Its first byte decides between TLS and plain TCP.
pub(crate) async fn answer(stream: TcpStream) -> io::Result<Wire> {
    let begun = async {
        let mut first = [0; 1];
        stream.peek(&mut first).await?;
        match first[0] {
            seal::FIRST_BYTE => Wire::sealed(stream, seal::listener()).await,
            _ => Ok(Wire::plain(stream)),
        }
    };
    timeout(handshake::LIMIT, begun).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Applies the leg's settings to a connection whose peer is now authenticated.
pub(crate) fn welcome(stream: &TcpStream, leg: &Leg) -> io::Result<()> {
    pace(stream, leg)?;
    watch_over(SockRef::from(stream), LEG_KEEPALIVE)
}

/// Returns the initial congestion windows for connections to or at these addresses, in segments.
pub(crate) fn windows(loaded: &Loaded) -> Vec<(End, u32)> {
    let segments = |leg: &Leg| leg.window().map_or(0, |bytes| bytes.div_ceil(SEGMENT) as u32);
    let to = loaded.config.peers.iter().map(|peer| (End::To(peer.address), segments(&peer.leg)));
    let accept = loaded.config.accept.iter();
    let at = accept.flat_map(|accept| {
        let widest = accept.peers.iter().map(|peer| segments(&peer.leg)).max().unwrap_or(0);
        accept.listen.iter().map(move |address| (End::At(address.port()), widest))
    });
    to.chain(at).filter(|(_, segments)| *segments > 0).collect()
}

/// Returns an error if the configuration requires a feature that this host lacks.
pub(crate) fn check(loaded: &Loaded) -> Result<(), String> {
    let accepted = loaded.config.accept.iter().flat_map(|accept| &accept.peers);
    let legs = loaded.config.peers.iter().map(|peer| &peer.leg).chain(accepted.map(|peer| &peer.leg));
    for algorithm in legs.filter_map(|leg| leg.congestion.as_deref()) {
        probe::congestion(algorithm).map_err(|error| {
            let file = "/proc/sys/net/ipv4/tcp_available_congestion_control";
            let there = std::fs::read_to_string(file).unwrap_or_default();
            format!("congestion = {algorithm:?} cannot be used here ({error}); there are: {}", there.trim())
        })?;
    }
    Ok(())
}

/// Sets the options of a connection to a client or a target.
pub(crate) fn watch_over_stranger(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    watch_over(SockRef::from(stream), STRANGER_KEEPALIVE)
}

const BACKLOG: i32 = 4096;
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// The payload of a segment on Ethernet, with timestamps.
const SEGMENT: u64 = 1448;
/// The default congestion control with turbo start. Its window survives a pause.
const TURBO_CONGESTION: &str = "bbr";

/// The idle time and the time between two probes. A dead connection must not be handed out.
const LEG_KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(3));
/// A client that disappeared is detected eventually.
const STRANGER_KEEPALIVE: (Duration, Duration) = (Duration::from_secs(120), Duration::from_secs(15));

/// Sets options before the socket connects or listens. The buffers must suffice for the largest of
/// `legs`.
fn prepare<'a>(socket: &Socket, legs: impl Iterator<Item = &'a Leg> + Clone) -> io::Result<()> {
    if let Some(window) = legs.clone().filter_map(Leg::window).max() {
        // The kernel doubles the requested size, and uses half of the result for the window. Two
        // windows are requested, because a second one waits behind the one in flight.
        let bytes = u32::try_from(2 * window).unwrap_or(u32::MAX).min(i32::MAX as u32 / 2);
        tuning::set_receive_buffer(socket, bytes)?;
        tuning::set_send_buffer(socket, bytes)?;
    }
    let explicit = legs.clone().find_map(|leg| leg.congestion.as_deref());
    if let Some(algorithm) = explicit {
        sockopt::set_tcp_congestion(socket, algorithm)?;
    } else if legs.clone().any(|leg| leg.turbo) {
        // This congestion control is not available in all kernels.
        let _ = sockopt::set_tcp_congestion(socket, TURBO_CONGESTION);
    }
    socket.set_tcp_nodelay(true)?;
    watch_over(SockRef::from(socket), LEG_KEEPALIVE)
}

/// Limits the rate to the leg's bandwidth, so that a large window does not leave in one burst.
fn pace(socket: impl AsFd, leg: &Leg) -> io::Result<()> {
    if let Some(bandwidth) = leg.bandwidth.filter(|_| leg.turbo) {
        tuning::set_max_pacing_rate(socket, bandwidth.bytes_per_second())?;
    }
    Ok(())
}

fn watch_over(socket: SockRef<'_>, (idle, interval): (Duration, Duration)) -> io::Result<()> {
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(4))
}
