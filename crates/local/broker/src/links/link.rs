//! One link: its slots, the words of its lanes that the broker reads and writes, and its stage.
//!
//! ```text
//!        much spare memory             for 2 s               10 s later
//! Open ------------------> Wasteful ------------> Retired ------------> Vacated
//!      <------------------
//!        little again
//! ```
//!
//! The registry's head has an example.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*, fence};
use std::time::{Duration, Instant};

use shunt_abi::geometry::{
    CONNS, Geometry, LANE_CLOSED, LANE_CURSOR, LANE_END_DIED, LANE_END_OFFSET, LANE_END_SHARED,
    LANE_END_SHUT_DOWN, LANE_FOLLOWED_OFFSET, LANE_HEAD_OFFSET, LANE_RETURNED, LANE_TAIL_OFFSET, Side,
    WAITER_READY_OFFSET, WAITER_SLEEPING_OFFSET, WAITERS,
};

use super::LINGER;
use crate::pairing::ProcessId;
use crate::principal::Whose;
use crate::setup::Memory;

/// Number of 4 KiB pages that the free connections of a link may hold for longer than [`LINGER`],
/// not counting the first two pages of each.
pub(super) const SPARE_PAGES: usize = 256;
/// How long connections may remain on a retired link.
pub(super) const STAY: Duration = Duration::from_secs(10);

/// One link, with the slots of its connections.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) ends: [ProcessId; 2],
    /// The principals that are charged for the link, even after their processes have ended.
    pub(super) whose: Whose,
    /// One bit per connection for each side, set while that side may use it.
    pub(super) held: [u64; 2],
    pub(super) cookies: Box<[[u64; 2]; CONNS]>,
    pub(super) memory: Arc<Memory>,
    /// Number of pages that each free connection holds beyond the first two.
    pub(super) spare: Box<[u16; CONNS]>,
    pub(super) stage: Stage,
    /// When the last user released the link, if it has none now.
    pub(super) empty_since: Option<Instant>,
    /// Set once one of the two processes has ended.
    pub(super) is_ownerless: bool,
    /// Number of sockets of ended processes on this link that are followed: see
    /// [`crate::unowned_sockets`].
    pub(super) followed: u32,
    /// Connections granted since a capture started reading the link, one bit each; `None` without a
    /// capture. Their slots are not reused during the capture, so the bytes of one connection are
    /// never attributed to another.
    pub(super) seen: Option<u64>,
}

/// Whether a link accepts new connections, and how far its retirement has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Accepts new connections.
    Open,
    /// Accepts new connections, but its free connections have held much memory since this time.
    Wasteful(Instant),
    /// Has accepted no new connections since this time.
    Retired(Instant),
    /// Accepts no new connections, and those that remain have been asked to fall back.
    Vacated,
}

impl Stage {
    /// Returns the next stage, given the number of spare pages of the free connections.
    pub(super) fn next(self, spare: usize, now: Instant) -> Stage {
        match self {
            Stage::Open if spare > SPARE_PAGES => Stage::Wasteful(now),
            Stage::Wasteful(_) if spare <= SPARE_PAGES => Stage::Open,
            Stage::Wasteful(since) if now >= since + LINGER => Stage::Retired(now),
            Stage::Retired(since) if now >= since + STAY => Stage::Vacated,
            same => same,
        }
    }

    pub(super) fn is_retired(self) -> bool {
        matches!(self, Stage::Retired(_) | Stage::Vacated)
    }
}

impl Link {
    /// Sets the flag "process has ended" in every lane on which `side` sent, so that the other end
    /// checks TCP.
    pub(super) fn say_died(&self, geometry: Geometry, side: usize) -> Died {
        let mut died = Died::default();
        for conn in bits(self.held[side]).filter(|conn| self.cookies[*conn][side] != 0) {
            if let Some(word) = self.end_word(geometry, conn, SIDES[side]) {
                word.fetch_or(LANE_END_DIED, AcqRel);
            }
            // The FIN was sent long ago, or it is queued behind bytes that the other end does not
            // read.
            let is_unsaid = self.has_unread(geometry, conn, SIDES[1 - side])
                || self.has_said(geometry, conn, SIDES[side], LANE_END_SHUT_DOWN | LANE_END_SHARED);
            died.all |= 1 << conn;
            died.unsaid |= u64::from(is_unsaid) << conn;
        }
        died
    }

    /// Returns whether a lane contains bytes that were neither read nor reclaimed.
    fn has_unread(&self, geometry: Geometry, conn: usize, side: Side) -> bool {
        let lane = geometry.lane_offset(conn, side);
        let words = [LANE_TAIL_OFFSET, LANE_HEAD_OFFSET].map(|at| self.memory.head().word(lane + at));
        let [Some(tail), Some(head)] = words.map(|word| word.map(|word| word.load(Acquire))) else {
            return false;
        };
        tail & LANE_RETURNED == 0 && (tail ^ head) & LANE_CURSOR != 0
    }

    /// Returns whether one of the two sides has ended a lane, which has no bytes any more.
    pub(super) fn has_ended(&self, geometry: Geometry, conn: usize, side: Side) -> bool {
        let tail = self.memory.head().word(geometry.lane_offset(conn, side) + LANE_TAIL_OFFSET);
        tail.is_some_and(|tail| tail.load(Acquire) & LANE_CLOSED != 0)
            && !self.has_unread(geometry, conn, side)
    }

    /// Returns whether all `flags` are set in the end word of a lane.
    pub(super) fn has_said(&self, geometry: Geometry, conn: usize, side: Side, flags: u64) -> bool {
        let word = self.end_word(geometry, conn, side);
        word.is_some_and(|word| word.load(Acquire) & flags == flags)
    }

    /// Returns the word in which the sender of a lane, or the broker, records how the sender left.
    pub(super) fn end_word(&self, geometry: Geometry, conn: usize, side: Side) -> Option<&AtomicU64> {
        self.memory.head().word(geometry.lane_offset(conn, side) + LANE_END_OFFSET)
    }

    /// Sets the ready bits of `conns` for the sleeping waiters of `side`, as a sender does, and
    /// returns the doorbells to notify. TCP alone is not enough: it reports nothing new if the peer
    /// has already sent its FIN.
    pub(super) fn wake(&self, geometry: Geometry, side: usize, conns: u64) -> Vec<(ProcessId, u32)> {
        if conns == 0 {
            return Vec::new();
        }
        let sleeps = |slot: &usize| {
            let line = geometry.waiter_offset(SIDES[side], *slot);
            let words =
                [WAITER_READY_OFFSET, WAITER_SLEEPING_OFFSET].map(|at| self.memory.head().word(line + at));
            let [Some(ready), Some(sleeping)] = words else { return false };
            ready.fetch_or(conns, AcqRel);
            // Orders the store of the ready bits before the load of `sleeping`. A waiter announces
            // its sleep first and checks the ready bits afterwards, so one of the two sees the
            // other.
            fence(SeqCst);
            sleeping.load(Relaxed) != 0 && sleeping.swap(0, AcqRel) != 0
        };
        (0..WAITERS).filter(sleeps).map(|slot| (self.ends[side], slot as u32)).collect()
    }

    /// Adds newly granted connections to the capture of this link, if there is one.
    pub(super) fn follow(&mut self, geometry: Geometry, conns: u64) {
        let Some(seen) = &mut self.seen else { return };
        *seen |= conns;
        self.set_followed(geometry, conns, true);
    }

    /// Publishes to the senders of these connections whether a capture reads them.
    pub(super) fn set_followed(&self, geometry: Geometry, conns: u64, is_followed: bool) {
        for (conn, side) in bits(conns).flat_map(|conn| SIDES.map(|side| (conn, side))) {
            let at = geometry.lane_offset(conn, side) + LANE_FOLLOWED_OFFSET;
            if let Some(word) = self.memory.head().half_word(at) {
                word.store(is_followed.into(), Relaxed);
            }
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.held[0] | self.held[1] | self.seen.unwrap_or(0) == u64::MAX
    }

    /// Returns the slots that must not be granted, one bit each: a process holds them, or a capture
    /// may still read their old bytes.
    pub(super) fn given_out(&self) -> u64 {
        self.held[0] | self.held[1] | self.seen.unwrap_or(0)
    }

    /// Returns the free slot that holds the most memory, so that this memory is reused.
    pub(super) fn best_free(&self) -> Option<u32> {
        let free = bits(!self.given_out());
        free.min_by_key(|conn| Reverse(self.spare[*conn])).map(|conn| conn as u32)
    }

    /// Returns the free slots that hold more than the first pages of their rings, one bit each.
    pub(super) fn grown(&self) -> u64 {
        let has_grown = |word, (conn, pages): (usize, &u16)| word | u64::from(*pages > 0) << conn;
        self.spare.iter().enumerate().fold(0, has_grown) & !self.given_out()
    }

    /// Returns the number of pages that free connections hold beyond their first two.
    pub(super) fn spare_pages(&self) -> usize {
        self.spare.iter().map(|pages| usize::from(*pages)).sum()
    }

    /// Returns whether the stage may change with time. It does not change during a capture.
    pub(super) fn has_to_be_looked_at(&self) -> bool {
        self.seen.is_none() && self.stage != Stage::Vacated && self.spare_pages() > SPARE_PAGES
    }

    pub(super) fn is_free(&self, conn: u32) -> bool {
        (self.held[0] | self.held[1]) & 1 << conn == 0
    }

    /// Returns whether the link can never be used again.
    pub(super) fn is_dead(&self) -> bool {
        self.is_ownerless && self.held == [0; 2] && self.followed == 0
    }

    pub(super) fn other_end(&self, process: ProcessId) -> ProcessId {
        if self.ends[0] == process { self.ends[1] } else { self.ends[0] }
    }
}

/// Connections whose process has ended, one bit each.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Died {
    pub(super) all: u64,
    /// The subset whose end TCP may not report to the peer, or only later.
    pub(super) unsaid: u64,
}

pub(super) const SIDES: [Side; 2] = [Side::A, Side::B];

pub(super) fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros() as usize;
        word &= word.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}
