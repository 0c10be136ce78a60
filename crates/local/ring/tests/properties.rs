//! Random operations on a lane in ordinary memory: compared with those on a queue, and run against
//! a peer that writes random values.

#![cfg(not(loom))]

mod common;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use proptest::collection::vec;
use proptest::prelude::*;
use shunt_ring::bytes::{MappedRing, Ring, SPILL};
use shunt_ring::user::Piece;
use shunt_ring::{Consumer, LaneHeader, Misbehaved, Producer, Published, ReadError, Sink, Source, Spill};

use common::Buffer;

/// The number of bytes on each side of a ring that no write may touch.
const GUARD: usize = 64;
/// A spill is this many times as long as its ring.
const SPILL_TIMES: usize = 2;
const CLOSED: u64 = 1 << 63;
const SPILLED: u64 = 1 << 60;

#[derive(Clone, Debug)]
enum Op {
    Write(usize, Vec<usize>),
    /// Fills the ring from outside, as a splice would, then commits.
    Commit(usize),
    Read(usize, Vec<usize>),
    Peek(usize, Vec<usize>),
    Discard(usize),
    Spill,
    HoldSpill,
    CloseBySender,
    CloseByReceiver,
}

fn op() -> impl Strategy<Value = Op> {
    let cuts = || vec(any::<usize>(), 0..4);
    prop_oneof![
        8 => (1..100usize, cuts()).prop_map(|(len, cuts)| Op::Write(len, cuts)),
        2 => (1..100usize).prop_map(Op::Commit),
        8 => (1..100usize, cuts()).prop_map(|(len, cuts)| Op::Read(len, cuts)),
        2 => (1..100usize, cuts()).prop_map(|(len, cuts)| Op::Peek(len, cuts)),
        2 => (0..20usize).prop_map(Op::Discard),
        2 => Just(Op::Spill),
        1 => Just(Op::HoldSpill),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let end = prop_oneof![Just(vec![Op::CloseBySender]), Just(vec![Op::CloseByReceiver]), Just(vec![])];
    (vec(op(), 1..60), end, vec(op(), 0..10)).prop_map(|(head, end, tail)| [head, end, tail].concat())
}

/// A lane with both its ends.
struct Lane {
    header: LaneHeader,
    memory: Vec<u8>,
    ring: MappedRing,
    producer: Producer,
    consumer: Consumer,
    /// Bytes written to the lane so far: the next byte is `pattern(written)`.
    written: u64,
}

impl Lane {
    fn new(size: usize) -> Lane {
        let mut memory = vec![0xee; (1 + SPILL_TIMES) * size + 3 * GUARD];
        let (start, spill) = (memory.as_mut_ptr().wrapping_add(GUARD), SPILL_TIMES * size);
        // SAFETY: the vector is kept next to the ring and never resized.
        let ring =
            unsafe { MappedRing::new(start, size).with_spill(start.wrapping_add(size + GUARD), spill) };
        Lane {
            header: LaneHeader::new(),
            memory,
            ring,
            producer: Producer::new(),
            consumer: Consumer::new(),
            written: 0,
        }
    }

    fn write(&mut self, len: usize, cuts: &[usize]) -> Result<Published, Misbehaved> {
        let mut buffer = Buffer::new(self.next_bytes(len), cuts);
        let mut source = buffer.source();
        let outcome = self.producer.write(&self.header, &self.ring, &mut source);
        let count = count(outcome);
        assert_eq!(len - source.remaining(), count, "a source moves by what was published");
        self.written += count as u64;
        outcome
    }

    fn commit(&mut self, wanted: usize) -> Result<Published, Misbehaved> {
        let room = self.producer.room(&self.header, &self.ring, wanted)?.min(wanted);
        let bytes = self.next_bytes(room);
        let mut put = 0;
        while put < room {
            let (to, run) = self.ring.run(self.producer.position() + put as u64, room - put);
            // SAFETY: `run` stays inside the ring.
            unsafe { std::ptr::copy_nonoverlapping(bytes[put..].as_ptr(), to, run) };
            put += run;
        }
        let outcome = self.producer.commit(&self.header, room);
        self.written += count(outcome) as u64;
        outcome
    }

    fn read(&mut self, len: usize, cuts: &[usize], peek: bool) -> Result<Vec<u8>, ReadError> {
        let mut buffer = Buffer::zeroed(len, cuts);
        let mut sink = buffer.sink();
        let outcome = match peek {
            true => self.consumer.peek(&self.header, &self.ring, &mut sink),
            false => self.consumer.read(&self.header, &self.ring, &mut sink),
        };
        assert_eq!(len - sink.remaining(), outcome.unwrap_or(0), "a sink moves by what was read");
        outcome.map(|count| buffer.bytes()[..count].to_vec())
    }

    fn next_bytes(&self, len: usize) -> Vec<u8> {
        (self.written..self.written + len as u64).map(pattern).collect()
    }

    fn guards_are_whole(&self) -> bool {
        let (front, rest) = self.memory.split_at(GUARD);
        let between = &rest[self.ring.len()..][..GUARD];
        let back = &rest[rest.len() - GUARD..];
        [front, between, back].concat().iter().all(|&byte| byte == 0xee)
    }
}

/// The test's own state of a lane's spill: its first byte, and whether it is held.
type Spilled = Option<(u64, bool)>;

/// Returns the room in the lane for the next byte, which leaves the spill if the lane is empty.
fn room(lane: &Lane, spilled: &mut Spilled, unread: usize) -> usize {
    if unread == 0 {
        *spilled = None;
    }
    match *spilled {
        None => lane.ring.len() - unread,
        Some((_, true)) => 0,
        Some((at, false)) => {
            let head = lane.written - unread as u64;
            lane.ring.spill_len() - (lane.written - at.max(head)) as usize
        }
    }
}

fn pattern(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Unread bytes are returned from the ring and from the spill.
#[test]
fn what_is_given_back_is_in_two_ranges() {
    let mut lane = Lane::new(16);
    assert_eq!(lane.write(16, &[]), Ok(Published::Bytes(16)));
    assert_eq!(lane.write(5, &[]), Ok(Published::Full));
    assert_eq!(lane.producer.spill_of(&lane.header, &lane.ring), Spill::Closed);
    assert!(lane.producer.spill(&lane.header, &lane.ring));
    assert_eq!(lane.write(5, &[]), Ok(Published::Bytes(5)));
    assert_eq!(lane.read(3, &[], false).map(|bytes| bytes.len()), Ok(3));
    assert!(lane.header.give_back());
    assert_eq!(lane.write(1, &[]), Ok(Published::Returned));
    let ranges = lane.producer.unread_ranges();
    assert_eq!(ranges, [3..16, SPILL..SPILL + 5]);
    let given: Vec<u8> = ranges
        .into_iter()
        .flatten()
        .map(|at| {
            // SAFETY: a byte of the ring or its spill.
            unsafe { *lane.ring.run(at, 1).0 }
        })
        .collect();
    assert_eq!(given, (3..21).map(pattern).collect::<Vec<u8>>());
}

/// A lane that a capture reads does not spill.
#[test]
fn a_lane_that_is_followed_does_not_spill() {
    let mut lane = Lane::new(16);
    Poke::Small(84, 1).apply(&lane.header);
    assert_eq!(lane.producer.spill_of(&lane.header, &lane.ring), Spill::None);
    assert!(!lane.producer.spill(&lane.header, &lane.ring));
}

/// The receiver's fast path finds nothing while bytes are in the spill.
#[test]
fn what_is_in_the_spill_is_not_found_at_once() {
    let mut lane = Lane::new(16);
    lane.write(16, &[]).unwrap();
    assert_eq!(lane.consumer.look_at_once(&lane.header, &lane.ring, 4), Some(4));
    lane.producer.spill(&lane.header, &lane.ring);
    lane.write(4, &[]).unwrap();
    // Those bytes were known before.
    assert_eq!(lane.consumer.look_at_once(&lane.header, &lane.ring, 16), Some(16));
    assert_eq!(lane.consumer.take(&lane.header, 16), Ok(()));
    assert_eq!(lane.consumer.look_at_once(&lane.header, &lane.ring, 4), None);
    assert_eq!(lane.consumer.available_at_once(&lane.header, &lane.ring), None);
    assert_eq!(lane.consumer.available(&lane.header, &lane.ring), Ok(4));
    assert_eq!(lane.consumer.look_at_once(&lane.header, &lane.ring, 4), None);
    assert_eq!(lane.read(4, &[], false).map(|bytes| bytes.len()), Ok(4));
    // The lane is empty, so the next byte is in the ring.
    lane.write(1, &[]).unwrap();
    assert_eq!(lane.consumer.look_at_once(&lane.header, &lane.ring, 4), None, "it looks first");
    assert_eq!(lane.consumer.available(&lane.header, &lane.ring), Ok(1));
    assert_eq!(lane.consumer.look_at_once(&lane.header, &lane.ring, 1), Some(1));
}

fn count(outcome: Result<Published, Misbehaved>) -> usize {
    match outcome {
        Ok(Published::Bytes(count)) => count,
        _ => 0,
    }
}

#[test]
fn a_call_publishes_a_block_at_the_most() {
    const BLOCK: usize = 64 * 1024;
    for len in [1, BLOCK / 2, BLOCK / 2 + 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK] {
        assert_eq!(Lane::new(4 * BLOCK).write(len, &[]), Ok(Published::Bytes(len.min(BLOCK))));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_lane_is_a_queue_with_an_end(bits in 0..7u32, ops in ops()) {
        let size = 1 << bits;
        let mut lane = Lane::new(size);
        let mut queue = VecDeque::new();
        let (mut closed, mut spilled) = (false, None);
        for op in ops {
            let room = match op {
                Op::Write(..) | Op::Commit(_) => room(&lane, &mut spilled, queue.len()),
                _ => 0,
            };
            match op {
                Op::Write(len, cuts) => {
                    let before = lane.written;
                    let expected = match () {
                        () if closed => Published::Closed,
                        () if room == 0 => Published::Full,
                        () => Published::Bytes(len.min(room)),
                    };
                    prop_assert_eq!(lane.write(len, &cuts), Ok(expected));
                    queue.extend((before..lane.written).map(pattern));
                }
                Op::Commit(wanted) => {
                    let before = lane.written;
                    let expected = if closed { Published::Closed } else { Published::Bytes(wanted.min(room)) };
                    prop_assert_eq!(lane.commit(wanted), Ok(expected));
                    queue.extend((before..lane.written).map(pattern));
                }
                Op::Read(len, cuts) => {
                    let expected: Vec<u8> = queue.drain(..len.min(queue.len())).collect();
                    prop_assert_eq!(lane.read(len, &cuts, false), Ok(expected));
                }
                Op::Peek(len, cuts) => {
                    let expected: Vec<u8> = queue.iter().copied().take(len).collect();
                    prop_assert_eq!(lane.read(len, &cuts, true), Ok(expected));
                }
                Op::Discard(len) => {
                    let expected = queue.drain(..len.min(queue.len())).count();
                    prop_assert_eq!(lane.consumer.discard(&lane.header, &lane.ring, len), Ok(expected));
                }
                Op::Spill => {
                    prop_assert!(lane.producer.spill(&lane.header, &lane.ring));
                    spilled = Some((spilled.map_or(lane.written, |(at, _)| at), false));
                }
                Op::HoldSpill => {
                    lane.producer.hold_spill();
                    spilled = spilled.map(|(at, _)| (at, true));
                }
                Op::CloseBySender | Op::CloseByReceiver => {
                    lane.header.close();
                    closed = true;
                }
            }
            prop_assert_eq!(lane.producer.unread(&lane.header), Ok(queue.len() as u64));
            prop_assert_eq!(lane.consumer.available(&lane.header, &lane.ring), Ok(queue.len()));
            prop_assert_eq!(lane.consumer.is_finished(), closed && queue.is_empty());
            prop_assert_eq!(lane.consumer.consumed() + queue.len() as u64, lane.producer.published());
            prop_assert_eq!(lane.header.is_closed(), closed);
        }
        prop_assert!(lane.guards_are_whole());
    }

    #[test]
    fn rubbish_in_the_header_harms_nobody_else(
        bits in 0..7u32,
        ops in vec((op(), proptest::option::of(poke())), 1..60),
        closing in any::<bool>(),
    ) {
        let mut lane = Lane::new(1 << bits);
        for (op, poke) in ops {
            if let Some(poke) = poke {
                poke.apply(&lane.header);
            }
            let (written, read) = (lane.producer.published(), lane.consumer.consumed());
            // `write` and `read` check the counts; the lane may return any outcome, but no count
            // may decrease.
            match op {
                Op::Write(len, cuts) => drop(lane.write(len, &cuts)),
                Op::Commit(wanted) => drop(lane.commit(wanted)),
                Op::Read(len, cuts) => drop(lane.read(len, &cuts, false)),
                Op::Peek(len, cuts) => drop(lane.read(len, &cuts, true)),
                Op::Discard(len) => drop(lane.consumer.discard(&lane.header, &lane.ring, len)),
                Op::Spill => drop(lane.producer.spill(&lane.header, &lane.ring)),
                Op::HoldSpill => lane.producer.hold_spill(),
                Op::CloseBySender | Op::CloseByReceiver => {}
            }
            if closing {
                lane.header.close();
            }
            let size = (lane.ring.len() + lane.ring.spill_len()) as u64;
            prop_assert!((written..=written + size).contains(&lane.producer.published()));
            // A reader may learn that another process has read a whole ring before it.
            prop_assert!((read..=read + size + 100).contains(&lane.consumer.consumed()));
            prop_assert!(lane.consumer.available(&lane.header, &lane.ring).unwrap_or(0) as u64 <= size);
            prop_assert!(lane.producer.unread(&lane.header).unwrap_or(0) <= size);
            prop_assert!(lane.header.rx_waiter().is_none_or(|slot| slot < 64));
            prop_assert!(lane.header.take_space_wanted().is_none_or(|slot| slot < 64));
            let _ = (lane.header.beginning(), lane.header.end(), lane.header.is_watched());
        }
        prop_assert!(lane.guards_are_whole());
    }
}

#[test]
fn memory_that_cannot_be_touched_neither_sends_nor_takes() {
    let mut lane = Lane::new(64);
    lane.write(10, &[]).unwrap();
    let mut bytes = [0u8; 30];
    let base = bytes.as_mut_ptr();
    // A good piece, and one that the program must not touch.
    let pieces = [Piece { base, len: 4 }, Piece { base: std::ptr::null_mut(), len: 20 }];
    let reach = |base: *mut u8, _| !base.is_null();
    // SAFETY: the piece that is not null lies in `bytes`.
    let (mut source, mut sink) = unsafe { (Source::checked(&pieces, reach), Sink::checked(&pieces, reach)) };
    assert_eq!(lane.producer.write(&lane.header, &lane.ring, &mut source), Ok(Published::Fault));
    assert_eq!((source.remaining(), lane.producer.published()), (24, 10));
    assert_eq!(lane.consumer.peek(&lane.header, &lane.ring, &mut { sink }), Err(ReadError::Fault));
    assert_eq!(lane.consumer.read(&lane.header, &lane.ring, &mut sink), Err(ReadError::Fault));
    assert_eq!((sink.remaining(), lane.consumer.consumed()), (24, 0));
    // As much as fits into the good piece can be read.
    lane.consumer.discard(&lane.header, &lane.ring, 7).unwrap();
    assert_eq!(lane.consumer.read(&lane.header, &lane.ring, &mut sink), Ok(3));
}

/// One word of the header, overwritten by the other process.
#[derive(Clone, Debug)]
enum Poke {
    Tail(u64),
    Start(u64),
    Head(u64),
    SpilledAt(u64),
    /// One of the 32-bit words, by its offset.
    Small(usize, u32),
}

fn poke() -> impl Strategy<Value = Poke> {
    // Values that could be right are the dangerous ones.
    let cursor = || {
        let flagged = |flag| (0..300u64).prop_map(move |near| near | flag);
        prop_oneof![0..300u64, flagged(CLOSED), flagged(SPILLED), flagged(CLOSED | SPILLED), any::<u64>()]
    };
    let small = prop_oneof![0..3u32, 60..70u32, any::<u32>()];
    prop_oneof![
        3 => cursor().prop_map(Poke::Tail),
        1 => prop_oneof![any::<u64>(), Just(u64::MAX), Just(0)].prop_map(Poke::Start),
        3 => cursor().prop_map(Poke::Head),
        1 => cursor().prop_map(Poke::SpilledAt),
        1 => (prop::sample::select(vec![72, 76, 80, 192, 196, 200]), small).prop_map(|(at, value)| Poke::Small(at, value)),
    ]
}

impl Poke {
    fn apply(self, header: &LaneHeader) {
        let base: *const u8 = std::ptr::from_ref(header).cast();
        let store = |at: usize, value: u64| {
            // SAFETY: the header is made of atomics, and `at` is where one of 64 bits begins.
            unsafe { (*base.wrapping_add(at).cast::<AtomicU64>()).store(value, Relaxed) };
        };
        match self {
            Poke::Tail(value) => store(0, value),
            Poke::Start(value) => store(64, value),
            Poke::Head(value) => store(128, value),
            Poke::SpilledAt(value) => store(112, value),
            // SAFETY: as above, for 32 bits.
            Poke::Small(at, value) => unsafe {
                (*base.wrapping_add(at).cast::<AtomicU32>()).store(value, Relaxed)
            },
        }
    }
}

/// The receiver is one lap behind, and still on the page that the sender would write.
#[test]
fn nothing_goes_at_once_that_there_is_no_room_for() {
    const SIZE: usize = 8192;
    let mut memory = vec![0; SIZE];
    // SAFETY: the vector is never resized.
    let ring = unsafe { MappedRing::new(memory.as_mut_ptr(), SIZE) };
    let (header, mut producer, mut consumer) = (LaneHeader::new(), Producer::new(), Consumer::new());
    let write =
        |producer: &mut Producer, len| producer.write(&header, &ring, &mut Buffer::zeroed(len, &[]).source());
    assert_eq!(write(&mut producer, SIZE), Ok(Published::Bytes(SIZE)));
    assert_eq!(consumer.read(&header, &ring, &mut Buffer::zeroed(100, &[]).sink()), Ok(100));
    assert_eq!(write(&mut producer, 10), Ok(Published::Bytes(10)));
    assert_eq!(producer.place_at_once(&header, &ring, 90), Some(SIZE as u64 + 10));
    assert_eq!(producer.place_at_once(&header, &ring, 91), None);
}

/// The fast path returns to the first page as a write does: only if the lane is empty, and for no
/// more than a page.
#[test]
fn what_leaves_its_page_at_once_goes_to_the_first() {
    const SIZE: usize = 8192;
    let mut memory = vec![0; SIZE];
    // SAFETY: the vector is never resized.
    let ring = unsafe { MappedRing::new(memory.as_mut_ptr(), SIZE) };
    let (header, mut producer, mut consumer) = (LaneHeader::new(), Producer::new(), Consumer::new());
    assert_eq!(producer.place_at_once(&header, &ring, 1), None, "its memory has not been asked for");
    let written = producer.write(&header, &ring, &mut Buffer::zeroed(4000, &[]).source());
    assert_eq!(written, Ok(Published::Bytes(4000)));
    assert_eq!(producer.place_at_once(&header, &ring, 96), Some(4000));
    assert_eq!(producer.place_at_once(&header, &ring, 97), None);
    assert_eq!(consumer.read(&header, &ring, &mut Buffer::zeroed(4000, &[]).sink()), Ok(4000));
    assert_eq!(producer.place_at_once(&header, &ring, 97), Some(0));
    assert_eq!(producer.publish(&header, 97), Ok(()));
    assert_eq!(consumer.look_at_once(&header, &ring, SIZE), Some(97));
    assert_eq!(consumer.place(&header), 0);
    assert_eq!(consumer.take(&header, 97), Ok(()));
    assert_eq!(producer.place_at_once(&header, &ring, 4097), None);
}
