//! The connection to the broker.
//!
//! No call ever blocks on the broker. A message that cannot be sent now is sent at a later
//! operation, and without a broker every connection stays on TCP (L6). Only with `--offer at-once`
//! does the first use of a connection wait, for at most [`MOMENT_NANOS`].
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
//! The control lock guards the state. Messages that need endpoints' locks become a list of `Deed`
//! values, which `carry_out` executes after it has released the control lock.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, CString, OsStr};
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::Ordering::*;

use rustix::io::Errno;
use shunt_abi::address::to_octets;
use shunt_abi::control::{
    self as message, Announce, DecodeError, Doorbell, GiveUp, Hello, Leave, MAX_MESSAGE, Mapped, Offer, Pair,
    PeerDoorbell, Release, Reply, Request, Unlink, Withdraw,
};
use shunt_abi::geometry::{CONNS, Geometry, Side, WAITERS};
use shunt_abi::latency::WANTED;
use shunt_abi::page::{CONNECTED, Counter, EntryCopy, Reach};
use shunt_abi::reason::Reason;
use shunt_sys::mapping::Mapping;
use shunt_sys::tcp::Opener;
use shunt_sys::{eventfd, guard, identity, memfd, seqpacket};

use crate::base::lock::{AcrossFork, Lock};
use crate::base::names::EndpointRef;
use crate::base::private::{self, PrivateFd, borrow, close_owned};
use crate::base::rank;
use crate::base::waiter::{self, Slot};
use crate::base::{code, process};
use crate::broker::presence;
use crate::broker::pulse::{Pulse, State};
use crate::epoll;
use crate::life::{attach, earlier_calls, untracked};
use crate::socket::endpoint::{self, Endpoint, Event, NEVER, Phase};
use crate::socket::keepalive::Silence;
use crate::socket::links::{Attachment, Identity, Link, Peer, Pin};
use crate::socket::sharing::{self, Heirs};
use crate::socket::tcp::Tcp;
use crate::socket::{offer_policy, peer_locality, settings};

pub(crate) mod remainder;

/// Operations until an endpoint that found no broker is considered again.
const RETRY_AFTER: u32 = 256;
/// Pause between two attempts to connect to a broker.
const RETRY_NANOS: u64 = 100_000_000;
/// The longest pause after brokers have rejected this process. The pause doubles with each
/// rejection.
const LONGEST_RETRY_NANOS: u64 = 30_000_000_000;
/// The most messages that one operation of the program receives, so that a broker that never stops
/// sending cannot block it.
const BATCH: usize = 256;
/// The number of detached connections whose other holders are checked at a time.
const FEW: usize = 8;
/// With `--offer at-once`, the longest time that the first use of a connection waits for the
/// broker. [`PAUSE_NANOS`] is the pause between two checks.
const MOMENT_NANOS: u64 = 2_000_000;
const PAUSE_NANOS: i64 = 50_000;
/// Pause after the broker's socket was full.
const BUSY_NANOS: u64 = 1_000_000;

static CONTROL: Lock<Control, { rank::CONTROL }> = Lock::new(Control::new());

struct Control {
    socket: Option<PrivateFd>,
    retry_at: u64,
    /// When the conversation began.
    begun_at: u64,
    /// The number of attempts in a row to register again that have failed.
    misses: u32,
    /// Set once the broker has answered the hello.
    is_welcome: bool,
    /// How many brokers in a row have closed the connection without an answer to the hello.
    unwelcome: u32,
    /// Until this time, peers of this process may not have reconnected to the broker yet.
    peers_come_until: u64,
    /// Why there is no broker.
    lacks: Reason,
    /// Nothing is offered until this time, because the broker's socket was full.
    busy_until: u64,
    pulse: Pulse,
    epoch: u32,
    /// Messages that the broker must receive and that did not fit into its socket. If one were
    /// lost, a connection of a link would never become free again.
    unsaid: VecDeque<Request>,
    /// Connections from which this process has detached, each with the row of the other processes
    /// that may still drain it.
    inherited: VecDeque<(u32, Release)>,
    links: BTreeMap<LinkName, &'static Link>,
    /// Set when a broker was lost, until those of its links that no connection uses have been
    /// retired.
    orphaned: bool,
    peers: BTreeMap<u64, &'static Peer>,
    /// Structures for reuse.
    spare_links: Vec<&'static Link>,
    spare_peers: Vec<&'static Peer>,
}

/// The epoch of the broker that made a link, the broker's id of the link, and this process's side.
type LinkName = (u32, u64, u32);

/// The effect of a message that must wait until the control lock is released, because it takes
/// endpoints' locks.
enum Deed {
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

/// What the broker has sent.
enum Message {
    /// A reply and the descriptor that came with it.
    Reply(Reply, Option<OwnedFd>),
    Undecodable(DecodeError),
    /// The broker has closed the conversation.
    End,
}

/// Why an endpoint is not offered now.
enum Later {
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
    let mut deeds = Vec::new();
    {
        let Some(mut control) = CONTROL.try_lock() else { return };
        control.take(&mut deeds);
        control.follow_at_once();
        control.retire_orphans(&mut deeds);
    }
    carry_out(deeds);
}

fn carry_out(deeds: Vec<Deed>) {
    for deed in deeds {
        match deed {
            Deed::Adopt(name, at, silence) => {
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
            Deed::Refuse(name, reason) => {
                if let Some(endpoint) = name.resolve() {
                    take_back(endpoint, reason, endpoint.offer.limit().saturating_mul(16));
                    // It may have been paired before.
                    if reason.ends_pairs() {
                        attach::go_back(endpoint, reason);
                    }
                }
            }
            Deed::Reopen(names) => earlier_calls::begin(|| {
                names.into_iter().filter_map(EndpointRef::resolve).for_each(Endpoint::reopen);
            }),
            Deed::Retire(link) => retire(link),
            Deed::Mute(peer) => {
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
            Deed::Vacate(link) => {
                for endpoint in (0..CONNS).filter_map(|conn| link.endpoint(conn)?.resolve()) {
                    attach::go_back(endpoint, Reason::LinkRetired);
                }
            }
            Deed::KeepBytes(name) => {
                if let Some(endpoint) = name.resolve() {
                    endpoint.tx.lock().custody.refuse();
                }
            }
            Deed::LostBroker => {
                for endpoint in
                    crate::socket::endpoint::all().filter(|endpoint| endpoint.phase() == Phase::Offered)
                {
                    take_back(endpoint, Reason::NoBroker, RETRY_AFTER);
                }
            }
        }
    }
}

/// Returns an offered endpoint to [`Phase::Tcp`]. It may be offered again after `again`
/// operations.
fn take_back(endpoint: &Endpoint, reason: Reason, again: u32) {
    if endpoint.change(Event::EndOffer) {
        postpone(endpoint, reason, again);
    }
}

fn postpone(endpoint: &Endpoint, reason: Reason, again: u32) {
    endpoint.offer.restart_with(again);
    process::count_bypass(reason);
    attach::mark(endpoint, reason);
}

/// Checks whether the broker is still there, or registers this process with its successor:
/// whichever is due according to [`presence`]. The caller holds no lock of an endpoint or an epoll
/// instance.
#[inline]
pub(crate) fn look_if_due(now: u64) {
    if presence::is_due(now) {
        look(now);
    }
}

#[cold]
fn look(now: u64) {
    if untracked::left() == Some(Reason::Sandboxed) {
        return presence::end();
    }
    let mut deeds = Vec::new();
    {
        let Some(mut control) = CONTROL.try_lock() else { return };
        if control.socket.is_some() {
            presence::note_there(now);
            control.take(&mut deeds);
        } else if control.register().is_err() {
            control.miss();
        }
        control.retire_orphans(&mut deeds);
    }
    carry_out(deeds);
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
        pause();
        verdict = attempt(endpoint, fd);
    }
    while endpoint.phase() == Phase::Offered && process::now() < deadline {
        pause();
        poll_inbox();
    }
}

fn pause() {
    let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: PAUSE_NANOS };
    let _ = rustix::thread::nanosleep(&time);
}

/// The result of an attempt to offer an endpoint.
enum Attempt {
    /// A message was sent to the broker, to find out whether it responds.
    Asked,
    /// The endpoint was offered, or will not be offered for a while.
    Done,
}

fn attempt(endpoint: &'static Endpoint, fd: RawFd) -> Attempt {
    let shared = || (endpoint.phase().is_idle() && epoll::is_shared(endpoint)).then_some(Reason::Shared);
    let under_way = || earlier_calls::may_be_in_progress(endpoint).then_some(Reason::EarlierCall);
    let against = code::objection().or_else(shared).or_else(under_way);
    let mut deeds = Vec::new();
    let verdict = {
        let Some(mut control) = CONTROL.try_lock() else { return Attempt::Done };
        if !endpoint.phase().is_idle() {
            return Attempt::Done;
        }
        control.release_drained();
        control.look_if_turned_away(&mut deeds);
        let verdict = control.offer(endpoint, fd, against, &mut deeds);
        control.retire_orphans(&mut deeds);
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
    carry_out(deeds);
    if asked { Attempt::Asked } else { Attempt::Done }
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
    CONTROL.lock().tell(Request::Withdraw(Withdraw { ticket }));
}

/// Connects to a private broker before the process changes its user. Afterwards the process could
/// no longer reach it, but an existing connection stays. A broker that is open to every user can be
/// reached after the change as well.
pub(crate) fn before_other_user() {
    let mut private = process::broker_paths().iter().filter(|path| is_private(path)).peekable();
    // Without a private broker, the first connection under the new user connects to the other one.
    if private.peek().is_some() {
        let _ = CONTROL.lock().connect(|| private.find_map(reach));
    }
}

/// Connects to any broker before the process changes its root directory, because the broker's
/// socket is not reachable afterwards.
pub(crate) fn before_other_root() {
    let _ = CONTROL.lock().connect(|| process::broker_paths().iter().find_map(reach));
}

/// How long an offer waits for the peer's. By then the peer has used the connection as much as this
/// end. If it has not offered the connection after this time, it will not, and the connection stays
/// on TCP.
const ALONE_NANOS: u64 = 1_000_000_000;

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
        // If a broker rejected this process, it rejected the peers too, and each reconnects at a
        // different time. A broker that does not receive messages matches no offers.
        if now < control.peers_come_until {
            return false;
        }
        // The endpoint may wait for a link that the other end has yet to map.
        if control.links.values().any(|link| !link.is_open() && !link.is_gone()) {
            return false;
        }
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
    CONTROL.lock().tell(Request::GiveUp(GiveUp { ticket }));
    postpone(endpoint, Reason::PeerNotOffered, NEVER);
    false
}

/// Reports to the broker that this process does not use the connection at `at`, where no byte was
/// moved. The pin keeps the link's identity until the message is queued.
pub(crate) fn release(at: &Pin) {
    release_after((**at, Heirs::None));
}

/// Reports to the broker that this process has detached from a connection. If child processes may
/// still drain the lanes, the message is a `Leave`, and the broker does not reuse the lanes yet.
/// The `Release` follows when no child can drain them any more.
pub(crate) fn release_after((at, heirs): (Attachment, Heirs)) {
    let mut control = CONTROL.lock();
    control.release_drained();
    if control.epoch != at.link.epoch {
        return;
    }
    let (link, conn, side) = (at.link.id, at.conn as u32, at.link.side as u32);
    let release = Release { link, conn, side };
    if let Heirs::None = heirs {
        return control.tell(Request::Release(release));
    }
    control.tell(Request::Leave(Leave { link, conn, side }));
    // For children of a fork that the shim did not see, no `Release` follows. The broker frees the
    // connection when this process ends.
    if let Heirs::OfRow(row) = heirs {
        control.inherited.push_back((row, release));
    }
}

/// Returns whether the broker of this `epoch` still receives messages.
pub(crate) fn has_broker(epoch: u32) -> bool {
    let mut control = CONTROL.lock();
    // A forked child knows nothing about its parent's broker.
    control.epoch != epoch || control.socket.is_some() && control.state() != State::Silent
}

/// Sends a doorbell to the broker, if the control lock is free and the broker's socket has room.
pub(crate) fn tell_doorbell(slot: Slot) {
    if let Some(mut control) = CONTROL.try_lock() {
        control.tell_doorbell(slot);
    }
}

/// Unmaps a link that will not be used again. Every caller that may have been the last user of the
/// link calls this.
pub(crate) fn retire(link: &'static Link) {
    {
        let mut control = CONTROL.lock();
        // The thread that removes the link from the map retires it. The structure may have been
        // reused for another link since the caller's check.
        if !link.is_idle_for_good() || control.links.remove(&name_of(link)).is_none() {
            return;
        }
    }
    // No epoll instance may use the link when it is unmapped.
    epoll::drop_link(link);
    link.unmap();
    let mut control = CONTROL.lock();
    control.spare_links.push(link);
    control.spare_if_unused(link.peer);
}

fn name_of(link: &Identity) -> LinkName {
    (link.epoch, link.id, link.side as u32)
}

/// Updates the broker's socket after a private descriptor has moved to another number.
pub(crate) fn renumber(old: RawFd, new: RawFd) {
    let mut control = CONTROL.lock();
    if control.socket.as_ref().is_some_and(|socket| socket.raw() == old) {
        let moved = (new >= 0).then(|| PrivateFd::from_raw(new));
        std::mem::replace(&mut control.socket, moved).map(PrivateFd::into_raw);
    }
}

/// Returns the control lock: no thread talks to the broker during a fork.
pub(crate) fn across_fork() -> &'static impl AcrossFork {
    &CONTROL
}

/// Discards the parent's connection to the broker in a forked child, which makes its own.
pub(crate) fn after_fork_in_child() {
    let mut control = CONTROL.lock();
    // Bytes that were in the lanes at the fork may still be read, or returned to the sender. So
    // those links stay mapped, and the doorbells of their peers stay open.
    let draining = |peer: &Peer| crate::socket::endpoint::all().any(|endpoint| endpoint.is_linked_with(peer));
    control.peers.values().filter(|peer| !draining(peer)).for_each(|peer| peer.forget_doorbells());
    presence::end();
    // A broker that has rejected the parent would reject the child too.
    let (retry_at, unwelcome, lacks) = match control.socket {
        None => (control.retry_at, control.unwelcome, control.lacks),
        Some(_) => (0, 0, Reason::NoBroker),
    };
    let Control { epoch, peers_come_until, .. } = *control;
    *control = Control { epoch: epoch + 1, retry_at, unwelcome, peers_come_until, lacks, ..Control::new() };
}

/// Drops the connection to the broker in a child of a fork that the shim did not see. The parent
/// goes on with it.
///
/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn disown() {
    // SAFETY: the caller's promise.
    unsafe { CONTROL.reset() };
    let mut control = CONTROL.lock();
    presence::end();
    if control.socket.take().is_some() {
        // That broker has not rejected this process.
        control.retry_at = 0;
        control.unwelcome = 0;
    }
    control.unsaid.clear();
    control.inherited.clear();
    control.forget_peers();
    control.epoch += 1;
}

impl Control {
    const fn new() -> Control {
        Control {
            socket: None,
            retry_at: 0,
            begun_at: 0,
            misses: 0,
            is_welcome: false,
            unwelcome: 0,
            peers_come_until: 0,
            lacks: Reason::NoBroker,
            busy_until: 0,
            pulse: Pulse::new(),
            epoch: 0,
            unsaid: VecDeque::new(),
            inherited: VecDeque::new(),
            links: BTreeMap::new(),
            orphaned: false,
            peers: BTreeMap::new(),
            spare_links: Vec::new(),
            spare_peers: Vec::new(),
        }
    }

    /// Connects to a broker and sends the hello, unless an attempt failed a moment ago.
    fn connect(&mut self, reach: impl FnOnce() -> Option<OwnedFd>) -> Result<(), Reason> {
        if self.socket.is_some() {
            return Ok(());
        }
        let now = process::now();
        if now < self.retry_at {
            return Err(self.lacks);
        }
        self.retry_at = now + RETRY_NANOS;
        self.lacks = Reason::NoBroker;
        if private::are_scarce() {
            return Err(Reason::DescriptorLimit);
        }
        let socket = reach().ok_or(Reason::NoBroker)?;
        let socket = PrivateFd::adopt(socket).ok_or(Reason::DescriptorLimit)?;
        let page = process::make_page().ok_or(Reason::NoMemory)?;
        self.epoch += 1;
        self.socket = Some(socket);
        (self.begun_at, self.misses) = (now, 0);
        presence::note_there(now);
        self.is_welcome = false;
        self.pulse = Pulse::new();
        waiter::forget_told();
        let said = {
            use std::os::fd::AsFd;
            self.say(&Request::Hello(Hello { program: program_name() }), &[page.as_fd()])
        };
        close_owned(page);
        if !said {
            // The hello must be the first message.
            self.lose();
            return Err(Reason::NoBroker);
        }
        Ok(())
    }

    /// Connects to a broker, and announces the doorbells to a new one.
    fn register(&mut self) -> Result<(), Reason> {
        let had_broker = self.socket.is_some();
        self.connect(|| process::broker_paths().iter().find_map(reach))?;
        if !had_broker {
            waiter::in_use().for_each(|slot| self.tell_doorbell(slot));
        }
        Ok(())
    }

    /// Registers with the next broker if the last one has just ended. With socket activation, the
    /// service manager accepts the connection before the next broker runs.
    fn follow_at_once(&mut self) {
        let now = process::now();
        let has_ended = presence::is_lost() && self.is_welcome && self.misses == 0;
        // A broker that disconnects this process again and again gets no chance to keep it busy.
        if has_ended && now.saturating_sub(self.begun_at) > RETRY_NANOS {
            self.retry_at = 0;
            if self.register().is_err() {
                self.miss();
            }
        }
    }

    /// Notes a failed attempt to register with the next broker. The next one follows after a longer
    /// pause.
    fn miss(&mut self) {
        self.misses = self.misses.saturating_add(1);
        let now = process::now();
        let pause = longer_pause(self.misses, now ^ u64::from(std::process::id()));
        presence::note_lost((now + pause).max(self.retry_at));
    }

    /// Sends a message that may be lost, after those that must not be lost. Returns `false` if it
    /// was not sent.
    fn say(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> bool {
        self.say_unsaid() && self.send(request, fds)
    }

    /// Sends a doorbell to the broker, if the broker's socket has room.
    fn tell_doorbell(&mut self, slot: Slot) {
        // The doorbell's descriptor cannot move to another number under the control lock: see
        // `renumber`.
        let doorbell = slot.doorbell();
        let said = self.socket.is_some()
            && doorbell >= 0
            && self.say(&Request::Doorbell(Doorbell { slot: slot.0 as u32, pad: 0 }), &[borrow(doorbell)]);
        if said {
            slot.note_told();
        }
    }

    /// Sends a message without descriptors, or queues it for later.
    fn tell(&mut self, request: Request) {
        if self.socket.is_some() {
            self.unsaid.push_back(request);
            self.say_unsaid();
        }
    }

    /// Sends the pending `Release` of detached connections that no other process can drain any
    /// more.
    fn release_drained(&mut self) {
        for _ in 0..self.inherited.len().min(FEW) {
            let Some((row, release)) = self.inherited.pop_front() else { return };
            if sharing::has_others(row) {
                self.inherited.push_back((row, release));
            } else {
                self.tell(Request::Release(release));
            }
        }
    }

    /// Sends the queued messages. Returns whether none is left.
    fn say_unsaid(&mut self) -> bool {
        while let Some(request) = self.unsaid.front().copied() {
            if !self.send(&request, &[]) {
                return false;
            }
            self.unsaid.pop_front();
        }
        self.socket.is_some()
    }

    /// Sends one message, if the broker's socket has room. Returns whether it was sent.
    fn send(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> bool {
        let Some(socket) = &self.socket else { return false };
        match seqpacket::send(socket, request.encode().as_bytes(), fds) {
            Ok(()) => {
                self.pulse.said(process::now());
                true
            }
            // The socket is full, or the descriptor of this message could not be sent.
            Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::BADF | Errno::NOBUFS | Errno::NOMEM) => {
                self.busy_until = process::now() + BUSY_NANOS;
                false
            }
            Err(_) => {
                self.lose();
                false
            }
        }
    }

    /// Returns whether the broker receives messages.
    fn state(&mut self) -> State {
        let taken = process::board().map_or(0, |board| board.taken.load(Acquire));
        self.pulse.state(taken, process::now())
    }

    /// Checks whether a socket may be sent to the broker now.
    fn is_awake(&mut self) -> Result<(), Later> {
        match self.state() {
            State::Awake => Ok(()),
            State::Silent => Err(Reason::BrokerSilent.into()),
            State::Unknown if !self.say(&Request::Announce(Announce { pad: 0 }), &[]) => Err(Later::Busy),
            State::Unknown | State::Asked => Err(Later::Asked),
        }
    }

    /// Checks whether a broker has answered the hello, or has closed the connection. Before the
    /// answer there is no board with a counter of messages.
    fn look_if_turned_away(&mut self, deeds: &mut Vec<Deed>) {
        if self.socket.is_some() && !self.is_welcome {
            self.take(deeds);
        }
    }

    /// Handles the loss of the broker. Attached connections go on, and their links are unmapped
    /// when they end.
    fn lose(&mut self) {
        self.socket = None;
        self.retry_at = process::now() + self.pause();
        presence::note_lost(self.retry_at);
        // Messages that the board has announced will not come any more.
        if let Some(board) = process::board() {
            process::SEEN.store(board.inbox.load(Acquire), Release);
        }
        self.unsaid.clear();
        self.inherited.clear();
        self.links.values().for_each(|link| link.set_orphan());
        self.orphaned = true;
        self.forget_peers();
    }

    /// Forgets the ids of all peers, because the next broker may use the same ids for others. The
    /// links keep their peers.
    fn forget_peers(&mut self) {
        for peer in std::mem::take(&mut self.peers).into_values() {
            self.spare_if_unused(peer);
        }
    }

    /// Returns the pause until the next attempt to connect. A broker of another version may have
    /// rejected hundreds of programs at the same time, so the pause varies, and they do not all
    /// reconnect at the same time.
    fn pause(&mut self) -> u64 {
        if self.is_welcome {
            return RETRY_NANOS;
        }
        let pause = longer_pause(self.unwelcome, process::now() ^ u64::from(std::process::id()));
        self.unwelcome = self.unwelcome.saturating_add(1);
        pause
    }

    /// Retires the links of a lost broker that no connection uses. The last connection of each
    /// other link retires it.
    fn retire_orphans(&mut self, deeds: &mut Vec<Deed>) {
        if std::mem::take(&mut self.orphaned) {
            let idle = self.links.values().filter(|link| link.is_idle_for_good());
            deeds.extend(idle.map(|link| Deed::Retire(link)));
        }
    }

    /// Keeps the structure of a peer that is no longer in use for another peer.
    fn spare_if_unused(&mut self, peer: &'static Peer) {
        let is = |other: &'static Peer| std::ptr::eq(other, peer);
        if !self.peers.values().any(|other| is(other)) && !self.links.values().any(|link| is(link.peer)) {
            peer.forget_doorbells();
            self.spare_peers.push(peer);
        }
    }

    /// Offers an endpoint if no reason is `against` it. In either case the endpoint gets a row in
    /// the page, so that `shunt status` can show the reason.
    fn offer(
        &mut self,
        endpoint: &Endpoint,
        fd: RawFd,
        against: Option<Reason>,
        deeds: &mut Vec<Deed>,
    ) -> Result<(), Later> {
        if process::now() < self.busy_until {
            return Err(Later::Busy);
        }
        if endpoint.entry().is_some() && self.socket.is_some() && self.state() == State::Asked {
            return Err(Later::Asked);
        }
        self.register().map_err(|reason| Later::After(reason, RETRY_AFTER))?;
        let identity = identity::identify(borrow(fd)).map_err(|_| Reason::NotTcp)?;
        list(endpoint, fd, &identity);
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
        if !self.say(&Offer::new(ticket, identity.local, identity.remote).into(), &[borrow(fd)]) {
            endpoint.change(Event::EndOffer);
            if self.socket.is_some() {
                attach::mark(endpoint, Reason::TooFewOperations);
                return Err(Later::Busy);
            }
            deeds.push(Deed::LostBroker);
            return Err(Reason::NoBroker.into());
        }
        endpoint.offer.set_message(self.pulse.latest());
        endpoint.offer.restart();
        offer_policy::note_offer(endpoint);
        process::count(Counter::Offered, 1);
        Ok(())
    }

    fn take(&mut self, deeds: &mut Vec<Deed>) {
        for _ in 0..BATCH {
            match self.receive() {
                None => return,
                Some(Ok(Message::Reply(reply, fd))) => self.obey(reply, fd, deeds),
                Some(Ok(Message::Undecodable(error))) => {
                    let is_other = matches!(error, DecodeError::Version(_));
                    self.lacks = if is_other { Reason::BrokerVersion } else { Reason::NoBroker };
                    self.lose_broker(deeds);
                }
                Some(Err(Errno::AGAIN)) => {
                    self.say_unsaid();
                    return;
                }
                Some(Err(Errno::INTR)) => {}
                Some(Ok(Message::End) | Err(_)) => {
                    self.lose_broker(deeds);
                }
            }
        }
    }

    /// Ends the conversation, and has the offers of endpoints taken back.
    fn lose_broker(&mut self, deeds: &mut Vec<Deed>) {
        self.lose();
        deeds.push(Deed::LostBroker);
    }

    /// Receives the next message. Returns `None` if there is no broker. Its buffers are large, so
    /// they are not on the stack while the message is obeyed.
    #[inline(never)]
    fn receive(&self) -> Option<rustix::io::Result<Message>> {
        let mut buffer = [0; MAX_MESSAGE];
        let received = seqpacket::recv(self.socket.as_ref()?, &mut buffer);
        Some(received.map(|(len, mut fds)| {
            if len == 0 {
                return Message::End;
            }
            process::SEEN.fetch_add(1, AcqRel);
            let first = fds.take_first();
            let count = fds.len() + usize::from(first.is_some());
            match Reply::decode(&buffer[..len], count) {
                Ok(reply) => Message::Reply(reply, first),
                Err(error) => {
                    first.into_iter().for_each(close_owned);
                    Message::Undecodable(error)
                }
            }
        }))
    }

    /// Does what a message of the broker says. Everything that needs other locks goes into `deeds`.
    fn obey(&mut self, reply: Reply, fd: Option<OwnedFd>, deeds: &mut Vec<Deed>) {
        match (reply, fd) {
            (Reply::Welcome(_), Some(board)) => self.be_welcome(board, deeds),
            (Reply::Link(body), Some(memory)) => self.map_link(body, memory),
            (Reply::PeerDoorbell(body), Some(doorbell)) => self.take_doorbell(body, doorbell, deeds),
            (Reply::Pair(body), None) => self.pair(body, deeds),
            (Reply::Refused(body), None) => {
                let reason = Reason::parse(body.reason as u16).unwrap_or(Reason::NotTcp);
                deeds.push(Deed::Refuse(EndpointRef::unpack(body.ticket), reason));
            }
            (Reply::Wanted(body), None) => {
                let name = EndpointRef::unpack(body.ticket);
                // All threads are listed once for many messages.
                match deeds.last_mut() {
                    Some(Deed::Reopen(names)) => names.push(name),
                    _ => deeds.push(Deed::Reopen(vec![name])),
                }
            }
            (Reply::NotKept(body), None) => deeds.push(Deed::KeepBytes(EndpointRef::unpack(body.ticket))),
            (Reply::PeerGone(body), None) => self.forget_peer(body.peer, deeds),
            (Reply::Unlink(body), None) => self.unlink(body, deeds),
            (Reply::Vacate(body), None) => {
                let link = self.links.get(&(self.epoch, body.link, body.side)).copied();
                deeds.extend(link.filter(|link| link.is_open()).map(Deed::Vacate));
            }
            (_, fd) => {
                if let Some(fd) = fd {
                    close_owned(fd);
                }
            }
        }
    }

    /// Maps the board, after which the broker may be asked.
    fn be_welcome(&mut self, board: OwnedFd, deeds: &mut Vec<Deed>) {
        let is_kept = process::set_board(&board);
        close_owned(board);
        if !is_kept {
            self.lacks = Reason::NoMemory;
            return self.lose_broker(deeds);
        }
        if self.unwelcome > 0 {
            self.peers_come_until = process::now() + LONGEST_RETRY_NANOS;
        }
        (self.is_welcome, self.unwelcome) = (true, 0);
    }

    /// Maps the memory of a new link, and reports whether that succeeded.
    fn map_link(&mut self, body: message::Link, memory: OwnedFd) {
        let geometry = Geometry::new(body.ring_bytes as usize);
        let mut is_mapped = 0;
        if let (Some(geometry), Some(side)) = (geometry, Side::parse(body.side))
            && memfd::verify_fixed(&memory, geometry.link_bytes()).is_ok()
            && let Ok(mapping) = Mapping::map(&memory, geometry.link_bytes())
                .or_else(|_| Mapping::map(&memory, geometry.spills_offset()))
        {
            let peer = self.peer(body.peer);
            let identity = Identity::new(body.link, side, peer, self.epoch, &mapping, geometry);
            let link = self.new_link(identity, mapping);
            self.links.insert(name_of(link), link);
            is_mapped = 1;
        }
        close_owned(memory);
        // The broker seals the memory once both ends have mapped it. No process touches the memory
        // before the first pair (L5).
        let (link, side) = (body.link, body.side);
        self.tell(Request::Mapped(Mapped { link, side, is_mapped }));
    }

    /// Keeps a peer's doorbell, unless this process has no descriptor for it.
    fn take_doorbell(&mut self, body: PeerDoorbell, doorbell: OwnedFd, deeds: &mut Vec<Deed>) {
        let peer = self.peer(body.peer);
        if peer.is_mute() {
            return close_owned(doorbell);
        }
        let adopted = PrivateFd::adopt_one_of_many(doorbell, peer.known_slots().count());
        match (body.slot as usize, adopted) {
            // The doorbell is tested before the peer sees that this process has it.
            (slot, Some(doorbell)) if slot < WAITERS && eventfd::ring(&doorbell).is_ok() => {
                peer.set_doorbell(slot, doorbell);
                let of_it = |link: &&&'static Link| link.is_open() && std::ptr::eq(link.peer, peer);
                for link in self.links.values().filter(of_it) {
                    link.view().set_known(link.side, slot);
                }
            }
            (_, None) => {
                peer.set_mute();
                deeds.push(Deed::Mute(peer));
            }
            _ => {}
        }
    }

    /// Opens the link of a pair, and has its connection attached.
    fn pair(&mut self, body: Pair, deeds: &mut Vec<Deed>) {
        let name = EndpointRef::unpack(body.ticket);
        let conn = body.conn as usize;
        if let Some(link) = self.link(&body) {
            link.open();
        }
        match self.link(&body).filter(|_| conn < CONNS) {
            Some(link) if !link.peer.is_mute() => {
                let silence = Silence::new(body.silence, body.silence_half_closed);
                deeds.push(Deed::Adopt(name, Attachment::new(link, conn).pin(), silence));
            }
            link => {
                // The other end must not wait for a connection that will not come about.
                if let Some(link) = link {
                    link.close_lanes(conn);
                }
                let Pair { link: id, conn, side, .. } = body;
                self.tell(Request::Release(Release { link: id, conn, side }));
                let reason = if link.is_some() { Reason::DescriptorLimit } else { Reason::NoMemory };
                deeds.push(Deed::Refuse(name, reason));
            }
        }
    }

    /// Forgets a peer that has ended. Its links remain until their connections have left them.
    fn forget_peer(&mut self, peer: u64, deeds: &mut Vec<Deed>) {
        let Some(peer) = self.peers.remove(&peer) else { return };
        peer.forget_doorbells();
        for link in self.links.values().filter(|link| std::ptr::eq(link.peer, peer)) {
            link.set_gone();
            // If the link is not sealed yet, the broker reports later when it can be unmapped.
            if link.is_open() {
                deeds.push(Deed::Retire(link));
            }
        }
        self.spare_if_unused(peer);
    }

    /// Retires one link.
    fn unlink(&mut self, body: Unlink, deeds: &mut Vec<Deed>) {
        let Some(link) = self.links.get(&(self.epoch, body.link, body.side)).copied() else { return };
        link.set_gone();
        if body.may_unmap != 0 {
            link.note_sealed();
        }
        // A peer without links is removed, as when it ends. The broker introduces it again when it
        // makes another link.
        let remains = |other: &&'static Link| !other.is_gone() && std::ptr::eq(other.peer, link.peer);
        if !self.links.values().any(remains) {
            self.peers.retain(|_, peer| !std::ptr::eq(*peer, link.peer));
        }
        deeds.push(Deed::Retire(link));
    }

    fn peer(&mut self, id: u64) -> &'static Peer {
        let spare = &mut self.spare_peers;
        self.peers.entry(id).or_insert_with(|| match spare.pop() {
            Some(peer) => {
                peer.reuse();
                peer
            }
            None => Peer::make(),
        })
    }

    fn new_link(&mut self, identity: Identity, mapping: Mapping) -> &'static Link {
        match self.spare_links.pop() {
            Some(link) => {
                // SAFETY: the link was retired before it became a spare, and the control lock is
                // held.
                unsafe { link.reuse(identity, mapping) };
                link
            }
            None => Box::leak(Box::new(Link::new(identity, mapping))),
        }
    }

    fn link(&self, body: &Pair) -> Option<&'static Link> {
        self.links.get(&(self.epoch, body.link, body.side)).copied()
    }
}

/// Returns the pause after the n-th rejection in a row. `chance` varies it by up to a half.
fn longer_pause(times: u32, chance: u64) -> u64 {
    let pause = (RETRY_NANOS << times.min(16)).min(LONGEST_RETRY_NANOS);
    // A multiplicative hash, because the values of `chance` may differ in any bits.
    pause / 2 + (chance.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) * pause / 2 / u64::from(u32::MAX)
}

/// Adds a row to the page for an endpoint that is considered for an offer.
fn list(endpoint: &Endpoint, fd: RawFd, identity: &identity::Identity) {
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

/// Returns the file name of the executable. A thread's name would not identify the program: some
/// programs rename their main thread, and any thread may be the first to connect.
fn program_name() -> [u8; 32] {
    let path = process::started_from().to_bytes();
    let bytes = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let mut name = [0; 32];
    let len = bytes.len().min(name.len());
    name[..len].copy_from_slice(&bytes[..len]);
    name
}

/// Connects to the broker at `path`. Returns `None` unless the socket belongs to this user or to
/// root, in a directory that proves it.
fn reach(path: &CString) -> Option<OwnedFd> {
    let socket = seqpacket::connect(path.to_bytes())
        .inspect_err(|error| process::note_reached(error.raw_os_error()))
        .ok()?;
    process::note_reached(0);
    if guard::is_trusted(Path::new(OsStr::from_bytes(path.to_bytes())), &socket) {
        return Some(socket);
    }
    close_owned(socket);
    None
}

/// Returns whether other users cannot connect to the socket at `path`.
fn is_private(path: &CStr) -> bool {
    rustix::fs::stat(path).is_ok_and(|data| data.st_mode & 0o002 == 0)
}
