//! Accepts connections from other relays. Each proves that it has its key, waits for as long as it
//! likes, and names one target.

use std::net::{IpAddr, TcpStream as StdStream};
use std::sync::Arc;
use std::time::Instant;

use shunt_control::{Full, Pass};
use tokio::net::TcpStream;

use crate::config::Loaded;
use crate::dial::Request;
use crate::frame::{FrameError, Open, Verdict};
use crate::handshake;
use crate::leg;
use crate::listener::Listener;
use crate::record::Record;
use crate::session::{self, Inward};
use crate::shared::Shared;
use crate::wire::Wire;

/// Accepts relays.
pub(crate) async fn accept(shared: Arc<Shared>, mut listener: Listener) {
    while let Some((stream, from)) = listener.accept().await {
        take_in(&shared, stream, from.ip());
    }
}

fn take_in(shared: &Arc<Shared>, stream: StdStream, from: IpAddr) {
    let (pass, full) = shared.strangers.enter(from, shared.loaded().config.expects(from));
    if let Some(full) = full {
        log_eviction(shared, from, full);
    }
    let shared = shared.clone();
    shared.clone().spawn(shared.next_worker(), async move {
        let known = tokio::select! {
            known = meet(&shared, stream, &pass) => known,
            () = pass.evicted() => return shared.metrics.count_stranger(),
        };
        match known {
            Ok((wire, peer)) if pass.prove() => serve(shared, wire, &peer).await,
            Ok(_) => shared.metrics.count_stranger(),
            Err(error) => {
                shared.metrics.count_stranger();
                tracing::debug!(%error, "somebody came who is no relay of ours");
            }
        }
    });
}

/// Logs that an unauthenticated connection was closed to make room, for the first time and for
/// every thousandth time.
fn log_eviction(shared: &Shared, from: IpAddr, full: Full) {
    let count = shared.metrics.count_evicted(full);
    if count % 1000 == 1 {
        tracing::warn!(
            newest = %from,
            share = full.label(),
            count,
            "too many at a time have not shown who they are: the oldest of those that say nothing are hung up on"
        );
    }
}

/// Authenticates a relay. Returns its connection and its name.
async fn meet(shared: &Shared, stream: StdStream, pass: &Pass) -> Result<(Wire, String), FrameError> {
    let (stream, loaded) = (TcpStream::from_std(stream)?, shared.loaded());
    let mut wire = leg::answer(stream).await?;
    let is_sealed = wire.is_sealed();
    let index = handshake::listen(&mut wire, &loaded.config.name, |name| {
        let peers = &loaded.config.accept.as_ref()?.peers;
        let index = peers.iter().position(|peer| peer.name == name && (is_sealed || !peer.leg.encrypt))?;
        pass.speak();
        Some((index, loaded.accepted_keys[index].clone()))
    });
    let index = index.await?;
    let peer = &loaded.config.accept.as_ref().expect("one of its peers came").peers[index];
    leg::welcome(wire.stream(), &peer.leg)?;
    Ok((wire, peer.name.clone()))
}

async fn serve(shared: Arc<Shared>, mut wire: Wire, peer: &str) {
    shared.metrics.idle_legs.inc();
    let opened = Open::read(&mut wire).await;
    shared.metrics.idle_legs.dec();
    // The other relay closes a connection that it does not need, without an open frame.
    let Ok(open) = opened else { return };
    let (inward, loaded) = (Inward::Relay(wire), shared.loaded());
    let slot = if shared.is_draining() { None } else { shared.slot() };
    let request = match judge(&loaded, peer, open) {
        Ok(request) if slot.is_some() => request,
        other => {
            let verdict = other.err().unwrap_or(Verdict::Full);
            shared.metrics.count(None, "relay", verdict);
            return inward.refuse(verdict).await;
        }
    };
    let via = request.via.as_deref();
    let record = Record::new(
        (open.client, open.target),
        request.via.clone(),
        Instant::now(),
        shared.metrics.flows(via),
    );
    record.note(&record.phases.accepted);
    let onward = request.dial(&shared, &[]);
    session::serve(&shared, &loaded.config, inward, onward, &record, "relay").await;
}

/// Returns the request, if this peer may reach the target. The current configuration decides, not
/// that of the time when the peer connected.
fn judge(loaded: &Loaded, peer: &str, open: Open) -> Result<Request, Verdict> {
    let accept = loaded.config.accept.as_ref().ok_or(Verdict::Denied)?;
    let peer = accept.peers.iter().find(|accepted| accepted.name == peer).ok_or(Verdict::Denied)?;
    if !peer.targets.iter().any(|targets| targets.contain(open.target)) {
        return Err(Verdict::Denied);
    }
    let via = loaded.config.route(open.target).and_then(|route| route.via.clone());
    Ok(Request { open, via })
}
