//! Connections that began with a client's SYN and wait for the end of its handshake.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::dial::Onward;
use crate::frame::Verdict;
use crate::shared::Worker;

/// By who connects to whom.
#[derive(Debug, Default)]
pub(crate) struct Early {
    begun: Mutex<HashMap<Ends, Begun>>,
}

/// The client and its target.
pub(crate) type Ends = (SocketAddr, SocketAddr);

/// What has begun, and where.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) worker: Worker,
    pub(crate) since: Instant,
    pub(crate) onward: oneshot::Receiver<Result<Onward, Verdict>>,
}

/// So many at a time: a flood of SYNs gets no more out of a relay.
const MOST: usize = 4096;
/// A client that has not answered by then has given up, or never meant to.
const PATIENCE: Duration = Duration::from_secs(10);

impl Early {
    /// Unless it has already.
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

    pub(crate) fn take(&self, ends: Ends) -> Option<Begun> {
        self.all().remove(&ends)
    }

    /// Gives up those whose clients have not answered; how many.
    pub(crate) fn expire(&self) -> usize {
        let mut all = self.all();
        let before = all.len();
        all.retain(|_, begun| begun.since.elapsed() < PATIENCE);
        before - all.len()
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Ends, Begun>> {
        self.begun.lock().expect("nobody panics while it is locked")
    }
}

/// Why nothing begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It has, with this SYN's first transmission.
    Begun,
    TooMany,
}
