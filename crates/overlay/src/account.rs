//! Whose host connections are: their sockets are made in the control group of the container, so that what the host counts and limits by
//! group is the container's, as with its own sockets. A host where that cannot be done makes them in the router's, and counts how many.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::fs::fstat;
use rustix::net::AddressFamily;
use shunt_sys::accounted;
use socket2::{Domain, Protocol, Socket, Type};

use crate::channel::{BELIEVED, Channel};
use crate::lock::lock;
use crate::shared::Shared;

/// So many are made at a time where many are needed: a process for each would take longer than the connection.
const BATCH: usize = 16;

/// Sockets that have been made ahead, by the inodes of their control groups: where one is needed others are, soon after it.
#[derive(Debug, Default)]
pub(crate) struct Spares(Mutex<HashMap<(u64, AddressFamily), Batch>>);

/// Those that were made at the same time.
#[derive(Debug)]
struct Batch {
    made: Instant,
    count: usize,
    left: Vec<OwnedFd>,
}

impl Spares {
    /// One of a group; or how many are to be made.
    fn take(&self, of: (u64, AddressFamily)) -> Result<OwnedFd, usize> {
        let mut batches = lock(&self.0);
        match batches.get_mut(&of).filter(|batch| batch.made.elapsed() < BELIEVED) {
            Some(batch) => batch.left.pop().ok_or_else(|| (2 * batch.count).min(BATCH)),
            None => Err(1),
        }
    }

    fn keep(&self, of: (u64, AddressFamily), left: Vec<OwnedFd>) {
        let batch = Batch { made: Instant::now(), count: left.len() + 1, left };
        let former = lock(&self.0).insert(of, batch);
        drop(former);
    }

    /// Lets go of what nobody has needed.
    pub(crate) fn sweep(&self) {
        lock(&self.0).retain(|_, batch| batch.made.elapsed() < BELIEVED);
    }
}

/// A TCP socket for a program whose supervisor is at the other end of `channel`; it does not block.
pub(crate) async fn socket(
    shared: &Arc<Shared>,
    channel: &Channel,
    domain: Domain,
) -> std::io::Result<Socket> {
    match channel.group(|| group(shared, channel)) {
        Ok(None) => own(domain),
        Ok(Some(group)) => match inside(shared, channel.namespace(), group, domain).await {
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
async fn inside(shared: &Arc<Shared>, namespace: u64, group: Arc<File>, domain: Domain) -> Option<Socket> {
    let family = if domain == Domain::IPV4 { AddressFamily::INET } else { AddressFamily::INET6 };
    let of = (fstat(&*group).ok()?.st_ino, family);
    let count = match shared.spares.take(of) {
        Ok(spare) => return Some(spare.into()),
        Err(count) => count,
    };
    let make = move || accounted::sockets(group.as_fd(), family, count);
    let made = shared.errands.ask(namespace, make).await.ok()?;
    let made = made.inspect_err(|error| tracing::debug!(%error, "no socket in a control group")).ok();
    let mut made = made?;
    let first = made.pop()?;
    shared.spares.keep(of, made);
    Some(first.into())
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
