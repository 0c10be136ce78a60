//! The network namespaces whose sockets the broker can query: its own, and those of its clients if
//! it may enter them.
//!
//! A client's control socket belongs to the network namespace in which the client connected, so the
//! kernel can report that namespace and give access to it. The broker opens a netlink socket inside
//! only while such a client is connected. Otherwise the netlink socket would keep a container's
//! network alive after all its processes have ended.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use shunt_sys::{Errno, identity, netns};

use crate::diag::{Diag, Found};
use crate::pairing::Key;
use crate::tracking::{Recent, Timeouts};

/// A registry of network namespaces; see the module.
#[derive(Debug)]
pub(crate) struct Namespaces {
    own: Diag,
    own_tracking: Recent,
    entered: HashMap<u64, Entered>,
    /// Set once the log contains a message that a namespace could not be entered.
    told: bool,
}

#[derive(Debug, Default)]
struct Entered {
    clients: usize,
    /// `None` if the namespace could not be entered.
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

    /// Registers the namespace of a client. Returns its cookie, which the caller later passes to
    /// [`leave`](Self::leave).
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
                    // The first failure is logged at info level, later ones at debug level.
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

    /// Adds one more user of a registered namespace. Returns `false` if its sockets cannot be
    /// queried.
    pub(crate) fn join_again(&mut self, cookie: u64) -> bool {
        if let Some(entered) = self.entered.get_mut(&cookie).filter(|entered| entered.diag.is_some()) {
            entered.clients += 1;
        }
        self.knows(cookie)
    }

    /// Removes a user of a namespace.
    pub(crate) fn leave(&mut self, cookie: u64) {
        if let Some(entered) = self.entered.get_mut(&cookie) {
            entered.clients -= 1;
            if entered.clients == 0 {
                self.entered.remove(&cookie);
            }
        }
    }

    /// Returns the cookie of the broker's own namespace.
    pub(crate) fn own(&self) -> u64 {
        self.own.netns()
    }

    /// Returns whether a client lives in another namespace that the broker can query.
    pub(crate) fn is_foreign(&self) -> bool {
        self.entered.values().any(|entered| entered.diag.is_some())
    }

    /// Returns whether the sockets of a namespace can be queried.
    pub(crate) fn knows(&self, cookie: u64) -> bool {
        let entered = self.entered.get(&cookie).and_then(|entered| entered.diag.as_ref());
        cookie == self.own.netns() || entered.is_some()
    }

    /// Returns the live TCP socket with these addresses, if it is the one with this cookie. Does
    /// not wait for any other process's locks.
    pub(crate) fn find(&mut self, key: Key, cookie: u64) -> Result<Option<Found>, Errno> {
        let Key { netns, local, remote } = key;
        let diag = match self.entered.get_mut(&netns) {
            _ if netns == self.own.netns() => Some(&mut self.own),
            entered => entered.and_then(|entered| entered.diag.as_mut()),
        };
        // Otherwise no client lives in this namespace any more.
        diag.map_or(Ok(None), |diag| diag.find(local, remote, cookie))
    }

    /// Returns the timeouts after which a namespace forgets silent connections, if it tracks
    /// connections and can be queried.
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

/// Opens a netlink socket in the namespace of `socket`.
fn enter(socket: BorrowedFd<'_>) -> Result<Diag, Errno> {
    let namespace = netns::of_socket(socket)?;
    netns::inside(namespace.as_fd(), Diag::open)
}
