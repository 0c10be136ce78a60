//! The connection to the broker.
//!
//! No call ever blocks on the broker. A message that cannot be sent now is sent at a later
//! operation, and without a broker every connection stays on TCP (L6). Only with `--offer at-once`
//! does the first use of a connection wait, for at most `MOMENT_NANOS` of `offer.rs`.
//!
//! ```text
//! process                                broker
//!   | Hello (page) ----------------------> |
//!   | <----------------- Welcome (board)   |
//!   | Doorbell, for each waiter ---------> |  eventfds by which the peer notifies this process
//!   | Offer (ticket, socket) ------------> |  the broker finds the mirroring socket
//!   | <-------------------- Link (memfd)   |  once for each link
//!   | Mapped ----------------------------> |  the broker seals the memory once both ends have it
//!   | <------------- Pair (ticket, conn)   |  attach the endpoint; or Refused (ticket, reason)
//!   | GiveUp (ticket) -------------------> |  there is no other end; Wanted (ticket) if it comes
//!   | Release (conn) --------------------> |  it is detached; or Leave, see `release_after`
//! ```
//!
//! Example: a client and a server of one host each send an `Offer` for their end of a connection.
//! The broker sends a `Link` to each, if they have none in common yet, and then a `Pair` with the
//! connection's index in the link. Each process finds the messages at its next operation, by the
//! counter on the board. Then it attaches the endpoint (`attach::adopt`).
//!
//! The control lock guards the state. Messages that need endpoints' locks become a list of `Effect`
//! values, which `apply` executes after it has released the control lock.
//!
//! `session` has the states of the session with the broker. `connection` connects, registers and
//! sends; `offer` decides about offers; `replies` handles the broker's messages; `links` has the end
//! of connections and links, `remainder` the bytes that TCP has yet to take, and `fork` the state of
//! a child.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::*;

use shunt_abi::geometry::CONNS;
use shunt_abi::latency::WANTED;
use shunt_abi::reason::Reason;

use crate::base::lock::Lock;
use crate::base::names::EndpointRef;
use crate::base::{process, rank};
use crate::broker::presence;
use crate::life::{attach, earlier_calls, untracked};
use crate::socket::endpoint::{Endpoint, Phase};
use crate::socket::keepalive::Silence;
use crate::socket::links::{Link, Peer, Pin};
use links::{LinkName, release};
use offer::take_back;
use session::Session;

mod connection;
mod fork;
mod links;
mod offer;
pub(crate) mod remainder;
mod replies;
mod session;

pub(crate) use connection::{announce_doorbell, before_other_root, before_other_user, has_broker, renumber};
pub(crate) use fork::{across_fork, after_fork_in_child, disown};
pub(crate) use links::{release_after, retire};
pub(crate) use offer::{consider, give_up_if_alone, may_be_held_by_broker, withdraw};

/// Operations until an endpoint that found no broker is considered again.
const RETRY_AFTER: u32 = 256;

static CONTROL: Lock<Control, { rank::CONTROL }> = Lock::new(Control::new());

struct Control {
    session: Session,
    links: BTreeMap<LinkName, &'static Link>,
    /// Set when a broker was lost, until those of its links that no connection uses have been
    /// retired.
    orphaned: bool,
    peers: BTreeMap<u64, &'static Peer>,
    /// Structures for reuse.
    spare_links: Vec<&'static Link>,
    spare_peers: Vec<&'static Peer>,
}

/// The effect of a message that must wait until the control lock is released, because it takes
/// endpoints' locks.
enum Effect {
    Adopt(EndpointRef, Pin, Silence),
    Refuse(EndpointRef, Reason),
    /// The other ends of these endpoints, which were missing, are offered now.
    Reopen(Vec<EndpointRef>),
    Retire(&'static Link),
    /// This process has no descriptor left for a doorbell of the peer: all connections with the
    /// peer fall back.
    Mute(&'static Peer),
    /// The broker has not kept the bytes of this endpoint that TCP has yet to take.
    KeepBytes(EndpointRef),
    /// The broker asks that all connections fall back from this link.
    Vacate(&'static Link),
    LostBroker,
}

/// Receives pending messages. If the board shows none, this costs one load.
#[inline]
pub(crate) fn poll_inbox() {
    if may_have_messages() {
        take_messages();
    }
}

/// Returns whether the board shows pending messages, or that a latency is wanted.
#[inline]
pub(crate) fn may_have_messages() -> bool {
    process::board().is_some_and(|board| board.inbox.load(Acquire) != process::SEEN.load(Relaxed))
}

#[cold]
fn take_messages() {
    if process::board()
        .is_some_and(|board| board.inbox.load(Acquire) & !WANTED == process::SEEN.load(Relaxed))
    {
        // There are none: a latency is wanted.
        return;
    }
    let mut effects = Vec::new();
    {
        let Some(mut control) = CONTROL.try_lock() else { return };
        control.receive_all(&mut effects);
        control.register_with_next();
        control.retire_orphans(&mut effects);
    }
    apply(effects);
}

fn apply(effects: Vec<Effect>) {
    for effect in effects {
        match effect {
            Effect::Adopt(name, at, silence) => {
                if let Err(reason) = attach::adopt(name, at.link, at.conn, silence) {
                    // The other end must not wait for a connection that will not come about.
                    if reason != Reason::Stale {
                        at.link.close_lanes(at.conn);
                    }
                    release(&at);
                    if let Some(endpoint) = name.resolve() {
                        take_back(endpoint, reason, RETRY_AFTER);
                    }
                }
            }
            Effect::Refuse(name, reason) => {
                if let Some(endpoint) = name.resolve() {
                    take_back(endpoint, reason, endpoint.offer.limit().saturating_mul(16));
                    // It may have been paired before.
                    if reason.ends_pairs() {
                        attach::go_back(endpoint, reason);
                    }
                }
            }
            Effect::Reopen(names) => earlier_calls::begin(|| {
                names.into_iter().filter_map(EndpointRef::resolve).for_each(Endpoint::reopen);
            }),
            Effect::Retire(link) => retire(link),
            Effect::Mute(peer) => {
                for endpoint in
                    crate::socket::endpoint::all().filter(|endpoint| endpoint.is_linked_with(peer))
                {
                    attach::go_back(endpoint, Reason::DescriptorLimit);
                }
                // The doorbells are closed, because other peers may need the descriptors. The check
                // is needed because the structure may have been reused for another peer meanwhile.
                let _control = CONTROL.lock();
                if peer.is_mute() {
                    peer.forget_doorbells();
                }
            }
            Effect::Vacate(link) => {
                for endpoint in (0..CONNS).filter_map(|conn| link.endpoint(conn)?.resolve()) {
                    attach::go_back(endpoint, Reason::LinkRetired);
                }
            }
            Effect::KeepBytes(name) => {
                if let Some(endpoint) = name.resolve() {
                    endpoint.tx.lock().custody.refuse();
                }
            }
            Effect::LostBroker => {
                for endpoint in
                    crate::socket::endpoint::all().filter(|endpoint| endpoint.phase() == Phase::Offered)
                {
                    take_back(endpoint, Reason::NoBroker, RETRY_AFTER);
                }
            }
        }
    }
}

/// Checks whether the broker is still there, or registers this process with its successor:
/// whichever is due according to [`presence`]. The caller holds no lock of an endpoint or an epoll
/// instance.
#[inline]
pub(crate) fn check_if_due(now: u64) {
    if presence::is_due(now) {
        check_broker(now);
    }
}

#[cold]
fn check_broker(now: u64) {
    if untracked::left() == Some(Reason::Sandboxed) {
        return presence::end();
    }
    let mut effects = Vec::new();
    {
        let Some(mut control) = CONTROL.try_lock() else { return };
        if control.session.has_broker() {
            presence::note_there(now);
            control.receive_all(&mut effects);
        } else if control.register().is_err() {
            control.note_failure();
        }
        control.retire_orphans(&mut effects);
    }
    apply(effects);
}

/// Registers this process when it has its first connection, so that `shunt status` lists it.
#[inline]
pub(crate) fn introduce() {
    if !presence::is_introduced() {
        introduce_now();
    }
}

#[cold]
fn introduce_now() {
    presence::note_introduction();
    if untracked::left() != Some(Reason::Sandboxed)
        && let Some(mut control) = CONTROL.try_lock()
    {
        // Without a broker, the first offer tries again.
        let _ = control.register();
    }
}

impl Control {
    const fn new() -> Control {
        Control {
            session: Session::new(),
            links: BTreeMap::new(),
            orphaned: false,
            peers: BTreeMap::new(),
            spare_links: Vec::new(),
            spare_peers: Vec::new(),
        }
    }
}
