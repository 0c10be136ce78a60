//! What all clients share, and every decision about it. Nothing here waits; what is said goes to outboxes.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Instant;

use shunt_abi::control::{
    DecodeError, Doorbell, Hello, Link, Pair, PeerDoorbell, PeerGone, Refused, Release, Reply, Request,
    Welcome,
};
use shunt_abi::geometry::{CONNS, Geometry, Side, WAITERS};
use shunt_abi::page::PAGE_BYTES;
use shunt_abi::reason::Reason;
use shunt_sys::identity::{IdentifyError, Identity, identify};
use shunt_sys::mapping::Mapping;
use shunt_sys::memfd::{SealError, verify_sealed};
use shunt_sys::seqpacket::Credentials;
use shunt_sys::{Errno, eventfd};
use thiserror::Error;

use crate::config::Limits;
use crate::diag::Diag;
use crate::disposal::Disposal;
use crate::links::{Grant, Links};
use crate::outbox::Outbox;
use crate::pairing::{Finding, Key, Offer, Offers, ProcessId};

/// Everything the broker knows.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) disposal: Disposal,
    pub(crate) limits: Limits,
    pub(crate) started: Instant,
    pub(crate) processes: BTreeMap<ProcessId, Process>,
    pub(crate) links: Links,
    pub(crate) pairs_made: u64,
    pub(crate) offers_refused: HashMap<Reason, u64>,
    pub(crate) bad_messages: BTreeMap<&'static str, u64>,
    diag: Diag,
    offers: Offers,
    next_process: ProcessId,
}

/// A process that has said hello.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) credentials: Credentials,
    pub(crate) program: String,
    pub(crate) outbox: Rc<Outbox>,
    doorbells: BTreeMap<u32, Rc<OwnedFd>>,
    /// Its first refused offer is a warning, the rest only for debugging: it may have thousands.
    warned: bool,
}

/// Why a client is hung up on.
#[derive(Clone, Copy, Debug, Error)]
pub(crate) enum BadMessage {
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error("message was cut off: too many bytes or descriptors")]
    Truncated,
    #[error("no hello before other messages")]
    BeforeHello,
    #[error("a second hello")]
    SecondHello,
    #[error("no page in the hello: {0}")]
    Page(#[from] SealError),
    #[error("the page cannot be mapped: {0}")]
    PageMapping(Errno),
    #[error("the doorbell is not an eventfd")]
    NotADoorbell,
}

impl BadMessage {
    /// The name it is counted under.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            BadMessage::Decode(DecodeError::Length(_)) => "length",
            BadMessage::Decode(DecodeError::Magic) => "magic",
            BadMessage::Decode(DecodeError::Version(_)) => "version",
            BadMessage::Decode(DecodeError::Kind(_)) => "kind",
            BadMessage::Decode(DecodeError::Descriptors(_)) => "descriptors",
            BadMessage::Decode(DecodeError::Field(_)) => "field",
            BadMessage::Truncated => "truncated",
            BadMessage::BeforeHello => "before_hello",
            BadMessage::SecondHello => "second_hello",
            BadMessage::Page(_) | BadMessage::PageMapping(_) => "page",
            BadMessage::NotADoorbell => "doorbell",
        }
    }
}

impl State {
    pub(crate) fn new(geometry: Geometry, limits: Limits, diag: Diag) -> State {
        State {
            disposal: Disposal::default(),
            limits,
            started: Instant::now(),
            processes: BTreeMap::new(),
            links: Links::new(geometry, limits.links),
            pairs_made: 0,
            offers_refused: HashMap::new(),
            bad_messages: BTreeMap::new(),
            diag,
            offers: Offers::default(),
            next_process: 1,
        }
    }

    /// Takes in a process that shows its page.
    pub(crate) fn hello(
        &mut self,
        credentials: Credentials,
        outbox: &Rc<Outbox>,
        hello: &Hello,
        page: OwnedFd,
    ) -> Result<ProcessId, BadMessage> {
        if let Err(error) = verify_sealed(&page, PAGE_BYTES) {
            self.disposal.close(credentials.uid, page);
            return Err(error.into());
        }
        outbox.set_page(Mapping::map(&page, PAGE_BYTES).map_err(BadMessage::PageMapping)?);
        let id = self.next_process;
        self.next_process += 1;
        let process = Process {
            credentials,
            program: program_name(&hello.program),
            outbox: outbox.clone(),
            doorbells: BTreeMap::new(),
            warned: false,
        };
        tracing::debug!(process = id, pid = credentials.pid, program = process.program, "hello");
        self.processes.insert(id, process);
        outbox.push(Welcome { process: id }.into(), None);
        Ok(id)
    }

    /// Does what a process asks. `fd` is there exactly when the kind of message has one.
    pub(crate) fn request(
        &mut self,
        id: ProcessId,
        request: Request,
        fd: Option<OwnedFd>,
    ) -> Result<(), BadMessage> {
        match (request, fd) {
            (Request::Offer(offer), Some(fd)) => self.offer(id, offer.ticket, fd),
            (Request::Withdraw(withdraw), None) => drop(self.offers.withdraw(id, withdraw.ticket)),
            (Request::Release(release), None) => self.release(id, &release)?,
            (Request::Doorbell(doorbell), Some(fd)) => self.doorbell(id, &doorbell, fd)?,
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

    /// Counts a message that its sender is hung up for.
    pub(crate) fn count_bad(&mut self, bad: &BadMessage) {
        *self.bad_messages.entry(bad.label()).or_default() += 1;
    }

    /// A process has ended, or has been hung up on.
    pub(crate) fn end(&mut self, id: ProcessId) {
        self.offers.forget(id);
        for peer in self.links.forget(id) {
            self.say(peer, PeerGone { peer: id }, None);
        }
        self.processes.remove(&id);
        tracing::debug!(process = id, "gone");
    }

    fn offer(&mut self, id: ProcessId, ticket: u64, socket: OwnedFd) {
        let Some(process) = self.processes.get(&id) else { return };
        let uid = process.credentials.uid;
        let shown = identify(&socket);
        // Before any answer, and whatever it is: while we hold it, the program's close does not end it.
        match shown {
            Ok(_) | Err(IdentifyError::NotEstablished(_)) => self.disposal.close_tcp(uid, socket),
            Err(_) => self.disposal.close(uid, socket),
        }
        let shown = match shown {
            Ok(shown) => shown,
            Err(error) => return self.refuse_lie(id, ticket, &error),
        };
        let refusal = if shown.netns != self.diag.netns() {
            Some(Reason::ForeignNamespace)
        } else if shown.bound_device {
            Some(Reason::BoundToDevice)
        } else if shown.local == shown.remote {
            Some(Reason::SelfConnected)
        } else if self.offers.count(id) >= self.limits.offers {
            Some(Reason::BrokerLimit)
        } else if self.links.holder(shown.cookie).is_some_and(|holder| holder != id) {
            Some(Reason::Shared)
        } else {
            None
        };
        match refusal {
            Some(reason) => self.refuse(id, ticket, reason),
            None => self.place(offer_of(id, ticket, &shown)),
        }
    }

    /// Pairs an offer, leaves it open, or refuses it.
    fn place(&mut self, offer: Offer) {
        loop {
            match self.offers.look(&offer) {
                Finding::Nothing => return self.offers.insert(offer),
                Finding::Shared(other) => {
                    self.refuse(other.process, other.ticket, Reason::Shared);
                    return self.refuse(offer.process, offer.ticket, Reason::Shared);
                }
                // Two sockets cannot have these addresses at once. The kernel knows which one lives.
                Finding::Occupied(older) => match self.live(&offer) {
                    Ok(true) => self.refuse_open(&older, Reason::Stale),
                    Ok(false) => return self.refuse(offer.process, offer.ticket, Reason::Stale),
                    Err(reason) => return self.refuse(offer.process, offer.ticket, reason),
                },
                // L3: at the moment of pairing both must still be the sockets that were shown.
                Finding::Counterpart(other) => {
                    match self.live(&offer).and_then(|live| Ok((live, self.live(&other)?))) {
                        Ok((true, true)) => {
                            self.offers.remove(&other.key);
                            return self.pair(&other, &offer);
                        }
                        Ok((false, other_lives)) => {
                            if !other_lives {
                                self.refuse_open(&other, Reason::Stale);
                            }
                            return self.refuse(offer.process, offer.ticket, Reason::Stale);
                        }
                        Ok((true, false)) => self.refuse_open(&other, Reason::Stale),
                        Err(reason) => return self.refuse(offer.process, offer.ticket, reason),
                    }
                }
            }
        }
    }

    /// Whether the socket that was offered is still the one with its addresses.
    fn live(&mut self, offer: &Offer) -> Result<bool, Reason> {
        match self.diag.cookie(offer.key.local, offer.key.remote) {
            Ok(cookie) => Ok(cookie == Some(offer.cookie)),
            Err(error) => {
                tracing::warn!(%error, "sock_diag does not answer; is the kernel's tcp_diag module there?");
                Err(Reason::ForeignNamespace)
            }
        }
    }

    /// `earlier` and `later` are one connection.
    fn pair(&mut self, earlier: &Offer, later: &Offer) {
        let grant = match self.links.grant(earlier, later) {
            Ok(grant) => grant,
            Err(error) => {
                tracing::warn!(%error, "no link for a pair");
                self.refuse(earlier.process, earlier.ticket, Reason::BrokerLimit);
                return self.refuse(later.process, later.ticket, Reason::BrokerLimit);
            }
        };
        self.pairs_made += 1;
        // Towards each process: the link, then the doorbells, then the pair.
        let ends = [(earlier, later, grant.sides[0]), (later, earlier, grant.sides[1])];
        for (to, peer, side) in ends {
            self.say_link(to.process, peer.process, side, &grant);
        }
        if grant.introduction {
            self.say_doorbells(earlier.process, later.process);
            if earlier.process != later.process {
                self.say_doorbells(later.process, earlier.process);
            }
        }
        for (to, _, side) in ends {
            let Grant { link, conn, .. } = grant;
            let pair = Pair { ticket: to.ticket, cookie: to.cookie, link, conn, side: side as u32 };
            self.say(to.process, pair, None);
        }
    }

    fn say_link(&self, to: ProcessId, peer: ProcessId, side: Side, grant: &Grant) {
        if let Some(memfd) = &grant.fresh {
            let ring_bytes = self.links.ring_bytes() as u64;
            let link = Link { link: grant.link, peer, ring_bytes, side: side as u32, pad: 0 };
            self.say(to, link, Some(memfd.clone()));
        }
    }

    fn say_doorbells(&self, to: ProcessId, of: ProcessId) {
        for (slot, fd) in self.processes.get(&of).into_iter().flat_map(|process| &process.doorbells) {
            self.say(to, PeerDoorbell { peer: of, slot: *slot, pad: 0 }, Some(fd.clone()));
        }
    }

    fn release(&mut self, id: ProcessId, release: &Release) -> Result<(), BadMessage> {
        if release.conn as usize >= CONNS {
            return Err(DecodeError::Field("conn").into());
        }
        if !self.links.release(id, release.link, release.conn) {
            // Not its own, or not any more. Nothing is harmed.
            tracing::debug!(
                process = id,
                link = release.link,
                conn = release.conn,
                "released what it does not hold"
            );
        }
        Ok(())
    }

    fn doorbell(&mut self, id: ProcessId, doorbell: &Doorbell, fd: OwnedFd) -> Result<(), BadMessage> {
        if doorbell.slot as usize >= WAITERS {
            self.close_all(id, Some(fd));
            return Err(DecodeError::Field("slot").into());
        }
        if !eventfd::is_doorbell(&fd) {
            self.close_all(id, Some(fd));
            return Err(BadMessage::NotADoorbell);
        }
        let fd = Rc::new(fd);
        if let Some(process) = self.processes.get_mut(&id) {
            process.doorbells.insert(doorbell.slot, fd.clone());
        }
        for peer in self.links.peers(id) {
            self.say(peer, PeerDoorbell { peer: id, slot: doorbell.slot, pad: 0 }, Some(fd.clone()));
        }
        Ok(())
    }

    fn say(&self, to: ProcessId, reply: impl Into<Reply>, fd: Option<Rc<OwnedFd>>) {
        if let Some(process) = self.processes.get(&to) {
            process.outbox.push(reply.into(), fd);
        }
    }

    fn refuse_open(&mut self, offer: &Offer, reason: Reason) {
        self.offers.remove(&offer.key);
        self.refuse(offer.process, offer.ticket, reason);
    }

    fn refuse_lie(&mut self, id: ProcessId, ticket: u64, error: &IdentifyError) {
        if let Some(process) = self.processes.get_mut(&id) {
            // A socket that is closing is what happens to honest programs.
            if !process.warned && !matches!(error, IdentifyError::NotEstablished(_)) {
                process.warned = true;
                let (pid, program) = (process.credentials.pid, &process.program);
                tracing::warn!(pid, program, %error, "offered something else than an established TCP socket");
            }
        }
        self.refuse(id, ticket, Reason::NotTcp);
    }

    fn refuse(&mut self, id: ProcessId, ticket: u64, reason: Reason) {
        *self.offers_refused.entry(reason).or_default() += 1;
        tracing::debug!(process = id, ticket, reason = reason.label(), "offer refused");
        self.say(id, Refused { ticket, reason: reason as u32, pad: 0 }, None);
    }

    fn close_all(&self, id: ProcessId, fds: impl IntoIterator<Item = OwnedFd>) {
        let uid = self.processes.get(&id).map_or(u32::MAX, |process| process.credentials.uid);
        fds.into_iter().for_each(|fd| self.disposal.close(uid, fd));
    }
}

fn offer_of(process: ProcessId, ticket: u64, shown: &Identity) -> Offer {
    let key = Key { netns: shown.netns, local: shown.local, remote: shown.remote };
    Offer { process, ticket, cookie: shown.cookie, key }
}

/// What the process calls itself, fit to be shown: it goes to logs and terminals.
fn program_name(padded: &[u8; 32]) -> String {
    let name = padded.split(|byte| *byte == 0).next().unwrap_or_default();
    let printable = |c: char| if c.is_control() || c == char::REPLACEMENT_CHARACTER { '?' } else { c };
    String::from_utf8_lossy(name).chars().map(printable).collect()
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
        assert_eq!(program_name(&padded(b"a\x1b[31m\xff\n")), "a?[31m??");
        assert_eq!(program_name(&[b'x'; 32]), "x".repeat(32));
        assert_eq!(program_name(&[0; 32]), "");
    }
}
