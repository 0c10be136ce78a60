//! A peer that writes anything to the words of a lane, at any moment. Neither direction panics,
//! loops or takes more than there is. A lane whose peer has been caught is left for a named reason
//! (L5).

#![cfg(not(loom))]

mod common;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use proptest::collection::vec;
use proptest::prelude::*;
use shunt_abi::reason::{Reason, Transport};
use shunt_ring::bytes::{MappedRing, Ring};
use shunt_ring::copy::Method;
use shunt_ring::user::Fault;
use shunt_ring::{LaneHeader, Sink, Source};
use shunt_transport::{EAGAIN, Kernel, Received, Rx, Sent, Tx, Waiting};

use common::{Buffer, Wire};

const RING: usize = 64;
const SPILL: usize = 2 * RING;
/// The most bytes that a lane contains.
const WHOLE: usize = RING + SPILL;
const SPILLED: u64 = 1 << 60;
const CLOSED: u64 = 1 << 63;
const RETURNED: u64 = 1 << 62;
/// The same bit in `head`: the sender has reclaimed the returned bytes.
const TAKEN: u64 = 1 << 63;
/// Offsets of the words that the two ends read of each other, two of 32 bits at a time.
const TAIL: usize = 0;
const START: usize = 64;
const END: usize = 72;
const BASE: usize = 88;
const SPILLED_AT: usize = 112;
const HEAD: usize = 128;
const WANTS: usize = 80;
const WATCHING: usize = 192;
const OVER: usize = 200;

/// A peer's change to a lane, with its name.
type Lie = (&'static str, fn(&Lane));
/// A sender's call, with its name.
type Deed = (&'static str, fn(&mut Tx, &Lane));

/// A lane whose words the peer can write.
struct Lane {
    header: LaneHeader,
    ring: MappedRing,
    _memory: Vec<u8>,
}

impl Lane {
    fn new() -> Lane {
        let mut memory = vec![0; WHOLE];
        let start = memory.as_mut_ptr();
        // SAFETY: the vector is kept next to the ring and never resized.
        let ring = unsafe { MappedRing::new(start, RING).with_spill(start.wrapping_add(RING), SPILL) };
        Lane { header: LaneHeader::new(), ring, _memory: memory }
    }

    fn poke(&self, offset: usize, word: u64) {
        self.word(offset).store(word, Relaxed);
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        let at = std::ptr::from_ref(&self.header).cast::<AtomicU64>().wrapping_byte_add(offset);
        // SAFETY: inside the header, which is made of atomics and aligned to its line.
        unsafe { &*at }
    }
}

/// The peer's socket beneath. The peer sends correctly by TCP.
#[derive(Default)]
struct Tcp(RefCell<Wire>);

impl Kernel for Tcp {
    fn sent(&self) -> Option<u64> {
        Some(0)
    }

    fn read(&self) -> Option<u64> {
        self.0.borrow().read()
    }

    fn received(&self) -> u64 {
        self.0.borrow().arrived_total()
    }

    fn waiting(&self) -> Waiting {
        self.0.borrow().waiting()
    }

    fn receive(&self, sink: &mut Sink<'_>) -> Result<usize, i32> {
        self.0.borrow_mut().receive(sink)
    }
}

/// A peer's change of a word in the middle of a call.
#[derive(Clone, Copy, Debug)]
enum Twist {
    Store(u64),
    Add(u64),
    Set(u64),
    Clear(u64),
}

/// The peer's changes between two steps of a call.
type Turn = Vec<(usize, Twist)>;

/// A peer that acts during a call: whenever the call touches the ring or asks TCP, the peer takes
/// the next of its turns, over and over again.
struct Busy<'a> {
    lane: &'a Lane,
    tcp: &'a Tcp,
    turns: &'a [Turn],
    steps: Cell<usize>,
}

/// A call that has moved this many bytes through so small a ring loops for ever.
const FOR_EVER: usize = 64 * WHOLE;

impl Busy<'_> {
    fn step(&self) {
        let step = self.steps.replace(self.steps.get() + 1);
        assert!(step < FOR_EVER, "a call does not end");
        for (place, twist) in self.turns.get(step % self.turns.len().max(1)).into_iter().flatten() {
            let word = self.lane.word(*place);
            let now = word.load(Relaxed);
            let twisted = match twist {
                Twist::Store(other) => *other,
                Twist::Add(more) => now.wrapping_add(*more),
                Twist::Set(bits) => now | bits,
                Twist::Clear(bits) => now & !bits,
            };
            word.store(twisted, Relaxed);
        }
    }
}

impl Ring for Busy<'_> {
    fn len(&self) -> usize {
        self.lane.ring.len()
    }

    fn spill_len(&self) -> usize {
        self.lane.ring.spill_len()
    }

    fn back(&self, _: u64, _: usize) -> Result<(), Reason> {
        self.step();
        Ok(())
    }

    fn fill(&self, at: u64, count: usize, source: &mut Source<'_>, method: Method) -> Result<(), Fault> {
        self.step();
        self.lane.ring.fill(at, count, source, method)
    }

    fn drain(&self, at: u64, count: usize, sink: &mut Sink<'_>) -> Result<(), Fault> {
        self.step();
        self.lane.ring.drain(at, count, sink)
    }
}

impl Kernel for Busy<'_> {
    fn sent(&self) -> Option<u64> {
        self.step();
        self.tcp.sent()
    }

    fn read(&self) -> Option<u64> {
        self.step();
        self.tcp.read()
    }

    fn received(&self) -> u64 {
        self.tcp.received()
    }

    fn waiting(&self) -> Waiting {
        self.step();
        self.tcp.waiting()
    }

    fn receive(&self, sink: &mut Sink<'_>) -> Result<usize, i32> {
        self.step();
        self.tcp.receive(sink)
    }
}

fn write(tx: &mut Tx, lane: &Lane, len: usize) -> Sent {
    tx.write(&lane.header, &lane.ring, &mut Buffer::zeroed(len, &[]).source())
}

/// Returns a sender on its lane with ten bytes under way.
fn sender(lane: &Lane) -> Tx {
    let mut tx = Tx::default();
    tx.adopt();
    lane.header.watch();
    assert_eq!(tx.transport(&lane.header, &Tcp::default(), true), Transport::Shm);
    assert_eq!(write(&mut tx, lane, 10), Sent::Bytes(10));
    tx
}

#[test]
fn a_sender_leaves_a_lane_whose_reader_lies() {
    let lies: [Lie; 3] = [
        ("has read what was never sent", |lane| lane.poke(HEAD, 1000)),
        ("has read what was never sent, and gives it back", |lane| {
            lane.poke(HEAD, 1000);
            lane.header.give_back();
        }),
        ("has sent on the sender's behalf", |lane| lane.poke(TAIL, 20)),
    ];
    let deeds: [Deed; 4] = [
        ("write", |tx, lane| assert_eq!(write(tx, lane, RING), Sent::UseTcp)),
        ("write_with", |tx, lane| {
            let sent = tx.write_with(&lane.header, &lane.ring, RING, |_, room| Ok::<_, ()>(room));
            assert_eq!(sent, Ok(Sent::UseTcp));
        }),
        ("notice_return", |tx, lane| tx.notice_return(&lane.header)),
        ("close", |tx, lane| tx.close(&lane.header, Reason::Fork)),
    ];
    for (lie, tell) in lies {
        for (deed, act) in deeds {
            let lane = Lane::new();
            let mut tx = sender(&lane);
            tell(&lane);
            act(&mut tx, &lane);
            // The receiver returned nothing, so the sender saw nothing.
            if deed == "notice_return" && !lane.header.is_returned() {
                assert_eq!(write(&mut tx, &lane, RING), Sent::UseTcp);
            }
            assert!(!tx.on_lane() && lane.header.is_closed(), "{lie}, seen by {deed}");
            // A call that leaves the lane anyway may leave it before it sees the lie.
            let named = tx.reason() == Reason::PeerMisbehaved || deed == "close";
            assert!(named, "{lie}, seen by {deed}: {:?}", tx.reason());
        }
    }
}

#[test]
fn a_receiver_leaves_a_lane_whose_sender_lies() {
    let lies: [Lie; 6] = [
        ("more than ring and spill hold", |lane| {
            lane.poke(SPILLED_AT, 8);
            lane.poke(TAIL, (8 + SPILL as u64 + 1) | SPILLED);
        }),
        ("more before the spill than the ring holds", |lane| {
            lane.poke(SPILLED_AT, 8 + RING as u64 + 1);
            lane.poke(TAIL, (8 + RING as u64 + 2) | SPILLED);
        }),
        ("a spill that begins behind its end", |lane| {
            lane.poke(SPILLED_AT, 20);
            lane.poke(TAIL, 19 | SPILLED);
        }),
        ("more than the ring holds", |lane| lane.poke(TAIL, RING as u64 + 9)),
        ("a tail that goes back", |lane| lane.poke(TAIL, 3)),
        ("a base ahead of what was read", |lane| {
            lane.poke(BASE, 1000);
            lane.poke(TAIL, 20);
        }),
    ];
    for (lie, tell) in lies {
        let (lane, tcp) = (Lane::new(), Tcp::default());
        let mut rx = Rx::default();
        rx.adopt();
        assert!(rx.try_watch(&lane.header, &Tcp::default(), true));
        lane.header.begin(0);
        lane.poke(TAIL, 8);
        let mut buffer = Buffer::zeroed(8, &[]);
        assert_eq!(rx.receive(&lane.header, &lane.ring, &tcp, &mut buffer.sink()), Received::Bytes(8));
        tell(&lane);
        assert_eq!(rx.receive(&lane.header, &lane.ring, &tcp, &mut buffer.sink()), Received::UseTcp, "{lie}");
        assert_eq!((rx.reason(), lane.header.is_closed()), (Reason::PeerMisbehaved, true), "{lie}");
    }
}

/// A program that only polls must learn from TCP what follows, like one that receives.
#[test]
fn receiver_that_only_counts_leaves_a_lane_whose_sender_lies() {
    type Count = (&'static str, fn(&mut Rx, &Lane, &Tcp) -> usize);
    let counts: [Count; 4] = [
        ("available", |rx, lane, tcp| rx.available(&lane.header, &lane.ring, tcp)),
        ("unread", |rx, lane, _| rx.unread(&lane.header, &lane.ring)),
        ("arrived_total", |rx, lane, _| rx.arrived_total(&lane.header, &lane.ring) as usize),
        ("discard", |rx, lane, tcp| rx.discard(&lane.header, &lane.ring, tcp, 1)),
    ];
    for (name, count) in counts {
        let (lane, tcp) = (Lane::new(), Tcp::default());
        let mut rx = Rx::default();
        rx.adopt();
        assert!(rx.try_watch(&lane.header, &tcp, true));
        lane.header.begin(0);
        assert_eq!(rx.available(&lane.header, &lane.ring, &tcp), 0);
        lane.poke(TAIL, RING as u64 + 1);
        assert_eq!(count(&mut rx, &lane, &tcp), 0, "{name}");
        assert_eq!((rx.reason(), rx.is_attached()), (Reason::PeerMisbehaved, false), "{name}");
        assert!(lane.header.is_closed(), "{name}");
    }
}

/// The sender reclaims bytes that the receiver has not returned, and sends more each time the
/// receiver has copied.
#[test]
fn a_sender_that_takes_back_and_sends_more_keeps_no_receiver() {
    for len in [8, RING] {
        let (lane, tcp) = (Lane::new(), Tcp::default());
        let mut rx = Rx::default();
        rx.adopt();
        assert!(rx.try_watch(&lane.header, &tcp, true));
        lane.header.begin(0);
        lane.poke(TAIL, 8);
        let turn = vec![(HEAD, Twist::Set(TAKEN)), (TAIL, Twist::Add(8))];
        let busy = Busy { lane: &lane, tcp: &tcp, turns: &[turn], steps: Cell::new(0) };
        let mut buffer = Buffer::zeroed(len, &[]);
        rx.receive(&lane.header, &busy, &busy, &mut buffer.sink());
        assert_eq!(rx.reason(), Reason::PeerMisbehaved);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Poke(usize, u64),
    /// The peer sends by TCP.
    Tcp(usize),
    Transport,
    Write(usize),
    WriteAtOnce(usize),
    WriteWith(usize, usize),
    NoticeReturn,
    Returned(usize),
    Receive(usize),
    ReceiveAtOnce(usize),
    Peek(usize),
    Discard(usize),
    Ask,
    CloseTx,
    CloseRx,
    GiveBack,
    Spill,
    HoldSpill,
}

fn place() -> impl Strategy<Value = usize> {
    prop::sample::select(vec![TAIL, START, END, WANTS, BASE, SPILLED_AT, HEAD, WATCHING, OVER])
}

fn flags() -> impl Strategy<Value = u64> {
    prop::sample::select(vec![0, CLOSED, RETURNED, CLOSED | RETURNED, SPILLED, SPILLED | CLOSED])
}

fn twist() -> impl Strategy<Value = Twist> {
    prop_oneof![
        2 => (0..200u64, flags()).prop_map(|(at, flags)| Twist::Store(at | flags)),
        3 => (1..40u64).prop_map(Twist::Add),
        3 => flags().prop_map(Twist::Set),
        2 => flags().prop_map(Twist::Clear),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    // Values that could be right are the dangerous ones.
    let near = || prop_oneof![0..4u64, 0..200u64, (0..200u64).prop_map(|at| at + (1 << 32))];
    let word = prop_oneof![
        4 => (near(), flags()).prop_map(|(at, flags)| at | flags),
        1 => any::<u64>(),
        1 => Just(u64::MAX),
    ];
    let len = || 1..100usize;
    prop_oneof![
        10 => (place(), word).prop_map(|(place, word)| Op::Poke(place, word)),
        3 => len().prop_map(Op::Tcp),
        3 => Just(Op::Transport),
        4 => len().prop_map(Op::Write),
        4 => len().prop_map(Op::WriteAtOnce),
        2 => (len(), len()).prop_map(|(wanted, count)| Op::WriteWith(wanted, count)),
        1 => Just(Op::NoticeReturn),
        2 => len().prop_map(Op::Returned),
        5 => len().prop_map(Op::Receive),
        5 => len().prop_map(Op::ReceiveAtOnce),
        3 => len().prop_map(Op::Peek),
        2 => len().prop_map(Op::Discard),
        3 => Just(Op::Ask),
        1 => Just(Op::CloseTx),
        1 => Just(Op::CloseRx),
        1 => Just(Op::GiveBack),
        2 => Just(Op::Spill),
        1 => Just(Op::HoldSpill),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Both directions of one endpoint, each on a lane whose words the peer changes.
    #[test]
    fn anything_in_the_words_of_a_lane_is_survived(ops in vec(op(), 1..80)) {
        let (out, inn, tcp) = (Lane::new(), Lane::new(), Tcp::default());
        let (mut tx, mut rx) = (Tx::default(), Rx::default());
        tx.adopt();
        rx.adopt();
        rx.try_watch(&inn.header, &tcp, true);
        for op in ops {
            match op {
                Op::Poke(place, word) => {
                    out.poke(place, word);
                    inn.poke(place, word);
                }
                Op::Tcp(len) => {
                    let mut wire = tcp.0.borrow_mut();
                    wire.send(std::iter::repeat_n(7, len));
                    wire.arrive(len);
                }
                Op::Transport => drop(tx.transport(&out.header, &tcp, true)),
                Op::Write(len) => {
                    if let Sent::Bytes(count) = write(&mut tx, &out, len) {
                        prop_assert!((1..=len.min(WHOLE)).contains(&count));
                    }
                }
                Op::Spill => drop(tx.spill(&out.header, &out.ring)),
                Op::HoldSpill => tx.hold_spill(),
                Op::WriteAtOnce(len) => {
                    if let Some(found) = tx.place_at_once(&out.header, &out.ring, len) {
                        prop_assert_eq!(out.ring.run(found.place, len).1, len);
                        found.publish(&out.header);
                    }
                }
                Op::WriteWith(wanted, count) => {
                    let fill = |_, room: usize| {
                        assert!(room <= SPILL);
                        Ok::<_, ()>(count.min(room))
                    };
                    let _ = tx.write_with(&out.header, &out.ring, wanted, fill);
                }
                Op::NoticeReturn => tx.notice_return(&out.header),
                Op::Returned(count) => {
                    if let Some(range) = tx.returning() {
                        let left = range.end - range.start;
                        prop_assert!((1..=SPILL as u64).contains(&left), "{range:?}");
                        tx.returned(count.min(left as usize));
                    }
                }
                Op::Receive(len) => {
                    let mut buffer = Buffer::zeroed(len, &[]);
                    match rx.receive(&inn.header, &inn.ring, &tcp, &mut buffer.sink()) {
                        Received::Bytes(count) => prop_assert!((1..=len).contains(&count)),
                        Received::Error(errno) => prop_assert_ne!(errno, EAGAIN),
                        _ => {}
                    }
                }
                Op::ReceiveAtOnce(len) => {
                    if let Some(found) = rx.look_at_once(&inn.header, &inn.ring, len) {
                        prop_assert!((1..=len.min(RING)).contains(&found.count));
                        found.take(&inn.header);
                    }
                }
                Op::Peek(len) => {
                    let mut buffer = Buffer::zeroed(len, &[]);
                    if let Received::Bytes(count) = rx.peek(&inn.header, &inn.ring, &tcp, &mut buffer.sink()) {
                        prop_assert!((1..=len).contains(&count));
                    }
                }
                Op::Discard(len) => prop_assert!(rx.discard(&inn.header, &inn.ring, &tcp, len) <= len),
                Op::Ask => {
                    prop_assert!(rx.available(&inn.header, &inn.ring, &tcp) <= WHOLE);
                    prop_assert!(rx.unread(&inn.header, &inn.ring) <= WHOLE);
                    rx.available(&inn.header, &inn.ring, &tcp);
                    rx.has_arrived_behind(&inn.header);
                    prop_assert!(tx.unread(&out.header) <= WHOLE as u64);
                    tx.is_writable(&out.header, &out.ring);
                }
                Op::CloseTx => tx.close(&out.header, Reason::Fork),
                Op::CloseRx => rx.close(&inn.header, &tcp, Reason::Fork),
                Op::GiveBack => drop(rx.give_back(&inn.header, Reason::Exec)),
            }
        }
        // In any state, the program can move both directions back to TCP.
        tx.close(&out.header, Reason::Fork);
        while let Some(range) = tx.returning() {
            tx.returned((range.end - range.start) as usize);
        }
        prop_assert!(!tx.on_lane() && !tx.is_adopted());
    }

    /// The peer acts during a call. Every call ends.
    #[test]
    fn a_call_ends_whatever_the_peer_does_meanwhile(
        turns in vec(vec((place(), twist()), 1..4), 1..4),
        before in vec((place(), twist()), 0..4),
        ops in vec(op(), 1..12),
        waiting in 0..100usize,
    ) {
        let (lane, tcp) = (Lane::new(), Tcp::default());
        let (mut tx, mut rx) = (Tx::default(), Rx::default());
        tx.adopt();
        rx.adopt();
        rx.try_watch(&lane.header, &tcp, true);
        tcp.0.borrow_mut().send(std::iter::repeat_n(7, waiting));
        tcp.0.borrow_mut().arrive(waiting);
        let busy = |turns| Busy { lane: &lane, tcp: &tcp, turns, steps: Cell::new(0) };
        Busy { lane: &lane, tcp: &tcp, turns: &[before], steps: Cell::new(0) }.step();
        let header = &lane.header;
        for op in ops {
            let busy = busy(&turns);
            match op {
                Op::Transport => drop(tx.transport(header, &busy, true)),
                Op::Write(len) => {
                    if let Sent::Bytes(count) =
                        tx.write(header, &busy, &mut Buffer::zeroed(len, &[]).source())
                    {
                        prop_assert!((1..=len.min(WHOLE)).contains(&count));
                    }
                }
                Op::Receive(len) => {
                    let mut buffer = Buffer::zeroed(len, &[]);
                    if let Received::Bytes(count) = rx.receive(header, &busy, &busy, &mut buffer.sink()) {
                        prop_assert!((1..=len).contains(&count));
                    }
                }
                Op::Peek(len) => {
                    let mut buffer = Buffer::zeroed(len, &[]);
                    rx.peek(header, &busy, &busy, &mut buffer.sink());
                }
                Op::WriteAtOnce(len) => {
                    if let Some(found) = tx.place_at_once(header, &busy, len) {
                        busy.step();
                        found.publish(header);
                    }
                }
                Op::ReceiveAtOnce(len) => {
                    if let Some(found) = rx.look_at_once(header, &busy, len) {
                        prop_assert!((1..=len.min(RING)).contains(&found.count));
                        busy.step();
                        found.take(header);
                    }
                }
                Op::Discard(len) => prop_assert!(rx.discard(header, &busy, &busy, len) <= len),
                Op::Ask => prop_assert!(rx.available(header, &busy, &busy) <= WHOLE),
                Op::CloseTx => tx.close(header, Reason::Fork),
                Op::CloseRx => rx.close(header, &busy, Reason::Fork),
                Op::GiveBack => drop(rx.give_back(header, Reason::Exec)),
                Op::Spill => drop(tx.spill(header, &busy)),
                Op::HoldSpill => tx.hold_spill(),
                Op::Poke(..) | Op::Tcp(_) | Op::WriteWith(..) | Op::NoticeReturn | Op::Returned(_) => {}
            }
        }
    }
}
