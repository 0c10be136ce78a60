//! Accepts clients: those that connect to a configured port, and those whose packets are
//! intercepted.

use std::io;
use std::net::{SocketAddr, TcpStream as StdStream};
use std::sync::Arc;
use std::time::Instant;

use socket2::Socket;
use tokio::net::TcpStream;

use crate::config::Source;
use crate::dial::Request;
use crate::early::Begun;
use crate::frame::Verdict;
use crate::leg;
use crate::listener::{Listener, Stop};
use crate::record::Record;
use crate::session::{self, Inward};
use crate::shared::{Shared, Slot};
use crate::socket;
use crate::wire::Wire;

/// Listens at a port that clients connect to explicitly.
pub(crate) fn listen(address: SocketAddr) -> io::Result<(Listener, Stop)> {
    let socket = socket::new(address)?;
    bind(socket, address)
}

/// Listens at the port to which packets for any address are diverted; needs CAP_NET_ADMIN.
pub(crate) fn listen_for_all(address: SocketAddr) -> io::Result<(Listener, Stop)> {
    let socket = socket::new(address)?;
    socket::make_transparent(&socket, address)?;
    bind(socket, address)
}

/// Accepts clients at a forward's address, as long as the configuration contains that forward.
pub(crate) async fn forward(shared: Arc<Shared>, mut listener: Listener, address: SocketAddr) {
    while let Some((stream, client)) = listener.accept().await {
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
pub(crate) async fn intercept(shared: Arc<Shared>, mut listener: Listener) {
    while let Some((stream, client)) = listener.accept().await {
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

const BACKLOG: i32 = 65_535;
/// The largest number of bytes that are sent in one segment with the target's address.
const FIRST: usize = 1200;

fn bind(socket: Socket, address: SocketAddr) -> io::Result<(Listener, Stop)> {
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Listener::new(socket)
}

/// The connection that a client asks for.
struct Wish {
    request: Request,
    mode: &'static str,
    begun: Option<Begun>,
}

fn take_in(shared: &Arc<Shared>, stream: StdStream, wish: Wish) {
    let worker = wish.begun.as_ref().map_or_else(|| shared.next_worker(), |begun| begun.worker);
    // Counted before the task begins, so that a relay which drains waits for it.
    let slot = shared.slot();
    let task = serve(shared.clone(), stream, wish, slot);
    shared.spawn(worker, async move {
        if let Err(error) = task.await {
            tracing::debug!(%error, "a client was gone at once");
        }
    });
}

async fn serve(shared: Arc<Shared>, stream: StdStream, wish: Wish, slot: Option<Slot>) -> io::Result<()> {
    let Wish { request, mode, begun } = wish;
    let stream = TcpStream::from_std(stream)?;
    leg::watch_over_stranger(&stream)?;
    let (client, loaded) = (Inward::Client(Wire::plain(stream)), shared.loaded());
    let via = request.via.as_deref();
    let Some(_slot) = slot else {
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
