//! Both ends of one direction over a simulated kernel, by random operations, against an oracle of
//! the whole stream.
//!
//! Every call into the kernel is a place where the other end may run: the operations scripted for
//! it happen there, in the middle of the call under test.
//!
//! Detects, in addition to the changes that `loom.rs` names and single steps can show: an error of
//! TCP that is dropped because bytes came before it; an end of file that does not stay; a receive
//! that stops short at a border; a peek beyond one.

#![cfg(not(loom))]

mod common;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use proptest::collection::vec;
use proptest::prelude::*;
use shunt_abi::reason::{Reason, Transport};
use shunt_ring::bytes::MappedRing;
use shunt_ring::lane::End;
use shunt_ring::{LaneHeader, Sink};
use shunt_transport::{Kernel, Received, Rx, Sent, Tx, Waiting};

use common::{Buffer, ECONNRESET, Wire};

#[derive(Clone, Debug)]
enum Op {
    AdoptTx,
    AdoptRx,
    TryWatch,
    Send(usize, Vec<usize>),
    /// As a splice does it: the kernel fills the ring.
    SendWith(usize),
    /// A write to the socket by a call that the shim did not see.
    HiddenSend(usize),
    /// A thread enters a kernel send; it returns with this number of bytes written.
    EnterSend,
    LeaveSend(usize),
    Receive(usize, Vec<usize>),
    Peek(usize),
    Discard(usize),
    /// A thread enters a kernel receive; it returns with at most this number of bytes.
    EnterReceive,
    LeaveReceive(usize),
    Arrive(usize),
    TcpNews,
    Spill,
    HoldSpill,
    CloseTx,
    CloseRx,
    /// The kernel's count of sent bytes does not settle the next time.
    Unsettle,
    /// Gives a new lane to both ends, which have left the old one.
    Renew,
    Finish,
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    let len = || prop_oneof![1..5usize, 1..60usize];
    let cuts = || vec(any::<usize>(), 0..3);
    prop_oneof![
        4 => Just(Op::AdoptTx),
        4 => Just(Op::AdoptRx),
        6 => Just(Op::TryWatch),
        12 => (len(), cuts()).prop_map(|(len, cuts)| Op::Send(len, cuts)),
        3 => len().prop_map(Op::SendWith),
        2 => len().prop_map(Op::HiddenSend),
        1 => Just(Op::EnterSend),
        2 => len().prop_map(Op::LeaveSend),
        12 => (len(), cuts()).prop_map(|(len, cuts)| Op::Receive(len, cuts)),
        3 => len().prop_map(Op::Peek),
        2 => len().prop_map(Op::Discard),
        1 => Just(Op::EnterReceive),
        2 => len().prop_map(Op::LeaveReceive),
        8 => len().prop_map(Op::Arrive),
        5 => Just(Op::TcpNews),
        3 => Just(Op::Spill),
        1 => Just(Op::HoldSpill),
        2 => Just(Op::CloseTx),
        2 => Just(Op::CloseRx),
        1 => Just(Op::Renew),
    ]
}

/// The usual course, then any operations, together with the other end's operations meanwhile.
fn story() -> impl Strategy<Value = (Vec<Op>, Vec<Vec<Op>>)> {
    let rare = prop_oneof![6 => Just(vec![]), 1 => Just(vec![Op::Unsettle])];
    let start = prop_oneof![
        Just(vec![Op::AdoptRx, Op::AdoptTx, Op::TryWatch]),
        Just(vec![Op::AdoptTx, Op::AdoptRx]),
        Just(vec![]),
    ];
    let end = prop_oneof![3 => Just(Op::Finish), 1 => Just(Op::Reset)];
    let story = (vec(op(), 0..6), rare, start, vec(op(), 0..60), end, vec(op(), 0..8)).prop_map(
        |(before, rare, start, middle, end, after)| [before, rare, start, middle, vec![end], after].concat(),
    );
    // The dangerous sender begins, falls back and writes to TCP, or ends, all in one moment of its
    // peer.
    let sender = (1..4usize, any::<bool>(), 1..4usize).prop_map(|(lane, goes_back, tcp)| {
        let back = if goes_back { Op::CloseTx } else { Op::Arrive(1) };
        vec![Op::Send(lane, vec![]), back, Op::Send(tcp, vec![]), Op::Arrive(60)]
    });
    let last = prop_oneof![Just(Op::Finish), Just(Op::Reset)]
        .prop_map(|end| vec![Op::Arrive(60), Op::Send(2, vec![]), Op::Arrive(2), end]);
    let moment = prop_oneof![
        12 => Just(vec![]),
        12 => vec(op(), 1..2),
        8 => sender,
        4 => vec(op(), 2..8),
        3 => last,
    ];
    (story, vec(moment, 0..40))
}

/// A lane that both ends share.
struct Lane {
    header: LaneHeader,
    ring: MappedRing,
    _memory: Vec<u8>,
    tx_adopted: Cell<bool>,
    rx_adopted: Cell<bool>,
}

impl Lane {
    fn new() -> Rc<Lane> {
        let mut memory = vec![0; 32 + 64];
        let start = memory.as_mut_ptr();
        // SAFETY: the vector is kept next to the ring and never resized.
        let ring = unsafe { MappedRing::new(start, 32).with_spill(start.wrapping_add(32), 64) };
        let header = LaneHeader::new();
        Rc::new(Lane { header, ring, _memory: memory, tx_adopted: false.into(), rx_adopted: false.into() })
    }
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// The lane: published, so readable.
    Lane,
    /// TCP, with the byte's index there.
    Tcp(u64),
}

/// One direction of a connection: both ends, and the place of each byte of the stream.
struct World {
    lane: RefCell<Rc<Lane>>,
    wire: RefCell<Wire>,
    tx: RefCell<Tx>,
    rx: RefCell<Rx>,
    script: RefCell<VecDeque<Vec<Op>>>,
    places: RefCell<Vec<Place>>,
    got: Cell<usize>,
    sender_in_kernel: Cell<bool>,
    receiver_in_kernel: Cell<bool>,
    unsettled: Cell<bool>,
    over: Cell<bool>,
    told_of_reset: Cell<bool>,
}

impl Kernel for World {
    fn sent(&self) -> Option<u64> {
        self.meanwhile();
        if self.unsettled.take() {
            return None;
        }
        Some(self.wire.borrow().sent())
    }

    fn read(&self) -> Option<u64> {
        self.meanwhile();
        self.wire.borrow().read()
    }

    fn received(&self) -> u64 {
        self.wire.borrow().arrived_total()
    }

    fn waiting(&self) -> Waiting {
        self.meanwhile();
        let waiting = self.wire.borrow().waiting();
        self.meanwhile();
        waiting
    }

    fn receive(&self, sink: &mut Sink<'_>) -> Result<usize, i32> {
        self.meanwhile();
        self.wire.borrow_mut().receive(sink)
    }
}

impl World {
    fn new(script: Vec<Vec<Op>>) -> World {
        World {
            lane: RefCell::new(Lane::new()),
            wire: RefCell::default(),
            tx: RefCell::default(),
            rx: RefCell::default(),
            script: RefCell::new(script.into()),
            places: RefCell::default(),
            got: Cell::default(),
            sender_in_kernel: Cell::default(),
            receiver_in_kernel: Cell::default(),
            unsettled: Cell::default(),
            over: Cell::default(),
            told_of_reset: Cell::default(),
        }
    }

    /// Runs the operations of the other end while this one is inside the kernel.
    fn meanwhile(&self) {
        let moment = self.script.borrow_mut().pop_front();
        for op in moment.into_iter().flatten() {
            self.run(op);
        }
    }

    /// Runs one operation. An end that is busy, or that cannot do it now, skips it.
    fn run(&self, op: Op) {
        let lane = self.lane.borrow().clone();
        match op {
            Op::Receive(..)
            | Op::Peek(_)
            | Op::Discard(_)
            | Op::AdoptRx
            | Op::TryWatch
            | Op::TcpNews
            | Op::CloseRx
            | Op::EnterReceive
            | Op::LeaveReceive(_) => {
                if let Ok(mut rx) = self.rx.try_borrow_mut() {
                    self.receiver(op, &lane, &mut rx);
                }
            }
            Op::Arrive(count) => self.wire.borrow_mut().arrive(count),
            Op::Renew => self.renew(),
            _ if self.over.get() => {}
            _ => {
                if let Ok(mut tx) = self.tx.try_borrow_mut() {
                    self.sender(op, &lane, &mut tx);
                }
            }
        }
    }

    fn sender(&self, op: Op, lane: &Lane, tx: &mut Tx) {
        let quiet = !self.sender_in_kernel.get();
        match op {
            Op::AdoptTx if !lane.tx_adopted.replace(true) => tx.adopt(),
            Op::Send(len, cuts) => {
                let mut left = len;
                if tx.transport(&lane.header, self, quiet) == Transport::Shm {
                    if cuts.is_empty() && self.send_at_once(len, lane, tx) {
                        return;
                    }
                    let mut buffer = Buffer::new(self.next_bytes(len), &cuts);
                    let mut source = buffer.source();
                    let sent = loop {
                        match tx.write(&lane.header, &lane.ring, &mut source) {
                            Sent::Bytes(_) if source.remaining() > 0 => {}
                            sent => break sent,
                        }
                    };
                    left = source.remaining();
                    self.place_in_lane(len - left);
                    match sent {
                        Sent::Ended => tx.close(&lane.header, Reason::PeerWentBack),
                        Sent::UseTcp => {}
                        _ => return,
                    }
                }
                self.send_by_tcp(left);
            }
            Op::SendWith(len) => {
                if tx.transport(&lane.header, self, quiet) != Transport::Shm {
                    return self.send_by_tcp(len);
                }
                let bytes = self.next_bytes(len);
                let outcome = tx.write_with(&lane.header, &lane.ring, len, |at, room| {
                    let mut put = 0;
                    while put < room {
                        let (to, run) = lane.ring.run(at + put as u64, room - put);
                        // SAFETY: `run` stays inside the ring.
                        unsafe { std::ptr::copy_nonoverlapping(bytes[put..].as_ptr(), to, run) };
                        put += run;
                    }
                    Ok::<usize, ()>(room)
                });
                match outcome {
                    Ok(Sent::Bytes(count)) => self.place_in_lane(count),
                    Ok(Sent::Full) => {}
                    Ok(Sent::Ended) => {
                        tx.close(&lane.header, Reason::PeerWentBack);
                        self.send_by_tcp(len);
                    }
                    Ok(Sent::UseTcp) => self.send_by_tcp(len),
                    Ok(Sent::SendAgain) => unreachable!("nothing is given back in these stories"),
                    Ok(Sent::Fault) => unreachable!("all memory is good in these stories"),
                    Err(()) => unreachable!("the filling cannot fail"),
                }
            }
            Op::HiddenSend(len) if !tx.on_lane() => self.send_by_tcp(len),
            Op::EnterSend if tx.transport(&lane.header, self, quiet) == Transport::Tcp => {
                self.sender_in_kernel.set(true)
            }
            Op::LeaveSend(len) if self.sender_in_kernel.replace(false) => self.send_by_tcp(len),
            Op::Spill => drop(tx.spill(&lane.header, &lane.ring)),
            Op::HoldSpill => tx.hold_spill(),
            Op::CloseTx => tx.close(&lane.header, Reason::Stalled),
            Op::Unsettle => self.unsettled.set(true),
            Op::Finish => {
                lane.header.set_end(End::ShutDown);
                self.wire.borrow_mut().finish();
                self.over.set(true);
            }
            Op::Reset => {
                self.wire.borrow_mut().reset();
                self.over.set(true);
            }
            _ => {}
        }
    }

    fn send_at_once(&self, len: usize, lane: &Lane, tx: &mut Tx) -> bool {
        let bytes = self.next_bytes(len);
        let total = tx.place_at_once(&lane.header, &lane.ring, len).and_then(|found| {
            let (to, run) = lane.ring.run(found.place, len);
            assert_eq!(run, len, "a page is one run");
            // SAFETY: `run` stays inside the ring.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, len) };
            found.publish(&lane.header)
        });
        if let Some(total) = total {
            assert_eq!(total, tx.lane_total());
            self.place_in_lane(len);
        }
        total.is_some()
    }

    fn receive_at_once(&self, bytes: &mut [u8], lane: &Lane, rx: &mut Rx) -> Option<usize> {
        let found = rx.look_at_once(&lane.header, &lane.ring, bytes.len())?;
        let count = found.count;
        let (from, run) = lane.ring.run(found.place(&lane.header), count);
        if run < count {
            return None;
        }
        // SAFETY: `run` stays inside the ring, and `bytes` has room for more.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), count) };
        let total = found.take(&lane.header)?;
        assert_eq!(total, rx.lane_total());
        Some(count)
    }

    fn receiver(&self, op: Op, lane: &Lane, rx: &mut Rx) {
        match op {
            Op::AdoptRx if !lane.rx_adopted.replace(true) => rx.adopt(),
            Op::TryWatch => {
                rx.try_watch(&lane.header, self, !self.receiver_in_kernel.get());
            }
            Op::TcpNews => rx.note_tcp_news(),
            Op::CloseRx => rx.close(&lane.header, self, Reason::Fork),
            Op::EnterReceive if !rx.is_attached() || rx.is_adopted() => self.receiver_in_kernel.set(true),
            Op::LeaveReceive(len) if self.receiver_in_kernel.replace(false) => {
                if let Received::Error(_) = self.receive_by_tcp(len) {
                    self.check_error(rx);
                }
            }
            Op::Receive(len, cuts) => {
                self.receive(len, &cuts, lane, rx);
            }
            Op::Peek(len) => self.peek(len, lane, rx),
            Op::Discard(len) => {
                let (before, there) = (self.deliverable(), rx.available(&lane.header, &lane.ring, self));
                let count = rx.discard(&lane.header, &lane.ring, self, len);
                assert!(count <= len && count >= there.min(len) && before >= there.min(before));
                self.got.set(self.got.get() + count);
                assert!(self.got.get() <= self.places.borrow().len());
            }
            _ => {}
        }
    }

    fn receive(&self, len: usize, cuts: &[usize], lane: &Lane, rx: &mut Rx) -> Received {
        let (on_lane, due) = (rx.on_lane(), self.deliverable());
        let mut bytes = vec![0; len];
        if cuts.is_empty()
            && let Some(count) = self.receive_at_once(&mut bytes, lane, rx)
        {
            self.check(&bytes[..count]);
            assert!(count >= due.min(len), "{count} of {len} bytes, though {due} were there");
            return Received::Bytes(count);
        }
        let mut buffer = Buffer::zeroed(len, cuts);
        let mut sink = buffer.sink();
        let mut outcome = rx.receive(&lane.header, &lane.ring, self, &mut sink);
        let moved = len - sink.remaining();
        // A kernel that has reset the connection has lost its count. Then only a receiver that was
        // on the lane is sure to reach those bytes.
        let due = if on_lane || !self.wire.borrow().was_reset() { due } else { 0 };
        match outcome {
            Received::Bytes(count) => {
                assert_eq!(count, moved);
                self.check(&buffer.bytes()[..count]);
                assert!(count >= due.min(len), "{count} of {len} bytes, though {due} were there");
            }
            Received::UseTcp | Received::Failed => {
                assert_eq!(moved, 0);
                outcome = self.receive_by_tcp(len);
            }
            _ => assert_eq!(moved, 0),
        }
        match outcome {
            Received::Empty => assert!(due == 0, "nothing, though {due} bytes were there"),
            Received::EndOfFile => self.check_end(),
            Received::Error(errno) => {
                assert_eq!(errno, ECONNRESET);
                assert!(due == 0, "an error before {due} bytes");
                self.check_error(rx);
            }
            _ => {}
        }
        outcome
    }

    /// Receives on the socket, as the caller does after [`Received::UseTcp`].
    fn receive_by_tcp(&self, len: usize) -> Received {
        let mut buffer = Buffer::zeroed(len, &[]);
        let outcome = self.wire.borrow_mut().receive(&mut buffer.sink());
        match outcome {
            Ok(0) => Received::EndOfFile,
            Ok(count) => {
                self.check(&buffer.bytes()[..count]);
                Received::Bytes(count)
            }
            Err(ECONNRESET) => Received::Error(ECONNRESET),
            Err(_) => Received::Empty,
        }
    }

    fn peek(&self, len: usize, lane: &Lane, rx: &mut Rx) {
        let due = self.deliverable();
        let mut buffer = Buffer::zeroed(len, &[]);
        match rx.peek(&lane.header, &lane.ring, self, &mut buffer.sink()) {
            Received::Bytes(count) => {
                assert!(count > 0);
                self.check_ahead(&buffer.bytes()[..count]);
            }
            Received::UseTcp => self.check_ahead(&self.wire.borrow().peek(len.min(rx.peek_limit()))),
            Received::Empty => assert!(due == 0 || self.wire.borrow().was_reset()),
            Received::EndOfFile => self.check_end(),
            Received::Failed => assert!(self.wire.borrow().was_reset()),
            Received::Error(errno) => {
                assert_eq!(errno, ECONNRESET);
                self.check_error(rx);
            }
        }
    }

    fn send_by_tcp(&self, len: usize) {
        let bytes = self.next_bytes(len);
        let mut wire = self.wire.borrow_mut();
        let from = wire.sent();
        self.places.borrow_mut().extend((from..from + len as u64).map(Place::Tcp));
        wire.send(bytes);
    }

    fn place_in_lane(&self, len: usize) {
        self.places.borrow_mut().extend(std::iter::repeat_n(Place::Lane, len));
    }

    fn renew(&self) {
        let (Ok(tx), Ok(rx)) = (self.tx.try_borrow(), self.rx.try_borrow()) else { return };
        if !tx.on_lane() && !tx.is_adopted() && !rx.is_attached() {
            self.lane.replace(Lane::new());
        }
    }

    /// Returns how many bytes a receiver could get now: consecutive bytes that are published or
    /// have arrived.
    fn deliverable(&self) -> usize {
        let arrived = self.wire.borrow().arrived_total();
        let places = self.places.borrow();
        places[self.got.get()..]
            .iter()
            .take_while(|place| match place {
                Place::Lane => true,
                Place::Tcp(at) => *at < arrived,
            })
            .count()
    }

    fn next_bytes(&self, len: usize) -> Vec<u8> {
        let from = self.places.borrow().len();
        (from..from + len).map(pattern).collect()
    }

    fn check(&self, bytes: &[u8]) {
        self.check_ahead(bytes);
        self.got.set(self.got.get() + bytes.len());
    }

    fn check_ahead(&self, bytes: &[u8]) {
        let from = self.got.get();
        assert!(from + bytes.len() <= self.places.borrow().len(), "more than was sent");
        let expected: Vec<u8> = (from..from + bytes.len()).map(pattern).collect();
        assert_eq!(bytes, expected, "at {from} of {:?}", self.places.borrow());
    }

    fn check_end(&self) {
        assert!(self.over.get());
        let reset = self.wire.borrow().was_reset();
        assert!(reset || self.got.get() == self.places.borrow().len(), "an end of file before the end");
        assert!(!reset || self.told_of_reset.get(), "a reset shown as an end of file");
    }

    fn check_error(&self, rx: &Rx) {
        assert!(self.wire.borrow().was_reset());
        assert!(!self.told_of_reset.replace(true) || is_lost(rx), "an error told twice");
    }

    /// Ends the stream. In every state of the ends, the receiver gets the rest and then the end.
    fn conclude(&self) {
        self.script.borrow_mut().clear();
        self.run(Op::LeaveSend(1));
        self.run(Op::LeaveReceive(1));
        self.run(Op::Finish);
        self.run(Op::Arrive(usize::MAX));
        let lane = self.lane.borrow().clone();
        let mut rx = self.rx.borrow_mut();
        rx.note_tcp_news();
        // A few more for a kernel that has lost its count.
        for _ in 0..self.places.borrow().len() + 40 {
            match self.receive(7, &[3], &lane, &mut rx) {
                Received::EndOfFile => {
                    assert_eq!(self.receive(7, &[], &lane, &mut rx), Received::EndOfFile, "the end stays");
                    return;
                }
                Received::Error(_) if is_lost(&rx) => return,
                Received::Empty => assert!(self.wire.borrow().was_reset(), "nothing, for ever"),
                _ => {}
            }
        }
        panic!("no end: {:?}", rx);
    }
}

/// Returns whether the receiver is on the way to a lane that it cannot reach, because the kernel
/// has lost its count.
fn is_lost(rx: &Rx) -> bool {
    rx.is_attached() && !rx.on_lane() && !rx.is_adopted()
}

fn pattern(at: usize) -> u8 {
    ((at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, max_shrink_iters: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_arrives_once_and_in_order((story, meanwhile) in story()) {
        let world = World::new(meanwhile);
        for op in story {
            world.run(op);
        }
        world.conclude();
    }
}
