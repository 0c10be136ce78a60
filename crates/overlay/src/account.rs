//! Whose host connections are: their sockets are made in the control group of the container, so that what the host counts and limits by
//! group is the container's, as with its own sockets. A host where that cannot be done makes them in the router's, and counts how many.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::net::AddressFamily;
use shunt_sys::accounted;
use socket2::{Domain, Protocol, Socket, Type};

use crate::channel::Channel;
use crate::errand::Errands;
use crate::shared::Shared;

/// A TCP socket for a program whose supervisor is at the other end of `channel`; it does not block.
pub(crate) async fn socket(
    shared: &Arc<Shared>,
    channel: &Channel,
    domain: Domain,
) -> std::io::Result<Socket> {
    match channel.group(|| group(shared, channel)) {
        Ok(None) => own(domain),
        Ok(Some(group)) => match inside(&shared.errands, channel.namespace(), group, domain).await {
            Some(socket) => Ok(socket),
            None => unaccounted(shared, domain),
        },
        Err(()) => unaccounted(shared, domain),
    }
}

/// The supervisor's group, which is its program's.
fn group(shared: &Shared, channel: &Channel) -> Result<Option<File>, ()> {
    let supervisor = channel.process().ok_or(())?;
    let group = shared.names.lock().expect("nobody panics while it is locked").group_of(supervisor);
    let group = group.and_then(|group| {
        if let (Some(guard), Some(group)) = (&shared.guard, &group) {
            guard.reach(group)?;
        }
        Ok(group)
    });
    // If it has ended, another process may have its number.
    match channel.process_lives() {
        true => group.map_err(|error| tracing::debug!(%error, "a control group cannot be used")),
        false => Err(()),
    }
}

/// Waits for the group if it is frozen.
async fn inside(errands: &Arc<Errands>, namespace: u64, group: Arc<File>, domain: Domain) -> Option<Socket> {
    let family = if domain == Domain::IPV4 { AddressFamily::INET } else { AddressFamily::INET6 };
    let made = errands.ask(namespace, move || accounted::socket(group.as_fd(), family)).await.ok()?;
    made.inspect_err(|error| tracing::debug!(%error, "no socket in a control group")).ok().map(Socket::from)
}

fn unaccounted(shared: &Shared, domain: Domain) -> std::io::Result<Socket> {
    shared.metrics.unaccounted();
    own(domain)
}

fn own(domain: Domain) -> std::io::Result<Socket> {
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}
