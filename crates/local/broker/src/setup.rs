//! The state machine of a link that is being made. The two ends share the memory only after it is
//! sealed, so that neither can take pages away from it (L5,
//! docs/adr/0032-shared-memory-is-sealed-before-use.md).
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
//! Before the seals are added, every process that has the memfd can punch holes into it. During a
//! punch, threads that touch, map or unmap the memory, or fork, sleep in the kernel, since these
//! operations take a lock of the file. Adding a seal waits too, so the blocking pool does it.
//!
//! [`Order`] limits the damage: of two users, the one that must not be delayed maps the memory
//! first, while no other process has it. Memory that could not be sealed stays mapped for good,
//! because unmapping it could wait. The two users share no memory from then on.
//!
//! Example: a client of user 1000 connects to a server of user 33. The server maps the link and
//! answers. Then the client receives the memfd, adds F_SEAL_SEAL, and punches holes in a loop. The
//! broker cannot seal the file. It refuses the waiting connections (`link_not_made`), and sends
//! `Unlink` with `may_unmap` 0. No thread of the server has waited.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
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

/// How long the two ends have to map the memory. A program answers with its next call that the shim
/// intercepts.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// The number of pairs of users that the broker remembers to keep apart. The oldest pair is
/// forgotten for a new one.
const APART: usize = 4096;

/// The memory of a link. It stays mapped for good unless it has been sealed, or the processes that
/// have it are [trusted](Memory::trust).
#[derive(Debug)]
pub(crate) struct Memory {
    map: Mapping,
    fd: OwnedFd,
    geometry: Geometry,
}

impl Memory {
    /// Creates and maps the memory. No thread may touch it before it is [sealed](Memory::seal).
    pub(crate) fn make(geometry: Geometry) -> Result<Memory> {
        let fd = memfd::create_fixed("shunt-link", geometry.link_bytes())?;
        let map = Mapping::map(&fd, geometry.link_bytes())?;
        map.set_stays(true);
        Ok(Memory { map, fd, geometry })
    }

    /// Prevents hole punching and new writable mappings, and backs everything before the rings with
    /// memory. Returns whether that succeeded. Blocks while another process punches holes.
    pub(crate) fn seal(&self) -> bool {
        // Fails if another process has added F_SEAL_SEAL first.
        let _ = memfd::seal(&self.fd);
        let is_sealed = memfd::verify_sealed(&self.fd, self.geometry.link_bytes()).is_ok();
        if is_sealed {
            self.map.set_stays(false);
        }
        is_sealed && mapping::back(self.map.as_ptr(), RINGS_OFFSET).is_ok()
    }

    /// Returns whether the memory can be unmapped without waiting for a hole punch.
    pub(crate) fn may_unmap(&self) -> bool {
        !self.map.stays()
    }

    /// Marks the memory as safe to unmap, because all processes that have it are trusted.
    pub(crate) fn trust(&self) {
        self.map.set_stays(false);
    }

    /// Returns the mapping, through which the broker reads and writes the part before the rings.
    pub(crate) fn head(&self) -> &Mapping {
        &self.map
    }

    /// Returns the number of pages that the rings of a connection and their spills hold. Does not
    /// count the first page of each ring, which every connection needs.
    pub(crate) fn grown_pages(&self, conn: usize) -> usize {
        let of_side = |side| {
            let ring = self.geometry.ring_offset(conn, side) + MIN_RING_BYTES;
            let grown = self.backed_pages(ring, self.geometry.ring_bytes() - MIN_RING_BYTES);
            // A spill grows from its first page on. Scanning all pages of an unused spill would
            // cost more than the rest of ending a connection.
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

// `Link::spare` counts these pages in 16 bits.
const _: () = assert!(2 * (MAX_RING_BYTES + MAX_SPILL_BYTES) / MIN_RING_BYTES <= u16::MAX as usize);

impl AsFd for Memory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Which end maps the memory first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Both at the same time: they belong to one user, or both are privileged.
    Together,
    /// The end on this side. The other end gets the memory after this one has answered.
    First(Side),
}

impl Order {
    /// Returns which of two ends maps first. `opener` is the side that called `connect`, if known.
    ///
    /// The end that maps second may wait for the first. So a privileged end is first. Between two
    /// users it is the end that accepted the connection, because it serves other clients and did
    /// not choose its peer. If that is not known, it is the older process.
    pub(crate) fn of(principals: [Principal; 2], opener: Option<Side>) -> Order {
        let [one, other] = principals;
        match (one.is_privileged(), other.is_privileged()) {
            (true, true) => Order::Together,
            (true, false) => Order::First(Side::A),
            (false, true) => Order::First(Side::B),
            (false, false) if one == other => Order::Together,
            // The process on side A has sent its hello before the one on side B.
            (false, false) => Order::First(opener.map_or(Side::A, Side::other)),
        }
    }

    /// Returns whether the end on this side is asked to map the memory at the start.
    pub(crate) fn asks(self, side: Side) -> bool {
        self == Order::Together || self == Order::First(side)
    }
}

/// The progress of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setup {
    /// Waits until both ends have mapped the memory: `asked` and `mapped` have one entry per side.
    AwaitingMaps { asked: [bool; 2], mapped: [bool; 2], until: Instant },
    /// The blocking pool adds the seals. If there is a failure already, the link is given up; it is
    /// sealed only so that unmapping waits for no other process.
    Sealing(Option<Failure>),
}

/// The action that follows from an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Nothing,
    /// Send the memory to the end on this side.
    Ask(Side),
    /// Seal the memory.
    Seal,
}

/// The reason why a link could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// At least one end has not answered in time.
    Unanswered,
    /// The end on this side could not map the memory.
    Unmapped(Side),
    /// One of the ends has prevented sealing, or there was not enough memory.
    Unsealed,
}

impl Failure {
    /// Returns the reason that is reported to the program on this side.
    pub(crate) fn reason(self, side: Side) -> Reason {
        if self == Failure::Unmapped(side) { Reason::NoMemory } else { Reason::LinkNotMade }
    }
}

impl Setup {
    fn begin(order: Order, now: Instant) -> Setup {
        let asked = [Side::A, Side::B].map(|side| order.asks(side));
        Setup::AwaitingMaps { asked, mapped: [false; 2], until: now + ANSWER_WITHIN }
    }

    /// Records the answer of an end.
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

    /// Gives the link up. Returns whether the caller must seal the memory now, on behalf of the
    /// ends that have it mapped.
    fn give_up(&mut self) -> bool {
        let is_sealing = matches!(self, Setup::Sealing(_));
        *self = Setup::Sealing(Some(Failure::Unanswered));
        !is_sealing
    }

    /// Returns whether the time to answer is over. In that case the caller must seal the memory.
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

    /// Returns why the link could not be made, if so, after the blocking pool is done.
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
    /// The earlier and the later offer of each waiting connection.
    pub(crate) waiting: Vec<[Offer; 2]>,
}

/// A registry of links that are being made, with at most one per pair of processes.
#[derive(Debug)]
pub(crate) struct Setups {
    by_link: BTreeMap<LinkId, Making>,
    by_ends: HashMap<[ProcessId; 2], LinkId>,
    /// The process that offered each socket of a waiting connection, by socket cookie.
    holders: HashMap<u64, ProcessId>,
    /// Limits the number of waiting connections.
    budget: Budget,
    /// Pairs of users that share no memory any more, in both orders, because one of them has
    /// prevented sealing.
    apart: HashSet<[Option<Account>; 2]>,
    /// The pairs of `apart` in one order, oldest first. At most [`APART`].
    kept_apart: VecDeque<[Option<Account>; 2]>,
}

/// What remains of the links of a process that has ended.
#[derive(Debug, Default)]
pub(crate) struct Left {
    /// Links whose memory must be sealed now.
    pub(crate) unsealed: Vec<(LinkId, Whose, Arc<Memory>)>,
    /// Offers of the other ends, whose counterparts are gone.
    pub(crate) offers: Vec<Offer>,
}

/// What the broker must do after an answer.
#[derive(Debug)]
pub(crate) enum Answered {
    /// Send the memory to the end on this side of these two.
    Ask(Side, [ProcessId; 2], Arc<Memory>),
    /// Seal the memory.
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
            kept_apart: VecDeque::new(),
        }
    }

    /// Forbids two users to share memory, because one of them has prevented sealing.
    pub(crate) fn keep_apart(&mut self, [one, other]: [Option<Account>; 2]) {
        if !self.apart.insert([one, other]) {
            return;
        }
        self.apart.insert([other, one]);
        self.kept_apart.push_back([one, other]);
        if self.kept_apart.len() > APART
            && let Some([one, other]) = self.kept_apart.pop_front()
        {
            self.apart.remove(&[one, other]);
            self.apart.remove(&[other, one]);
        }
    }

    /// Returns whether two users may share memory.
    pub(crate) fn may_share(&self, accounts: [Option<Account>; 2]) -> bool {
        !self.apart.contains(&accounts)
    }

    /// Queues a connection for the link of these two processes, if one is being made.
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

    /// Registers a new link.
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

    /// Records the answer of an end, and returns the action that follows.
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

    /// Gives up the links whose time to answer is over. Returns them, since their memory must be
    /// sealed now.
    pub(crate) fn expired(&mut self, now: Instant) -> Vec<(LinkId, Whose, Arc<Memory>)> {
        let is_over = |(id, making): (&LinkId, &mut Making)| {
            making.setup.expired(now).then(|| (*id, making.whose, making.memory.clone()))
        };
        self.by_link.iter_mut().filter_map(is_over).collect()
    }

    /// Returns the earliest time at which [`expired`](Setups::expired) may return a link.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.by_link.values().filter_map(|making| making.setup.deadline()).min()
    }

    /// Removes a link that the blocking pool is done with. Returns it, and the reason if it could
    /// not be made.
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

    /// Returns the process that offered a socket whose connection waits.
    pub(crate) fn holder(&self, cookie: u64) -> Option<ProcessId> {
        self.holders.get(&cookie).copied()
    }

    /// Returns the processes that are about to share a link with this one.
    pub(crate) fn peers(&self, process: ProcessId) -> impl Iterator<Item = ProcessId> {
        let of_it = self.by_link.values().filter(move |making| making.ends.contains(&process));
        of_it.map(move |making| making.ends[usize::from(making.ends[0] == process)])
    }

    /// Withdraws an offer of a process whose connection waits. Returns the offer of the other end.
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

    /// Gives up the links of a process that has ended. They stay registered until they are sealed.
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

/// The state of a connection for which there is no link yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It waits for a link that is being made.
    Waits,
    /// No link between the two processes is being made.
    NoLink,
    /// Too many connections wait.
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

    /// Begins a link with two waiting connections.
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
    fn number_of_users_kept_apart_is_bounded() {
        let mut setups = Setups::new(8);
        let account = |uid| stranger(uid, 7).account();
        for uid in 1..=2 * APART as u32 {
            for _ in 0..2 {
                setups.keep_apart([account(0), account(uid)]);
            }
            assert!(!setups.may_share([account(uid), account(0)]));
        }
        assert_eq!((setups.apart.len(), setups.kept_apart.len()), (2 * APART, APART));
        assert!(setups.may_share([account(1), account(0)]), "the oldest is forgotten");
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
