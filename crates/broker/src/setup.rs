//! Links that are being made. The ends share the memory only once neither can take anything of it
//! away (L5, docs/adr/0032-memory-that-nobody-can-punch.md).
//!
//! ```text
//!   broker                                       each end
//!   makes and maps the memfd
//!   Link, with the memfd  ─────────────────────> maps it, closes it, touches nothing
//!   AwaitingMaps  <───────────────────── Mapped
//!   Sealing: on the blocking pool, F_SEAL_FUTURE_WRITE and F_SEAL_SEAL
//!   touches it, resets lanes
//!   Pair, for each connection that waits  ─────> touches it
//! ```
//!
//! Until the seals are there, whoever has the memfd can punch holes. Meanwhile a thread that
//! touches the memory sleeps in the kernel, and so does one that maps it, unmaps it or forks: all
//! of these take a lock of the file's. To add a seal waits as well, so the blocking pool does that.
//!
//! Hence [`Order`]: of two users the one that the other must not keep waiting maps the memory
//! first, while nobody else has it. And memory that could not be sealed stays mapped for good: to
//! unmap it would wait. The two users share no other memory from then on.
//!
//! Example: a client of user 1000 connects to a server of user 33. The server maps the link and
//! answers. Then the client gets it, adds F_SEAL_SEAL, and punches in a loop. The broker cannot
//! seal the file. It refuses the connections that wait (`link_not_made`), and sends `Unlink` with
//! `may_unmap` 0. No thread of the server has waited.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shunt_abi::geometry::{Geometry, MAX_RING_BYTES, MAX_SPILL_BYTES, MIN_RING_BYTES, RINGS_OFFSET, Side};
use shunt_abi::reason::Reason;
use shunt_sys::Result;
use shunt_sys::mapping::{self, Mapping};
use shunt_sys::memfd;

use crate::links::LinkId;
use crate::pairing::{Offer, ProcessId};
use crate::principal::{Account, Budget, Principal, Whose};

/// How long the two ends have to map the memory. A program answers with its next call.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// The memory of a link. It stays mapped for good unless it has been sealed, or whoever has it is
/// [trusted](Memory::trust).
#[derive(Debug)]
pub(crate) struct Memory {
    map: Mapping,
    fd: OwnedFd,
    geometry: Geometry,
}

impl Memory {
    /// Makes the memory and maps it. Nothing may touch it before it is [sealed](Memory::seal).
    pub(crate) fn make(geometry: Geometry) -> Result<Memory> {
        let fd = memfd::create_fixed("shunt-link", geometry.link_bytes())?;
        let map = Mapping::map(&fd, geometry.link_bytes())?;
        map.set_stays(true);
        Ok(Memory { map, fd, geometry })
    }

    /// Ends punching and new mappings, and puts memory behind all that lies before the rings.
    /// Returns whether that has been achieved. Blocks for as long as holes are being punched.
    pub(crate) fn seal(&self) -> bool {
        // Whoever has added F_SEAL_SEAL first has made this impossible.
        let _ = memfd::seal(&self.fd);
        let is_sealed = memfd::verify_sealed(&self.fd, self.geometry.link_bytes()).is_ok();
        if is_sealed {
            self.map.set_stays(false);
        }
        is_sealed && mapping::back(self.map.as_ptr(), RINGS_OFFSET).is_ok()
    }

    /// Returns whether to unmap it waits for no punch.
    pub(crate) fn may_unmap(&self) -> bool {
        !self.map.stays()
    }

    /// Whoever has it is trusted not to keep others waiting.
    pub(crate) fn trust(&self) {
        self.map.set_stays(false);
    }

    /// What lies before the rings is read and written there.
    pub(crate) fn head(&self) -> &Mapping {
        &self.map
    }

    /// Returns how many pages the two rings of a connection and their spills have beyond the first
    /// page of each ring, which every connection needs.
    pub(crate) fn grown_pages(&self, conn: usize) -> usize {
        let of_side = |side| {
            let ring = self.geometry.ring_offset(conn, side) + MIN_RING_BYTES;
            let grown = self.backed_pages(ring, self.geometry.ring_bytes() - MIN_RING_BYTES);
            // A spill grows from its first page on. To look at all pages of one that has none would
            // take longer than all else that the end of a connection costs.
            let spill = self.geometry.spill_offset(conn, side);
            match self.backed_pages(spill, MIN_RING_BYTES) {
                0 => grown,
                _ => grown + self.backed_pages(spill, self.geometry.spill_bytes()),
            }
        };
        of_side(Side::A) + of_side(Side::B)
    }

    fn backed_pages(&self, offset: usize, len: usize) -> usize {
        let pages = mapping::backed_pages(self.map.as_ptr().wrapping_add(offset), len);
        pages.into_iter().filter(|is_backed| *is_backed).count()
    }
}

// What the links count of it fits into 16 bits.
const _: () = assert!(2 * (MAX_RING_BYTES + MAX_SPILL_BYTES) / MIN_RING_BYTES <= u16::MAX as usize);

impl AsFd for Memory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Which end maps the memory first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Both at the same time: they are one user's, or may do everything.
    Together,
    /// This one. The other gets the memory when it has answered.
    First(Side),
}

impl Order {
    /// Returns which of two ends maps first. `opener` is the side of the end that has called
    /// connect, if that is known.
    ///
    /// Whoever maps second may wait for the first. So the privileged end is first, and else the one
    /// that has accepted the connection: it serves others too, and did not choose its peer. Where
    /// that is not known, it is the older process.
    pub(crate) fn of(principals: [Principal; 2], opener: Option<Side>) -> Order {
        let [one, other] = principals;
        match (one.is_privileged(), other.is_privileged()) {
            (true, true) => Order::Together,
            (true, false) => Order::First(Side::A),
            (false, true) => Order::First(Side::B),
            (false, false) if one == other => Order::Together,
            // A process on side A has said hello before the one on side B.
            (false, false) => Order::First(opener.map_or(Side::A, Side::other)),
        }
    }

    /// Returns whether the end on this side is asked to map the memory at the beginning.
    pub(crate) fn asks(self, side: Side) -> bool {
        self == Order::Together || self == Order::First(side)
    }
}

/// How far a link has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setup {
    /// These ends have been asked to map the memory, and those have answered that they have.
    AwaitingMaps { asked: [bool; 2], mapped: [bool; 2], until: Instant },
    /// The blocking pool adds the seals. With a failure the link is given up, and sealed so that to
    /// unmap it waits for no other process.
    Sealing(Option<Failure>),
}

/// What follows from an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Nothing,
    /// The end on this side is to map the memory now.
    Ask(Side),
    /// The memory is to be sealed now.
    Seal,
}

/// Why a link does not come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Not both ends have answered in time.
    Unanswered,
    /// This end could not map the memory.
    Unmapped(Side),
    /// One of the ends has seen to it that the memory cannot be sealed, or there is no memory for
    /// it.
    Unsealed,
}

impl Failure {
    /// What the program on this side is told.
    pub(crate) fn reason(self, side: Side) -> Reason {
        if self == Failure::Unmapped(side) { Reason::NoMemory } else { Reason::LinkNotMade }
    }
}

impl Setup {
    fn begin(order: Order, now: Instant) -> Setup {
        let asked = [Side::A, Side::B].map(|side| order.asks(side));
        Setup::AwaitingMaps { asked, mapped: [false; 2], until: now + ANSWER_WITHIN }
    }

    /// An end has answered.
    fn answered(&mut self, side: Side, is_mapped: bool, now: Instant) -> Next {
        let Setup::AwaitingMaps { asked, mapped, until } = self else { return Next::Nothing };
        let (own, other) = (side as usize, side.other() as usize);
        if !asked[own] {
            return Next::Nothing;
        }
        mapped[own] = is_mapped;
        let failure = match (is_mapped, mapped[other]) {
            (false, _) => Some(Failure::Unmapped(side)),
            (true, true) => None,
            (true, false) if asked[other] => return Next::Nothing,
            (true, false) => {
                asked[other] = true;
                *until = now + ANSWER_WITHIN;
                return Next::Ask(side.other());
            }
        };
        *self = Setup::Sealing(failure);
        Next::Seal
    }

    /// Nobody will use the link. Returns whether its memory is to be sealed now, for those who have
    /// it mapped.
    fn give_up(&mut self) -> bool {
        let is_sealing = matches!(self, Setup::Sealing(_));
        *self = Setup::Sealing(Some(Failure::Unanswered));
        !is_sealing
    }

    /// Returns whether the time to answer is over, and the memory is to be sealed for that.
    fn expired(&mut self, now: Instant) -> bool {
        let is_over = self.deadline().is_some_and(|until| until <= now);
        if is_over {
            *self = Setup::Sealing(Some(Failure::Unanswered));
        }
        is_over
    }

    fn deadline(&self) -> Option<Instant> {
        match self {
            Setup::AwaitingMaps { until, .. } => Some(*until),
            Setup::Sealing(_) => None,
        }
    }

    /// The blocking pool is done. Returns why the link does not come about, if it does not.
    fn outcome(self, is_sealed: bool) -> Option<Failure> {
        match self {
            Setup::AwaitingMaps { .. } => Some(Failure::Unanswered),
            Setup::Sealing(Some(failure)) => Some(failure),
            Setup::Sealing(None) => (!is_sealed).then_some(Failure::Unsealed),
        }
    }
}

/// A link that is being made, and the connections that wait for it.
#[derive(Debug)]
pub(crate) struct Making {
    pub(crate) ends: [ProcessId; 2],
    pub(crate) whose: Whose,
    pub(crate) memory: Arc<Memory>,
    setup: Setup,
    /// The earlier and the later offer of each.
    pub(crate) waiting: Vec<[Offer; 2]>,
}

/// All links that are being made: one at a time for each two processes.
#[derive(Debug)]
pub(crate) struct Setups {
    by_link: BTreeMap<LinkId, Making>,
    by_ends: HashMap<[ProcessId; 2], LinkId>,
    /// Who has offered the sockets of connections that wait.
    holders: HashMap<u64, ProcessId>,
    /// Connections that wait.
    budget: Budget,
    /// Two users that share no memory any more, in both orders: one has kept some from being
    /// sealed.
    apart: HashSet<[Option<Account>; 2]>,
}

/// What the end of a process leaves of links that were being made.
#[derive(Debug, Default)]
pub(crate) struct Left {
    /// Links whose memory is to be sealed now.
    pub(crate) unsealed: Vec<(LinkId, Whose, Arc<Memory>)>,
    /// Offers whose other end is no more.
    pub(crate) offers: Vec<Offer>,
}

/// What the broker does after an answer.
#[derive(Debug)]
pub(crate) enum Answered {
    /// It sends the memory to the end on this side, of these two.
    Ask(Side, [ProcessId; 2], Arc<Memory>),
    /// It has the memory sealed.
    Seal(Whose, Arc<Memory>),
}

impl Setups {
    pub(crate) fn new(limit: usize) -> Setups {
        Setups {
            by_link: BTreeMap::new(),
            by_ends: HashMap::new(),
            holders: HashMap::new(),
            budget: Budget::new(limit),
            apart: HashSet::new(),
        }
    }

    /// One of two users has kept memory from being sealed.
    pub(crate) fn keep_apart(&mut self, [one, other]: [Option<Account>; 2]) {
        self.apart.extend([[one, other], [other, one]]);
    }

    /// Returns whether two users may share memory.
    pub(crate) fn may_share(&self, accounts: [Option<Account>; 2]) -> bool {
        !self.apart.contains(&accounts)
    }

    /// Has a connection wait for the link of these two processes that is being made.
    pub(crate) fn wait(&mut self, ends: [ProcessId; 2], whose: Whose, offers: [Offer; 2]) -> Wait {
        let making = self.by_ends.get(&ends).and_then(|id| self.by_link.get_mut(id));
        let Some(making) = making else { return Wait::NoLink };
        if !self.budget.take(whose, 1) {
            return Wait::Full;
        }
        self.holders.extend(offers.iter().map(|offer| (offer.cookie, offer.process)));
        making.waiting.push(offers);
        Wait::Waits
    }

    /// Begins a link.
    pub(crate) fn begin(
        &mut self,
        id: LinkId,
        ends: [ProcessId; 2],
        whose: Whose,
        memory: Arc<Memory>,
        order: Order,
        now: Instant,
    ) {
        self.by_ends.insert(ends, id);
        self.by_link
            .insert(id, Making { ends, whose, memory, setup: Setup::begin(order, now), waiting: Vec::new() });
    }

    /// An end has answered.
    pub(crate) fn answered(
        &mut self,
        process: ProcessId,
        id: LinkId,
        side: Side,
        is_mapped: bool,
        now: Instant,
    ) -> Option<Answered> {
        let making = self.by_link.get_mut(&id).filter(|making| making.ends[side as usize] == process)?;
        match making.setup.answered(side, is_mapped, now) {
            Next::Nothing => None,
            Next::Ask(side) => Some(Answered::Ask(side, making.ends, making.memory.clone())),
            Next::Seal => Some(Answered::Seal(making.whose, making.memory.clone())),
        }
    }

    /// Returns the links for which the time to answer is over. Their memory is to be sealed now.
    pub(crate) fn expired(&mut self, now: Instant) -> Vec<(LinkId, Whose, Arc<Memory>)> {
        let is_over = |(id, making): (&LinkId, &mut Making)| {
            making.setup.expired(now).then(|| (*id, making.whose, making.memory.clone()))
        };
        self.by_link.iter_mut().filter_map(is_over).collect()
    }

    /// When the next of them will be, at the earliest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.by_link.values().filter_map(|making| making.setup.deadline()).min()
    }

    /// The blocking pool is done with a link. Returns it, and why it does not come about, if it
    /// does not.
    pub(crate) fn sealed(&mut self, id: LinkId, is_sealed: bool) -> Option<(Making, Option<Failure>)> {
        let making = self.remove(id)?;
        let failure = making.setup.outcome(is_sealed);
        Some((making, failure))
    }

    fn remove(&mut self, id: LinkId) -> Option<Making> {
        let making = self.by_link.remove(&id)?;
        self.by_ends.remove(&making.ends);
        self.budget.give(making.whose, making.waiting.len());
        making.waiting.iter().flatten().for_each(|offer| {
            self.holders.remove(&offer.cookie);
        });
        Some(making)
    }

    /// The process that has offered a socket whose connection waits.
    pub(crate) fn holder(&self, cookie: u64) -> Option<ProcessId> {
        self.holders.get(&cookie).copied()
    }

    /// The processes that are about to share a link with this one.
    pub(crate) fn peers(&self, process: ProcessId) -> impl Iterator<Item = ProcessId> {
        let of_it = self.by_link.values().filter(move |making| making.ends.contains(&process));
        of_it.map(move |making| making.ends[usize::from(making.ends[0] == process)])
    }

    /// A process takes an offer back. Returns that of the other end, if it was waiting.
    pub(crate) fn withdraw(&mut self, process: ProcessId, ticket: u64) -> Option<Offer> {
        let is_it = |offer: &Offer| offer.process == process && offer.ticket == ticket;
        for making in self.by_link.values_mut().filter(|making| making.ends.contains(&process)) {
            if let Some(at) = making.waiting.iter().position(|offers| offers.iter().any(is_it)) {
                let offers = making.waiting.swap_remove(at);
                self.budget.give(making.whose, 1);
                offers.iter().for_each(|offer| {
                    self.holders.remove(&offer.cookie);
                });
                return offers.into_iter().find(|offer| !is_it(offer));
            }
        }
        None
    }

    /// A process has ended. The links that were being made for it are given up: they stay here
    /// until they are sealed.
    pub(crate) fn forget(&mut self, process: ProcessId) -> Left {
        let mut left = Left::default();
        for (id, making) in self.by_link.iter_mut().filter(|(_, making)| making.ends.contains(&process)) {
            if making.setup.give_up() {
                left.unsealed.push((*id, making.whose, making.memory.clone()));
            }
            let waiting = std::mem::take(&mut making.waiting);
            self.budget.give(making.whose, waiting.len());
            for offer in waiting.into_iter().flatten() {
                self.holders.remove(&offer.cookie);
                left.offers.extend(Some(offer).filter(|offer| offer.process != process));
            }
        }
        left
    }
}

/// What becomes of a connection for which there is no link yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It waits for the one that is being made.
    Waits,
    /// None is being made.
    NoLink,
    /// Too many wait.
    Full,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairing::Key;
    use crate::principal::tests::{ROOT, stranger};
    use rustix::fs::{FallocateFlags, SealFlags, fallocate, fcntl_add_seals};
    use std::sync::atomic::Ordering::Relaxed;

    fn offer(process: ProcessId, ticket: u64) -> Offer {
        let address = ([127, 0, 0, 1], 1).into();
        let key = Key { netns: 0, local: address, remote: address };
        Offer { process, ticket, cookie: 100 * process + ticket, key, seen: None, since: Instant::now() }
    }

    fn memory() -> Arc<Memory> {
        Arc::new(Memory::make(Geometry::new(4 * MIN_RING_BYTES).unwrap()).unwrap())
    }

    /// A link with two connections that wait.
    fn begun() -> (Setups, Instant) {
        let (mut setups, now) = (Setups::new(8), Instant::now());
        let whose = Whose::both(ROOT, ROOT);
        assert_eq!(setups.wait([1, 2], whose, [offer(1, 1), offer(2, 1)]), Wait::NoLink);
        setups.begin(7, [1, 2], whose, memory(), Order::Together, now);
        for ticket in [1, 2] {
            assert_eq!(setups.wait([1, 2], whose, [offer(1, ticket), offer(2, ticket)]), Wait::Waits);
        }
        (setups, now)
    }

    fn seals(answered: Option<Answered>) -> bool {
        matches!(answered, Some(Answered::Seal(..)))
    }

    #[test]
    fn a_link_is_sealed_once_both_ends_have_mapped_it() {
        let (mut setups, now) = begun();
        assert_eq!((setups.deadline(), setups.holder(201)), (Some(now + ANSWER_WITHIN), Some(2)));
        assert!(setups.answered(1, 7, Side::A, true, now).is_none());
        assert!(setups.answered(1, 7, Side::B, true, now).is_none(), "it answers for the other end");
        assert!(setups.answered(3, 7, Side::B, true, now).is_none());
        assert!(setups.answered(2, 8, Side::B, true, now).is_none());
        let Some(Answered::Seal(_, memory)) = setups.answered(2, 7, Side::B, true, now) else { panic!() };
        assert!(setups.answered(2, 7, Side::B, false, now).is_none(), "it has answered");
        assert!(setups.expired(now + 2 * ANSWER_WITHIN).is_empty());
        let (making, failure) = setups.sealed(7, memory.seal()).unwrap();
        assert_eq!((making.waiting.len(), failure), (2, None));
        assert!(setups.sealed(7, true).is_none() && setups.holder(201).is_none());
        assert_eq!((setups.budget.all(), setups.deadline()), (0, None));
    }

    #[test]
    fn the_second_end_gets_the_memory_once_the_first_has_mapped_it() {
        let (mut setups, now) = (Setups::new(8), Instant::now());
        let whose = Whose::both(ROOT, ROOT);
        setups.begin(7, [1, 2], whose, memory(), Order::First(Side::B), now);
        assert!(setups.answered(1, 7, Side::A, true, now).is_none(), "it does not have it");
        let later = now + ANSWER_WITHIN / 2;
        let answered = setups.answered(2, 7, Side::B, true, later);
        assert!(matches!(answered, Some(Answered::Ask(Side::A, [1, 2], _))), "{answered:?}");
        assert!(setups.answered(2, 7, Side::B, true, later).is_none());
        assert_eq!(setups.deadline(), Some(later + ANSWER_WITHIN));
        assert!(seals(setups.answered(1, 7, Side::A, true, later)));
        assert_eq!(setups.sealed(7, true).unwrap().1, None);

        setups.begin(8, [1, 2], whose, memory(), Order::First(Side::B), now);
        assert!(seals(setups.answered(2, 8, Side::B, false, now)));
        assert_eq!(setups.sealed(8, true).unwrap().1, Some(Failure::Unmapped(Side::B)));
    }

    #[test]
    fn whom_the_other_must_not_keep_waiting_maps_first() {
        let (one, other) = (stranger(1, 7), stranger(2, 7));
        for opener in [None, Some(Side::A), Some(Side::B)] {
            assert_eq!(Order::of([ROOT, ROOT], opener), Order::Together);
            assert_eq!(Order::of([one, one], opener), Order::Together);
            assert_eq!(Order::of([ROOT, one], opener), Order::First(Side::A));
            assert_eq!(Order::of([one, ROOT], opener), Order::First(Side::B));
        }
        assert_eq!(Order::of([one, other], Some(Side::A)), Order::First(Side::B));
        assert_eq!(Order::of([one, other], Some(Side::B)), Order::First(Side::A));
        assert_eq!(Order::of([one, other], None), Order::First(Side::A));
    }

    #[test]
    fn users_of_whom_one_has_kept_memory_from_being_sealed_are_kept_apart() {
        let mut setups = Setups::new(8);
        let [root, one, other] = [ROOT, stranger(1, 7), stranger(2, 7)].map(|one| one.account());
        setups.keep_apart([one, other]);
        assert!(!setups.may_share([one, other]) && !setups.may_share([other, one]));
        assert!(setups.may_share([one, one]) && setups.may_share([root, one]));
    }

    #[test]
    fn an_end_that_cannot_map_it_or_does_not_answer_has_no_link() {
        let (mut setups, now) = begun();
        assert!(seals(setups.answered(2, 7, Side::B, false, now)));
        let (_, failure) = setups.sealed(7, true).unwrap();
        assert_eq!(failure, Some(Failure::Unmapped(Side::B)));
        let reasons = [Side::A, Side::B].map(|side| failure.unwrap().reason(side));
        assert_eq!(reasons, [Reason::LinkNotMade, Reason::NoMemory]);

        let (mut setups, now) = begun();
        assert!(setups.answered(1, 7, Side::A, true, now).is_none());
        assert!(setups.expired(now + ANSWER_WITHIN / 2).is_empty());
        assert_eq!(setups.expired(now + 2 * ANSWER_WITHIN).len(), 1);
        assert!(setups.answered(2, 7, Side::B, true, now).is_none(), "too late");
        assert_eq!(setups.sealed(7, true).unwrap().1, Some(Failure::Unanswered));
    }

    #[test]
    fn the_offers_of_a_process_that_ends_are_no_longer_waited_for() {
        let (mut setups, _) = begun();
        assert_eq!(setups.peers(1).collect::<Vec<_>>(), [2]);
        let other = setups.withdraw(1, 2).map(|offer| (offer.process, offer.ticket));
        assert_eq!((other, setups.withdraw(1, 2), setups.budget.all()), (Some((2, 2)), None, 1));
        let left = setups.forget(1);
        let offers: Vec<_> = left.offers.iter().map(|offer| (offer.process, offer.ticket)).collect();
        assert_eq!((left.unsealed.len(), offers, setups.budget.all()), (1, vec![(2, 1)], 0));
        assert!(setups.forget(2).unsealed.is_empty(), "that is under way");
        assert_eq!(setups.sealed(7, true).unwrap().1, Some(Failure::Unanswered));
        assert!(setups.by_ends.is_empty() && setups.holders.is_empty());
    }

    #[test]
    fn memory_can_be_punched_until_it_is_sealed() {
        let memory = memory();
        let punch = || {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&*memory, flags, 0, 4096).is_ok()
        };
        assert!(punch());
        assert!(memory.seal() && !punch());
        memory.head().word(8).unwrap().store(7, Relaxed);
    }

    #[test]
    fn memory_that_an_end_has_sealed_first_is_refused() {
        let memory = memory();
        fcntl_add_seals(&*memory, SealFlags::SEAL).unwrap();
        assert!(!memory.seal());
    }

    #[test]
    fn grown_rings_and_spills_are_counted_without_the_first_pages_of_rings() {
        let memory = memory();
        assert!(memory.seal());
        let touch = |side, page| {
            let at = memory.geometry.ring_offset(3, side) + page * MIN_RING_BYTES;
            memory.map.word(at).unwrap().store(7, Relaxed);
        };
        touch(Side::A, 0);
        assert_eq!(memory.grown_pages(3), 0);
        touch(Side::A, 2);
        touch(Side::B, 1);
        touch(Side::B, 3);
        assert_eq!((memory.grown_pages(3), memory.grown_pages(4)), (3, 0));
        for page in 0..2 {
            let at = memory.geometry.spill_offset(3, Side::B) + page * MIN_RING_BYTES;
            memory.map.word(at).unwrap().store(7, Relaxed);
        }
        assert_eq!((memory.grown_pages(3), memory.grown_pages(2), memory.grown_pages(4)), (5, 0, 0));
    }
}
