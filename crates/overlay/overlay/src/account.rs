//! Sockets for host connections, made in the control group of the container. So the host counts and
//! limits them as the container's own sockets. Where that is impossible, the socket is made in the
//! router's group and counted as unaccounted.

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

/// The largest number of sockets made together. A process is started to make them, which takes
/// longer than the rest of a set-up.
const BATCH: usize = 16;

/// Sockets that were made in advance, by the inode of their control group and their family. A
/// program that needs one is likely to need others soon.
#[derive(Debug, Default)]
pub(crate) struct Spares(Mutex<HashMap<(u64, AddressFamily), Batch>>);

/// Sockets that were made together.
#[derive(Debug)]
struct Batch {
    made: Instant,
    count: usize,
    left: Vec<OwnedFd>,
}

impl Spares {
    /// Returns a spare socket of that group and family, or else the number of sockets to make.
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

    /// Closes spare sockets that were not used in time.
    pub(crate) fn sweep(&self) {
        lock(&self.0).retain(|_, batch| batch.made.elapsed() < BELIEVED);
    }
}

/// Returns a non-blocking TCP socket for the program whose supervisor is at the other end of
/// `channel`.
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

/// Returns the supervisor's control group, which is its program's too.
fn group(shared: &Shared, channel: &Channel) -> Result<Option<File>, ()> {
    let supervisor = channel.process().ok_or(())?;
    let group = shared.names.lock().expect("nobody panics while it is locked").group_of(supervisor);
    let group = group.and_then(|group| {
        if let (Some(guard), Some(group)) = (&shared.guard, &group) {
            guard.reach(group)?;
        }
        Ok(group)
    });
    // If the process has ended, another process may have its id by now.
    match channel.process_lives() {
        true => group.map_err(|error| tracing::debug!(%error, "a control group cannot be used")),
        false => Err(()),
    }
}

/// Makes a socket in that group. This blocks while the group is frozen.
async fn inside(shared: &Arc<Shared>, namespace: u64, group: Arc<File>, domain: Domain) -> Option<Socket> {
    let family = if domain == Domain::IPV4 { AddressFamily::INET } else { AddressFamily::INET6 };
    let of = (fstat(&*group).ok()?.st_ino, family);
    let count = match shared.spares.take(of) {
        Ok(spare) => return Some(spare.into()),
        Err(count) => count,
    };
    let make = move || accounted::sockets(group.as_fd(), family, count);
    let made = shared.blocking_pool.ask(namespace, make).await.ok()?;
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
