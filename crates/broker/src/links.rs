//! Links and their connection slots: who holds what, and when it may be given out again.
//!
//! A slot has a holder on each side. It is free only when both have released it or their process has ended,
//! so that nobody is given a lane that somebody may still use, and its rings have been [rinsed](crate::rinse). A link of which
//! nobody has used anything for a while is dropped.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*, fence};
use std::time::{Duration, Instant};

use shunt_abi::geometry::{
    CONNS, Geometry, LANE_BYTES, LANE_CURSOR, LANE_END_ABANDONED, LANE_END_DIED, LANE_END_OFFSET,
    LANE_END_SHARED, LANE_END_SHUT_DOWN, LANE_FOLLOWED_OFFSET, LANE_HEAD_OFFSET, LANE_RETURNED,
    LANE_TAIL_OFFSET, Side, WAITER_READY_OFFSET, WAITER_SLEEPING_OFFSET, WAITERS,
};
use shunt_kernel::sequence::Origin;
use shunt_sys::{Errno, memfd};
use thiserror::Error;

use crate::pairing::{Key, Offer, ProcessId};
use crate::principal::{Budget, Principal, Whose};
use crate::rinse::Memory;

pub(crate) type LinkId = u64;

/// How long a link stays that nobody uses: connections come one after another.
pub(crate) const LINGER: Duration = Duration::from_secs(2);

/// All links.
#[derive(Debug)]
pub(crate) struct Links {
    geometry: Geometry,
    /// How many there may be.
    budget: Budget,
    /// Whose processes they are.
    owners: HashMap<ProcessId, Principal>,
    next: LinkId,
    links: HashMap<LinkId, Link>,
    /// Links with a free slot, by pair of processes.
    open: HashMap<(ProcessId, ProcessId), Vec<LinkId>>,
    by_process: HashMap<ProcessId, HashSet<LinkId>>,
    /// Who holds a paired socket.
    holders: HashMap<u64, Holder>,
    /// Links that nobody may use any more.
    emptied: BTreeSet<LinkId>,
    /// Links with rings that are to be rinsed.
    soiled: Vec<LinkId>,
    /// What has happened to links that somebody reads along, and has not been told.
    news: Vec<News>,
}

/// What has happened to a link that somebody reads along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// Nobody uses a connection of it any more.
    Ended(LinkId, u32),
    /// It is no more.
    Dropped(LinkId),
}

#[derive(Debug)]
struct Holder {
    process: ProcessId,
    /// In how many slots.
    slots: usize,
    /// What its process calls it.
    ticket: u64,
    /// Where the kernel finds the socket.
    key: Key,
    /// Where its streams begin, if the kernel could be asked.
    origin: Option<Origin>,
}

/// One end of a pair, or of what may become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) process: ProcessId,
    pub(crate) ticket: u64,
    pub(crate) key: Key,
    pub(crate) origin: Option<Origin>,
}

impl Held {
    pub(crate) fn of(offer: &Offer) -> Held {
        let Offer { process, ticket, key, .. } = *offer;
        Held { process, ticket, key, origin: offer.seen.map(|seen| seen.origin) }
    }
}

#[derive(Debug)]
struct Link {
    memfd: Rc<OwnedFd>,
    ends: [ProcessId; 2],
    /// Whose they are: stays when they have ended.
    whose: Whose,
    /// Bit per connection and side: set while that side may use it.
    held: [u64; 2],
    cookies: Box<[[u64; 2]; CONNS]>,
    memory: Arc<Memory>,
    /// Since when nobody has used it.
    empty_since: Option<Instant>,
    /// One of the two processes has ended.
    orphaned: bool,
    /// How many sockets that a dead process has left here are [followed](crate::orphans).
    followed: u32,
    /// If somebody reads along: the connections that there have been since, a bit for each. No place is given out twice meanwhile, so
    /// that nobody's bytes are taken for another's.
    seen: Option<u64>,
}

/// One side of a slot. A process connected to itself has both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) link: LinkId,
    /// Below [`CONNS`].
    pub(crate) conn: u32,
    pub(crate) side: Side,
}

/// A slot given to two endpoints.
#[derive(Debug)]
pub(crate) struct Grant {
    pub(crate) link: LinkId,
    pub(crate) conn: u32,
    /// Sides of the earlier and of the later offer.
    pub(crate) sides: [Side; 2],
    /// The memfd, if the link is new and both processes must be told of it.
    pub(crate) fresh: Option<Rc<OwnedFd>>,
    /// The two processes have had no link before: their doorbells are exchanged.
    pub(crate) introduction: bool,
}

/// A link that is no more.
#[derive(Debug)]
pub(crate) struct Dropped {
    pub(crate) link: LinkId,
    pub(crate) ends: [ProcessId; 2],
    pub(crate) whose: Whose,
    pub(crate) memory: Arc<Memory>,
    /// Somebody reads along, and may not have read all.
    pub(crate) is_seen: bool,
}

/// A connection for who reads along.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight {
    pub(crate) conn: u32,
    pub(crate) cookies: [u64; 2],
    /// Where the kernel finds the sockets of the two sides.
    pub(crate) keys: [Key; 2],
    /// The sequence number of the first byte that each side receives.
    pub(crate) first: [Option<u32>; 2],
}

/// Who is to hear of the end of a process.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Bereaved {
    /// Those that shared a link with it.
    pub(crate) peers: BTreeSet<ProcessId>,
    /// The waiters of theirs that sleep on such a link.
    pub(crate) asleep: BTreeSet<(ProcessId, u32)>,
    /// What it has left so that the kernel may tell nobody, or not yet, when nobody holds it any more. Each is to be followed, or
    /// [no more](Links::end_following).
    pub(crate) orphans: Vec<Orphan>,
}

/// A socket of a process that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Orphan {
    /// The side of that process.
    pub(crate) place: Place,
    pub(crate) cookie: u64,
    pub(crate) key: Key,
}

/// Why there is no slot.
#[derive(Debug, Error)]
pub(crate) enum GrantError {
    #[error("all links, or all that one of the two users may have, are in use")]
    Full,
    #[error("no memory or descriptor for another link: {0}")]
    Kernel(#[from] Errno),
}

impl Links {
    pub(crate) fn new(geometry: Geometry, limit: usize) -> Links {
        Links {
            geometry,
            budget: Budget::new(limit),
            owners: HashMap::new(),
            next: 1,
            links: HashMap::new(),
            open: HashMap::new(),
            by_process: HashMap::new(),
            holders: HashMap::new(),
            emptied: BTreeSet::new(),
            soiled: Vec::new(),
            news: Vec::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.links.len()
    }

    /// How many a stranger has.
    pub(crate) fn count_of(&self, whose: Principal) -> usize {
        self.budget.of(whose)
    }

    /// A process has come.
    pub(crate) fn join(&mut self, process: ProcessId, whose: Principal) {
        self.owners.insert(process, whose);
    }

    pub(crate) fn ring_bytes(&self) -> usize {
        self.geometry.ring_bytes()
    }

    /// The process whose side of a slot holds this socket.
    pub(crate) fn holder(&self, cookie: u64) -> Option<ProcessId> {
        self.holders.get(&cookie).map(|holder| holder.process)
    }

    /// The processes that share a link with this one; itself too, if it is connected to itself.
    pub(crate) fn peers(&self, process: ProcessId) -> BTreeSet<ProcessId> {
        let links = self.by_process.get(&process).into_iter().flatten().filter_map(|id| self.links.get(id));
        links.filter(|link| !link.orphaned).map(|link| link.other_end(process)).collect()
    }

    /// Finds or makes a slot for two endpoints and resets its lanes.
    pub(crate) fn grant(&mut self, earlier: &Offer, later: &Offer) -> Result<Grant, GrantError> {
        let pair = sorted(earlier.process, later.process);
        let introduction = !self.open.contains_key(&pair);
        let has_room = |id: &&LinkId| self.links.get(id).is_some_and(|link| link.given_out() != u64::MAX);
        let found = self.open.get(&pair).and_then(|open| open.iter().rev().find(has_room)).copied();
        let (id, fresh) = match found {
            Some(id) => (id, None),
            None => {
                let (id, memfd) = self.create(pair)?;
                (id, Some(memfd))
            }
        };
        let link = self.links.get_mut(&id).expect("open links exist");
        link.empty_since = None;
        let conn = (!link.given_out()).trailing_zeros();
        debug_assert!(conn < CONNS as u32);
        // A connection of a process with itself has its earlier offer on side A.
        let first = if link.ends[0] == earlier.process { Side::A } else { Side::B };
        let sides = [first, first.other()];
        let reset =
            link.memory.head().zero(self.geometry.lane_offset(conn as usize, Side::A), 2 * LANE_BYTES);
        debug_assert!(reset, "lane headers lie before the rings");
        for (side, offer) in sides.into_iter().zip([earlier, later]) {
            link.held[side as usize] |= 1 << conn;
            link.cookies[conn as usize][side as usize] = offer.cookie;
            let Held { process, ticket, key, origin } = Held::of(offer);
            let new = Holder { process, slots: 0, ticket, key, origin };
            let holder = self.holders.entry(offer.cookie).or_insert(new);
            holder.slots += 1;
            holder.ticket = ticket;
        }
        link.follow(self.geometry, 1 << conn);
        if link.is_full() {
            self.open.entry(pair).or_default().retain(|open| *open != id);
        }
        Ok(Grant { link: id, conn, sides, fresh, introduction })
    }

    fn create(&mut self, pair: (ProcessId, ProcessId)) -> Result<(LinkId, Rc<OwnedFd>), GrantError> {
        let owner = |id| self.owners.get(id).copied().ok_or(GrantError::Full);
        let whose = Whose::both(owner(&pair.0)?, owner(&pair.1)?);
        if !self.budget.allows(whose, 1) {
            return Err(GrantError::Full);
        }
        let memfd = Rc::new(memfd::create_fixed("shunt-link", self.geometry.link_bytes())?);
        let memory = Arc::new(Memory::map(&memfd, self.geometry)?);
        let id = self.next;
        self.next += 1;
        self.budget.force(whose, 1);
        let link = Link {
            memfd: memfd.clone(),
            ends: [pair.0, pair.1],
            whose,
            held: [0; 2],
            cookies: Box::new([[0; 2]; CONNS]),
            memory,
            empty_since: None,
            orphaned: false,
            followed: 0,
            seen: None,
        };
        self.links.insert(id, link);
        self.open.entry(pair).or_default().push(id);
        for process in [pair.0, pair.1] {
            self.by_process.entry(process).or_default().insert(id);
        }
        Ok((id, memfd))
    }

    /// `process` has left its side of a slot for good. `false` if it did not hold it.
    pub(crate) fn release(&mut self, process: ProcessId, place: Place) -> bool {
        let Place { link: id, conn, side } = place;
        let Some(link) = self.links.get_mut(&id) else { return false };
        if link.ends[side as usize] != process || link.held[side as usize] & 1 << conn == 0 {
            return false;
        }
        let was_full = link.is_full();
        link.held[side as usize] &= !(1 << conn);
        let cookie = std::mem::take(&mut link.cookies[conn as usize][side as usize]);
        if link.is_free(conn) && link.seen.is_some() {
            self.news.push(News::Ended(id, conn));
        }
        if link.is_free(conn) && !link.orphaned {
            if link.seen.is_none() && link.memory.soil(conn as usize) {
                self.soiled.push(id);
            }
            if link.held == [0; 2] {
                link.empty_since = Some(Instant::now());
                self.emptied.insert(id);
            }
        }
        let (full, dead) = (link.is_full(), link.is_dead());
        let (pair, orphaned) = (sorted(link.ends[0], link.ends[1]), link.orphaned);
        self.let_go(cookie);
        if dead {
            self.drop_link(id);
        } else if was_full && !full && !orphaned {
            self.open.entry(pair).or_default().push(id);
        }
        true
    }

    /// `process` holds the socket in a slot no more, but the slot is not to be given out yet.
    pub(crate) fn leave(&mut self, process: ProcessId, place: Place) {
        let Place { link: id, conn, side } = place;
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.ends[side as usize] == process {
            let cookie = std::mem::take(&mut link.cookies[conn as usize][side as usize]);
            self.let_go(cookie);
        }
    }

    /// A process has ended: frees what it held, and says whom to tell.
    pub(crate) fn forget(&mut self, process: ProcessId) -> Bereaved {
        let mut bereaved = Bereaved { peers: self.peers(process), ..Bereaved::default() };
        bereaved.peers.remove(&process);
        for id in self.by_process.get(&process).cloned().unwrap_or_default() {
            let Some(link) = self.links.get_mut(&id) else { continue };
            link.orphaned = true;
            self.open.remove(&sorted(link.ends[0], link.ends[1]));
            let mut freed = Vec::new();
            for side in [0, 1].into_iter().filter(|side| link.ends[*side] == process) {
                freed.extend(bits(link.held[side]).map(|conn| link.cookies[conn][side]));
                let died = link.say_died(self.geometry, side);
                let orphans = bits(died.unsaid).filter_map(|conn| {
                    let cookie = link.cookies[conn][side];
                    let key = self.holders.get(&cookie)?.key;
                    let place = Place { link: id, conn: conn as u32, side: SIDES[side] };
                    Some(Orphan { place, cookie, key })
                });
                let before = bereaved.orphans.len();
                bereaved.orphans.extend(orphans);
                link.followed += (bereaved.orphans.len() - before) as u32;
                bereaved.asleep.extend(link.wake(self.geometry, 1 - side, died.all));
                let left = std::mem::take(&mut link.held[side]) & !link.held[1 - side];
                if link.seen.is_some() {
                    self.news.extend(bits(left).map(|conn| News::Ended(id, conn as u32)));
                }
            }
            let dead = link.is_dead();
            freed.into_iter().for_each(|cookie| self.let_go(cookie));
            if dead {
                self.drop_link(id);
            }
        }
        self.by_process.remove(&process);
        self.owners.remove(&process);
        bereaved
    }

    /// Whether the other end of a slot, or a child that it may have left there, is there to hear what becomes of this one.
    pub(crate) fn is_heard(&self, place: Place) -> bool {
        let Some(link) = self.links.get(&place.link) else { return false };
        let other = place.side.other();
        link.held[other as usize] & 1 << place.conn != 0
            || link.has_said(self.geometry, place.conn as usize, other, LANE_END_DIED | LANE_END_SHARED)
    }

    /// Says that nobody holds any more what a dead process has left on its side of a slot. Returns whose doorbells are to be rung.
    pub(crate) fn say_abandoned(&self, place: Place) -> Vec<(ProcessId, u32)> {
        let Some(link) = self.links.get(&place.link) else { return Vec::new() };
        if let Some(word) = link.end_word(self.geometry, place.conn as usize, place.side) {
            word.fetch_or(LANE_END_ABANDONED, AcqRel);
        }
        link.wake(self.geometry, place.side.other() as usize, 1 << place.conn)
    }

    /// Nobody asks about a socket that a dead process has left any more.
    pub(crate) fn end_following(&mut self, place: Place) {
        let Some(link) = self.links.get_mut(&place.link) else { return };
        link.followed -= 1;
        if link.is_dead() {
            self.drop_link(place.link);
        }
    }

    /// The memory of links that are to be rinsed, and whose they are.
    pub(crate) fn take_soiled(&mut self) -> Vec<(Whose, Arc<Memory>)> {
        let soiled = std::mem::take(&mut self.soiled);
        let links = soiled.into_iter().filter_map(|id| self.links.get(&id));
        links.map(|link| (link.whose, link.memory.clone())).collect()
    }

    /// Whether there are links that may soon be dropped.
    pub(crate) fn has_emptied(&self) -> bool {
        !self.emptied.is_empty()
    }

    /// Drops the links that nobody has used for [`LINGER`] before `now`.
    pub(crate) fn drop_empty(&mut self, now: Instant) -> Vec<Dropped> {
        let mut dropped = Vec::new();
        for id in std::mem::take(&mut self.emptied) {
            let Some(link) = self.links.get(&id).filter(|link| !link.orphaned) else { continue };
            // It is used again.
            let Some(since) = link.empty_since else { continue };
            if now < since + LINGER {
                self.emptied.insert(id);
                continue;
            }
            let (ends, whose, memory) = (link.ends, link.whose, link.memory.clone());
            dropped.push(Dropped { link: id, ends, whose, memory, is_seen: link.seen.is_some() });
            self.drop_link(id);
            self.forget_pair_without_links(ends, id);
        }
        dropped
    }

    /// A link of two processes is no more. If it was their last, they have to be introduced again.
    fn forget_pair_without_links(&mut self, ends: [ProcessId; 2], dropped: LinkId) {
        let others = self.by_process.get(&ends[0]).into_iter().flatten();
        let is_theirs = |id: &LinkId| self.links.get(id).is_some_and(|link| link.ends == ends);
        let has_others = others.into_iter().any(is_theirs);
        let pair = sorted(ends[0], ends[1]);
        if !has_others {
            self.open.remove(&pair);
        } else if let Some(open) = self.open.get_mut(&pair) {
            open.retain(|id| *id != dropped);
        }
    }

    /// All links, in the order in which they were made.
    pub(crate) fn ids(&self) -> Vec<LinkId> {
        let mut ids: Vec<_> = self.links.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// The two processes of a link.
    pub(crate) fn ends(&self, id: LinkId) -> Option<[ProcessId; 2]> {
        self.links.get(&id).map(|link| link.ends)
    }

    /// From now on somebody reads a link along. Says which connections there are, a bit for each.
    pub(crate) fn see(&mut self, id: LinkId) -> u64 {
        let Some(link) = self.links.get_mut(&id) else { return 0 };
        let under_way = link.held[0] | link.held[1];
        link.seen.get_or_insert_default();
        link.follow(self.geometry, under_way);
        under_way
    }

    /// What there is to see of a link, and its memory.
    pub(crate) fn sights(&self, id: LinkId) -> Option<(&Rc<OwnedFd>, Vec<Sight>)> {
        let link = self.links.get(&id)?;
        let conns = bits(link.held[0] & link.held[1]);
        Some((&link.memfd, conns.filter_map(|conn| self.sight_of(link, conn as u32)).collect()))
    }

    /// One connection of it.
    pub(crate) fn sight(&self, id: LinkId, conn: u32) -> Option<Sight> {
        self.sight_of(self.links.get(&id)?, conn)
    }

    fn sight_of(&self, link: &Link, conn: u32) -> Option<Sight> {
        let cookies = link.cookies[conn as usize];
        let [one, other] = [self.holders.get(&cookies[0])?, self.holders.get(&cookies[1])?];
        let first = [one, other].map(|holder| holder.origin.map(|origin| origin.received));
        Some(Sight { conn, cookies, keys: [one.key, other.key], first })
    }

    /// Returns the two ends of each connection that both of its processes hold.
    pub(crate) fn held(&self) -> Vec<[Held; 2]> {
        let end = |cookie: u64| {
            let Holder { process, ticket, key, origin, .. } = *self.holders.get(&cookie)?;
            Some(Held { process, ticket, key, origin })
        };
        let cookies = self
            .links
            .values()
            .flat_map(|link| bits(link.held[0] & link.held[1]).map(|conn| link.cookies[conn]));
        cookies.filter_map(|[one, other]| Some([end(one)?, end(other)?])).collect()
    }

    /// What has happened to links that somebody reads along, since this was last asked.
    pub(crate) fn take_news(&mut self) -> Vec<News> {
        std::mem::take(&mut self.news)
    }

    /// Nobody reads along any more: places that have been used once may be given out again.
    pub(crate) fn unsee(&mut self) {
        for (id, link) in &mut self.links {
            let was_full = link.is_full();
            let Some(seen) = link.seen.take() else { continue };
            link.set_followed(self.geometry, seen, false);
            if link.orphaned {
                continue;
            }
            let free = bits(seen & !(link.held[0] | link.held[1]));
            // Each is noted, and one rinse takes all.
            if free.filter(|conn| link.memory.soil(*conn)).count() > 0 {
                self.soiled.push(*id);
            }
            if was_full && !link.is_full() {
                self.open.entry(sorted(link.ends[0], link.ends[1])).or_default().push(*id);
            }
        }
        self.news.clear();
    }

    fn let_go(&mut self, cookie: u64) {
        if let Some(holder) = self.holders.get_mut(&cookie) {
            holder.slots -= 1;
            if holder.slots == 0 {
                self.holders.remove(&cookie);
            }
        }
    }

    fn drop_link(&mut self, id: LinkId) {
        let Some(link) = self.links.remove(&id) else { return };
        if link.seen.is_some() {
            self.news.push(News::Dropped(id));
        }
        self.budget.give(link.whose, 1);
        for process in link.ends {
            if let Some(links) = self.by_process.get_mut(&process) {
                links.remove(&id);
                if links.is_empty() {
                    self.by_process.remove(&process);
                }
            }
        }
    }
}

impl Link {
    /// Writes into every lane that `side` sent on that its process has ended, so that the other end asks TCP.
    fn say_died(&self, geometry: Geometry, side: usize) -> Died {
        let mut died = Died::default();
        for conn in bits(self.held[side]).filter(|conn| self.cookies[*conn][side] != 0) {
            if let Some(word) = self.end_word(geometry, conn, SIDES[side]) {
                word.fetch_or(LANE_END_DIED, AcqRel);
            }
            // A FIN came long ago, or waits behind bytes that the other end does not read.
            let is_unsaid = self.has_unread(geometry, conn, SIDES[1 - side])
                || self.has_said(geometry, conn, SIDES[side], LANE_END_SHUT_DOWN | LANE_END_SHARED);
            died.all |= 1 << conn;
            died.unsaid |= u64::from(is_unsaid) << conn;
        }
        died
    }

    /// Whether bytes lie in a lane that nobody has read or given back.
    fn has_unread(&self, geometry: Geometry, conn: usize, side: Side) -> bool {
        let lane = geometry.lane_offset(conn, side);
        let words = [LANE_TAIL_OFFSET, LANE_HEAD_OFFSET].map(|at| self.memory.head().word(lane + at));
        let [Some(tail), Some(head)] = words.map(|word| word.map(|word| word.load(Acquire))) else {
            return false;
        };
        tail & LANE_RETURNED == 0 && (tail ^ head) & LANE_CURSOR != 0
    }

    /// Whether all of `flags` have been said of how the sender of a lane left.
    fn has_said(&self, geometry: Geometry, conn: usize, side: Side, flags: u64) -> bool {
        let word = self.end_word(geometry, conn, side);
        word.is_some_and(|word| word.load(Acquire) & flags == flags)
    }

    /// How the sender of a lane left.
    fn end_word(&self, geometry: Geometry, conn: usize, side: Side) -> Option<&AtomicU64> {
        self.memory.head().word(geometry.lane_offset(conn, side) + LANE_END_OFFSET)
    }

    /// Marks `conns` for the waiters of `side` that sleep, as a sender does, and returns whose doorbells are to be rung: TCP
    /// tells of the death only if it has not said before that the peer sends no more.
    fn wake(&self, geometry: Geometry, side: usize, conns: u64) -> Vec<(ProcessId, u32)> {
        if conns == 0 {
            return Vec::new();
        }
        let sleeps = |slot: &usize| {
            let line = geometry.waiter_offset(SIDES[side], *slot);
            let words =
                [WAITER_READY_OFFSET, WAITER_SLEEPING_OFFSET].map(|at| self.memory.head().word(line + at));
            let [Some(ready), Some(sleeping)] = words else { return false };
            ready.fetch_or(conns, AcqRel);
            // Between the mark and this look: whoever announces its sleep looks for marks afterwards.
            fence(SeqCst);
            sleeping.load(Relaxed) != 0 && sleeping.swap(0, AcqRel) != 0
        };
        (0..WAITERS).filter(sleeps).map(|slot| (self.ends[side], slot as u32)).collect()
    }

    /// Somebody who reads this link along sees these connections too, which are given out now.
    fn follow(&mut self, geometry: Geometry, conns: u64) {
        let Some(seen) = &mut self.seen else { return };
        *seen |= conns;
        self.set_followed(geometry, conns, true);
    }

    /// Tells the senders of these connections whether somebody reads along.
    fn set_followed(&self, geometry: Geometry, conns: u64, is_followed: bool) {
        for (conn, side) in bits(conns).flat_map(|conn| SIDES.map(|side| (conn, side))) {
            let at = geometry.lane_offset(conn, side) + LANE_FOLLOWED_OFFSET;
            if let Some(word) = self.memory.head().half_word(at) {
                word.store(is_followed.into(), Relaxed);
            }
        }
    }

    fn is_full(&self) -> bool {
        self.held[0] | self.held[1] | self.seen.unwrap_or(0) == u64::MAX
    }

    /// Slots that are not to be given out: somebody holds them, their rings are being rinsed, or somebody may still read what has
    /// passed there.
    fn given_out(&self) -> u64 {
        self.held[0] | self.held[1] | self.memory.unclean() | self.seen.unwrap_or(0)
    }

    fn is_free(&self, conn: u32) -> bool {
        (self.held[0] | self.held[1]) & 1 << conn == 0
    }

    /// Nobody will use it again.
    fn is_dead(&self) -> bool {
        self.orphaned && self.held == [0; 2] && self.followed == 0
    }

    fn other_end(&self, process: ProcessId) -> ProcessId {
        if self.ends[0] == process { self.ends[1] } else { self.ends[0] }
    }
}

/// Connections whose process has ended, a bit for each.
#[derive(Clone, Copy, Debug, Default)]
struct Died {
    all: u64,
    /// Those of them of whose end TCP may tell nobody, or not yet.
    unsaid: u64,
}

const SIDES: [Side; 2] = [Side::A, Side::B];

fn sorted(one: ProcessId, two: ProcessId) -> (ProcessId, ProcessId) {
    (one.min(two), one.max(two))
}

fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros() as usize;
        word &= word.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairing::Key;
    use crate::principal::tests::ROOT;
    use proptest::prelude::*;
    use shunt_abi::geometry::{MIN_RING_BYTES, RINGS_OFFSET};
    use shunt_sys::mapping::Mapping;
    use std::sync::atomic::Ordering::Relaxed;

    fn links(limit: usize) -> Links {
        links_with(MIN_RING_BYTES, limit)
    }

    fn links_with(ring_bytes: usize, limit: usize) -> Links {
        let mut links = Links::new(Geometry::new(ring_bytes).unwrap(), limit);
        (0..16).for_each(|process| links.join(process, ROOT));
        links
    }

    fn offer(process: ProcessId, cookie: u64) -> Offer {
        let address = ([127, 0, 0, 1], 1).into();
        let key = Key { netns: 0, local: address, remote: address };
        Offer { process, ticket: 0, cookie, key, seen: None, since: Instant::now() }
    }

    fn at(link: LinkId, conn: u32, side: Side) -> Place {
        Place { link, conn, side }
    }

    /// The earlier and the later offer's.
    fn places(grant: &Grant) -> [Place; 2] {
        grant.sides.map(|side| at(grant.link, grant.conn, side))
    }

    /// Three connections of two processes, and their link.
    fn three(links: &mut Links) -> ([Grant; 3], Mapping) {
        let grants = [(10, 20), (11, 21), (12, 22)]
            .map(|(one, two)| links.grant(&offer(1, one), &offer(2, two)).unwrap());
        let whole = Mapping::map(grants[0].fresh.as_ref().unwrap(), RINGS_OFFSET).unwrap();
        (grants, whole)
    }

    fn end<'a>(whole: &'a Mapping, links: &Links, place: Place) -> &'a AtomicU64 {
        let lane = links.geometry.lane_offset(place.conn as usize, place.side);
        whole.word(lane + LANE_END_OFFSET).unwrap()
    }

    #[test]
    fn a_slot_comes_back_only_when_both_sides_have_left_it() {
        let mut links = links(8);
        let first = links.grant(&offer(1, 10), &offer(2, 20)).unwrap();
        assert!(first.fresh.is_some() && first.introduction);
        assert_eq!((first.conn, links.holder(10), links.holder(20)), (0, Some(1), Some(2)));
        let [one, two] = places(&first);
        assert!(links.release(1, one));
        assert!(!links.release(1, one), "released twice");
        assert!(!links.release(1, two) && !links.release(3, two), "not its own");
        assert_eq!(links.grant(&offer(1, 11), &offer(2, 21)).unwrap().conn, 1);
        assert!(links.release(2, two));
        let again = links.grant(&offer(2, 22), &offer(1, 12)).unwrap();
        assert_eq!((again.link, again.conn, again.sides), (first.link, 0, [Side::B, Side::A]));
        assert!(again.fresh.is_none() && !again.introduction);
        assert_eq!((links.holder(10), links.holder(12)), (None, Some(1)));
    }

    #[test]
    fn a_slot_that_was_left_is_not_given_out_before_it_is_released() {
        let mut links = links(8);
        let first = links.grant(&offer(1, 10), &offer(2, 20)).unwrap();
        let [one, two] = places(&first);
        assert!(links.release(2, two));
        links.leave(1, one);
        assert_eq!(links.holder(10), None);
        let again = links.grant(&offer(3, 10), &offer(2, 20)).unwrap();
        assert_ne!(again.link, first.link);
        links.leave(2, two);
        assert_eq!(links.holder(20), Some(2), "another slot's");
        assert_eq!(links.grant(&offer(1, 11), &offer(2, 21)).unwrap().conn, 1);
        assert!(links.release(1, one));
        assert_eq!(links.grant(&offer(1, 12), &offer(2, 22)).unwrap().conn, 0);
    }

    #[test]
    fn lanes_are_zero_when_a_slot_is_given_out() {
        let mut links = links(8);
        let grant = links.grant(&offer(1, 10), &offer(2, 20)).unwrap();
        let whole = Mapping::map(grant.fresh.unwrap(), RINGS_OFFSET).unwrap();
        let lane = links.geometry.lane_offset(0, Side::B);
        whole.word(lane).unwrap().store(u64::MAX, Relaxed);
        whole.word(lane + 2 * LANE_BYTES).unwrap().store(5, Relaxed);
        links.release(1, at(grant.link, 0, Side::A));
        links.release(2, at(grant.link, 0, Side::B));
        links.grant(&offer(1, 10), &offer(2, 20)).unwrap();
        assert_eq!(whole.word(lane).unwrap().load(Relaxed), 0);
        assert_eq!(whole.word(lane + 2 * LANE_BYTES).unwrap().load(Relaxed), 5, "another connection's lane");
    }

    #[test]
    fn a_link_that_nobody_uses_is_dropped_after_a_while() {
        let mut links = links(8);
        let begun = Instant::now();
        let first = links.grant(&offer(1, 10), &offer(2, 20)).unwrap();
        let leave = |links: &mut Links, grant: &Grant| {
            let [one, two] = places(grant);
            assert!(links.release(1, one) && links.release(2, two));
        };
        leave(&mut links, &first);
        assert!(links.has_emptied());
        assert!(links.drop_empty(begun).is_empty(), "connections come one after another");
        let second = links.grant(&offer(1, 11), &offer(2, 21)).unwrap();
        assert_eq!((second.link, second.introduction), (first.link, false));
        assert!(links.drop_empty(begun + 10 * LINGER).is_empty(), "it is used");
        assert!(!links.has_emptied());
        leave(&mut links, &second);
        let dropped = links.drop_empty(Instant::now() + LINGER);
        assert_eq!((dropped.len(), dropped[0].link, dropped[0].ends), (1, first.link, [1, 2]));
        assert_eq!((links.len(), links.by_process.len(), links.open.len()), (0, 0, 0));
        let third = links.grant(&offer(1, 12), &offer(2, 22)).unwrap();
        assert!(third.fresh.is_some() && third.introduction);
    }

    #[test]
    fn processes_know_each_other_as_long_as_they_have_a_link() {
        let mut links = links(8);
        let mut grant = |number| links.grant(&offer(1, number), &offer(2, 1000 + number)).unwrap();
        let grants: Vec<_> = (0..65).map(&mut grant).collect();
        let [one, two] = places(&grants[64]);
        assert!(links.release(1, one) && links.release(2, two));
        let dropped = links.drop_empty(Instant::now() + LINGER);
        assert_eq!((dropped.len(), dropped[0].link, dropped[0].ends), (1, grants[64].link, [1, 2]));
        let next = links.grant(&offer(1, 65), &offer(2, 1065)).unwrap();
        assert!(next.fresh.is_some() && !next.introduction);
    }

    #[test]
    fn a_slot_whose_rings_have_grown_is_rinsed_before_it_is_given_out() {
        let mut links = links_with(2 * MIN_RING_BYTES, 8);
        let grant = links.grant(&offer(1, 10), &offer(2, 20)).unwrap();
        let whole = Mapping::map(grant.fresh.as_ref().unwrap(), links.geometry.link_bytes()).unwrap();
        let second_page = links.geometry.ring_offset(0, Side::B) + MIN_RING_BYTES;
        whole.word(second_page).unwrap().store(7, Relaxed);
        let [one, two] = places(&grant);
        assert!(links.release(1, one));
        assert!(links.take_soiled().is_empty(), "the other may still use it");
        assert!(links.release(2, two));
        let soiled = links.take_soiled();
        assert_eq!((soiled.len(), soiled[0].0), (1, ROOT.into()));
        assert_eq!(links.grant(&offer(1, 11), &offer(2, 21)).unwrap().conn, 1);
        crate::rinse::Rinser::new(crate::errands::Errands::default()).rinse(ROOT.into(), &soiled[0].1);
        let deadline = Instant::now() + Duration::from_secs(30);
        while soiled[0].1.unclean() != 0 {
            assert!(Instant::now() < deadline, "not rinsed");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(whole.word(second_page).unwrap().load(Relaxed), 0);
        assert_eq!(links.grant(&offer(1, 12), &offer(2, 22)).unwrap().conn, 0);
    }

    #[test]
    fn a_full_link_is_followed_by_another_up_to_the_limit() {
        let mut links = links(2);
        let mut grants = Vec::new();
        for cookie in 0..128 {
            grants.push(links.grant(&offer(1, cookie), &offer(2, 1000 + cookie)).unwrap());
        }
        assert_eq!(links.len(), 2);
        assert!(grants[64].fresh.is_some() && !grants[64].introduction);
        assert!(matches!(links.grant(&offer(1, 500), &offer(2, 501)), Err(GrantError::Full)));
        let early = &grants[3];
        let [one, two] = places(early);
        assert!(links.release(1, one) && links.release(2, two));
        let grant = links.grant(&offer(1, 500), &offer(2, 501)).unwrap();
        assert_eq!((grant.link, grant.conn), (early.link, early.conn));
    }

    #[test]
    fn a_process_connected_to_itself_holds_both_sides() {
        let mut links = links(8);
        let grant = links.grant(&offer(1, 10), &offer(1, 11)).unwrap();
        assert_eq!(grant.sides, [Side::A, Side::B]);
        assert_eq!(links.peers(1), BTreeSet::from([1]));
        let [one, two] = places(&grant);
        assert!(links.release(1, two));
        assert_eq!((links.holder(10), links.holder(11)), (Some(1), None));
        assert_eq!(links.grant(&offer(1, 12), &offer(1, 13)).unwrap().conn, 1);
        assert!(links.release(1, one));
        assert!(!links.release(1, one) && !links.release(1, two));
        assert_eq!(links.forget(1), Bereaved::default());
        assert_eq!((links.len(), links.holders.len()), (0, 0));
    }

    #[test]
    fn an_ended_process_leaves_its_peers_their_lanes() {
        let mut links = links(8);
        let grant = links.grant(&offer(1, 10), &offer(2, 20)).unwrap();
        links.grant(&offer(1, 11), &offer(3, 30)).unwrap();
        assert_eq!(links.forget(1).peers, BTreeSet::from([2, 3]));
        assert_eq!(links.len(), 2);
        assert!(links.release(2, places(&grant)[1]));
        assert_eq!(links.len(), 1);
        assert_eq!(links.forget(3), Bereaved::default());
        assert_eq!((links.len(), links.holders.len(), links.by_process.len()), (0, 0, 0));
        assert!(links.open.is_empty());
    }

    #[test]
    fn the_end_that_a_process_has_left_is_not_said_to_have_died() {
        let mut links = links(8);
        let grant = links.grant(&offer(1, 10), &offer(1, 11)).unwrap();
        let whole = Mapping::map(grant.fresh.as_ref().unwrap(), RINGS_OFFSET).unwrap();
        let [one, two] = places(&grant);
        links.leave(1, two);
        let (one, two) = (end(&whole, &links, one), end(&whole, &links, two));
        links.forget(1);
        assert_eq!((one.load(Relaxed), two.load(Relaxed)), (LANE_END_DIED, 0));
    }

    #[test]
    fn a_lane_that_is_unread_has_its_reader_followed() {
        let mut links = links(8);
        let (grants, whole) = three(&mut links);
        for ((grant, tail), head) in
            grants.iter().zip([7, 7 | LANE_RETURNED, 7 | 1 << 63]).zip([0, 0, 7 | 1 << 63])
        {
            let lane = links.geometry.lane_offset(grant.conn as usize, grant.sides[1]);
            whole.word(lane + LANE_TAIL_OFFSET).unwrap().store(tail, Relaxed);
            whole.word(lane + LANE_HEAD_OFFSET).unwrap().store(head, Relaxed);
        }
        let orphans = links.forget(1).orphans;
        assert_eq!(orphans, [Orphan { place: places(&grants[0])[0], cookie: 10, key: offer(1, 10).key }]);
        assert!(links.is_heard(orphans[0].place));
        assert_eq!(links.forget(2), Bereaved::default());
        assert!(!links.is_heard(orphans[0].place));
        assert_eq!(links.len(), 1);
        links.end_following(orphans[0].place);
        assert_eq!(links.len(), 0);
    }

    #[test]
    fn a_process_connected_to_itself_is_heard_by_its_children() {
        let mut links = links(8);
        let grant = links.grant(&offer(1, 10), &offer(1, 11)).unwrap();
        let whole = Mapping::map(grant.fresh.as_ref().unwrap(), RINGS_OFFSET).unwrap();
        let [first, second] = places(&grant);
        end(&whole, &links, first).store(LANE_END_SHARED, Relaxed);
        end(&whole, &links, second).store(LANE_END_SHUT_DOWN | LANE_END_SHARED, Relaxed);
        let orphans = links.forget(1).orphans;
        assert_eq!(orphans, [Orphan { place: second, cookie: 11, key: offer(1, 11).key }]);
        assert!(links.is_heard(second));
        assert_eq!(links.say_abandoned(second), []);
        assert!(end(&whole, &links, second).load(Relaxed) & LANE_END_ABANDONED != 0);
        links.end_following(second);
        assert_eq!((links.len(), links.by_process.len()), (0, 0));
    }

    #[test]
    fn what_a_process_has_shut_down_and_shared_is_its_childrens() {
        let mut links = links(8);
        let (grants, whole) = three(&mut links);
        let ends = grants.each_ref().map(|grant| end(&whole, &links, places(grant)[0]));
        ends[0].store(LANE_END_SHUT_DOWN | LANE_END_SHARED, Relaxed);
        ends[1].store(LANE_END_SHARED, Relaxed);
        ends[2].store(LANE_END_SHUT_DOWN, Relaxed);
        let orphans = links.forget(1).orphans;
        let place = places(&grants[0])[0];
        assert_eq!(orphans, [Orphan { place, cookie: 10, key: offer(1, 10).key }]);
        assert!(links.is_heard(place));
        whole
            .word(links.geometry.waiter_offset(Side::B, 3) + WAITER_SLEEPING_OFFSET)
            .unwrap()
            .store(1, Relaxed);
        assert_eq!(links.say_abandoned(place), [(2, 3)]);
        assert_eq!(ends.map(|end| end.load(Relaxed) & LANE_END_ABANDONED != 0), [true, false, false]);
        assert!(links.release(2, places(&grants[0])[1]));
        assert!(!links.is_heard(place));
    }

    #[test]
    fn whoever_sleeps_on_a_link_is_woken_when_the_peer_ends() {
        let mut links = links(8);
        let grant = links.grant(&offer(1, 10), &offer(2, 20)).unwrap();
        let left = links.grant(&offer(1, 11), &offer(2, 21)).unwrap();
        links.leave(1, places(&left)[0]);
        let whole = Mapping::map(grant.fresh.unwrap(), RINGS_OFFSET).unwrap();
        let word = |side, slot, at| whole.word(links.geometry.waiter_offset(side, slot) + at).unwrap();
        word(Side::B, 3, WAITER_SLEEPING_OFFSET).store(1, Relaxed);
        // Its own.
        word(Side::A, 5, WAITER_SLEEPING_OFFSET).store(1, Relaxed);
        let geometry = links.geometry;
        assert_eq!(links.forget(1).asleep, BTreeSet::from([(2, 3)]));
        let word = |slot, at| whole.word(geometry.waiter_offset(Side::B, slot) + at).unwrap().load(Relaxed);
        assert_eq!(word(3, WAITER_SLEEPING_OFFSET), 0);
        assert_eq!((word(3, WAITER_READY_OFFSET), word(0, WAITER_READY_OFFSET)), (1, 1));
    }

    proptest! {
        #[test]
        fn no_slot_has_two_users(steps in proptest::collection::vec((0..3u8, 0..4u64, 0..4u64, any::<usize>()), 1..400)) {
            let mut links = links(64);
            let mut held: HashMap<(LinkId, u32), Vec<(ProcessId, Side)>> = HashMap::new();
            for (cookie, (step, one, two, pick)) in steps.into_iter().enumerate() {
                match step {
                    0 => {
                        let grant = links.grant(&offer(one, cookie as u64 * 2), &offer(two, cookie as u64 * 2 + 1)).unwrap();
                        let users = held.entry((grant.link, grant.conn)).or_default();
                        prop_assert!(users.is_empty());
                        *users = vec![(one, grant.sides[0]), (two, grant.sides[1])];
                    }
                    1 => {
                        let mut slots: Vec<_> = held.keys().copied().collect();
                        slots.sort();
                        let Some(slot) = slots.get(pick % slots.len().max(1)) else { continue };
                        let users = held.get_mut(slot).unwrap();
                        let side = if two % 2 == 0 { Side::A } else { Side::B };
                        let found = users.iter().position(|user| *user == (one, side));
                        prop_assert_eq!(links.release(one, at(slot.0, slot.1, side)), found.is_some());
                        found.map(|found| users.swap_remove(found));
                    }
                    _ => {
                        links.forget(one);
                        links.join(one, ROOT);
                        held.values_mut().for_each(|users| users.retain(|(user, _)| *user != one));
                    }
                }
                held.retain(|_, users| !users.is_empty());
            }
            for process in 0..4 {
                links.forget(process);
                links.join(process, ROOT);
            }
            prop_assert_eq!((links.len(), links.holders.len(), links.by_process.len(), links.open.len()), (0, 0, 0, 0));
        }
    }
}
