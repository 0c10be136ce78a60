//! Offers of endpoints to the broker: whether and when an endpoint is offered, and how an offer ends
//! without a pair.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use shunt_abi::address::to_octets;
use shunt_abi::control::{GiveUp, Offer, Request, Withdraw};
use shunt_abi::page::{CONNECTED, Counter, EntryCopy, Reach};
use shunt_abi::reason::Reason;
use shunt_sys::identity;
use shunt_sys::tcp::Opener;

use super::{CONTROL, Control, Effect, RETRY_AFTER, apply, poll_inbox};
use crate::base::private::borrow;
use crate::base::{code, process};
use crate::broker::pulse::State;
use crate::epoll;
use crate::life::{attach, earlier_calls, untracked};
use crate::socket::endpoint::{Endpoint, Event, NEVER, Phase};
use crate::socket::tcp::Tcp;
use crate::socket::{endpoint, offer_policy, peer_locality, settings};

/// How long an offer waits for the peer's. By then the peer has used the connection as much as this
/// end. If it has not offered the connection after this time, it will not, and the connection stays
/// on TCP.
const ALONE_NANOS: u64 = 1_000_000_000;
/// With `--offer at-once`, the longest time that the first use of a connection waits for the
/// broker. [`PAUSE_NANOS`] is the pause between two checks.
const MOMENT_NANOS: u64 = 2_000_000;
const PAUSE_NANOS: i64 = 50_000;

/// Why an endpoint is not offered now.
pub(super) enum Later {
    /// For this reason, which is checked again after this number of operations.
    After(Reason, u32),
    /// The broker is busy.
    Busy,
    /// A message was sent to the broker. The next operation may find that the broker has received
    /// it.
    Asked,
}

impl From<Reason> for Later {
    fn from(reason: Reason) -> Later {
        let may_pass = matches!(
            reason,
            Reason::NoBroker
                | Reason::BrokerVersion
                | Reason::BrokerSilent
                | Reason::Shared
                | Reason::Stdio
                | Reason::NewCode
                | Reason::EarlierCall
        );
        Later::After(reason, if may_pass { RETRY_AFTER } else { u32::MAX })
    }
}

/// The result of an attempt to offer an endpoint.
enum Attempt {
    /// A message was sent to the broker, to find out whether it responds.
    Asked,
    /// The endpoint was offered, or will not be offered for a while.
    Done,
}

/// Considers an offer of an endpoint that the program uses. The caller holds no lock.
#[cold]
pub(crate) fn consider(endpoint: &'static Endpoint, fd: RawFd) {
    untracked::look_around();
    let mut verdict = attempt(endpoint, fd);
    if !process::offers_at_once() {
        return;
    }
    // Most connections would end before the broker answers.
    let deadline = process::now() + MOMENT_NANOS;
    while matches!(verdict, Attempt::Asked) && process::now() < deadline {
        wait_a_moment();
        verdict = attempt(endpoint, fd);
    }
    while endpoint.phase() == Phase::Offered && process::now() < deadline {
        wait_a_moment();
        poll_inbox();
    }
}

/// Returns whether the broker may still hold the socket of an offered endpoint. The broker closes
/// its descriptor once it has received the offer. That may be after its answer, and even after the
/// connection was attached and has fallen back. For a socket with SO_LINGER the broker does not
/// report the time of its close.
#[inline]
pub(crate) fn may_be_held_by_broker(endpoint: &Endpoint, fd: RawFd) -> bool {
    let offered_as = endpoint.offer.message();
    if offered_as == 0 {
        return false;
    }
    let taken = process::board().map_or(0, |board| board.taken.load(Acquire));
    let lingers = || {
        let linger = rustix::net::sockopt::socket_linger(borrow(fd));
        linger.is_ok_and(|linger| linger.is_some_and(|time| !time.is_zero()))
    };
    taken < offered_as || lingers()
}

/// Withdraws the offer of an endpoint that ends before it was paired.
pub(crate) fn withdraw(endpoint: &Endpoint) {
    peer_locality::unpaired(endpoint);
    let ticket = endpoint.reference().pack();
    CONTROL.lock().send_or_queue(Request::Withdraw(Withdraw { ticket }));
}

/// Withdraws an offer that the peer has not matched for [`ALONE_NANOS`]. Returns `true` if the
/// broker is being asked whether it responds; the answer comes soon.
#[cold]
pub(crate) fn give_up_if_alone(endpoint: &Endpoint) -> bool {
    endpoint.offer.restart();
    let now = process::now();
    if now.saturating_sub(endpoint.offer.offered_at()) < ALONE_NANOS {
        return false;
    }
    {
        let mut control = CONTROL.lock();
        if control.session.peers_may_come(now) {
            return false;
        }
        // The endpoint may wait for a link that the other end has yet to map.
        if control.links.values().any(|link| !link.is_open() && !link.is_gone()) {
            return false;
        }
        // A broker that does not receive messages matches no offers.
        if let Err(later) = control.is_awake() {
            return matches!(later, Later::Asked);
        }
    }
    {
        // The locks exclude an answer that is being handled now: see `attach::adopt`.
        let (_tx, _rx) = (endpoint.tx.lock(), endpoint.rx.lock());
        if endpoint.phase() != Phase::Offered {
            return false;
        }
        endpoint.bar(Reason::PeerNotOffered);
        endpoint.change(Event::EndOffer);
    }
    peer_locality::unpaired(endpoint);
    let ticket = endpoint.reference().pack();
    CONTROL.lock().send_or_queue(Request::GiveUp(GiveUp { ticket }));
    postpone(endpoint, Reason::PeerNotOffered, NEVER);
    false
}

impl Control {
    /// Offers an endpoint if no reason is `against` it. In either case the endpoint gets a row in
    /// the page, so that `shunt status` can show the reason.
    pub(super) fn offer(
        &mut self,
        endpoint: &Endpoint,
        fd: RawFd,
        against: Option<Reason>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Later> {
        if self.session.is_busy(process::now()) {
            return Err(Later::Busy);
        }
        if endpoint.entry().is_some() && self.state() == Some(State::Asked) {
            return Err(Later::Asked);
        }
        self.register().map_err(|reason| Later::After(reason, RETRY_AFTER))?;
        let identity = identity::identify(borrow(fd)).map_err(|_| Reason::NotTcp)?;
        add_row(endpoint, fd, &identity);
        if let Some(reason) = endpoint.barred().or_else(untracked::left).or(against) {
            return Err(reason.into());
        }
        if let Some(reason) = crate::socket::sharing::sharing(endpoint) {
            return Err(reason.into());
        }
        if endpoint::is_standard_stream(endpoint) {
            return Err(Reason::Stdio.into());
        }
        if (Tcp { endpoint, fd }).is_bypassed() {
            let again = endpoint.offer.limit().saturating_mul(2);
            return Err(Later::After(Reason::OffsetUnclear, again));
        }
        is_worth_offering(endpoint, &identity)?;
        settings::learn(endpoint, fd)?;
        self.is_awake()?;
        if !endpoint.change(Event::Offer) {
            // Another thread has attached or settled it meanwhile.
            return Err(endpoint.barred().map_or(Later::Busy, Later::from));
        }
        attach::mark(endpoint, Reason::PeerNotOffered);
        let ticket = endpoint.reference().pack();
        if !self.try_send(&Offer::new(ticket, identity.local, identity.remote).into(), &[borrow(fd)]) {
            endpoint.change(Event::EndOffer);
            if self.session.has_broker() {
                attach::mark(endpoint, Reason::TooFewOperations);
                return Err(Later::Busy);
            }
            effects.push(Effect::LostBroker);
            return Err(Reason::NoBroker.into());
        }
        endpoint.offer.set_message(self.session.last_message());
        endpoint.offer.restart();
        offer_policy::note_offer(endpoint);
        process::count(Counter::Offered, 1);
        Ok(())
    }
}

fn wait_a_moment() {
    let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: PAUSE_NANOS };
    let _ = rustix::thread::nanosleep(&time);
}

fn attempt(endpoint: &'static Endpoint, fd: RawFd) -> Attempt {
    let shared = || (endpoint.phase().is_idle() && epoll::is_shared(endpoint)).then_some(Reason::Shared);
    let under_way = || earlier_calls::may_be_in_progress(endpoint).then_some(Reason::EarlierCall);
    let against = code::objection().or_else(shared).or_else(under_way);
    let mut effects = Vec::new();
    let verdict = {
        let Some(mut control) = CONTROL.try_lock() else { return Attempt::Done };
        if !endpoint.phase().is_idle() {
            return Attempt::Done;
        }
        control.release_drained();
        control.check_for_welcome(&mut effects);
        let verdict = control.offer(endpoint, fd, against, &mut effects);
        control.retire_orphans(&mut effects);
        verdict
    };
    let asked = matches!(verdict, Err(Later::Asked));
    match verdict {
        Ok(()) => {}
        // The endpoint is in the page, so `shunt status` shows the reason. No further attempt is
        // needed.
        Err(Later::After(reason, _)) if endpoint.barred().is_some() && endpoint.entry().is_some() => {
            postpone(endpoint, reason, NEVER);
        }
        Err(Later::After(reason, again)) => postpone(endpoint, reason, again),
        // The broker has many offers to process at the moment.
        Err(Later::Busy) => endpoint.offer.restart(),
        Err(Later::Asked) => {}
    }
    apply(effects);
    if asked { Attempt::Asked } else { Attempt::Done }
}

/// Returns an offered endpoint to [`Phase::Tcp`]. It may be offered again after `again`
/// operations.
pub(super) fn take_back(endpoint: &Endpoint, reason: Reason, again: u32) {
    if endpoint.change(Event::EndOffer) {
        postpone(endpoint, reason, again);
    }
}

fn postpone(endpoint: &Endpoint, reason: Reason, again: u32) {
    endpoint.offer.restart_with(again);
    process::count_bypass(reason);
    attach::mark(endpoint, reason);
}

/// Adds a row to the page for an endpoint that is considered for an offer.
fn add_row(endpoint: &Endpoint, fd: RawFd, identity: &identity::Identity) {
    if endpoint.entry().is_some() {
        return;
    }
    let Some(entry) = process::list() else { return };
    let (local, remote) = (identity.local, identity.remote);
    entry.publish(&EntryCopy {
        cookie: identity.cookie,
        fd,
        local: to_octets(local.ip()),
        local_port: local.port(),
        remote: to_octets(remote.ip()),
        remote_port: remote.port(),
        transports: if endpoint.opener() == Opener::Us { CONNECTED } else { 0 },
        tcp_sent: sent_before(endpoint, fd),
        tcp_received: shunt_sys::tcp::read(borrow(fd)).unwrap_or(0),
        option: endpoint.blamed(),
        ..EntryCopy::default()
    });
    endpoint.set_entry(Some(entry));
}

/// Returns the bytes that TCP has sent before the row is made. Returns 0 if another thread stays
/// inside a send. That thread adds its bytes once the row is there. Bytes that are counted twice
/// would look like bytes that the shim did not see ([`Tcp::is_bypassed`]).
fn sent_before(endpoint: &Endpoint, fd: RawFd) -> u64 {
    const LOOKS: usize = 8;
    let quiet = || endpoint.is_quiet_for_send();
    let look = || {
        let sent = quiet().then(|| shunt_sys::tcp::sent(borrow(fd), endpoint.opener()).ok().flatten());
        // A send that has begun meanwhile may be in the count already.
        sent.flatten().filter(|_| quiet())
    };
    (0..LOOKS).find_map(|_| look()).unwrap_or(0)
}

/// Checks whether the broker could pair the endpoint (L7), as far as this process can find out. The
/// broker writes onto the board which peers it can reach, and may be able to reach more later. So
/// the check is repeated, at growing intervals.
fn is_worth_offering(endpoint: &Endpoint, identity: &identity::Identity) -> Result<(), Later> {
    let near = may_be_local(&identity.local, &identity.remote);
    let patience = peer_locality::patience(identity.remote.ip());
    let watched = endpoint.offer.limit();
    let later = |reason| Later::After(reason, peer_locality::longer(watched));
    match process::board().map_or(Reach::Namespace, |board| board.reach()) {
        Reach::Nothing => Err(later(Reason::ForeignNamespace)),
        _ if near => Ok(()),
        Reach::Namespace => {
            endpoint.offer.note_remote();
            Err(later(Reason::RemotePeer))
        }
        Reach::Host if watched < patience => Err(Later::After(Reason::TooFewOperations, patience)),
        Reach::Host => {
            peer_locality::offered(endpoint, identity.remote.ip());
            Ok(())
        }
    }
}

/// Returns whether the addresses show that the peer is on this host. For a connection to a local
/// address, the kernel uses the same address as the source, unless the program binds another. No
/// other host can reach a loopback address.
fn may_be_local(local: &SocketAddr, remote: &SocketAddr) -> bool {
    remote.ip() == local.ip() || remote.ip().is_loopback() || local.ip().is_loopback()
}
