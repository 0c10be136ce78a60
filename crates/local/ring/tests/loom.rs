//! Lanes and waiters in all interleavings: `RUSTFLAGS="--cfg loom" cargo test --release`.
//!
//! Each model names the changes to `src` that make it fail; each was tried. Waiting is modelled by
//! a doorbell that only the protocol rings, so a lost wake-up is a deadlock.

#![cfg(loom)]

mod common;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use loom::sync::{Arc, Mutex};
use loom::thread;
use shunt_ring::bytes::Ring;
use shunt_ring::copy::Method;
use shunt_ring::split::{self, ReceiverWords, SenderWords, Words};
use shunt_ring::{Consumer, LaneHeader, Producer, Published, WaiterLine};

use common::Buffer;
use common::model::{CheckedRing, Doorbell, explore};

/// The one waiter of these models. Connections are numbered in the order in which they come.
const SLOT: usize = 0;

struct Lane {
    header: LaneHeader,
    ring: CheckedRing,
    conn: usize,
}

impl Lane {
    fn new(size: usize, conn: usize) -> Lane {
        Lane::with_spill(size, 0, conn)
    }

    fn with_spill(size: usize, spill: usize, conn: usize) -> Lane {
        Lane { header: LaneHeader::new(), ring: CheckedRing::new(size, spill), conn }
    }

    /// Publishes as many of the bytes from `first` on as fit.
    fn write(&self, producer: &mut Producer, first: u8, len: u8) -> Published {
        let mut buffer = Buffer::new((first..first + len).collect(), &[]);
        producer.write(&self.header, &self.ring, &mut buffer.source()).expect("both ends behave")
    }

    fn read(&self, consumer: &mut Consumer, len: usize) -> Vec<u8> {
        let mut buffer = Buffer::zeroed(len, &[]);
        let count = consumer.read(&self.header, &self.ring, &mut buffer.sink()).expect("both ends behave");
        buffer.bytes()[..count].to_vec()
    }

    /// Publishes one byte, on the fast path if possible, and otherwise as [`write`](Self::write)
    /// does.
    fn write_at_once(&self, producer: &mut Producer, byte: u8) -> Published {
        let Some(at) = producer.place_at_once(&self.header, &self.ring, 1) else {
            return self.write(producer, byte, 1);
        };
        self.ring
            .fill(at, 1, &mut Buffer::new(vec![byte], &[]).source(), Method::Plain)
            .expect("good memory");
        match producer.publish(&self.header, 1) {
            Ok(()) => Published::Bytes(1),
            Err(_) => self.write(producer, byte, 1),
        }
    }

    /// Reads on the fast path if possible, and otherwise as [`read`](Self::read) does.
    fn read_at_once(&self, consumer: &mut Consumer, len: usize) -> Vec<u8> {
        let Some(count) = consumer.look_at_once(&self.header, &self.ring, len) else {
            return self.read(consumer, len);
        };
        let at = consumer.place(&self.header);
        let mut buffer = Buffer::zeroed(count, &[]);
        self.ring.drain(at, count, &mut buffer.sink()).expect("good memory");
        match consumer.take(&self.header, count) {
            Ok(()) => buffer.bytes().to_vec(),
            Err(_) => self.read(consumer, len),
        }
    }

    /// Notifies the receiver, as a sender does after publishing.
    fn announce_bytes(&self, waiter: &Waiter) {
        if self.header.rx_waiter() == Some(SLOT) && waiter.line.notify(self.conn) {
            waiter.doorbell.ring();
        }
    }

    /// Notifies the sender, as a receiver does after reading.
    fn announce_space(&self, waiter: &Waiter) {
        if self.header.take_space_wanted() == Some(SLOT) && waiter.line.notify(self.conn) {
            waiter.doorbell.ring();
        }
    }
}

#[derive(Default)]
struct Waiter {
    line: WaiterLine,
    doorbell: Doorbell,
}

impl Waiter {
    /// Announces a sleep, checks once more, and sleeps unless that check found something.
    fn sleep_unless(&self, found: impl FnOnce() -> bool) {
        self.line.announce_sleep();
        if !found() {
            self.doorbell.wait();
        }
        self.line.awake();
    }
}

fn counting(bytes: u8) -> Vec<u8> {
    (1..=bytes).collect()
}

/// Detects: `commit` with Relaxed instead of AcqRel; `available` with a Relaxed load; `advance`
/// with a Relaxed exchange or `refresh` with a Relaxed load (the sender overwrites bytes that are
/// still being read); `advance` before `drain`; one byte more of `room`; the base moved while bytes
/// are unread, stored after `commit`, or loaded before the tail.
#[test]
fn bytes_arrive_in_order_and_whole() {
    explore("bytes_arrive_in_order_and_whole", 9, || {
        let lane = Arc::new(Lane::new(2, 0));
        let sender = thread::spawn({
            let lane = lane.clone();
            move || {
                let mut producer = Producer::new();
                let mut written = 0;
                for _ in 0..3 {
                    if let Published::Bytes(count) = lane.write(&mut producer, written + 1, 2) {
                        written += count as u8;
                    }
                }
                written
            }
        });
        let mut consumer = Consumer::new();
        let mut got = lane.read(&mut consumer, 1);
        got.extend(lane.read(&mut consumer, 4));
        got.extend(lane.read(&mut consumer, 4));
        let written = sender.join().unwrap();
        got.extend(lane.read(&mut consumer, 4));
        assert_eq!(got, counting(written));
    });
}

/// Detects: no fence in `commit` or `announce_sleep`; `sleeping` stored with Release instead of
/// swapped and fenced; no second check in `sleep_unless`; `rx_waiter` set after the announcement.
#[test]
fn a_thread_that_sleeps_on_a_lane_is_woken() {
    explore("a_thread_that_sleeps_on_a_lane_is_woken", 5, || {
        let lane = Arc::new(Lane::new(4, 0));
        let waiter = Arc::new(Waiter::default());
        let sender = thread::spawn({
            let (lane, waiter) = (lane.clone(), waiter.clone());
            move || {
                let mut producer = Producer::new();
                for byte in 1..=2 {
                    assert_eq!(lane.write(&mut producer, byte, 1), Published::Bytes(1));
                    lane.announce_bytes(&waiter);
                }
            }
        });
        let mut consumer = Consumer::new();
        let mut got = Vec::new();
        while got.len() < 2 {
            got.extend(lane.read(&mut consumer, 4));
            if got.len() < 2 {
                lane.header.set_rx_waiter(Some(SLOT));
                waiter.sleep_unless(|| {
                    consumer.available(&lane.header, &lane.ring).expect("both ends behave") > 0
                });
                lane.header.set_rx_waiter(None);
            }
        }
        sender.join().unwrap();
        assert_eq!(got, counting(2));
    });
}

/// Runs a model of an epoll instance. It checks only lanes whose bit is set, so no bit may be
/// missed, in particular not by a sender that finds the bit set and does nothing.
fn epoll(name: &'static str, preemptions: usize, sizes: &'static [u8]) {
    explore(name, preemptions, move || {
        let waiter = Arc::new(Waiter::default());
        let lanes: Arc<Vec<Lane>> = Arc::new((0..sizes.len()).map(|conn| Lane::new(4, conn)).collect());
        let senders: Vec<_> = (0..sizes.len())
            .map(|conn| {
                let (lanes, waiter) = (lanes.clone(), waiter.clone());
                lanes[conn].header.set_rx_waiter(Some(SLOT));
                thread::spawn(move || {
                    let mut producer = Producer::new();
                    for byte in 1..=sizes[conn] {
                        assert_eq!(lanes[conn].write(&mut producer, byte, 1), Published::Bytes(1));
                        lanes[conn].announce_bytes(&waiter);
                    }
                })
            })
            .collect();
        let mut ends: Vec<_> = sizes.iter().map(|_| (Consumer::new(), Vec::new())).collect();
        while ends.iter().zip(sizes).any(|((_, got), size)| got.len() < usize::from(*size)) {
            let ready = waiter.line.take_ready();
            for (lane, (consumer, got)) in lanes.iter().zip(&mut ends) {
                if ready & 1 << lane.conn != 0 {
                    got.extend(lane.read(consumer, 4));
                }
            }
            if ready == 0 {
                waiter.sleep_unless(|| waiter.line.peek_ready() != 0);
            }
        }
        for sender in senders {
            sender.join().unwrap();
        }
        for ((_, got), size) in ends.iter().zip(sizes) {
            assert_eq!(*got, counting(*size));
        }
    });
}

/// Detects: no fence in `take_ready` (a bit that is still set hides the second byte), in `notify`
/// after setting a bit, or in `announce_sleep`; no second check.
#[test]
fn an_epoll_instance_misses_no_byte_of_a_busy_lane() {
    epoll("an_epoll_instance_misses_no_byte_of_a_busy_lane", 5, &[3]);
}

/// A connection is registered in an epoll instance in whose line another connection has left a
/// ready bit. The instance clears that bit and checks the connection.
///
/// Detects: no fence in `take_mark`; the check before it.
#[test]
fn what_a_mark_of_old_hides_is_seen() {
    explore("what_a_mark_of_old_hides_is_seen", 5, || {
        let waiter = Arc::new(Waiter::default());
        let lane = Arc::new(Lane::new(4, 0));
        lane.header.set_rx_waiter(Some(SLOT));
        waiter.line.notify(0);
        let sender = thread::spawn({
            let (lane, waiter) = (lane.clone(), waiter.clone());
            move || {
                let mut producer = Producer::new();
                for byte in 1..=2 {
                    assert_eq!(lane.write(&mut producer, byte, 1), Published::Bytes(1));
                    lane.announce_bytes(&waiter);
                }
            }
        });
        let mut consumer = Consumer::new();
        waiter.line.take_mark(0);
        let mut got = lane.read(&mut consumer, 4);
        while got.len() < 2 {
            match waiter.line.take_ready() {
                0 => waiter.sleep_unless(|| waiter.line.peek_ready() != 0),
                _ => got.extend(lane.read(&mut consumer, 4)),
            }
        }
        sender.join().unwrap();
        assert_eq!(got, counting(2));
    });
}

/// Detects: `ready` stored, or loaded and stored, instead of or-ed.
#[test]
fn an_epoll_instance_misses_no_lane() {
    epoll("an_epoll_instance_misses_no_lane", 4, &[2, 1]);
}

/// Runs a model in which a sender finds the lane full and writes two more bytes than fit. `wait` is
/// how it waits for space.
fn full_lane(name: &str, wait: impl Fn(&Lane, &Waiter, &mut Producer) + Send + Sync + 'static) {
    explore(name, 5, move || {
        let lane = Arc::new(Lane::new(2, 0));
        let waiter = Arc::new(Waiter::default());
        let mut producer = Producer::new();
        assert_eq!(lane.write(&mut producer, 1, 2), Published::Bytes(2));
        let receiver = thread::spawn({
            let (lane, waiter) = (lane.clone(), waiter.clone());
            move || {
                let mut consumer = Consumer::new();
                let mut got = Vec::new();
                for _ in 0..2 {
                    got.extend(lane.read(&mut consumer, 1));
                    lane.announce_space(&waiter);
                }
                (consumer, got)
            }
        });
        for byte in 3..=4 {
            while lane.write(&mut producer, byte, 1) == Published::Full {
                wait(&lane, &waiter, &mut producer);
            }
        }
        let (mut consumer, mut got) = receiver.join().unwrap();
        got.extend(lane.read(&mut consumer, 4));
        assert_eq!(got, counting(4));
    });
}

fn has_room(lane: &Lane, producer: &mut Producer) -> bool {
    producer.room(&lane.header, &lane.ring, 1).expect("both ends behave") > 0
}

/// Detects: no fence in `want_space` or in `advance`; no second check; the request before the
/// announcement; `take_space_wanted` called before reading; `tx_waiter` stored after `tx_wants`.
#[test]
fn a_thread_that_sleeps_on_a_full_lane_is_woken() {
    full_lane("a_thread_that_sleeps_on_a_full_lane_is_woken", |lane, waiter, producer| {
        waiter.sleep_unless(|| {
            lane.header.want_space(SLOT);
            has_room(lane, producer)
        });
    });
}

/// A non-blocking send leaves its request for space behind, and an epoll instance sleeps later.
///
/// Detects: no check for space after the request; no check of the ready word after the
/// announcement.
#[test]
fn an_epoll_instance_that_waits_for_space_is_woken() {
    full_lane("an_epoll_instance_that_waits_for_space_is_woken", |lane, waiter, producer| {
        lane.header.want_space(SLOT);
        if !has_room(lane, producer) {
            while waiter.line.take_ready() == 0 {
                waiter.sleep_unless(|| waiter.line.peek_ready() != 0);
            }
        }
    });
}

/// Sends three bytes, each by `write`, and ends the lane when it is full. Returns how many are in
/// it.
fn send_three(
    lane: &Arc<Lane>,
    write: impl Fn(&Lane, &mut Producer, u8) -> Published + Send + 'static,
) -> thread::JoinHandle<u8> {
    let lane = lane.clone();
    thread::spawn(move || {
        let mut producer = Producer::new();
        let mut written = 0;
        for _ in 0..3 {
            match write(&lane, &mut producer, written + 1) {
                Published::Bytes(count) => written += count as u8,
                Published::Full => lane.header.close(),
                Published::Closed | Published::Returned => break,
                Published::Fault | Published::NoMemory(_) => unreachable!("the model's memory is good"),
            }
        }
        written
    })
}

/// Either end, or both, end a lane that is being written. Both must agree on its last byte.
///
/// Detects: `commit` that loads and stores instead of comparing and swapping; `close` that stores
/// the tail it has loaded.
#[test]
fn both_ends_agree_on_the_last_byte() {
    explore("both_ends_agree_on_the_last_byte", 9, || {
        let lane = Arc::new(Lane::new(2, 0));
        let sender = send_three(&lane, |lane, producer, byte| lane.write(producer, byte, 1));
        let mut consumer = Consumer::new();
        let mut got = lane.read(&mut consumer, 1);
        lane.header.close();
        got.extend(lane.read(&mut consumer, 4));
        // The end is final: no byte is published behind it, even if the sender does not know of it
        // yet.
        assert!(consumer.is_finished());
        assert_eq!(got, counting(sender.join().unwrap()));
    });
}

/// The model of the previous test, where every write and read takes the fast path if it can.
///
/// Detects: a Relaxed load of the tail; `take` with a Relaxed exchange.
#[test]
fn what_goes_at_once_arrives_in_order_and_whole() {
    explore("what_goes_at_once_arrives_in_order_and_whole", 9, || {
        let lane = Arc::new(Lane::new(2, 0));
        let sender = send_three(&lane, Lane::write_at_once);
        let mut consumer = Consumer::new();
        let mut got = lane.read_at_once(&mut consumer, 1);
        got.extend(lane.read_at_once(&mut consumer, 4));
        lane.header.close();
        got.extend(lane.read_at_once(&mut consumer, 4));
        assert!(consumer.is_finished());
        assert_eq!(got, counting(sender.join().unwrap()));
    });
}

/// A lane in two files, a doorbell for each end, and the receiver's answer, which the sender may
/// not have yet.
struct Split {
    sender: SenderWords,
    receiver: ReceiverWords,
    ring: CheckedRing,
    /// The receiver's doorbell, then the sender's.
    doorbells: [Doorbell; 2],
    answered: Mutex<bool>,
}

impl Split {
    fn new(size: usize, answered: bool) -> Split {
        Split {
            sender: SenderWords::default(),
            receiver: ReceiverWords::default(),
            ring: CheckedRing::new(size, 0),
            doorbells: Default::default(),
            answered: Mutex::new(answered),
        }
    }

    fn words(&self) -> Words<'_> {
        Words { sender: &self.sender, receiver: &self.receiver }
    }

    /// Sends `count` bytes, each as a message, and sleeps while there is no room.
    fn send(&self, count: u8) {
        let mut producer = split::Producer::new();
        let nobody = ReceiverWords::default();
        // The words that the sender sees until it has the answer.
        let mut words = Words { sender: &self.sender, receiver: &nobody };
        let mut next = 1;
        while next <= count {
            let mut buffer = Buffer::new(vec![next], &[]);
            if producer.write(words, &self.ring, &mut buffer.source()) == Ok(Published::Bytes(1)) {
                next += 1;
                if *self.answered.lock().unwrap() {
                    words = self.words();
                }
                if producer.notify(words) {
                    self.doorbells[0].ring();
                }
                continue;
            }
            if *self.answered.lock().unwrap() {
                words = self.words();
            }
            producer.announce_sleep(words);
            if producer.room(words, &self.ring, 1) == Ok(0) {
                self.doorbells[1].wait();
            }
            producer.awake(words);
        }
    }

    fn answer(&self) {
        *self.answered.lock().unwrap() = true;
        self.doorbells[1].ring();
    }

    /// Receives `count` bytes, one by one, and sleeps while there is none.
    fn receive(&self, count: u8) -> Vec<u8> {
        let mut consumer = split::Consumer::new();
        let mut got = Vec::new();
        while got.len() < usize::from(count) {
            let mut buffer = Buffer::zeroed(1, &[]);
            if consumer.read(self.words(), &self.ring, &mut buffer.sink()) == Ok(0) {
                consumer.announce_sleep(self.words());
                if consumer.available(self.words(), &self.ring) == Ok(0) {
                    self.doorbells[0].wait();
                }
                consumer.awake(self.words());
                continue;
            }
            got.extend(buffer.bytes());
            // Notify once half of the ring is free.
            if consumer.is_notification_due(self.words())
                && consumer.available(self.words(), &self.ring).expect("both behave") <= self.ring.len() / 2
                && consumer.notify(self.words())
            {
                self.doorbells[1].ring();
            }
        }
        got
    }
}

/// The pattern of `shunt-channel`: a sender always loads the receiver's sleep number, and a
/// receiver the sender's once half of the ring is free. The sender sends `COUNT` bytes through a
/// ring of 2.
///
/// Detects: `announce`, `publish` or `read_block` without its fence, or a cursor loaded relaxed; a
/// sleep number that is always 1.
#[test]
fn a_channel_of_two_that_sleep_goes_on() {
    const COUNT: u8 = 3;
    explore("a_channel_of_two_that_sleep_goes_on", 3, || {
        let lane = Arc::new(Split::new(2, true));
        let sending = thread::spawn({
            let lane = lane.clone();
            move || lane.send(COUNT)
        });
        let got = lane.receive(COUNT);
        sending.join().unwrap();
        assert_eq!(got, counting(COUNT));
    });
}

/// The receiver answers while its sender sends the first messages, and both may sleep then.
///
/// Detects: a sender that checks for the answer before it publishes, and not afterwards; a receiver
/// that answers after its last check.
#[test]
fn a_channel_is_set_up_while_it_is_used() {
    // The last message finds room, or has to wait for the answer and for room.
    for count in [2, 3] {
        explore("a_channel_is_set_up_while_it_is_used", 3, move || {
            let lane = Arc::new(Split::new(2, false));
            let sending = thread::spawn({
                let lane = lane.clone();
                move || lane.send(count)
            });
            lane.answer();
            let got = lane.receive(count);
            sending.join().unwrap();
            assert_eq!(got, counting(count));
        });
    }
}

/// A sender that waits for a lent slot sleeps, and the receiver ends the slot's use meanwhile. The
/// sender then writes the slot again, and must not change what the receiver has read.
///
/// Detects: `release` without its fence, or relaxed; `last_over` relaxed.
#[test]
fn a_sender_that_waits_for_a_lent_slot_goes_on() {
    explore("a_sender_that_waits_for_a_lent_slot_goes_on", 3, || {
        let lane = Arc::new(Split::new(2, true));
        let (word, slot) = (Arc::new(AtomicU64::new(0)), Arc::new(UnsafeCell::new(1u8)));
        let receiving = thread::spawn({
            let (lane, word, slot) = (lane.clone(), word.clone(), slot.clone());
            move || {
                // SAFETY: the first use of the slot, which the receiver ends below.
                let read = slot.with(|byte| unsafe { *byte });
                if split::SlotWord::of(&word).release(1, lane.words()).is_some() {
                    lane.doorbells[1].ring();
                }
                read
            }
        });
        let mut producer = split::Producer::new();
        while split::SlotWord::of(&word).last_over() != 1 {
            producer.announce_sleep(lane.words());
            if split::SlotWord::of(&word).last_over() != 1 {
                lane.doorbells[1].wait();
            }
            producer.awake(lane.words());
        }
        // SAFETY: the first use is over.
        slot.with_mut(|byte| unsafe { *byte = 2 });
        assert_eq!(receiving.join().unwrap(), 1);
    });
}

/// A publisher writes a slot again that a subscriber has and may be reading, after it has revoked the
/// message. What the subscriber reads is of that message, or it finds the message revoked.
///
/// Detects: `revoke_before` without its fence, or after the memory is written; `revoked_before`
/// without its fence.
#[test]
fn a_message_that_is_not_revoked_is_as_it_was_published() {
    explore("a_message_that_is_not_revoked_is_as_it_was_published", 3, || {
        let words = Arc::new(SenderWords::default());
        let slot = Arc::new((AtomicU64::new(1), AtomicU64::new(1)));
        let publishing = thread::spawn({
            let (words, slot) = (words.clone(), slot.clone());
            move || {
                words.revoke_before(8);
                slot.0.store(2, Relaxed);
                slot.1.store(2, Relaxed);
            }
        });
        let read = (slot.1.load(Relaxed), slot.0.load(Relaxed));
        if words.revoked_before() <= 7 {
            assert_eq!(read, (1, 1));
        }
        publishing.join().unwrap();
        assert_eq!(words.revoked_before(), 8);
    });
}

/// Two threads of a subscriber give back two uses of one slot, of which the first was revoked.
///
/// Detects: `release` that swaps.
#[test]
fn end_of_a_revoked_use_does_not_take_back_that_of_a_later_one() {
    explore("end_of_a_revoked_use_does_not_take_back_that_of_a_later_one", 3, || {
        let lane = Arc::new(Split::new(2, true));
        let word = Arc::new(AtomicU64::new(0));
        let other = thread::spawn({
            let (lane, word) = (lane.clone(), word.clone());
            move || {
                let _ = split::SlotWord::of(&word).release(1, lane.words());
            }
        });
        split::SlotWord::of(&word).release(2, lane.words());
        other.join().unwrap();
        assert_eq!(split::SlotWord::of(&word).last_over(), 2);
    });
}

fn unread(producer: &Producer) -> Vec<u8> {
    producer.unread_ranges().into_iter().flatten().map(|at| at as u8 + 1).collect()
}

/// The sender spills twice, and returns to its ring in between if the receiver is fast: every byte
/// comes once, in order.
///
/// Detects: a sender that leaves the spill before the lane is empty; one that stores `spilled_at`
/// after it publishes; a receiver that keeps the previous `spilled_at`, or whose fast path does not
/// stop at [`SPILLED`](shunt_abi::geometry::LANE_SPILLED).
#[test]
fn what_spills_comes_in_order() {
    explore("what_spills_comes_in_order", 3, || {
        let lane = Arc::new(Lane::with_spill(1, 4, 0));
        let sending = thread::spawn({
            let lane = lane.clone();
            move || {
                let mut producer = Producer::new();
                for first in 1..=4 {
                    if lane.write_at_once(&mut producer, first) == Published::Full {
                        assert!(producer.spill(&lane.header, &lane.ring));
                        assert_eq!(lane.write(&mut producer, first, 1), Published::Bytes(1));
                    }
                }
                lane.header.close();
            }
        });
        let mut consumer = Consumer::new();
        let mut got = Vec::new();
        for _ in 0..2 {
            got.extend(lane.read_at_once(&mut consumer, 1));
        }
        sending.join().unwrap();
        got.extend(lane.read(&mut consumer, 4));
        assert_eq!(got, counting(4));
    });
}

/// After a fork, two processes read a lane that has ended, and one of them returns the rest: every
/// byte comes once.
///
/// Detects: `advance` that swaps or stores instead of comparing; `end` that only loads the cursor
/// of the returned bytes.
#[test]
fn what_two_read_and_give_back_comes_once() {
    explore("what_two_read_and_give_back_comes_once", 2, || {
        let lane = Arc::new(Lane::new(4, 0));
        let mut producer = Producer::new();
        assert_eq!(lane.write(&mut producer, 1, 3), Published::Bytes(3));
        lane.header.close();
        let sender = thread::spawn({
            let lane = lane.clone();
            move || match lane.write(&mut producer, 4, 1) {
                Published::Returned => unread(&producer),
                outcome => {
                    assert_eq!(outcome, Published::Closed);
                    lane.header.leave();
                    // Only now is it certain that the receiver returned nothing.
                    match producer.commit(&lane.header, 0) {
                        Ok(Published::Returned) => unread(&producer),
                        outcome => {
                            assert_eq!(outcome, Ok(Published::Closed));
                            Vec::new()
                        }
                    }
                }
            }
        });
        let other = thread::spawn({
            let lane = lane.clone();
            move || {
                let mut consumer = Consumer::new();
                let mut got = lane.read(&mut consumer, 1);
                got.extend(lane.read(&mut consumer, 1));
                (consumer, got)
            }
        });
        let mut consumer = Consumer::new();
        let mut got = lane.read(&mut consumer, 1);
        let gives_back = lane.header.give_back();
        let (mut other, more) = other.join().unwrap();
        got.extend(more);
        got.extend::<Vec<u8>>(sender.join().unwrap());
        if !gives_back {
            got.extend(lane.read(&mut other, 4));
        }
        got.sort_unstable();
        assert_eq!(got, counting(3));
    });
}
