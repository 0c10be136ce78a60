//! Connections between two relays. Turbo start lets them fill the leg from the first byte on, and
//! keepalive detects soon that the other end is gone.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt;
use shunt_kernel::window::End;
use shunt_sys::tuning;
use socket2::{SockRef, Socket, TcpKeepalive};
use thiserror::Error;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::config::{AcceptedPeer, Config, Leg, Loaded, Peer};
use crate::frame::FrameError;
use crate::handshake;
use crate::listener::{Listener, Stop};
use crate::probe;
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
    Options::for_legs(std::iter::once(&peer.leg)).set(&socket)?;
    let connecting = TcpSocket::from_std_stream(socket.into()).connect(peer.address);
    let limit = |_| io::Error::from(io::ErrorKind::TimedOut);
    let stream = timeout(CONNECT_LIMIT, connecting).await.map_err(limit)??;
    pace(&stream, &peer.leg)?;
    let mut wire = match peer.leg.encrypt {
        true => {
            timeout(handshake::LIMIT, Wire::sealed(stream, shunt_tls::caller())).await.map_err(limit)??
        }
        false => Wire::plain(stream),
    };
    handshake::call(&mut wire, name, key).await?;
    Ok(wire)
}

/// Listens for peers.
pub(crate) fn listen(address: SocketAddr, options: &Options) -> io::Result<(Listener, Stop)> {
    let socket = socket::new(address)?;
    socket.set_reuse_address(true)?;
    options.set(&socket)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Listener::new(socket)
}

/// Options that a socket gets before it connects or listens. Other ones need another socket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Options {
    /// The bytes that its buffers hold.
    window: Option<u64>,
    congestion: Option<Congestion>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Congestion {
    Configured(String),
    /// Preferred for turbo start. It is not available in all kernels.
    Turbo,
}

impl Options {
    /// Returns the options that suit all of these peers. The kernel negotiates the window scale
    /// before it is known which of them connects.
    pub(crate) fn for_peers(peers: &[AcceptedPeer]) -> Options {
        Options::for_legs(peers.iter().map(|peer| &peer.leg))
    }

    fn for_legs<'a>(legs: impl Iterator<Item = &'a Leg> + Clone) -> Options {
        let configured = legs.clone().find_map(|leg| leg.congestion.clone()).map(Congestion::Configured);
        let turbo = legs.clone().any(|leg| leg.turbo).then_some(Congestion::Turbo);
        Options { window: legs.filter_map(Leg::window).max(), congestion: configured.or(turbo) }
    }

    fn set(&self, socket: &Socket) -> io::Result<()> {
        if let Some(window) = self.window {
            // The kernel doubles the requested size, and uses half of the result for the window.
            // Two windows are requested, because a second one waits behind the one in flight.
            let bytes = u32::try_from(2 * window).unwrap_or(u32::MAX).min(i32::MAX as u32 / 2);
            tuning::set_receive_buffer(socket, bytes)?;
            tuning::set_send_buffer(socket, bytes)?;
        }
        match &self.congestion {
            Some(Congestion::Configured(algorithm)) => sockopt::set_tcp_congestion(socket, algorithm)?,
            Some(Congestion::Turbo) => drop(sockopt::set_tcp_congestion(socket, TURBO_CONGESTION)),
            None => {}
        }
        socket.set_tcp_nodelay(true)?;
        watch_over(SockRef::from(socket), LEG_KEEPALIVE)
    }
}

/// Starts a connection that was accepted. Its first byte decides between TLS and plain TCP.
pub(crate) async fn answer(stream: TcpStream) -> io::Result<Wire> {
    let begun = async {
        let mut first = [0; 1];
        stream.peek(&mut first).await?;
        match first[0] {
            shunt_tls::FIRST_BYTE => Wire::sealed(stream, shunt_tls::listener()).await,
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
pub(crate) fn windows(config: &Config) -> HashMap<End, u32> {
    let segments = |leg: &Leg| leg.window().map(|bytes| bytes.div_ceil(SEGMENT) as u32);
    let to = config.peers.iter().map(|peer| (End::To(peer.address), segments(&peer.leg)));
    let at = config.accept.iter().flat_map(|accept| {
        let widest = accept.peers.iter().filter_map(|peer| segments(&peer.leg)).max();
        accept.listen.iter().map(move |address| (End::At(address.port()), widest))
    });
    let mut windows = HashMap::new();
    for (end, segments) in to.chain(at) {
        if let Some(segments) = segments.filter(|segments| *segments > 0) {
            let widest = windows.entry(end).or_insert(segments);
            *widest = segments.max(*widest);
        }
    }
    windows
}

/// Returns the windows to set so that `wanted` replaces `now`. 0 restores the default.
pub(crate) fn changes(now: &HashMap<End, u32>, wanted: &HashMap<End, u32>) -> Vec<(End, u32)> {
    let removed = now.keys().filter(|end| !wanted.contains_key(end)).map(|end| (*end, 0));
    let new = wanted.iter().filter(|(end, segments)| now.get(end) != Some(segments));
    removed.chain(new.map(|(end, segments)| (*end, *segments))).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_option_of_a_listener_is_part_of_its_options() {
        let options = |more: &str| {
            let text = format!(
                "name = 'a'\n[accept]\nlisten = ['0.0.0.0:7440']\n[[accept.peer]]\nname = 'd'\nkey = 'k'\n{more}"
            );
            let config: Config = toml::from_str(&text).unwrap();
            Options::for_peers(&config.accept.unwrap().peers)
        };
        let turbo = "turbo = true\nbandwidth = '1gbit'\nrtt = '20ms'\n";
        let all = [
            options(""),
            options("congestion = 'reno'\n"),
            options("congestion = 'cubic'\n"),
            options(turbo),
            options(&format!("{turbo}congestion = 'cubic'\n")),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[at + 1..].contains(one), "{one:?}");
        }
        assert_eq!(options("bandwidth = '1gbit'\n"), options(""));
    }

    #[test]
    fn a_leg_without_turbo_start_gets_the_default_window_back() {
        let turbo = "turbo = true\nbandwidth = '1gbit'\nrtt = '20ms'\n";
        let peer = |name: &str, port: u16, more: &str| {
            format!("[[peer]]\nname = '{name}'\naddress = '10.2.0.2:{port}'\nkey = 'k'\n{more}")
        };
        let windows = |peers: &str, accepted: &str| {
            let accept = "[accept]\nlisten = ['0.0.0.0:7440']\n[[accept.peer]]\nname = 'd'\nkey = 'k'\n";
            let text = format!("name = 'a'\n{peers}{accept}{accepted}");
            super::windows(&toml::from_str(&text).unwrap())
        };
        let to = |port| End::To(([10, 2, 0, 2], port).into());
        let both = windows(&[peer("b", 1, turbo), peer("c", 2, turbo)].concat(), turbo);
        assert_eq!(both, HashMap::from([(to(1), 1727), (to(2), 1727), (End::At(7440), 1727)]));
        let one = windows(&peer("b", 1, ""), "");
        assert!(one.is_empty());
        let mut removed = changes(&both, &one);
        removed.sort_by_key(|(end, _)| format!("{end:?}"));
        assert_eq!(removed, [(End::At(7440), 0), (to(1), 0), (to(2), 0)]);
        assert_eq!(changes(&one, &windows(&peer("b", 1, turbo), "")), [(to(1), 1727)]);
        assert_eq!(changes(&both, &both), []);
        // One of two peers at an address wants a larger window.
        let shared = windows(&[peer("b", 1, turbo), peer("c", 1, "")].concat(), "");
        assert_eq!(shared, HashMap::from([(to(1), 1727)]));
    }
}
