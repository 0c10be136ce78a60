//! The registry of links and their connection slots: which process holds a slot, and when it may be
//! reused.
//!
//! A slot has one holder on each side. It becomes free only when both sides have released it or
//! their processes have ended, so a lane is never granted while a process may still use it.
//!
//! ```text
//!   grant ──> held by both ──release or exit──> held by one ──release or exit──> free
//! ```
//!
//! A link is registered here once it is [sealed](crate::setup). Only dropping a link frees its
//! memory. A link without users is dropped after [`LINGER`]. A link whose free connections hold
//! much memory is *retired* first ([`Stage`]): it gets no new connections, and connections that
//! remain on it for [`STAY`](link::STAY) are asked to fall back to TCP.
//!
//! Example: 64 connections of two processes fill a link, and 60 of them end after large transfers.
//! If the free slots hold more than [`SPARE_PAGES`](link::SPARE_PAGES) pages for two seconds, the
//! link is retired. Ten seconds later the remaining four are asked to fall back. The link is
//! dropped two seconds after the last release.
//!
//! This file has the registry, and `link` a link.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use shunt_abi::geometry::{
    CONNS, Geometry, LANE_BYTES, LANE_END_ABANDONED, LANE_END_DIED, LANE_END_SHARED, Side,
};
use shunt_kernel::sequence::Origin;
use thiserror::Error;

use crate::pairing::{Key, Offer, ProcessId};
use crate::principal::{Budget, Principal, Whose};
use crate::setup::Memory;
use link::{Link, SIDES, Stage, bits};

mod link;

pub(crate) type LinkId = u64;

/// How long a link without users is kept. The next connection often follows soon.
pub(crate) const LINGER: Duration = Duration::from_secs(2);
/// A registry of all links.
#[derive(Debug)]
pub(crate) struct Links {
    geometry: Geometry,
    /// Limits the number of links.
    budget: Budget,
    /// The principal of each connected process.
    owners: HashMap<ProcessId, Principal>,
    next: LinkId,
    links: HashMap<LinkId, Link>,
    /// Links with a free slot, by pair of processes.
    open: HashMap<(ProcessId, ProcessId), Vec<LinkId>>,
    by_process: HashMap<ProcessId, HashSet<LinkId>>,
    /// The process that holds each paired socket, by socket cookie.
    holders: HashMap<u64, Holder>,
    /// Links without users, which may be dropped.
    emptied: BTreeSet<LinkId>,
    /// Links whose free connections hold much memory.
    wasteful: BTreeSet<LinkId>,
    /// Events of captured links that have not been reported yet.
    capture_events: Vec<CaptureEvent>,
}

/// An event of a link that a capture reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CaptureEvent {
    /// Neither side uses this connection any more.
    Ended(LinkId, u32),
    /// The link was dropped.
    Dropped(LinkId),
}

#[derive(Debug)]
struct Holder {
    process: ProcessId,
    /// Number of slots that refer to the socket.
    slots: usize,
    /// The handle that the process uses for the socket.
    ticket: u64,
    /// The key under which the kernel's socket table lists the socket.
    key: Key,
    /// The initial sequence numbers of its streams, if the kernel could report them.
    origin: Option<Origin>,
}

/// One end of a pair, or of a candidate pair.
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

/// One side of a slot. A process that is connected to itself holds both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) link: LinkId,
    /// Less than [`CONNS`].
    pub(crate) conn: u32,
    pub(crate) side: Side,
}

/// A slot granted to two endpoints.
#[derive(Debug)]
pub(crate) struct Grant {
    pub(crate) link: LinkId,
    pub(crate) conn: u32,
    /// The sides of the earlier and of the later offer.
    pub(crate) sides: [Side; 2],
}

/// A link that was removed from the registry.
#[derive(Debug)]
pub(crate) struct Dropped {
    pub(crate) link: LinkId,
    pub(crate) ends: [ProcessId; 2],
}

/// A connection as a capture sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CaptureView {
    pub(crate) conn: u32,
    pub(crate) cookies: [u64; 2],
    /// The keys under which the kernel's socket table lists the sockets of the two sides.
    pub(crate) keys: [Key; 2],
    /// The sequence number of the first byte that each side receives.
    pub(crate) first: [Option<u32>; 2],
}

/// The processes to notify, and the sockets to follow, after a process has ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct DisconnectEffects {
    /// Processes that shared a link with it.
    pub(crate) peers: BTreeSet<ProcessId>,
    /// Their waiters that sleep on such a link.
    pub(crate) asleep: BTreeSet<(ProcessId, u32)>,
    /// Its sockets for which TCP may not report the end to the peer, or only later, once no process
    /// holds them. The caller follows each of them, or calls
    /// [`end_following`](Links::end_following).
    pub(crate) unowned: Vec<UnownedSocket>,
}

/// A socket of a process that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnownedSocket {
    /// The side that the process held.
    pub(crate) place: Place,
    pub(crate) cookie: u64,
    pub(crate) key: Key,
}

/// All links are in use, or one of the two users has reached its limit.
#[derive(Debug, Error)]
#[error("all links, or all that one of the two users may have, are in use")]
pub(crate) struct Full;

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
            wasteful: BTreeSet::new(),
            capture_events: Vec::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.links.len()
    }

    /// Returns the number of links charged to an unprivileged principal.
    pub(crate) fn count_of(&self, whose: Principal) -> usize {
        self.budget.of(whose)
    }

    /// Registers a process.
    pub(crate) fn join(&mut self, process: ProcessId, whose: Principal) {
        self.owners.insert(process, whose);
    }

    pub(crate) fn ring_bytes(&self) -> usize {
        self.geometry.ring_bytes()
    }

    /// Returns the process that holds this socket in a slot.
    pub(crate) fn holder(&self, cookie: u64) -> Option<ProcessId> {
        self.holders.get(&cookie).map(|holder| holder.process)
    }

    /// Returns the sockets of a process whose lanes have ended and are empty, by cookie: first the
    /// lane to which the process writes, then the other. TCP carries their next bytes. A process that
    /// does not use such a socket has not noticed.
    pub(crate) fn ended_lanes(&self, process: ProcessId) -> HashMap<u64, [bool; 2]> {
        let links = self.by_process.get(&process).into_iter().flatten().filter_map(|id| self.links.get(id));
        let mut ended = HashMap::new();
        for link in links {
            for side in SIDES.into_iter().filter(|side| link.ends[*side as usize] == process) {
                let held = (0..CONNS).filter(|conn| link.held[side as usize] & 1 << conn != 0);
                for conn in held {
                    let lanes = [side, side.other()].map(|from| link.has_ended(self.geometry, conn, from));
                    if lanes != [false, false] {
                        ended.insert(link.cookies[conn][side as usize], lanes);
                    }
                }
            }
        }
        ended
    }

    /// Returns the processes that share a link with this one. Includes the process itself if it is
    /// connected to itself.
    pub(crate) fn peers(&self, process: ProcessId) -> BTreeSet<ProcessId> {
        let links = self.by_process.get(&process).into_iter().flatten().filter_map(|id| self.links.get(id));
        links.filter(|link| !link.is_ownerless).map(|link| link.other_end(process)).collect()
    }

    /// Returns the two processes in the order of the sides of their links.
    pub(crate) fn order(one: ProcessId, two: ProcessId) -> [ProcessId; 2] {
        [one.min(two), one.max(two)]
    }

    /// Returns the layout of a link.
    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the principals to charge for a link between two processes.
    pub(crate) fn whose(&self, ends: [ProcessId; 2]) -> Result<Whose, Full> {
        let owner = |id| self.owners.get(id).copied().ok_or(Full);
        Ok(Whose::both(owner(&ends[0])?, owner(&ends[1])?))
    }

    /// Charges the budget for one link and returns its id. The caller then makes the link.
    pub(crate) fn reserve(&mut self, whose: Whose) -> Result<LinkId, Full> {
        if !self.budget.take(whose, 1) {
            return Err(Full);
        }
        let id = self.next;
        self.next += 1;
        Ok(id)
    }

    /// Gives back the budget of a reserved link that could not be made.
    pub(crate) fn cancel(&mut self, whose: Whose) {
        self.budget.give(whose, 1);
    }

    /// Registers a reserved link that is now sealed. Returns whether it is the only link of the two
    /// processes. In that case the caller exchanges their doorbells.
    pub(crate) fn add(
        &mut self,
        id: LinkId,
        ends: [ProcessId; 2],
        whose: Whose,
        memory: Arc<Memory>,
        now: Instant,
    ) -> bool {
        let pair = (ends[0], ends[1]);
        let is_only = !self.open.contains_key(&pair);
        let link = Link {
            ends,
            whose,
            held: [0; 2],
            cookies: Box::new([[0; 2]; CONNS]),
            memory,
            spare: Box::new([0; CONNS]),
            stage: Stage::Open,
            empty_since: Some(now),
            is_ownerless: false,
            followed: 0,
            seen: None,
        };
        self.links.insert(id, link);
        self.emptied.insert(id);
        self.open.entry(pair).or_default().push(id);
        for process in ends {
            self.by_process.entry(process).or_default().insert(id);
        }
        is_only
    }

    /// Grants two endpoints a slot in an existing link and resets its lanes. Prefers the slot that
    /// holds the most memory.
    pub(crate) fn grant(&mut self, earlier: &Offer, later: &Offer) -> Option<Grant> {
        let ends = Links::order(earlier.process, later.process);
        let pair = (ends[0], ends[1]);
        let open = self.open.get(&pair)?;
        let links = &self.links;
        let with = |wanted: fn(&Link) -> bool| {
            open.iter().rev().copied().find(|id| links.get(id).is_some_and(wanted))
        };
        let id = with(|link| link.grown() != 0).or_else(|| with(|link| link.given_out() != u64::MAX))?;
        let link = self.links.get_mut(&id).expect("open links exist");
        link.empty_since = None;
        let conn = link.best_free()?;
        debug_assert!(link.given_out() & 1 << conn == 0);
        link.spare[conn as usize] = 0;
        // If a process is connected to itself, its earlier offer gets side A.
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
        Some(Grant { link: id, conn, sides })
    }

    /// Releases `process`'s side of a slot for good. Returns `false` if the process did not hold
    /// it.
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
            self.capture_events.push(CaptureEvent::Ended(id, conn));
        }
        if link.is_free(conn) && !link.is_ownerless {
            link.spare[conn as usize] = link.memory.grown_pages(conn as usize) as u16;
            if link.has_to_be_looked_at() {
                self.wasteful.insert(id);
            }
            if link.held == [0; 2] {
                link.empty_since = Some(Instant::now());
                self.emptied.insert(id);
            }
        }
        let (full, dead) = (link.is_full() || link.stage.is_retired(), link.is_dead());
        let (pair, is_ownerless) = (sorted(link.ends[0], link.ends[1]), link.is_ownerless);
        self.let_go(cookie);
        if dead {
            self.drop_link(id);
        } else if was_full && !full && !is_ownerless {
            self.open.entry(pair).or_default().push(id);
        }
        true
    }

    /// Records that `process` no longer holds the socket in a slot. The slot is not reused yet.
    pub(crate) fn leave(&mut self, process: ProcessId, place: Place) {
        let Place { link: id, conn, side } = place;
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.ends[side as usize] == process {
            let cookie = std::mem::take(&mut link.cookies[conn as usize][side as usize]);
            self.let_go(cookie);
        }
    }

    /// Frees what an ended process held. Returns the processes to notify.
    pub(crate) fn forget(&mut self, process: ProcessId) -> DisconnectEffects {
        let mut effects = DisconnectEffects { peers: self.peers(process), ..DisconnectEffects::default() };
        effects.peers.remove(&process);
        for id in self.by_process.get(&process).cloned().unwrap_or_default() {
            let Some(link) = self.links.get_mut(&id) else { continue };
            link.is_ownerless = true;
            self.open.remove(&sorted(link.ends[0], link.ends[1]));
            let mut freed = Vec::new();
            for side in [0, 1].into_iter().filter(|side| link.ends[*side] == process) {
                freed.extend(bits(link.held[side]).map(|conn| link.cookies[conn][side]));
                let died = link.say_died(self.geometry, side);
                let unowned = bits(died.unsaid).filter_map(|conn| {
                    let cookie = link.cookies[conn][side];
                    let key = self.holders.get(&cookie)?.key;
                    let place = Place { link: id, conn: conn as u32, side: SIDES[side] };
                    Some(UnownedSocket { place, cookie, key })
                });
                let before = effects.unowned.len();
                effects.unowned.extend(unowned);
                link.followed += (effects.unowned.len() - before) as u32;
                effects.asleep.extend(link.wake(self.geometry, 1 - side, died.all));
                let left = std::mem::take(&mut link.held[side]) & !link.held[1 - side];
                if link.seen.is_some() {
                    self.capture_events.extend(bits(left).map(|conn| CaptureEvent::Ended(id, conn as u32)));
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
        effects
    }

    /// Returns whether the other end of a slot still needs to learn about this end. That is so
    /// while a process holds the other end, or while a child of an ended process may.
    pub(crate) fn is_heard(&self, place: Place) -> bool {
        let Some(link) = self.links.get(&place.link) else { return false };
        let other = place.side.other();
        link.held[other as usize] & 1 << place.conn != 0
            || link.has_said(self.geometry, place.conn as usize, other, LANE_END_DIED | LANE_END_SHARED)
    }

    /// Sets the flag that no process holds the socket of an ended process any more. Returns the
    /// doorbells to notify.
    pub(crate) fn say_abandoned(&self, place: Place) -> Vec<(ProcessId, u32)> {
        let Some(link) = self.links.get(&place.link) else { return Vec::new() };
        if let Some(word) = link.end_word(self.geometry, place.conn as usize, place.side) {
            word.fetch_or(LANE_END_ABANDONED, AcqRel);
        }
        link.wake(self.geometry, place.side.other() as usize, 1 << place.conn)
    }

    /// Stops following a socket of an ended process.
    pub(crate) fn end_following(&mut self, place: Place) {
        let Some(link) = self.links.get_mut(&place.link) else { return };
        link.followed -= 1;
        if link.is_dead() {
            self.drop_link(place.link);
        }
    }

    /// Returns whether some link may soon be dropped, retired or vacated.
    pub(crate) fn has_idle_memory(&self) -> bool {
        !self.emptied.is_empty() || !self.wasteful.is_empty()
    }

    /// Retires links whose free connections have held much memory for too long. Returns the links
    /// whose remaining connections must be asked to fall back, and adds the waiters that sleep on
    /// them to `asleep`.
    pub(crate) fn retire(
        &mut self,
        now: Instant,
        asleep: &mut BTreeSet<(ProcessId, u32)>,
    ) -> Vec<(LinkId, [ProcessId; 2])> {
        let mut vacated = Vec::new();
        for id in std::mem::take(&mut self.wasteful) {
            let Some(link) = self.links.get_mut(&id).filter(|link| !link.is_ownerless) else { continue };
            let before = link.stage;
            // The rings of a captured link are left as they are, unless it is closed.
            if link.seen.is_some() && before != Stage::Vacated {
                continue;
            }
            link.stage = before.next(link.spare_pages(), now);
            if link.stage.is_retired() && !before.is_retired() {
                let pair = (link.ends[0], link.ends[1]);
                if let Some(open) = self.open.get_mut(&pair) {
                    open.retain(|open| *open != id);
                }
            }
            match link.stage {
                Stage::Open => {}
                Stage::Vacated if link.held != [0; 2] => {
                    asleep.extend(
                        [0, 1].into_iter().flat_map(|side| link.wake(self.geometry, side, link.held[side])),
                    );
                    vacated.push((id, link.ends));
                }
                Stage::Vacated => {}
                Stage::Wasteful(_) | Stage::Retired(_) => drop(self.wasteful.insert(id)),
            }
        }
        vacated
    }

    /// Drops the links that have had no user for [`LINGER`] at time `now`.
    pub(crate) fn drop_empty(&mut self, now: Instant) -> Vec<Dropped> {
        let mut dropped = Vec::new();
        for id in std::mem::take(&mut self.emptied) {
            let Some(link) = self.links.get(&id).filter(|link| !link.is_ownerless) else { continue };
            // A connection was granted meanwhile.
            let Some(since) = link.empty_since else { continue };
            if now < since + LINGER {
                self.emptied.insert(id);
                continue;
            }
            let ends = link.ends;
            dropped.push(Dropped { link: id, ends });
            self.drop_link(id);
            self.forget_pair_without_links(ends, id);
        }
        dropped
    }

    /// Cleans up after the drop of a link. If it was the last one of the two processes, their
    /// doorbells must be exchanged again for the next.
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

    /// Returns the ids of all links, oldest first.
    pub(crate) fn ids(&self) -> Vec<LinkId> {
        let mut ids: Vec<_> = self.links.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// Returns the two processes of a link.
    pub(crate) fn ends(&self, id: LinkId) -> Option<[ProcessId; 2]> {
        self.links.get(&id).map(|link| link.ends)
    }

    /// Marks a link as captured. Returns the existing connections, one bit each.
    pub(crate) fn see(&mut self, id: LinkId) -> u64 {
        let Some(link) = self.links.get_mut(&id) else { return 0 };
        let under_way = link.held[0] | link.held[1];
        link.seen.get_or_insert_default();
        link.follow(self.geometry, under_way);
        under_way
    }

    /// Returns the memory of a link and the connections on it.
    pub(crate) fn capture_views(&self, id: LinkId) -> Option<(&Arc<Memory>, Vec<CaptureView>)> {
        let link = self.links.get(&id)?;
        let conns = bits(link.held[0] & link.held[1]);
        Some((&link.memory, conns.filter_map(|conn| self.capture_view_of(link, conn as u32)).collect()))
    }

    /// Returns one connection of a link.
    pub(crate) fn capture_view(&self, id: LinkId, conn: u32) -> Option<CaptureView> {
        self.capture_view_of(self.links.get(&id)?, conn)
    }

    fn capture_view_of(&self, link: &Link, conn: u32) -> Option<CaptureView> {
        let cookies = link.cookies[conn as usize];
        let [one, other] = [self.holders.get(&cookies[0])?, self.holders.get(&cookies[1])?];
        let first = [one, other].map(|holder| holder.origin.map(|origin| origin.received));
        Some(CaptureView { conn, cookies, keys: [one.key, other.key], first })
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

    /// Takes the events of captured links that have not been reported yet.
    pub(crate) fn take_capture_events(&mut self) -> Vec<CaptureEvent> {
        std::mem::take(&mut self.capture_events)
    }

    /// Returns the links between two processes.
    pub(crate) fn between(&self, ends: [ProcessId; 2]) -> Vec<LinkId> {
        let of_one = self.by_process.get(&ends[0]).into_iter().flatten().copied();
        of_one.filter(|id| self.links.get(id).is_some_and(|link| link.ends == ends)).collect()
    }

    /// Closes a link: it gets no new connections, and [`retire`](Self::retire) returns it once, so
    /// that those it has are asked to fall back to TCP.
    pub(crate) fn close(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id).filter(|link| !link.is_ownerless) else { return };
        link.stage = Stage::Vacated;
        self.wasteful.insert(id);
        if let Some(open) = self.open.get_mut(&(link.ends[0], link.ends[1])) {
            open.retain(|open| *open != id);
        }
    }

    /// Unmarks the links that no capture reads any more. Slots that were used during the capture
    /// become free again.
    pub(crate) fn unsee(&mut self, is_read: impl Fn(LinkId) -> bool) {
        for (id, link) in self.links.iter_mut().filter(|(id, link)| link.seen.is_some() && !is_read(**id)) {
            let was_full = link.is_full();
            let Some(seen) = link.seen.take() else { continue };
            link.set_followed(self.geometry, seen, false);
            if link.is_ownerless {
                continue;
            }
            if link.has_to_be_looked_at() {
                self.wasteful.insert(*id);
            }
            if was_full && !link.is_full() && !link.stage.is_retired() {
                self.open.entry(sorted(link.ends[0], link.ends[1])).or_default().push(*id);
            }
        }
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
            self.capture_events.push(CaptureEvent::Dropped(id));
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

fn sorted(one: ProcessId, two: ProcessId) -> (ProcessId, ProcessId) {
    (one.min(two), one.max(two))
}

#[cfg(test)]
mod tests {
    use super::link::STAY;
    use super::*;
    use crate::pairing::Key;
    use crate::principal::tests::ROOT;
    use proptest::prelude::*;
    use shunt_abi::geometry::{
        LANE_CLOSED, LANE_END_OFFSET, LANE_END_SHUT_DOWN, LANE_HEAD_OFFSET, LANE_RETURNED, LANE_TAIL_OFFSET,
        MIN_RING_BYTES, WAITER_READY_OFFSET, WAITER_SLEEPING_OFFSET,
    };
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    fn links(limit: usize) -> Links {
        links_with(MIN_RING_BYTES, limit)
    }

    /// Grants a slot and makes a link if necessary, as the broker does once a link is sealed.
    fn given(links: &mut Links, earlier: &Offer, later: &Offer) -> Result<Grant, Full> {
        if let Some(grant) = links.grant(earlier, later) {
            return Ok(grant);
        }
        let ends = Links::order(earlier.process, later.process);
        let whose = links.whose(ends)?;
        let id = links.reserve(whose)?;
        let memory = Memory::make(links.geometry).unwrap();
        assert!(memory.seal());
        links.add(id, ends, whose, Arc::new(memory), Instant::now());
        Ok(links.grant(earlier, later).expect("a link with room"))
    }

    fn memory(links: &Links, grant: &Grant) -> Arc<Memory> {
        links.links[&grant.link].memory.clone()
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

    /// Returns the places of the earlier and of the later offer.
    fn places(grant: &Grant) -> [Place; 2] {
        grant.sides.map(|side| at(grant.link, grant.conn, side))
    }

    /// Grants three connections between two processes. Returns them and the memory of their link.
    fn three(links: &mut Links) -> ([Grant; 3], Arc<Memory>) {
        let grants = [(10, 20), (11, 21), (12, 22)]
            .map(|(one, two)| given(links, &offer(1, one), &offer(2, two)).unwrap());
        let whole = memory(links, &grants[0]);
        (grants, whole)
    }

    fn end<'a>(whole: &'a Memory, links: &Links, place: Place) -> &'a AtomicU64 {
        let lane = links.geometry.lane_offset(place.conn as usize, place.side);
        whole.head().word(lane + LANE_END_OFFSET).unwrap()
    }

    #[test]
    fn a_slot_comes_back_only_when_both_sides_have_left_it() {
        let mut links = links(8);
        let first = given(&mut links, &offer(1, 10), &offer(2, 20)).unwrap();
        assert_eq!((first.conn, links.holder(10), links.holder(20)), (0, Some(1), Some(2)));
        let [one, two] = places(&first);
        assert!(links.release(1, one));
        assert!(!links.release(1, one), "released twice");
        assert!(!links.release(1, two) && !links.release(3, two), "not its own");
        assert_eq!(given(&mut links, &offer(1, 11), &offer(2, 21)).unwrap().conn, 1);
        assert!(links.release(2, two));
        let again = given(&mut links, &offer(2, 22), &offer(1, 12)).unwrap();
        assert_eq!((again.link, again.conn, again.sides), (first.link, 0, [Side::B, Side::A]));
        assert_eq!((links.holder(10), links.holder(12)), (None, Some(1)));
    }

    #[test]
    fn a_slot_that_was_left_is_not_given_out_before_it_is_released() {
        let mut links = links(8);
        let first = given(&mut links, &offer(1, 10), &offer(2, 20)).unwrap();
        let [one, two] = places(&first);
        assert!(links.release(2, two));
        links.leave(1, one);
        assert_eq!(links.holder(10), None);
        let again = given(&mut links, &offer(3, 10), &offer(2, 20)).unwrap();
        assert_ne!(again.link, first.link);
        links.leave(2, two);
        assert_eq!(links.holder(20), Some(2), "another slot's");
        assert_eq!(given(&mut links, &offer(1, 11), &offer(2, 21)).unwrap().conn, 1);
        assert!(links.release(1, one));
        assert_eq!(given(&mut links, &offer(1, 12), &offer(2, 22)).unwrap().conn, 0);
    }

    #[test]
    fn lanes_that_have_ended_are_known_once_they_are_empty() {
        let mut links = links(8);
        let grant = given(&mut links, &offer(1, 10), &offer(2, 20)).unwrap();
        assert_eq!(links.ended_lanes(1), HashMap::new());
        let whole = memory(&links, &grant);
        let lane = links.geometry.lane_offset(0, Side::A);
        let set = |at: usize, value: u64| whole.head().word(lane + at).unwrap().store(value, Relaxed);
        set(LANE_TAIL_OFFSET, LANE_CLOSED | 5);
        assert_eq!(links.ended_lanes(1), HashMap::new(), "bytes are left to be read");
        set(LANE_HEAD_OFFSET, 5);
        assert_eq!(links.ended_lanes(1), HashMap::from([(10, [true, false])]));
        assert_eq!(links.ended_lanes(2), HashMap::from([(20, [false, true])]));
        let [one, _] = places(&grant);
        assert!(links.release(1, one));
        assert_eq!(links.ended_lanes(1), HashMap::new());
    }

    #[test]
    fn lanes_are_zero_when_a_slot_is_given_out() {
        let mut links = links(8);
        let grant = given(&mut links, &offer(1, 10), &offer(2, 20)).unwrap();
        let whole = memory(&links, &grant);
        let whole = whole.head();
        let lane = links.geometry.lane_offset(0, Side::B);
        whole.word(lane).unwrap().store(u64::MAX, Relaxed);
        whole.word(lane + 2 * LANE_BYTES).unwrap().store(5, Relaxed);
        links.release(1, at(grant.link, 0, Side::A));
        links.release(2, at(grant.link, 0, Side::B));
        given(&mut links, &offer(1, 10), &offer(2, 20)).unwrap();
        assert_eq!(whole.word(lane).unwrap().load(Relaxed), 0);
        assert_eq!(whole.word(lane + 2 * LANE_BYTES).unwrap().load(Relaxed), 5, "another connection's lane");
    }

    #[test]
    fn a_link_that_nobody_uses_is_dropped_after_a_while() {
        let mut links = links(8);
        let begun = Instant::now();
        let first = given(&mut links, &offer(1, 10), &offer(2, 20)).unwrap();
        let leave = |links: &mut Links, grant: &Grant| {
            let [one, two] = places(grant);
            assert!(links.release(1, one) && links.release(2, two));
        };
        leave(&mut links, &first);
        assert!(links.has_idle_memory());
        assert!(links.drop_empty(begun).is_empty(), "connections come one after another");
        let second = given(&mut links, &offer(1, 11), &offer(2, 21)).unwrap();
        assert_eq!(second.link, first.link);
        assert!(links.drop_empty(begun + 10 * LINGER).is_empty(), "it is used");
        assert!(!links.has_idle_memory());
        leave(&mut links, &second);
        let dropped = links.drop_empty(Instant::now() + LINGER);
        assert_eq!((dropped.len(), dropped[0].link, dropped[0].ends), (1, first.link, [1, 2]));
        assert_eq!((links.len(), links.by_process.len(), links.open.len()), (0, 0, 0));
        let third = given(&mut links, &offer(1, 12), &offer(2, 22)).unwrap();
        assert_ne!(third.link, first.link);
    }

    #[test]
    fn processes_know_each_other_as_long_as_they_have_a_link() {
        let mut links = links(8);
        let grants: Vec<_> = (0..65)
            .map(|number| given(&mut links, &offer(1, number), &offer(2, 1000 + number)).unwrap())
            .collect();
        let [one, two] = places(&grants[64]);
        assert!(links.release(1, one) && links.release(2, two));
        let dropped = links.drop_empty(Instant::now() + LINGER);
        assert_eq!((dropped.len(), dropped[0].link, dropped[0].ends), (1, grants[64].link, [1, 2]));
        let next = given(&mut links, &offer(1, 65), &offer(2, 1065)).unwrap();
        assert!(!grants.iter().any(|grant| grant.link == next.link));
    }

    /// Fills both rings of a connection.
    fn fill(links: &Links, grant: &Grant) {
        let memory = memory(links, grant);
        for side in SIDES {
            let ring = links.geometry.ring_offset(grant.conn as usize, side);
            (0..links.geometry.ring_bytes()).step_by(MIN_RING_BYTES).for_each(|page| {
                memory.head().word(ring + page).unwrap().store(7, Relaxed);
            });
        }
    }

    /// Backs the first page of one spill of a connection with memory.
    fn spill(links: &Links, grant: &Grant) {
        let at = links.geometry.spill_offset(grant.conn as usize, Side::B);
        memory(links, grant).head().word(at).unwrap().store(7, Relaxed);
    }

    #[test]
    fn what_has_grown_the_most_is_given_out_first() {
        let mut links = links_with(2 * MIN_RING_BYTES, 8);
        let mut next = |number| given(&mut links, &offer(1, number), &offer(2, 100 + number)).unwrap();
        let grants = [next(0), next(1), next(2)];
        fill(&links, &grants[1]);
        fill(&links, &grants[2]);
        spill(&links, &grants[2]);
        for grant in &grants {
            let [one, two] = places(grant);
            assert!(links.release(1, one) && links.release(2, two));
        }
        for (number, conn) in [(11, grants[2].conn), (12, grants[1].conn), (13, 0)] {
            let next = given(&mut links, &offer(1, number), &offer(2, 10 + number)).unwrap();
            assert_eq!(next.conn, conn);
        }
    }

    fn retire(links: &mut Links, now: Instant) -> Vec<(LinkId, [ProcessId; 2])> {
        links.retire(now, &mut BTreeSet::new())
    }

    #[test]
    fn a_link_whose_free_connections_hold_much_memory_is_retired_and_then_vacated() {
        let mut links = links_with(128 * MIN_RING_BYTES, 8);
        let begun = Instant::now();
        let grants = [(10, 20), (11, 21), (12, 22)]
            .map(|(one, two)| given(&mut links, &offer(1, one), &offer(2, two)).unwrap());
        grants[..2].iter().for_each(|grant| fill(&links, grant));
        let leave = |links: &mut Links, grant: &Grant| {
            let [one, two] = places(grant);
            assert!(links.release(1, one) && links.release(2, two));
        };
        leave(&mut links, &grants[0]);
        assert!(retire(&mut links, begun).is_empty() && links.wasteful.is_empty(), "little is kept");
        leave(&mut links, &grants[1]);
        assert!(links.has_idle_memory() && retire(&mut links, begun).is_empty());
        // The link is used again meanwhile.
        let again = given(&mut links, &offer(1, 13), &offer(2, 23)).unwrap();
        assert_eq!(again.link, grants[0].link);
        assert!(retire(&mut links, begun + 2 * LINGER).is_empty() && links.wasteful.is_empty());
        leave(&mut links, &again);
        let begun = Instant::now();
        assert!(retire(&mut links, begun).is_empty() && retire(&mut links, begun + LINGER).is_empty());
        let other = given(&mut links, &offer(1, 14), &offer(2, 24)).unwrap();
        assert_ne!(other.link, grants[0].link, "a retired link gets no new connections");
        assert!(retire(&mut links, begun + LINGER + STAY / 2).is_empty());
        let whole = memory(&links, &grants[2]);
        let sleeping = links.geometry.waiter_offset(Side::B, 3) + WAITER_SLEEPING_OFFSET;
        whole.head().word(sleeping).unwrap().store(1, Relaxed);
        let mut asleep = BTreeSet::new();
        assert_eq!(links.retire(begun + LINGER + STAY, &mut asleep), [(grants[0].link, [1, 2])]);
        assert_eq!(asleep, BTreeSet::from([(2, 3)]));
        assert!(retire(&mut links, begun + 10 * STAY).is_empty(), "they have been asked");
        leave(&mut links, &grants[2]);
        let dropped = links.drop_empty(Instant::now() + LINGER);
        assert_eq!(dropped.iter().map(|dropped| dropped.link).collect::<Vec<_>>(), [grants[0].link]);
    }

    #[test]
    fn a_full_link_is_followed_by_another_up_to_the_limit() {
        let mut links = links(2);
        let mut grants = Vec::new();
        for cookie in 0..128 {
            grants.push(given(&mut links, &offer(1, cookie), &offer(2, 1000 + cookie)).unwrap());
        }
        assert_eq!(links.len(), 2);
        assert_ne!(grants[64].link, grants[63].link);
        assert!(given(&mut links, &offer(1, 500), &offer(2, 501)).is_err());
        let early = &grants[3];
        let [one, two] = places(early);
        assert!(links.release(1, one) && links.release(2, two));
        let grant = given(&mut links, &offer(1, 500), &offer(2, 501)).unwrap();
        assert_eq!((grant.link, grant.conn), (early.link, early.conn));
    }

    #[test]
    fn a_process_connected_to_itself_holds_both_sides() {
        let mut links = links(8);
        let grant = given(&mut links, &offer(1, 10), &offer(1, 11)).unwrap();
        assert_eq!(grant.sides, [Side::A, Side::B]);
        assert_eq!(links.peers(1), BTreeSet::from([1]));
        let [one, two] = places(&grant);
        assert!(links.release(1, two));
        assert_eq!((links.holder(10), links.holder(11)), (Some(1), None));
        assert_eq!(given(&mut links, &offer(1, 12), &offer(1, 13)).unwrap().conn, 1);
        assert!(links.release(1, one));
        assert!(!links.release(1, one) && !links.release(1, two));
        assert_eq!(links.forget(1), DisconnectEffects::default());
        assert_eq!((links.len(), links.holders.len()), (0, 0));
    }

    #[test]
    fn an_ended_process_leaves_its_peers_their_lanes() {
        let mut links = links(8);
        let grant = given(&mut links, &offer(1, 10), &offer(2, 20)).unwrap();
        given(&mut links, &offer(1, 11), &offer(3, 30)).unwrap();
        assert_eq!(links.forget(1).peers, BTreeSet::from([2, 3]));
        assert_eq!(links.len(), 2);
        assert!(links.release(2, places(&grant)[1]));
        assert_eq!(links.len(), 1);
        assert_eq!(links.forget(3), DisconnectEffects::default());
        assert_eq!((links.len(), links.holders.len(), links.by_process.len()), (0, 0, 0));
        assert!(links.open.is_empty());
    }

    #[test]
    fn the_end_that_a_process_has_left_is_not_said_to_have_died() {
        let mut links = links(8);
        let grant = given(&mut links, &offer(1, 10), &offer(1, 11)).unwrap();
        let whole = memory(&links, &grant);
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
            whole.head().word(lane + LANE_TAIL_OFFSET).unwrap().store(tail, Relaxed);
            whole.head().word(lane + LANE_HEAD_OFFSET).unwrap().store(head, Relaxed);
        }
        let unowned = links.forget(1).unowned;
        assert_eq!(
            unowned,
            [UnownedSocket { place: places(&grants[0])[0], cookie: 10, key: offer(1, 10).key }]
        );
        assert!(links.is_heard(unowned[0].place));
        assert_eq!(links.forget(2), DisconnectEffects::default());
        assert!(!links.is_heard(unowned[0].place));
        assert_eq!(links.len(), 1);
        links.end_following(unowned[0].place);
        assert_eq!(links.len(), 0);
    }

    #[test]
    fn a_process_connected_to_itself_is_heard_by_its_children() {
        let mut links = links(8);
        let grant = given(&mut links, &offer(1, 10), &offer(1, 11)).unwrap();
        let whole = memory(&links, &grant);
        let [first, second] = places(&grant);
        end(&whole, &links, first).store(LANE_END_SHARED, Relaxed);
        end(&whole, &links, second).store(LANE_END_SHUT_DOWN | LANE_END_SHARED, Relaxed);
        let unowned = links.forget(1).unowned;
        assert_eq!(unowned, [UnownedSocket { place: second, cookie: 11, key: offer(1, 11).key }]);
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
        let unowned = links.forget(1).unowned;
        let place = places(&grants[0])[0];
        assert_eq!(unowned, [UnownedSocket { place, cookie: 10, key: offer(1, 10).key }]);
        assert!(links.is_heard(place));
        whole
            .head()
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
        let grant = given(&mut links, &offer(1, 10), &offer(2, 20)).unwrap();
        let left = given(&mut links, &offer(1, 11), &offer(2, 21)).unwrap();
        links.leave(1, places(&left)[0]);
        let whole = memory(&links, &grant);
        let whole = whole.head();
        let word = |side, slot, at| whole.word(links.geometry.waiter_offset(side, slot) + at).unwrap();
        word(Side::B, 3, WAITER_SLEEPING_OFFSET).store(1, Relaxed);
        // A waiter of the ended process itself, which must not be reported.
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
                        let grant = given(&mut links, &offer(one, cookie as u64 * 2), &offer(two, cookie as u64 * 2 + 1)).unwrap();
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
