//! A receiver that has much to read from TCP before the lane. Every byte comes in order, with about
//! one system call for each receive, and the kernel's own count decides where the lane begins.

#![cfg(not(loom))]

mod common;

use std::cell::{Cell, RefCell, RefMut};
use std::ops::Range;

use shunt_abi::reason::{Reason, Transport};
use shunt_ring::bytes::MappedRing;
use shunt_ring::{LaneHeader, Sink};
use shunt_transport::{Kernel, Received, Rx, Sent, Tx, Waiting};

use common::{Buffer, Wire};

const MESSAGE: usize = 64;
/// The stream: the first `BACKLOG` bytes by TCP,
const BACKLOG: usize = 1 << 20;
/// the bytes up to here by the lane,
const BEHIND: usize = BACKLOG + 100;
/// and the rest by TCP again. The sender writes it when the receiver
const ALL: usize = BEHIND + 1000;
/// still has this many bytes to read before the lane.
const NEAR: usize = 10_000;

/// A kernel that counts the calls into it.
#[derive(Default)]
struct Asked {
    wire: RefCell<Wire>,
    questions: Cell<usize>,
}

impl Asked {
    fn ask(&self) -> RefMut<'_, Wire> {
        self.questions.set(self.questions.get() + 1);
        self.wire.borrow_mut()
    }

    /// Reads from the socket past the shim.
    fn read_unseen(&self, count: usize) {
        let mut buffer = Buffer::zeroed(count, &[]);
        assert_eq!(self.wire.borrow_mut().receive(&mut buffer.sink()), Ok(count));
    }
}

impl Kernel for Asked {
    fn sent(&self) -> Option<u64> {
        Some(self.wire.borrow().sent())
    }

    fn read(&self) -> Option<u64> {
        self.ask().read()
    }

    fn received(&self) -> u64 {
        self.ask().arrived_total()
    }

    fn waiting(&self) -> Waiting {
        self.ask().waiting()
    }

    fn receive(&self, sink: &mut Sink<'_>) -> Result<usize, i32> {
        self.ask().receive(sink)
    }
}

fn byte(place: usize) -> u8 {
    (place % 251) as u8
}

/// Receives the stream message by message, except the bytes that are read past the shim half-way.
/// Returns the number of calls into the kernel for a receive.
fn catch_up(unseen: usize) -> usize {
    let mut memory = vec![0; 4096];
    // SAFETY: the vector outlives the ring and is never resized.
    let ring = unsafe { MappedRing::new(memory.as_mut_ptr(), memory.len()) };
    let (lane, kernel) = (LaneHeader::new(), Asked::default());
    let (mut tx, mut rx) = (Tx::default(), Rx::default());
    rx.adopt();
    assert!(rx.try_watch(&lane, &kernel, true));
    send(&kernel, 0..BACKLOG);
    tx.adopt();
    assert_eq!(tx.transport(&lane, &kernel, true), Transport::Shm);
    let mut rest = Buffer::new((BACKLOG..BEHIND).map(byte).collect(), &[]);
    assert_eq!(tx.write(&lane, &ring, &mut rest.source()), Sent::Bytes(BEHIND - BACKLOG));
    kernel.questions.set(0);
    let (mut place, mut receives) = (0, 0);
    while place < ALL {
        if place == BACKLOG / 2 {
            kernel.read_unseen(unseen);
            place += unseen;
        }
        if place >= BACKLOG - NEAR && tx.on_lane() {
            tx.close(&lane, Reason::Stalled);
            send(&kernel, BEHIND..ALL);
        }
        let mut buffer = Buffer::zeroed(MESSAGE, &[]);
        let count = match rx.receive(&lane, &ring, &kernel, &mut buffer.sink()) {
            Received::Bytes(count) => count,
            Received::UseTcp => kernel.wire.borrow_mut().receive(&mut buffer.sink()).expect("the rest"),
            other => panic!("{other:?} at {place}"),
        };
        assert!(buffer.bytes()[..count].iter().copied().eq((place..place + count).map(byte)), "at {place}");
        place += count;
        receives += 1;
        if unseen == 0 {
            // The sender knows that the receiver reads.
            assert_eq!(lane.ahead(), BACKLOG.saturating_sub(place) as u64);
        }
    }
    kernel.questions.get() / receives
}

fn send(kernel: &Asked, bytes: Range<usize>) {
    let mut wire = kernel.wire.borrow_mut();
    let count = bytes.len();
    wire.send(bytes.map(byte));
    wire.arrive(count);
}

#[test]
fn costs_a_call_for_each_receive() {
    assert_eq!(catch_up(0), 1);
}

#[test]
fn ends_where_the_kernel_says() {
    for unseen in [1, MESSAGE, 1000, NEAR] {
        catch_up(unseen);
    }
}
