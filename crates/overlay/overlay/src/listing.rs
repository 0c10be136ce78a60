//! Lists the current connections of supervised programs on this host, for `shunt status` and `shunt
//! explain`: the end, the network path and the reason for it.

use std::collections::HashMap;
use std::net::SocketAddr;

use serde_json::{Value, json};
use shunt_kernel::names;

use crate::metrics::End;
use crate::shared::Shared;
use crate::unserved;

/// The number of connections that are listed. The others are only counted.
const MOST: usize = 4096;

/// Lists the connections on both paths, without those that have ended meanwhile.
pub(crate) fn report(shared: &Shared) -> Value {
    let mut listed = on_host(shared);
    listed.extend(on_overlay(shared));
    let left_out = listed.len().saturating_sub(MOST);
    listed.truncate(MOST);
    let unserved = unserved::report(shared);
    json!({
        "name": shared.loaded().config.name,
        "connections": listed,
        "left-out": left_out,
        "unserved": unserved,
    })
}

fn on_host(shared: &Shared) -> Vec<Value> {
    // The addresses that the programs see.
    let named = names::all().unwrap_or_default();
    let named: HashMap<u64, (SocketAddr, SocketAddr)> =
        named.into_iter().map(|named| (named.socket.cookie, (named.local, named.remote))).collect();
    let describe = |(end, place, _)| {
        let crate::connections::Place { cookie, local, remote } = place;
        let (own, other) = named.get(&cookie)?;
        Some(json!({
            "end": label(end),
            "path": "host",
            "local": own,
            "remote": other,
            "host": { "local": local, "remote": remote },
        }))
    };
    shared.connections.on_host().into_iter().filter_map(describe).collect()
}

fn on_overlay(shared: &Shared) -> Vec<Value> {
    let mut listed = Vec::new();
    for (namespace, stayed) in shared.connections.on_overlay() {
        // Without a supervisor in the namespace, no supervised program is left there.
        let Some(open) = shared.registry.namespace(namespace).and_then(|known| known.connections().ok())
        else {
            continue;
        };
        for socket in open {
            let Some((flow, reason)) = stayed.get(&socket.cookie) else { continue };
            // The peer of a client may be a service's address, which the kernel translates.
            let is_client = socket.local != flow.destination;
            listed.push(json!({
                "end": label(if is_client { End::Client } else { End::Server }),
                "path": "overlay",
                "local": socket.local,
                "remote": socket.remote,
                "reason": reason.label(),
                "explanation": reason.explanation(),
                "advice": reason.advice(),
            }));
        }
    }
    listed
}

fn label(end: End) -> &'static str {
    match end {
        End::Client => "client",
        End::Server => "server",
    }
}
