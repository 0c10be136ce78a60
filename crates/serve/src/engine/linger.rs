//! Sockets that are kept open until the peer has acknowledged their last bytes.
//!
//! Closing a socket with unread input sends RST, which can discard output that the peer has not
//! read yet. So a finished connection is shut down for writing, drained, and closed later.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use shunt_sys::tcp;

use super::link::receive;

/// A socket that was shut down for writing and waits for the last acknowledgement.
#[derive(Debug)]
pub(crate) struct Lingering {
    socket: OwnedFd,
    until: Instant,
}

/// The longest time that a socket lingers.
const LONGEST: Duration = Duration::from_secs(10);

impl Lingering {
    /// Wraps a socket that was shut down for writing.
    pub(crate) fn new(socket: OwnedFd, now: Instant) -> Lingering {
        Lingering { socket, until: now + LONGEST }
    }

    /// Discards pending input. Returns true if the socket can be closed.
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
