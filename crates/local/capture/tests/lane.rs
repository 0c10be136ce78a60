//! Captures lanes while both ends are working, and lanes with arbitrary content.

use std::cell::Cell;

use proptest::prelude::*;
use shunt_abi::geometry::{Geometry, LANE_FOLLOWED_OFFSET, MIN_RING_BYTES, RINGS_OFFSET, Side};
use shunt_capture::{Lane, Memory};
use shunt_ring::bytes::{MappedRing, Ring};
use shunt_ring::copy::Method;
use shunt_ring::link::LinkView;
use shunt_ring::user::Piece;
use shunt_ring::{Consumer, LaneHeader, Producer, Sink, Source};
use shunt_sys::mapping::Mapping;
use shunt_sys::memfd::create_fixed;
use shunt_sys::view::{View, for_reading};

/// Larger than the block that may be in progress beyond a cursor.
const RING: usize = 128 * 1024;
const CONN: usize = 3;

/// A link, and one of its lanes with both ends.
struct Link {
    memory: Mapping,
    links: LinkView,
    view: View,
    geometry: Geometry,
    producer: Producer,
    consumer: Consumer,
    sent: u64,
    /// Bytes that are written beyond the cursor and not published.
    under_way: usize,
}

impl Link {
    fn new(ring_bytes: usize) -> Link {
        let geometry = Geometry::new(ring_bytes).unwrap();
        let memfd = create_fixed("shunt-test", geometry.link_bytes()).unwrap();
        let memory = Mapping::map(&memfd, geometry.link_bytes()).unwrap();
        // SAFETY: the mapping is kept in the same structure.
        let links = unsafe { LinkView::new(memory.as_ptr(), geometry, true) };
        let view = View::map(for_reading(&memfd).unwrap(), RINGS_OFFSET).unwrap();
        let (producer, consumer) = (Producer::new(), Consumer::new());
        Link { memory, links, view, geometry, producer, consumer, sent: 0, under_way: 0 }
    }

    fn followed(self) -> Link {
        let at = self.geometry.lane_offset(CONN, Side::B) + LANE_FOLLOWED_OFFSET;
        self.memory.half_word(at).unwrap().store(1, std::sync::atomic::Ordering::Relaxed);
        self
    }

    fn lane(&self) -> Lane {
        Lane::new(self.geometry, CONN, Side::B)
    }

    fn parts(&self) -> (&LaneHeader, MappedRing) {
        (self.links.lane(CONN, Side::B), self.links.ring(CONN, Side::B))
    }

    /// Writes up to `count` bytes beyond the cursor, without publishing them. Each byte encodes its
    /// position.
    fn begin_to_send(&mut self, count: usize) {
        self.finish_sending();
        let mut bytes: Vec<u8> = (self.sent..).take(count).map(byte).collect();
        let pieces = [Piece { base: bytes.as_mut_ptr(), len: count }];
        let (header, ring) = (self.links.lane(CONN, Side::B), self.links.ring(CONN, Side::B));
        // SAFETY: the piece is the vector, which outlives it.
        let mut source = unsafe { Source::new(&pieces) };
        self.under_way = self.producer.room(header, &ring, count).unwrap().min(count);
        assert!(ring.fill(self.producer.position(), self.under_way, &mut source, Method::Plain).is_ok());
    }

    fn finish_sending(&mut self) {
        let header = self.links.lane(CONN, Side::B);
        if self.under_way > 0 {
            self.producer.commit(header, self.under_way).unwrap();
            self.sent += std::mem::take(&mut self.under_way) as u64;
        }
    }

    /// Sends up to `count` bytes.
    fn send(&mut self, count: usize) {
        self.finish_sending();
        let mut bytes: Vec<u8> = (self.sent..).take(count).map(byte).collect();
        let pieces = [Piece { base: bytes.as_mut_ptr(), len: count }];
        let (header, ring) = (self.links.lane(CONN, Side::B), self.links.ring(CONN, Side::B));
        // SAFETY: the piece is the vector, which outlives it.
        let mut source = unsafe { Source::new(&pieces) };
        self.producer.write(header, &ring, &mut source).unwrap();
        self.sent += (count - source.remaining()) as u64;
    }

    fn receive(&mut self, count: usize) -> usize {
        let mut bytes = vec![0; count];
        let pieces = [Piece { base: bytes.as_mut_ptr(), len: count }];
        let (header, ring) = (self.links.lane(CONN, Side::B), self.links.ring(CONN, Side::B));
        // SAFETY: as in `send`.
        let mut sink = unsafe { Sink::new(&pieces) };
        self.consumer.read(header, &ring, &mut sink).unwrap()
    }
}

/// Returns the byte at a position of the stream. Runs at different positions within a few rings
/// differ.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Polls a lane, checks every copied byte, and returns the number of missed bytes.
fn look(lane: &mut Lane, memory: &impl Memory, bytes: &mut Vec<u8>) -> u64 {
    let before = lane.seen();
    let look = lane.look(memory, u64::MAX, bytes);
    assert!(!lane.is_spoiled());
    assert_eq!(before + look.missed + bytes.len() as u64, lane.seen());
    let at = before + look.missed;
    let right = bytes.iter().zip(at..).all(|(found, at)| *found == byte(at));
    assert!(right, "others' bytes at {at}..{}", lane.seen());
    look.missed
}

#[test]
fn whoever_is_read_along_leaves_what_was_read_for_a_while() {
    let mut bytes = Vec::new();
    for is_followed in [false, true] {
        let mut link = Link::new(RING);
        if is_followed {
            link = link.followed();
        }
        let mut lane = link.lane();
        for _ in 0..200 {
            link.send(100);
            link.receive(100);
        }
        let missed = look(&mut lane, &link.view, &mut bytes);
        assert_eq!(missed > 0, !is_followed, "{missed}");
        assert_eq!(lane.seen(), 20_000);
    }
}

#[test]
fn what_was_overwritten_is_a_gap_of_its_length() {
    let mut link = Link::new(RING).followed();
    let (mut lane, mut bytes) = (link.lane(), Vec::new());
    for _ in 0..100 {
        link.send(5000);
        link.receive(5000);
    }
    assert_eq!(look(&mut lane, &link.view, &mut bytes), 500_000 - (RING as u64 - 65_536));
    link.send(700);
    assert_eq!((look(&mut lane, &link.view, &mut bytes), bytes.len()), (0, 700));
}

/// A capture may begin while a sender uses the spill, which is not read along.
#[test]
fn what_is_in_the_spill_is_missed_and_what_follows_is_not() {
    let mut link = Link::new(RING);
    let (mut lane, mut bytes) = (link.lane(), Vec::new());
    link.send(RING / 2);
    link.send(RING / 2);
    assert_eq!(look(&mut lane, &link.view, &mut bytes), 0);
    assert_eq!(bytes.len(), RING);
    {
        let (header, ring) = (link.links.lane(CONN, Side::B), link.links.ring(CONN, Side::B));
        assert!(link.producer.spill(header, &ring));
    }
    link.send(500);
    let mut link = link.followed();
    assert_eq!(look(&mut lane, &link.view, &mut bytes), 500);
    assert_eq!(link.receive(2 * RING), RING + 500);
    link.send(300);
    assert_eq!(look(&mut lane, &link.view, &mut bytes), 0);
    assert_eq!(bytes.len(), 300);
}

#[test]
fn how_it_ended_is_told_once_all_has_been_seen() {
    use shunt_capture::Ended;
    use shunt_ring::lane::End;
    let ended = |end: fn(&LaneHeader)| {
        let mut link = Link::new(RING);
        let (mut lane, mut bytes) = (link.lane(), Vec::new());
        assert_eq!(lane.beginning(&link.view), None);
        link.parts().0.begin(7);
        link.send(10);
        assert_eq!(lane.beginning(&link.view), Some(7));
        assert_eq!(look(&mut lane, &link.view, &mut bytes), 0);
        assert_eq!((lane.ended(), lane.has_moved(&link.view)), (None, false));
        link.receive(4);
        link.send(5);
        end(link.parts().0);
        assert!(lane.has_moved(&link.view));
        look(&mut lane, &link.view, &mut bytes);
        assert!(!lane.has_moved(&link.view));
        lane.ended()
    };
    assert_eq!(ended(|lane| lane.close()), Some(Ended::ForTcp(15)));
    assert_eq!(ended(|lane| assert!(lane.give_back())), Some(Ended::ForTcp(4)));
    assert_eq!(
        ended(|lane| {
            lane.set_end(End::ShutDown);
            lane.leave();
        }),
        Some(Ended::WithStream)
    );
    assert_eq!(ended(|lane| lane.set_end(End::Died)), None);
}

/// A memory in which a step of either end happens before every read.
struct Busy<'a> {
    link: &'a mut Cell<Option<Link>>,
    steps: Cell<std::vec::IntoIter<Step>>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Send(usize),
    BeginToSend(usize),
    Receive(usize),
    Nothing,
}

impl Busy<'_> {
    fn with<T>(&self, look: impl FnOnce(&View) -> T) -> T {
        let mut link = self.link.take().unwrap();
        let mut steps = self.steps.take();
        match steps.next() {
            Some(Step::Send(count)) => link.send(count),
            Some(Step::BeginToSend(count)) => link.begin_to_send(count),
            Some(Step::Receive(count)) => drop(link.receive(count)),
            Some(Step::Nothing) | None => {}
        }
        self.steps.set(steps);
        let found = look(&link.view);
        self.link.set(Some(link));
        found
    }
}

impl Memory for Busy<'_> {
    fn word(&self, offset: usize) -> Option<u64> {
        self.with(|view| view.word(offset))
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> bool {
        // Read one half, and the other half after the next step.
        let (first, second) = bytes.split_at_mut(bytes.len() / 2);
        let half = first.len();
        self.with(|view| view.read(offset, first)) && self.with(|view| view.read(offset + half, second))
    }
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1usize..3000).prop_map(Step::Send),
        1 => (1usize..65_536).prop_map(Step::Send),
        2 => (1usize..65_536).prop_map(Step::BeginToSend),
        4 => (1usize..70_000).prop_map(Step::Receive),
        1 => Just(Step::Nothing),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(50))]

    #[test]
    fn every_byte_that_is_shown_is_the_one_that_was_sent(
        is_followed in any::<bool>(),
        steps in proptest::collection::vec(any_step(), 1..300),
    ) {
        let link = Link::new(RING);
        let mut lane = link.lane();
        let mut link = Cell::new(Some(if is_followed { link.followed() } else { link }));
        let busy = Busy { link: &mut link, steps: Cell::new(steps.into_iter()) };
        let mut bytes = Vec::new();
        for _ in 0..60 {
            look(&mut lane, &busy, &mut bytes);
        }
        let mut link = link.into_inner().unwrap();
        link.finish_sending();
        look(&mut lane, &link.view, &mut bytes);
        prop_assert_eq!(lane.seen(), link.sent);
    }

    #[test]
    fn rubbish_is_survived(
        words in proptest::collection::vec((0usize..40, prop_oneof![any::<u64>(), 0..20_000u64, Just(u64::MAX)]), 1..60),
    ) {
        let link = Link::new(MIN_RING_BYTES);
        let mut lane = link.lane();
        let (header, mut bytes) = (link.geometry.lane_offset(CONN, Side::B), Vec::new());
        for (at, word) in words {
            link.memory.word(header + at * 8).unwrap().store(word, std::sync::atomic::Ordering::Relaxed);
            let before = lane.seen();
            let look = lane.look(&link.view, u64::MAX, &mut bytes);
            prop_assert!(bytes.len() <= MIN_RING_BYTES);
            prop_assert!(lane.seen() == before + look.missed + bytes.len() as u64);
            let _ = (lane.beginning(&link.view), lane.ended(), lane.has_moved(&link.view));
        }
    }
}
