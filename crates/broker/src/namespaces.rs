//! The network namespaces whose sockets the broker can ask the kernel about: its own, and, if it is allowed to enter
//! them, those that its clients live in.
//!
//! A client's control socket belongs to the namespace that the client was in when it connected, so the kernel says
//! which that is and leads there. A namespace is kept while such a client is connected, and no longer: a socket inside
//! would keep alive a container's network that everybody else has left.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use shunt_sys::{Errno, identity, netns};

use crate::diag::{Diag, Found};
use crate::pairing::Key;
use crate::tracking::{Recent, Timeouts};

/// See the module.
#[derive(Debug)]
pub(crate) struct Namespaces {
    own: Diag,
    own_tracking: Recent,
    entered: HashMap<u64, Entered>,
    /// Somebody has been told that one could not be entered.
    told: bool,
}

#[derive(Debug, Default)]
struct Entered {
    clients: usize,
    /// Nothing if it could not be entered.
    diag: Option<Diag>,
    tracking: Recent,
}

impl Namespaces {
    pub(crate) fn new() -> Result<Namespaces, Errno> {
        Ok(Namespaces {
            own: Diag::open()?,
            own_tracking: Recent::default(),
            entered: HashMap::new(),
            told: false,
        })
    }

    /// Takes in the namespace of a client, which is the result, and what [`leave`](Self::leave) wants back.
    pub(crate) fn join(&mut self, control: BorrowedFd<'_>) -> Result<u64, Errno> {
        let cookie = identity::namespace(control)?;
        if cookie == self.own.netns() {
            return Ok(cookie);
        }
        let entered = self.entered.entry(cookie).or_default();
        entered.clients += 1;
        if entered.diag.is_none() {
            entered.diag = enter(control)
                .inspect_err(|error| {
                    // The first is told, the others only for debugging.
                    if std::mem::replace(&mut self.told, true) {
                        tracing::debug!(%error, cookie, "cannot ask about the sockets of a namespace");
                    } else {
                        tracing::info!(%error, "sockets of another network namespace stay on TCP: not allowed to ask about them");
                    }
                })
                .ok();
        }
        Ok(cookie)
    }

    /// The same for a namespace that has been taken in. `false`: its sockets cannot be asked about.
    pub(crate) fn join_again(&mut self, cookie: u64) -> bool {
        if let Some(entered) = self.entered.get_mut(&cookie).filter(|entered| entered.diag.is_some()) {
            entered.clients += 1;
        }
        self.knows(cookie)
    }

    /// A client has gone.
    pub(crate) fn leave(&mut self, cookie: u64) {
        if let Some(entered) = self.entered.get_mut(&cookie) {
            entered.clients -= 1;
            if entered.clients == 0 {
                self.entered.remove(&cookie);
            }
        }
    }

    /// The broker's own.
    pub(crate) fn own(&self) -> u64 {
        self.own.netns()
    }

    /// Whether a client lives in another namespace than the broker.
    pub(crate) fn is_abroad(&self) -> bool {
        self.entered.values().any(|entered| entered.diag.is_some())
    }

    /// Whether the sockets of a namespace can be asked about.
    pub(crate) fn knows(&self, cookie: u64) -> bool {
        let entered = self.entered.get(&cookie).and_then(|entered| entered.diag.as_ref());
        cookie == self.own.netns() || entered.is_some()
    }

    /// The live TCP socket with these addresses, if it is the one with this cookie. Waits for nobody.
    pub(crate) fn find(&mut self, key: Key, cookie: u64) -> Result<Option<Found>, Errno> {
        let Key { netns, local, remote } = key;
        let diag = match self.entered.get_mut(&netns) {
            _ if netns == self.own.netns() => Some(&mut self.own),
            entered => entered.and_then(|entered| entered.diag.as_mut()),
        };
        // Otherwise nobody lives there any more.
        diag.map_or(Ok(None), |diag| diag.find(local, remote, cookie))
    }

    /// Returns when a namespace forgets silent connections, if it tracks them and can be asked.
    pub(crate) fn tracking(&mut self, netns: u64) -> Option<Timeouts> {
        let now = Instant::now();
        if netns == self.own.netns() {
            return self.own_tracking.get(now, Timeouts::read);
        }
        let Entered { diag, tracking, .. } = self.entered.get_mut(&netns)?;
        let diag = diag.as_ref()?;
        tracking.get(now, || {
            let namespace = netns::of_socket(diag).ok()?;
            netns::inside(namespace.as_fd(), || Ok(Timeouts::read())).ok()?
        })
    }
}

/// A look into the namespace that a socket belongs to.
fn enter(socket: BorrowedFd<'_>) -> Result<Diag, Errno> {
    let namespace = netns::of_socket(socket)?;
    netns::inside(namespace.as_fd(), Diag::open)
}
