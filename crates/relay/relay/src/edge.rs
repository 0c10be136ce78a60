//! Accepts clients: those that connect to a configured port, and those whose packets are
//! intercepted.

use std::io;
use std::net::{SocketAddr, TcpStream as StdStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::Socket;
use tokio::net::{TcpListener, TcpStream};

use crate::config::Source;
use crate::dial::Request;
use crate::early::Begun;
use crate::frame::Verdict;
use crate::leg;
use crate::record::Record;
use crate::session::{self, Inward};
use crate::shared::Shared;
use crate::socket;
use crate::wire::Wire;

/// Listens at a port that clients connect to explicitly.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket::new(address)?;
    bind(socket, address)
}

/// Listens at the port to which packets for any address are diverted; needs CAP_NET_ADMIN.
pub(crate) fn listen_for_all(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket::new(address)?;
    socket::make_transparent(&socket, address)?;
    bind(socket, address)
}

/// Accepts clients at a forward's address, as long as the configuration contains that forward.
pub(crate) async fn forward(shared: Arc<Shared>, listener: TcpListener, address: SocketAddr) {
    loop {
        let (stream, client) = accept(&listener).await;
        let loaded = shared.loaded();
        let Some(forward) = loaded.config.forwards.iter().find(|forward| forward.listen == address) else {
            continue;
        };
        let request = Request::new(client, forward.target, forward.source, forward.via.clone());
        take_in(&shared, stream, Wish { request, mode: "forward", begun: None });
    }
}

/// Accepts intercepted clients. The local address of the accepted socket is the target that the
/// client connected to.
pub(crate) async fn intercept(shared: Arc<Shared>, listener: TcpListener) {
    loop {
        let (stream, client) = accept(&listener).await;
        let Ok(target) = stream.local_addr() else { continue };
        let loaded = shared.loaded();
        // If no route matches any more, this relay connects to the target directly.
        let (via, source, mode) = match loaded.config.route(target) {
            Some(route) => (route.via.clone(), route.source, route.mode.label()),
            None => (None, Source::Relay, "none"),
        };
        let request = Request::new(client, target, source, via);
        let begun = shared.early.take((request.open.client, request.open.target));
        take_in(&shared, stream, Wish { request, mode, begun });
    }
}

/// Accepts the next connection. It is returned as a socket that is not registered with any runtime.
/// Errors such as a lack of descriptors or memory are retried.
pub(crate) async fn accept(listener: &TcpListener) -> (StdStream, SocketAddr) {
    loop {
        let accepted = listener.accept().await;
        // The worker that gets the connection has its own event loop.
        match accepted.and_then(|(stream, peer)| Ok((stream.into_std()?, peer))) {
            Ok(accepted) => return accepted,
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

const BACKLOG: i32 = 65_535;
/// The largest number of bytes that are sent in one segment with the target's address.
const FIRST: usize = 1200;

fn bind(socket: Socket, address: SocketAddr) -> io::Result<TcpListener> {
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// The connection that a client asks for.
struct Wish {
    request: Request,
    mode: &'static str,
    begun: Option<Begun>,
}

fn take_in(shared: &Arc<Shared>, stream: StdStream, wish: Wish) {
    let worker = wish.begun.as_ref().map_or_else(|| shared.next_worker(), |begun| begun.worker);
    let task = serve(shared.clone(), stream, wish);
    shared.spawn(worker, async move {
        if let Err(error) = task.await {
            tracing::debug!(%error, "a client was gone at once");
        }
    });
}

async fn serve(shared: Arc<Shared>, stream: StdStream, wish: Wish) -> io::Result<()> {
    let Wish { request, mode, begun } = wish;
    let stream = TcpStream::from_std(stream)?;
    leg::watch_over_stranger(&stream)?;
    let (client, loaded) = (Inward::Client(Wire::plain(stream)), shared.loaded());
    let via = request.via.as_deref();
    let Some(_slot) = shared.slot() else {
        shared.metrics.count(via, mode, Verdict::Full);
        client.refuse(Verdict::Full).await;
        return Ok(());
    };
    let began = begun.as_ref().map_or_else(Instant::now, |begun| begun.since);
    let ends = (request.open.client, request.open.target);
    let record = Record::new(ends, request.via.clone(), began, shared.metrics.flows(via));
    record.note(&record.phases.accepted);
    let first = if via.is_some() && begun.is_none() { at_once(client.wire()) } else { Vec::new() };
    if !first.is_empty() {
        record.up.note(first.len());
    }
    let onward = async {
        match begun {
            Some(begun) => begun.onward.await.unwrap_or(Err(Verdict::NoRelay)),
            None => request.dial(&shared, &first).await,
        }
    };
    session::serve(&shared, &loaded.config, client, onward, &record, mode).await;
    Ok(())
}

/// Returns the bytes that have arrived already, up to a limit.
fn at_once(wire: &Wire) -> Vec<u8> {
    let mut bytes = vec![0; FIRST];
    let have = wire.take_first(&mut bytes);
    bytes.truncate(have);
    bytes
}
