//! Registers sockets with the event loop.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::unix::AsyncFd;

/// Registers a socket with the event loop. Returns the socket on failure.
#[allow(deprecated, reason = "`register` is unsafe for types that may close early; an OwnedFd cannot")]
pub(crate) fn watch(socket: OwnedFd) -> Result<AsyncFd<OwnedFd>, (OwnedFd, io::Error)> {
    AsyncFd::try_new(socket).map_err(|error| error.into_parts())
}
