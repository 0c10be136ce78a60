//! The state that all clients share, and all decisions about it. Nothing here blocks: messages to
//! clients go to their outboxes.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::histogram::Histogram;
use rustix::fs::fstat;
use shunt_abi::control::{
    DecodeError, Doorbell as NewDoorbell, DropKept, Hello, Keep, Leave, Mapped, NotKept, PeerDoorbell,
    PeerGone, Release, Reply, Request, SendKept, Unlink, Vacate, Welcome,
};
use shunt_abi::geometry::{CONNS, Geometry, Side, WAITERS};
use shunt_abi::page::{BOARD_BYTES, PAGE_BYTES, Page, Reach};
use shunt_abi::reason::Reason;
use shunt_abi::shown::visible_bytes;
use shunt_abi::status::Totals;
use shunt_control::SET_UP_BUCKETS;
use shunt_kernel::sequence::Reader;
use shunt_sys::mapping::{self, Shown};
use shunt_sys::memfd::{SealError, create_sealed, verify_sealed};
use shunt_sys::seqpacket::Credentials;
use shunt_sys::{Errno, eventfd};
use thiserror::Error;
use tokio::sync::Notify;

use crate::allowance::Debts;
use crate::blocking_pool::{ClientFd, Pool};
use crate::capture::Captures;
use crate::config::Limits;
use crate::ended_processes::EndedProcesses;
use crate::fair_limiter::FairLimiter;
use crate::given_up::GivenUp;
use crate::latency_wishes::LatencyByProgram;
use crate::links::{Dropped, Links, Place};
use crate::making::Sealer;
use crate::namespaces::Namespaces;
use crate::notifier::{Doorbell, Notifier};
use crate::outbox::{Descriptor, Outbox};
use crate::overlay::Overlay;
use crate::pairing::{Offers, ProcessId};
use crate::principal::{Budget, Charge, Principal};
use crate::rate_limited_log::RateLimitedLog;
use crate::remainders::Remainders;
use crate::setup::Setups;
use crate::status;
use crate::unowned_sockets::UnownedSockets;

/// The complete state of the broker.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) pool: Pool,
    pub(crate) limits: Limits,
    pub(crate) started: Instant,
    /// The time of the start, in seconds since 1970.
    pub(crate) started_at: u64,
    pub(crate) processes: BTreeMap<ProcessId, Process>,
    /// Sums of the counters of processes that have ended.
    pub(crate) ended: Totals,
    /// The latencies of processes that have ended, by program.
    pub(crate) ended_latency: LatencyByProgram,
    /// Notified when someone asks for latencies.
    pub(crate) latency_wanted: Rc<Notify>,
    /// The last ones that have ended.
    pub(crate) recent: EndedProcesses,
    pub(crate) links: Links,
    /// Counters over all clients.
    pub(crate) tally: Tally,
    /// How long the first offer of a pair waited for the second.
    pub(crate) pairing: Histogram,
    /// Counters per connected unprivileged principal.
    tallies: HashMap<Principal, Tally>,
    pub(crate) log_limits: RateLimitedLog,
    /// Limits the number of connected clients.
    pub(crate) clients: Rc<RefCell<Budget>>,
    /// Limits the number of messages that clients have not read.
    pub(crate) queued: Rc<RefCell<Budget>>,
    /// Limits the bytes of statuses that clients have not read.
    pub(crate) unread_statuses: Rc<RefCell<Budget>>,
    /// Schedules requests that take long.
    pub(crate) slow_requests: Rc<FairLimiter>,
    /// Processor time spent in calls on clients' control sockets.
    pub(crate) debts: Rc<Debts>,
    doorbells: Rc<RefCell<Budget>>,
    /// Limits the number of clients that capture.
    pub(crate) readers: Rc<RefCell<Budget>>,
    pub(crate) captures: Captures,
    /// The files of all pages, by device and inode.
    pages: HashSet<(u64, u64)>,
    pub(crate) namespaces: Namespaces,
    pub(crate) overlay: Overlay,
    pub(crate) offers: Offers,
    pub(crate) given_up: GivenUp,
    /// Reads sequence numbers of sockets to match the ends of a connection across namespaces.
    /// `None` if the broker may not load the BPF program.
    pub(crate) sequences: Option<Reader>,
    /// Notified when a link has no users left: see [`crate::sweep`].
    pub(crate) emptied: Rc<Notify>,
    /// Notified when an offer becomes open: see [`crate::expiry`].
    pub(crate) opened: Rc<Notify>,
    notifier: Notifier,
    /// Bytes that TCP has yet to take.
    pub(crate) remainders: Remainders,
    pub(crate) unowned: UnownedSockets,
    /// Links that are being made.
    pub(crate) setups: Setups,
    pub(crate) sealer: Sealer,
    next_process: ProcessId,
}

/// Counters of events since the start.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) pairs_made: u64,
    pub(crate) offers_refused: HashMap<Reason, u64>,
    /// Pairs that a changed policy has ended.
    pub(crate) pairs_ended: HashMap<Reason, u64>,
    pub(crate) bad_messages: BTreeMap<&'static str, u64>,
}

/// A process that has sent its hello.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) credentials: Credentials,
    pub(crate) principal: Principal,
    pub(crate) program: String,
    pub(crate) outbox: Rc<Outbox>,
    /// The network namespace of the process at the time of its hello.
    pub(crate) netns: u64,
    doorbells: BTreeMap<u32, Arc<Doorbell>>,
    rung_by: Charge,
    page: (u64, u64),
    /// Set once a refused offer of this process was logged as a warning. Later ones are logged at
    /// debug level, since there may be thousands.
    pub(crate) warned: bool,
}

/// Why the broker closes a client's connection.
#[derive(Clone, Copy, Debug, Error)]
pub(crate) enum BadMessage {
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error("message was cut off: too many bytes or descriptors")]
    Truncated,
    #[error("the kernel does not say who has sent a message")]
    Unnamed,
    #[error(
        "its process is another user's than the message says, or has moved to another network namespace: it is to ask by a new connection"
    )]
    NotStill,
    #[error("no hello before other messages")]
    BeforeHello,
    #[error("a second hello")]
    SecondHello,
    #[error("no page in the hello: {0}")]
    Page(#[from] SealError),
    #[error("the page cannot be mapped: {0}")]
    PageMapping(Errno),
    #[error("there is no memory for the board: {0}")]
    Board(Errno),
    #[error("the page is another process's, or has been shown before")]
    PageShown,
    #[error("another status was asked for before the one before was read")]
    UnreadStatus,
    #[error("others of this user have too many statuses that they do not read")]
    StatusLimit,
    #[error("whoever reads along says nothing more")]
    AfterCapture,
    #[error("too many read along already")]
    CaptureLimit,
    #[error("it does not read its messages")]
    Unread,
    #[error("its network namespace cannot be told: {0}")]
    Namespace(Errno),
    #[error("the doorbell is not an eventfd")]
    NotADoorbell,
}

impl BadMessage {
    /// Returns the metric label of the error.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            BadMessage::Decode(DecodeError::Length(_)) => "length",
            BadMessage::Decode(DecodeError::Magic) => "magic",
            BadMessage::Decode(DecodeError::Version(_)) => "version",
            BadMessage::Decode(DecodeError::Kind(_)) => "kind",
            BadMessage::Decode(DecodeError::Descriptors(_)) => "descriptors",
            BadMessage::Decode(DecodeError::Field(_)) => "field",
            BadMessage::Truncated => "truncated",
            BadMessage::Unnamed => "unnamed",
            BadMessage::NotStill => "not_still",
            BadMessage::BeforeHello => "before_hello",
            BadMessage::SecondHello => "second_hello",
            BadMessage::Page(_) | BadMessage::PageMapping(_) => "page",
            BadMessage::Board(_) => "board",
            BadMessage::PageShown => "page_shown",
            BadMessage::UnreadStatus => "unread_status",
            BadMessage::StatusLimit => "status_limit",
            BadMessage::AfterCapture => "after_capture",
            BadMessage::CaptureLimit => "capture_limit",
            BadMessage::Unread => "unread",
            BadMessage::Namespace(_) => "namespace",
            BadMessage::NotADoorbell => "doorbell",
        }
    }
}

impl State {
    pub(crate) fn new(
        geometry: Geometry,
        limits: Limits,
        namespaces: Namespaces,
        overlay: Overlay,
        sequences: Option<Reader>,
        sealer: Sealer,
        pool: Pool,
    ) -> State {
        let budget = |limit| Rc::new(RefCell::new(Budget::new(limit)));
        State {
            limits,
            started: Instant::now(),
            started_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            processes: BTreeMap::new(),
            ended: Totals::default(),
            ended_latency: LatencyByProgram::default(),
            latency_wanted: Rc::default(),
            recent: EndedProcesses::default(),
            links: Links::new(geometry, limits.links),
            tally: Tally::default(),
            pairing: Histogram::new(SET_UP_BUCKETS),
            tallies: HashMap::new(),
            log_limits: RateLimitedLog::default(),
            clients: budget(limits.clients),
            queued: budget(limits.all_queued),
            unread_statuses: budget(limits.status_bytes),
            slow_requests: Rc::new(FairLimiter::new()),
            debts: Rc::default(),
            doorbells: budget(limits.doorbells),
            readers: budget(limits.captures),
            captures: Captures::default(),
            pages: HashSet::new(),
            namespaces,
            overlay,
            offers: Offers::new(limits.all_offers),
            given_up: GivenUp::new(limits.all_offers),
            sequences,
            emptied: Rc::default(),
            opened: Rc::default(),
            notifier: Notifier::new(pool.clone()),
            remainders: Remainders::new(limits.remainders, pool.clone()),
            unowned: UnownedSockets::default(),
            setups: Setups::new(limits.all_offers),
            sealer,
            pool,
            next_process: 1,
        }
    }

    /// Registers a process that has sent its page.
    pub(crate) fn hello(
        &mut self,
        (credentials, principal): (Credentials, Principal),
        outbox: &Rc<Outbox>,
        hello: &Hello,
        page: OwnedFd,
    ) -> Result<ProcessId, BadMessage> {
        // Closed by the pool, whatever follows.
        let page = ClientFd::new(&self.pool, principal, page);
        verify_sealed(&page, PAGE_BYTES)?;
        let file = fstat(&page).map(|file| (file.st_dev, file.st_ino)).map_err(BadMessage::PageMapping)?;
        // A page that many processes present would be listed in a status once for each.
        if self.pages.contains(&file) {
            return Err(BadMessage::PageShown);
        }
        let page = Shown::map(&page, PAGE_BYTES).map_err(BadMessage::PageMapping)?;
        // Back the part that the broker always reads with memory. An honest process has done so
        // already, but the broker does not rely on it.
        page.back(offset_of!(Page, entries)).map_err(BadMessage::PageMapping)?;
        let (board, mapping) = create_sealed("shunt-board", BOARD_BYTES).map_err(BadMessage::Board)?;
        mapping::back(mapping.as_ptr(), BOARD_BYTES).map_err(BadMessage::Board)?;
        outbox.set_memory(page, mapping);
        let netns = self.namespaces.join(outbox.socket().as_fd()).map_err(BadMessage::Namespace)?;
        let id = self.next_process;
        self.next_process += 1;
        let process = Process {
            credentials,
            principal,
            program: program_name(&hello.program),
            outbox: outbox.clone(),
            netns,
            doorbells: BTreeMap::new(),
            rung_by: Charge::new(&self.doorbells, principal),
            page: file,
            warned: false,
        };
        tracing::debug!(process = id, pid = credentials.pid, program = process.program, "hello");
        self.processes.insert(id, process);
        self.pages.insert(file);
        self.offers.join(id, principal);
        self.links.join(id, principal);
        self.tell_reach();
        outbox.push(Welcome { process: id }.into(), Some(Rc::new(board)));
        Ok(id)
    }

    /// Handles a request of a process. `fd` is present exactly if messages of this kind carry a
    /// descriptor.
    pub(crate) fn request(
        &mut self,
        id: ProcessId,
        request: Request,
        fd: Option<OwnedFd>,
    ) -> Result<(), BadMessage> {
        match (request, fd) {
            (Request::Offer(offer), Some(fd)) => self.offer(id, &offer, fd)?,
            (Request::Announce(_), None) => {}
            (Request::Withdraw(withdraw), None) => self.withdraw(id, withdraw.ticket),
            (Request::GiveUp(given_up), None) => self.give_up(id, given_up.ticket),
            (Request::Mapped(Mapped { link, side, is_mapped }), None) => {
                let Place { link, side, .. } = place(link, 0, side)?;
                if is_mapped > 1 {
                    return Err(DecodeError::Field("is_mapped").into());
                }
                self.mapped(id, link, side, is_mapped == 1);
            }
            (Request::Release(Release { link, conn, side }), None) => {
                if !self.links.release(id, place(link, conn, side)?) {
                    // The slot belongs to another process, or was released already. This is
                    // harmless.
                    tracing::debug!(process = id, link, conn, side, "released what it does not hold");
                }
                self.note_released();
            }
            (Request::Leave(Leave { link, conn, side }), None) => {
                self.links.leave(id, place(link, conn, side)?);
            }
            (Request::Doorbell(doorbell), Some(fd)) => self.doorbell(id, &doorbell, fd)?,
            (Request::SendKept(SendKept { ticket, then_shut, .. }), None) => {
                if then_shut > 1 {
                    return Err(DecodeError::Field("then_shut").into());
                }
                self.remainders.send_kept(id, ticket, then_shut == 1);
            }
            (Request::DropKept(DropKept { ticket }), None) => {
                if let Some(process) = self.processes.get(&id) {
                    let ack = process.outbox.acks.pending();
                    self.remainders.drop_kept(id, ticket, ack);
                }
            }
            (Request::Hello(_), fd) => {
                self.close_all(id, fd);
                return Err(BadMessage::SecondHello);
            }
            (_, fd) => {
                let count = usize::from(fd.is_some());
                self.close_all(id, fd);
                return Err(DecodeError::Descriptors(count).into());
            }
        }
        Ok(())
    }

    /// Keeps bytes that TCP has yet to take.
    pub(crate) fn keep(&mut self, id: ProcessId, keep: &Keep, fds: [OwnedFd; 2]) {
        let Some(process) = self.processes.get(&id) else { return self.close_all(id, fds) };
        let (whose, ack) = (process.principal, process.outbox.acks.pending());
        if !self.remainders.keep(id, whose, keep, fds, ack) {
            self.say(id, NotKept { ticket: keep.ticket }, None);
        }
    }

    /// Counts a message for which the client's connection is closed.
    pub(crate) fn count_bad(&mut self, whose: Principal, bad: &BadMessage) {
        self.count(Some(whose), |tally| *tally.bad_messages.entry(bad.label()).or_default() += 1);
    }

    /// Counts an event in the totals and for each unprivileged principal in `whose`.
    pub(crate) fn count(&mut self, whose: impl IntoIterator<Item = Principal>, note: impl Fn(&mut Tally)) {
        note(&mut self.tally);
        for one in whose.into_iter().filter(|one| !one.is_privileged()) {
            note(self.tallies.entry(one).or_default());
        }
    }

    /// Returns the counters of an unprivileged principal.
    pub(crate) fn tally_of(&self, whose: Principal) -> Option<&Tally> {
        self.tallies.get(&whose)
    }

    /// Removes the counters of a principal whose last client has disconnected: no client can query
    /// them any more.
    pub(crate) fn departed(&mut self, whose: Principal) {
        if self.clients.borrow().of(whose) == 0 {
            self.tallies.remove(&whose);
        }
    }

    /// Returns the principal of a process.
    pub(crate) fn principal(&self, id: ProcessId) -> Option<Principal> {
        self.processes.get(&id).map(|process| process.principal)
    }

    /// Changes the principal of a process. What it holds stays charged to the previous principal;
    /// new resources are charged to the new one.
    pub(crate) fn becomes(&mut self, id: ProcessId, principal: Principal) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        tracing::debug!(process = id, from = process.principal.uid, to = principal.uid, "another user's");
        process.principal = principal;
        let mut rung_by = Charge::new(&self.doorbells, principal);
        if rung_by.set(process.rung_by.amount()) {
            process.rung_by = rung_by;
        }
        self.offers.becomes(id, principal);
        self.links.join(id, principal);
        for peer in self.links.peers(id) {
            self.review_captures(Links::order(id, peer));
        }
    }

    /// Removes a process that has ended or was disconnected. The sockets that it leaves behind are
    /// followed.
    pub(crate) fn end(&mut self, id: ProcessId) {
        self.offers.forget(id);
        self.given_up.forget(id);
        let mut effects = self.links.forget(id);
        effects.peers.extend(self.setups.peers(id).filter(|peer| *peer != id));
        let unpaired = self.abandon_links_of(id);
        let whose = self.principal(id);
        for socket in std::mem::take(&mut effects.unowned) {
            match whose.filter(|_| self.namespaces.join_again(socket.key.netns)) {
                Some(whose) => self.unowned.add(whose, socket, Instant::now()),
                None => self.links.end_following(socket.place),
            }
        }
        for peer in effects.peers {
            self.say(peer, PeerGone { peer: id }, None);
        }
        self.ring(effects.asleep);
        self.report_capture_events();
        if let Some(process) = self.processes.remove(&id) {
            let last = status::last_state(&process);
            self.ended += &last.totals;
            self.ended_latency.add(&last.program, &last.totals.latency);
            self.recent.add(process.principal, last, Instant::now());
            self.namespaces.leave(process.netns);
            self.pages.remove(&process.page);
            self.tell_reach();
        }
        unpaired.into_iter().for_each(|offer| self.place(offer));
        tracing::debug!(process = id, "gone");
    }

    /// Reports releases to captures, and schedules the return of memory that stays unused.
    pub(crate) fn note_released(&mut self) {
        self.report_capture_events();
        if self.links.has_idle_memory() {
            self.emptied.notify_one();
        }
    }

    /// Drops links without users, and has both ends unmap them, which frees the memory. Asks
    /// connections to fall back from links that hold much unused memory.
    pub(crate) fn give_memory_back(&mut self, now: Instant) {
        for Dropped { link, ends } in self.links.drop_empty(now) {
            self.unlink(link, ends, true);
        }
        let mut asleep = BTreeSet::new();
        for (link, ends) in self.links.retire(now, &mut asleep) {
            for (end, side) in ends.into_iter().zip([Side::A, Side::B]) {
                self.say(end, Vacate { link, side: side as u32, pad: 0 }, None);
            }
        }
        // A sleeping thread takes no messages, so wake it.
        self.ring(asleep);
        self.report_capture_events();
    }

    /// Notifies both ends that a link is gone. `may_unmap` reports whether they can unmap it
    /// without waiting for another process.
    pub(crate) fn unlink(&self, link: u64, ends: [ProcessId; 2], may_unmap: bool) {
        for (end, side) in ends.into_iter().zip([Side::A, Side::B]) {
            self.say(end, Unlink { link, side: side as u32, may_unmap: may_unmap.into() }, None);
        }
    }

    /// Notifies the doorbells of sleeping waiters whose ready bits are set.
    pub(crate) fn ring(&self, asleep: impl IntoIterator<Item = (ProcessId, u32)>) {
        for (process, slot) in asleep {
            let Some(process) = self.processes.get(&process) else { continue };
            if let Some(doorbell) = process.doorbells.get(&slot) {
                self.notifier.notify(process.principal, doorbell);
            }
        }
    }

    /// Ends the conversations with all processes. By its board or by its doorbells, each finds out
    /// soon, even if it sleeps.
    pub(crate) fn disconnect_all(&self) {
        for process in self.processes.values() {
            process.outbox.disconnect();
            for doorbell in process.doorbells.values() {
                self.notifier.notify(process.principal, doorbell);
            }
        }
    }

    /// Returns whether doorbells wait for their notification.
    pub(crate) fn is_notifying(&self) -> bool {
        self.notifier.is_busy()
    }

    /// Updates on all boards which connections are worth offering, where that has changed.
    fn tell_reach(&self) {
        let abroad = self.sequences.is_some() && self.namespaces.is_foreign();
        for process in self.processes.values() {
            let reach = match self.namespaces.knows(process.netns) {
                false => Reach::Nothing,
                true if abroad => Reach::Host,
                true => Reach::Namespace,
            };
            process.outbox.with_board(|board| board.set_reach(reach));
        }
    }

    pub(crate) fn say_doorbells(&self, to: ProcessId, of: ProcessId) {
        for (slot, fd) in self.processes.get(&of).into_iter().flat_map(|process| &process.doorbells) {
            self.say(to, PeerDoorbell { peer: of, slot: *slot, pad: 0 }, Some(Rc::new(fd.clone())));
        }
    }

    fn doorbell(&mut self, id: ProcessId, doorbell: &NewDoorbell, fd: OwnedFd) -> Result<(), BadMessage> {
        if doorbell.slot as usize >= WAITERS {
            self.close_all(id, Some(fd));
            return Err(DecodeError::Field("slot").into());
        }
        if !eventfd::is_doorbell(&fd) {
            self.close_all(id, Some(fd));
            return Err(BadMessage::NotADoorbell);
        }
        let Some(process) = self.processes.get_mut(&id) else {
            self.close_all(id, Some(fd));
            return Ok(());
        };
        // If the budget is exhausted, the doorbell is not registered. A waiter without a doorbell
        // sleeps for short intervals only.
        if !process.doorbells.contains_key(&doorbell.slot) && !process.rung_by.more(1) {
            self.close_all(id, Some(fd));
            return Ok(());
        }
        let kept = Arc::new(Doorbell::new(ClientFd::new(&self.pool, process.principal, fd)));
        process.doorbells.insert(doorbell.slot, kept.clone());
        for peer in self.links.peers(id) {
            // Processes whose link is still being made exchange doorbells when it is ready.
            self.say(
                peer,
                PeerDoorbell { peer: id, slot: doorbell.slot, pad: 0 },
                Some(Rc::new(kept.clone())),
            );
        }
        Ok(())
    }

    pub(crate) fn say(&self, to: ProcessId, reply: impl Into<Reply>, fd: Option<Rc<dyn Descriptor>>) {
        if let Some(process) = self.processes.get(&to) {
            process.outbox.push(reply.into(), fd);
        }
    }

    pub(crate) fn close_all(&self, id: ProcessId, fds: impl IntoIterator<Item = OwnedFd>) {
        let whose = self.principal(id).unwrap_or(Principal::unknown(None));
        fds.into_iter().for_each(|fd| self.pool.close(whose, fd));
    }
}

/// Parses a place named by a process. [`Links`] checks whether the process holds it.
fn place(link: u64, conn: u32, side: u32) -> Result<Place, BadMessage> {
    let side = Side::parse(side).ok_or(DecodeError::Field("side"))?;
    if conn as usize >= CONNS {
        return Err(DecodeError::Field("conn").into());
    }
    Ok(Place { link, conn, side })
}

/// Returns the program name of a hello in a form that is safe to show in logs and terminals.
fn program_name(padded: &[u8; 32]) -> String {
    visible_bytes(padded.split(|byte| *byte == 0).next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_names_are_fit_to_be_shown() {
        let padded = |name: &[u8]| {
            let mut bytes = [0; 32];
            bytes[..name.len()].copy_from_slice(name);
            bytes
        };
        assert_eq!(program_name(&padded(b"memcached")), "memcached");
        assert_eq!(program_name(&padded(b"a\x1b[31m\xff\n")), "a\\u{1b}[31m\\xff\\u{a}");
        assert_eq!(program_name(&padded("ng\u{200b}inx\u{202e}".as_bytes())), "ng\\u{200b}inx\\u{202e}");
        assert_eq!(program_name(&[b'x'; 32]), "x".repeat(32));
        assert_eq!(program_name(&[0; 32]), "");
    }
}
