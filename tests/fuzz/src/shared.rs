//! The memory of a link, every word of which the peer can write.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shunt_abi::geometry::{Geometry, LANE_BYTES, LANES_OFFSET, MIN_RING_BYTES, RINGS_OFFSET, Side};
use shunt_ring::LaneHeader;
use shunt_ring::bytes::MappedRing;
use shunt_ring::link::LinkView;
use shunt_ring::user::Piece;
use shunt_ring::{Sink, Source};

use crate::input::Input;

/// Bytes of one ring.
pub(crate) const RING: usize = MIN_RING_BYTES;
/// The rings of one connection, and one ring of the next connection as a guard.
const BYTES: usize = RINGS_OFFSET + 3 * RING;
const WORDS_OF_LANE: usize = LANE_BYTES / 8;

#[repr(C, align(4096))]
struct Memory([AtomicU64; BYTES / 8]);

/// The first connection of a link, with both its lanes.
pub(crate) struct Shared {
    memory: Box<Memory>,
    view: LinkView,
}

impl Shared {
    pub(crate) fn new() -> Shared {
        let memory = Box::new(Memory([const { AtomicU64::new(0) }; BYTES / 8]));
        let geometry = Geometry::new(RING).expect("the smallest there is");
        let base = std::ptr::from_ref(&*memory).cast_mut().cast();
        // SAFETY: aligned to a page, kept in the same structure as the view, and made of atomics,
        // so it may be written through a shared reference. Only the rings of connection 0 are used,
        // which are inside.
        let view = unsafe { LinkView::new(base, geometry, false) };
        Shared { memory, view }
    }

    pub(crate) fn lane(&self, sender: Side) -> (&LaneHeader, MappedRing) {
        (self.view.lane(0, sender), self.view.ring(0, sender))
    }

    /// Writes a word of the lanes' headers or of a ring, as the peer may.
    pub(crate) fn spoil(&self, input: &mut Input<'_>) {
        let header = LANES_OFFSET / 8 + input.below(2 * WORDS_OF_LANE);
        let ring = RINGS_OFFSET / 8 + input.below(2 * RING / 8);
        let place = if input.byte().is_multiple_of(8) { ring } else { header };
        let word = &self.memory.0[place];
        word.store(input.lie(word.load(Relaxed)), Relaxed);
    }

    /// Checks that the memory around the connection's lanes and rings is unchanged.
    pub(crate) fn assert_rest_is_whole(&self) {
        let (lanes, rings) = (LANES_OFFSET / 8, RINGS_OFFSET / 8);
        let around = [0..lanes, lanes + 2 * WORDS_OF_LANE..rings, rings + 2 * RING / 8..self.memory.0.len()];
        for word in around.into_iter().flatten().map(|at| &self.memory.0[at]) {
            assert_eq!(word.load(Relaxed), 0, "something else was written");
        }
    }
}

/// A program's buffer.
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    pieces: [Piece; 1],
}

impl Buffer {
    pub(crate) fn new(len: usize) -> Buffer {
        let mut bytes = vec![0xa5; len];
        let pieces = [Piece { base: bytes.as_mut_ptr(), len }];
        Buffer { bytes, pieces }
    }

    pub(crate) fn source(&mut self) -> Source<'_> {
        debug_assert_eq!(self.bytes.len(), self.pieces[0].len);
        // SAFETY: the piece is the vector, which stays borrowed.
        unsafe { Source::new(&self.pieces) }
    }

    pub(crate) fn sink(&mut self) -> Sink<'_> {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { Sink::new(&self.pieces) }
    }
}
