//! The layout of a link: one sealed memfd shared by exactly two processes.
//!
//! ```text
//! 0                 header page: waiters of side 0, waiters of side 1, known doorbells
//! WAITERS_OFFSET    2 sides x WAITERS x 64 bytes
//! LANES_OFFSET      CONNS x 2 directions x LANE_BYTES
//! RINGS_OFFSET      CONNS x 2 directions x ring_bytes, each page aligned
//! spills_offset     CONNS x 2 directions x spill_bytes
//! ```
//!
//! Lane `(conn, side)` is the direction whose *sender* is `side`. Its *spill* takes what TCP's
//! buffers would take while its ring is full.

/// Connections per link: one bit each of a 64-bit ready word.
pub const CONNS: usize = 64;
/// Waiters (epoll instances, threads) per side that can have a doorbell of their own.
pub const WAITERS: usize = 64;
/// Bytes of one waiter's line: a cache line, so that two waiters never share one.
pub const WAITER_BYTES: usize = 64;
/// Offset in a waiter's line of the ready word: one bit for each connection to check.
pub const WAITER_READY_OFFSET: usize = 0;
/// Offset of the word that is not 0 while the waiter sleeps.
pub const WAITER_SLEEPING_OFFSET: usize = 8;
/// Bytes of one lane's header: two lines for the sender, two for the receiver. Processors fetch
/// lines in pairs.
pub const LANE_BYTES: usize = 256;
/// Offset in a lane's header of `tail`: the count of bytes that the sender has written, with flags.
pub const LANE_TAIL_OFFSET: usize = 0;
/// The flag of `tail` by which the receiver returns its unread bytes.
pub const LANE_RETURNED: u64 = 1 << 62;
/// Offset of `head`: the count of bytes that the receiver has read.
pub const LANE_HEAD_OFFSET: usize = 128;
/// The flag of `tail` by which the sender announces that bytes are in the spill.
pub const LANE_SPILLED: u64 = 1 << 60;
/// The bits of both words that count bytes.
pub const LANE_CURSOR: u64 = (1 << 60) - 1;
/// The flag of `tail` that ends the lane.
pub const LANE_CLOSED: u64 = 1 << 63;
/// Offset in a lane's header of the stream offset at which it begins: 1 + the offset, or 0.
pub const LANE_START_OFFSET: usize = 64;
/// Offset in a lane's header of the word that records how the sender's direction ended.
pub const LANE_END_OFFSET: usize = 72;
/// Offset of the half word that the broker sets while a capture reads the lane: see
/// [`crate::control::Capture`].
pub const LANE_FOLLOWED_OFFSET: usize = 84;
/// Offset of the count of the byte that is at the beginning of the ring.
pub const LANE_BASE_OFFSET: usize = 88;
/// The flag of that end word that the sender sets when it has shut the direction down.
pub const LANE_END_SHUT_DOWN: u64 = 1;
/// The flag that the sender sets when it has closed the socket.
pub const LANE_END_CLOSED: u64 = 2;
/// The flag that the broker adds when the sender's process has ended.
pub const LANE_END_DIED: u64 = 4;
/// The flag that the sender sets before it shares its socket with a child.
pub const LANE_END_SHARED: u64 = 16;
/// The flag that the broker adds once no process holds the socket any more.
pub const LANE_END_ABANDONED: u64 = 32;
/// Offset of the link-wide words `known[2]`.
pub const KNOWN_OFFSET: usize = 0;
/// Offset of the words by which each side reports that it has mapped the spills.
pub const SPILLS_MAPPED_OFFSET: usize = KNOWN_OFFSET + 16;
/// Offset of the waiters.
pub const WAITERS_OFFSET: usize = 4096;
/// Offset of the lane headers.
pub const LANES_OFFSET: usize = WAITERS_OFFSET + 2 * WAITERS * WAITER_BYTES;
/// Offset of the rings.
pub const RINGS_OFFSET: usize = LANES_OFFSET + CONNS * 2 * LANE_BYTES;
/// Ring size unless the broker specifies another.
pub const DEFAULT_RING_BYTES: usize = 256 * 1024;
/// The smallest ring, one page.
pub const MIN_RING_BYTES: usize = 4096;
/// The largest ring.
pub const MAX_RING_BYTES: usize = 16 * 1024 * 1024;
/// A spill is this many times as large as its ring.
const SPILL_TIMES: usize = 16;
/// But no larger than this: together with a ring more than TCP's buffers take of a sender whose
/// receiver reads nothing, which is 4.0 MB on loopback where `tcp_wmem` ends at 4 MiB.
pub const MAX_SPILL_BYTES: usize = 4 * 1024 * 1024;

const _: () = assert!(RINGS_OFFSET.is_multiple_of(4096));

/// One of the two processes of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The first.
    A = 0,
    /// The second.
    B = 1,
}

impl Side {
    /// Returns the side that a message names, if the value is valid.
    pub fn parse(raw: u32) -> Option<Side> {
        match raw {
            0 => Some(Side::A),
            1 => Some(Side::B),
            _ => None,
        }
    }

    /// Returns the other side.
    pub fn other(self) -> Side {
        match self {
            Side::A => Side::B,
            Side::B => Side::A,
        }
    }
}

/// Checked sizes of one link. Both processes take them from the broker's message, never from shared
/// memory (L5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    ring_bytes: usize,
}

impl Geometry {
    /// Returns a geometry with rings of `ring_bytes`: a power of two between a page and
    /// `MAX_RING_BYTES`.
    pub fn new(ring_bytes: usize) -> Option<Geometry> {
        let fits = (MIN_RING_BYTES..=MAX_RING_BYTES).contains(&ring_bytes);
        (ring_bytes.is_power_of_two() && fits).then_some(Geometry { ring_bytes })
    }

    /// Returns the bytes of one ring.
    pub fn ring_bytes(self) -> usize {
        self.ring_bytes
    }

    /// Returns the bytes of one spill, a power of two.
    pub fn spill_bytes(self) -> usize {
        (self.ring_bytes * SPILL_TIMES).min(MAX_SPILL_BYTES)
    }

    /// Returns the bytes of the whole link.
    pub fn link_bytes(self) -> usize {
        self.spills_offset() + CONNS * 2 * self.spill_bytes()
    }

    /// Returns the offset of the spills, which is the size of a link without them.
    pub fn spills_offset(self) -> usize {
        RINGS_OFFSET + CONNS * 2 * self.ring_bytes
    }

    /// Returns the offset of the waiter line `slot` of `side`.
    pub fn waiter_offset(self, side: Side, slot: usize) -> usize {
        assert!(slot < WAITERS);
        WAITERS_OFFSET + (side as usize * WAITERS + slot) * WAITER_BYTES
    }

    /// Returns the offset of the header of the lane that `sender` writes for `conn`.
    pub fn lane_offset(self, conn: usize, sender: Side) -> usize {
        assert!(conn < CONNS);
        LANES_OFFSET + (conn * 2 + sender as usize) * LANE_BYTES
    }

    /// Returns the offset of the ring of that lane.
    pub fn ring_offset(self, conn: usize, sender: Side) -> usize {
        assert!(conn < CONNS);
        RINGS_OFFSET + (conn * 2 + sender as usize) * self.ring_bytes
    }

    /// Returns the offset of the spill of that lane.
    pub fn spill_offset(self, conn: usize, sender: Side) -> usize {
        assert!(conn < CONNS);
        self.spills_offset() + (conn * 2 + sender as usize) * self.spill_bytes()
    }
}

impl Default for Geometry {
    fn default() -> Geometry {
        Geometry { ring_bytes: DEFAULT_RING_BYTES }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_lie_inside_the_link_and_do_not_overlap() {
        let geometry = Geometry::new(MIN_RING_BYTES).unwrap();
        let mut starts: Vec<usize> = (0..CONNS)
            .flat_map(|conn| [geometry.ring_offset(conn, Side::A), geometry.ring_offset(conn, Side::B)])
            .collect();
        starts.push(geometry.spills_offset());
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == MIN_RING_BYTES));
        assert!(starts[0] >= geometry.lane_offset(CONNS - 1, Side::B) + LANE_BYTES);
    }

    #[test]
    fn spills_lie_behind_the_rings_and_do_not_overlap() {
        for ring_bytes in [MIN_RING_BYTES, DEFAULT_RING_BYTES, MAX_RING_BYTES] {
            let geometry = Geometry::new(ring_bytes).unwrap();
            let spill_bytes = geometry.spill_bytes();
            let mut starts: Vec<usize> = (0..CONNS)
                .flat_map(|conn| [geometry.spill_offset(conn, Side::A), geometry.spill_offset(conn, Side::B)])
                .collect();
            starts.push(geometry.link_bytes());
            assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == spill_bytes));
            assert_eq!(starts[0], geometry.ring_offset(CONNS - 1, Side::B) + ring_bytes);
            assert!(spill_bytes.is_power_of_two() && starts[0].is_multiple_of(MIN_RING_BYTES));
        }
    }

    #[test]
    fn sizes_that_are_no_ring_are_refused() {
        for bytes in [0, 1, 4095, 4097, 3 * 4096, MAX_RING_BYTES * 2, usize::MAX] {
            assert_eq!(Geometry::new(bytes), None, "{bytes}");
        }
    }
}
