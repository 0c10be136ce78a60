//! Lanes and waiters in all interleavings: `RUSTFLAGS="--cfg loom" cargo test --release`.
//!
//! Each model names the changes to `src` that make it fail; they have been tried. Waiting is modelled by a doorbell
//! that nothing but the protocol rings, so a lost wake-up is a deadlock.

#![cfg(loom)]

mod common;

use loom::sync::Arc;
use loom::thread;
use shunt_ring::bytes::Ring;
use shunt_ring::{Consumer, LaneHeader, Producer, Published, WaiterLine};

use common::Buffer;
use common::model::{CheckedRing, Doorbell, explore};

/// The one waiter of these models; connections are numbered as they come.
const SLOT: usize = 0;

struct Lane {
    header: LaneHeader,
    ring: CheckedRing,
    conn: usize,
}

impl Lane {
    fn new(size: usize, conn: usize) -> Lane {
        Lane { header: LaneHeader::new(), ring: CheckedRing::new(size), conn }
    }

    /// Publishes what fits of the bytes from `first` on.
    fn write(&self, producer: &mut Producer, first: u8, len: u8) -> Published {
        let mut buffer = Buffer::new((first..first + len).collect(), &[]);
        producer.write(&self.header, &self.ring, &mut buffer.source()).expect("both ends behave")
    }

    fn read(&self, consumer: &mut Consumer, len: usize) -> Vec<u8> {
        let mut buffer = Buffer::zeroed(len, &[]);
        let count = consumer.read(&self.header, &self.ring, &mut buffer.sink()).expect("both ends behave");
        buffer.bytes()[..count].to_vec()
    }

    /// The same as [`write`](Self::write), of one byte, which goes at once if it can.
    fn write_at_once(&self, producer: &mut Producer, byte: u8) -> Published {
        let Some(at) = producer.place_at_once(&self.header, &self.ring, 1) else {
            return self.write(producer, byte, 1);
        };
        self.ring.fill(at, 1, &mut Buffer::new(vec![byte], &[]).source()).expect("good memory");
        match producer.publish(&self.header, 1) {
            Ok(()) => Published::Bytes(1),
            Err(_) => self.write(producer, byte, 1),
        }
    }

    /// The same as [`read`](Self::read), at once if it can be.
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

    /// What a sender does after publishing.
    fn announce_bytes(&self, waiter: &Waiter) {
        if self.header.rx_waiter() == Some(SLOT) && waiter.line.notify(self.conn) {
            waiter.doorbell.ring();
        }
    }

    /// What a receiver does after reading.
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
    /// Announces a sleep, looks once more, and sleeps unless that found something.
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

/// Caught: `commit` with Relaxed instead of AcqRel; `available` with a Relaxed load; `advance` with a Relaxed exchange or
/// `refresh` with a Relaxed load (the sender fills what is still being read); `advance` before `drain`; one byte more
/// of `room`; the base moved while bytes are unread, stored after `commit`, or read before the tail.
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

/// Caught: no fence in `commit` or `announce_sleep`; `sleeping` stored with Release instead of swapped and fenced; no
/// second look in `sleep_unless`; `rx_waiter` named after the announcement.
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

/// An epoll instance looks only at lanes whose bit is set, so a bit must never be missed, in particular not by a sender
/// that finds it set and leaves it at that.
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

/// Caught: no fence in `take_ready` (a bit that is still set hides the second byte), in `notify` after marking a bit, or
/// in `announce_sleep`; no second look.
#[test]
fn an_epoll_instance_misses_no_byte_of_a_busy_lane() {
    epoll("an_epoll_instance_misses_no_byte_of_a_busy_lane", 5, &[3]);
}

/// A connection comes into a set in whose line another has left a mark: that is taken, and the connection looked at.
///
/// Caught: no fence in `take_mark`; the look before it.
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

/// Caught: `ready` stored, or loaded and stored, instead of or-ed.
#[test]
fn an_epoll_instance_misses_no_lane() {
    epoll("an_epoll_instance_misses_no_lane", 4, &[2, 1]);
}

/// A sender finds the lane full and writes two more bytes than fit; `wait` is how it waits for space.
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

/// Caught: no fence in `want_space` or in `advance`; no second look; the wish before the announcement;
/// `take_space_wanted` asked before reading; `tx_waiter` stored after `tx_wants`.
#[test]
fn a_thread_that_sleeps_on_a_full_lane_is_woken() {
    full_lane("a_thread_that_sleeps_on_a_full_lane_is_woken", |lane, waiter, producer| {
        waiter.sleep_unless(|| {
            lane.header.want_space(SLOT);
            has_room(lane, producer)
        });
    });
}

/// A non-blocking send leaves its wish behind, and an epoll instance sleeps later.
///
/// Caught: no look for space after the wish; no look at the ready word after the announcement.
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

/// Sends three bytes, each by `write`, and ends the lane when it is full. Says how many are in it.
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
/// Caught: `commit` that loads and stores instead of comparing and swapping; `close` that stores the tail it has loaded.
#[test]
fn both_ends_agree_on_the_last_byte() {
    explore("both_ends_agree_on_the_last_byte", 9, || {
        let lane = Arc::new(Lane::new(2, 0));
        let sender = send_three(&lane, |lane, producer, byte| lane.write(producer, byte, 1));
        let mut consumer = Consumer::new();
        let mut got = lane.read(&mut consumer, 1);
        lane.header.close();
        got.extend(lane.read(&mut consumer, 4));
        // The end is final: nothing is published behind it, whether the sender knows of it yet or not.
        assert!(consumer.is_finished());
        assert_eq!(got, counting(sender.join().unwrap()));
    });
}

/// The same where all goes at once that can.
///
/// Caught: a look at the tail with a Relaxed load; `take` with a Relaxed exchange.
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

/// The pattern of `crates/channel`: each end has a line of its own, a sender always looks at the receiver's, and a receiver
/// at the sender's once half of the ring is free. The sender sends `COUNT` bytes through a ring of 2.
#[test]
fn a_channel_of_two_that_sleep_goes_on() {
    const COUNT: u8 = 3;
    explore("a_channel_of_two_that_sleep_goes_on", 3, || {
        let lane = Arc::new(Lane::new(2, 0));
        let (receiver, sender) = (Arc::new(Waiter::default()), Arc::new(Waiter::default()));
        let sending = thread::spawn({
            let (lane, receiver, sender) = (lane.clone(), receiver.clone(), sender.clone());
            move || {
                let mut producer = Producer::new();
                let mut next = 1;
                while next <= COUNT {
                    match lane.write(&mut producer, next, 1) {
                        Published::Bytes(_) => {
                            next += 1;
                            if receiver.line.notify(0) {
                                receiver.doorbell.ring();
                            }
                        }
                        _ => sender.sleep_unless(|| has_room(&lane, &mut producer)),
                    }
                }
            }
        });
        let mut consumer = Consumer::new();
        let mut got = Vec::new();
        while got.len() < usize::from(COUNT) {
            let bytes = lane.read(&mut consumer, 1);
            if bytes.is_empty() {
                receiver
                    .sleep_unless(|| consumer.available(&lane.header, &lane.ring).expect("both behave") > 0);
                continue;
            }
            got.extend(bytes);
            let unread = consumer.available(&lane.header, &lane.ring).expect("both behave");
            if unread <= 1 && sender.line.notify(0) {
                sender.doorbell.ring();
            }
        }
        sending.join().unwrap();
        assert_eq!(got, counting(COUNT));
    });
}

/// After a fork two processes read a lane that has ended, and one of them gives the rest back: every byte comes once.
///
/// Caught: `advance` that swaps or stores instead of comparing; `end` that only loads the cursor of what was given back.
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
                Published::Returned => producer.unread_range().map(|at| at as u8 + 1).collect(),
                outcome => {
                    assert_eq!(outcome, Published::Closed);
                    lane.header.leave();
                    // Only now is it certain that nothing was given back.
                    match producer.commit(&lane.header, 0) {
                        Ok(Published::Returned) => producer.unread_range().map(|at| at as u8 + 1).collect(),
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
