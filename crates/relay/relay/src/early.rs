//! Onward connections that started with a client's SYN and wait for the end of its handshake.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::dial::Onward;
use crate::frame::Verdict;
use crate::shared::Worker;

/// The started connections, by the addresses of client and target.
#[derive(Debug, Default)]
pub(crate) struct Early {
    begun: Mutex<HashMap<Ends, Begun>>,
}

/// The addresses of a client and of its target.
pub(crate) type Ends = (SocketAddr, SocketAddr);

/// A started onward connection, and the worker that carries it.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) worker: Worker,
    pub(crate) since: Instant,
    /// The time from which on the client can end its handshake. `None` while its SYN is held.
    pub(crate) answered: Option<Instant>,
    pub(crate) onward: oneshot::Receiver<Result<Onward, Verdict>>,
}

/// The largest number of started connections, so that a flood of SYNs cannot exhaust the relay.
const MOST: usize = 4096;
/// How long the client may take to end its handshake. Later, it has given up, or its address was
/// forged.
const PATIENCE: Duration = Duration::from_secs(10);

impl Early {
    /// Starts a connection for `ends`, unless there is one already.
    pub(crate) fn begin(&self, ends: Ends, begun: impl FnOnce() -> Begun) -> Result<(), Refusal> {
        let mut all = self.all();
        if all.contains_key(&ends) {
            return Err(Refusal::Begun);
        }
        if all.len() >= MOST {
            return Err(Refusal::TooMany);
        }
        all.insert(ends, begun());
        Ok(())
    }

    /// Notes that a client's SYN is not held any more.
    pub(crate) fn release(&self, ends: Ends) {
        if let Some(begun) = self.all().get_mut(&ends) {
            begun.answered = Some(Instant::now());
        }
    }

    pub(crate) fn take(&self, ends: Ends) -> Option<Begun> {
        self.all().remove(&ends)
    }

    /// Drops the connections whose clients have not ended their handshake in time. Returns their
    /// number. A client whose SYN is held has no handshake to end.
    pub(crate) fn expire(&self, now: Instant) -> usize {
        let mut all = self.all();
        let before = all.len();
        let is_late = |answered| now.saturating_duration_since(answered) >= PATIENCE;
        all.retain(|_, begun| !begun.answered.is_some_and(is_late));
        before - all.len()
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Ends, Begun>> {
        self.begun.lock().expect("nobody panics while it is locked")
    }
}

/// Why no connection is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// A connection has already started. The SYN is a retransmission.
    Begun,
    TooMany,
}
