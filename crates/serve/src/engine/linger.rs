//! Connections that are over but for their last bytes. Closed before those are acknowledged, or with something unread, they
//! could be reset, and what was written last be lost.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use shunt_sys::tcp;

use super::link::receive;

/// See the module.
#[derive(Debug)]
pub(crate) struct Lingering {
    socket: OwnedFd,
    until: Instant,
}

/// After that nobody listens any more.
const LONGEST: Duration = Duration::from_secs(10);

impl Lingering {
    /// Of a socket that was shut down for writing.
    pub(crate) fn new(socket: OwnedFd, now: Instant) -> Lingering {
        Lingering { socket, until: now + LONGEST }
    }

    /// Throws away what still comes. True: it can be closed.
    pub(crate) fn is_done(&self, now: Instant) -> bool {
        let mut rest = [0; 16 * 1024];
        loop {
            match receive(self.socket.as_fd(), &mut rest) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                Err(_) => return true,
            }
        }
        now >= self.until || tcp::outq(self.socket.as_fd()).is_ok_and(|unacknowledged| unacknowledged == 0)
    }
}
