//! The switch onto a lane and back in all interleavings: `RUSTFLAGS="--cfg loom" cargo test
//! --release`.
//!
//! One direction of a connection over a simulated kernel. The sender numbers its bytes, and the
//! receiver records the bytes that it gets. After both have run, the rest is read until the end of
//! file. Each model names the changes to `src` (or to a rule that the shim keeps) that make it
//! fail; each was tried.

#![cfg(loom)]

mod common;

use loom::sync::{Arc, Mutex};
use loom::thread;
use shunt_abi::reason::{Reason, Transport};
use shunt_ring::bytes::Ring;
use shunt_ring::lane::End;
use shunt_ring::{LaneHeader, Sink};
use shunt_transport::{Kernel, Received, Rx, Sent, Tx, Waiting};

use common::model::{CheckedRing, explore};
use common::{Buffer, Wire};

/// The sending end: the state that its lock protects.
#[derive(Default)]
struct Sending {
    tx: Tx,
    in_kernel: usize,
}

/// The receiving end: the state that its lock protects.
#[derive(Default)]
struct Receiving {
    rx: Rx,
    in_kernel: usize,
    got: Vec<u8>,
    ended: bool,
}

/// One direction of a connection, with both its ends.
struct Connection {
    header: LaneHeader,
    ring: CheckedRing,
    tcp: Tcp,
    sending: Mutex<Sending>,
    receiving: Mutex<Receiving>,
}

struct Tcp(Mutex<Wire>);

impl Tcp {
    /// Written bytes arrive immediately: the property tests cover bytes in flight.
    fn send(&self, byte: u8) {
        let mut wire = self.0.lock().unwrap();
        wire.send([byte]);
        wire.arrive(1);
    }
}

impl Kernel for Tcp {
    fn sent(&self) -> Option<u64> {
        Some(self.0.lock().unwrap().sent())
    }

    fn read(&self) -> Option<u64> {
        self.0.lock().unwrap().read()
    }

    fn received(&self) -> u64 {
        self.0.lock().unwrap().arrived_total()
    }

    fn waiting(&self) -> Waiting {
        self.0.lock().unwrap().waiting()
    }

    fn receive(&self, sink: &mut Sink<'_>) -> Result<usize, i32> {
        self.0.lock().unwrap().receive(sink)
    }
}

impl Connection {
    /// Returns a connection of which both ends have a lane and no end watches it. One byte,
    /// numbered 1, waits in TCP.
    fn adopted() -> Arc<Connection> {
        let connection = Connection {
            header: LaneHeader::new(),
            ring: CheckedRing::new(2, 0),
            tcp: Tcp(Mutex::default()),
            sending: Mutex::default(),
            receiving: Mutex::default(),
        };
        connection.sending.lock().unwrap().tx.adopt();
        connection.receiving.lock().unwrap().rx.adopt();
        connection.tcp.send(1);
        Arc::new(connection)
    }

    /// Returns a connection as `adopted` does, and the receiver watches.
    fn watched() -> Arc<Connection> {
        let connection = Connection::adopted();
        assert!(connection.try_watch());
        connection
    }

    /// Returns a connection as `watched` does; both ends are on the lane, and TCP has been read.
    fn switched() -> Arc<Connection> {
        let connection = Connection::watched();
        connection.send(2);
        connection.receive(8);
        assert_eq!(connection.receiving.lock().unwrap().got, [1, 2]);
        connection
    }

    fn try_watch(&self) -> bool {
        let mut side = self.receiving.lock().unwrap();
        let quiet = side.in_kernel == 0;
        side.rx.try_watch(&self.header, &self.tcp, quiet)
    }

    /// A non-blocking send. It writes to TCP under the lock if the lane does not accept the byte,
    /// and leaves a lane that is full.
    fn send(&self, byte: u8) {
        let mut side = self.sending.lock().unwrap();
        if !self.write(&mut side, byte) {
            self.tcp.send(byte);
        }
    }

    /// A blocking send. It enters the kernel without the lock.
    fn send_blocking(&self, byte: u8) {
        {
            let mut side = self.sending.lock().unwrap();
            if self.write(&mut side, byte) {
                return;
            }
            side.in_kernel += 1;
        }
        self.tcp.send(byte);
        self.sending.lock().unwrap().in_kernel -= 1;
    }

    fn write(&self, side: &mut Sending, byte: u8) -> bool {
        let quiet = side.in_kernel == 0;
        if side.tx.transport(&self.header, &self.tcp, quiet) == Transport::Tcp {
            return false;
        }
        let mut buffer = Buffer::new(vec![byte], &[]);
        match side.tx.write(&self.header, &self.ring, &mut buffer.source()) {
            Sent::Bytes(_) => true,
            Sent::Full => {
                side.tx.close(&self.header, Reason::Stalled);
                self.send_again(side);
                false
            }
            Sent::Ended => {
                side.tx.take_back(&self.header, Reason::PeerWentBack);
                self.send_again(side);
                false
            }
            Sent::UseTcp => false,
            Sent::SendAgain => {
                self.send_again(side);
                false
            }
            Sent::Fault => unreachable!("the model's memory can be read"),
        }
    }

    /// Sends the bytes that the receiver returned by TCP, before any other byte.
    fn send_again(&self, side: &mut Sending) {
        side.tx.notice_return(&self.header);
        while let Some(range) = side.tx.returning() {
            let mut buffer = Buffer::zeroed(1, &[]);
            self.ring.drain(range.start, 1, &mut buffer.sink()).unwrap();
            self.tcp.send(buffer.bytes()[0]);
            side.tx.returned(1);
        }
    }

    fn give_back(&self) -> bool {
        self.receiving.lock().unwrap().rx.give_back(&self.header, Reason::Exec)
    }

    fn take_back(&self) {
        let mut side = self.sending.lock().unwrap();
        side.tx.take_back(&self.header, Reason::Unread);
        self.send_again(&mut side);
    }

    /// The kernel's part of the end of a process or of a shutdown.
    fn finish(&self) {
        self.tcp.0.lock().unwrap().finish();
    }

    fn close_sending(&self) {
        self.sending.lock().unwrap().tx.close(&self.header, Reason::Fork);
    }

    fn close_receiving(&self) {
        self.receiving.lock().unwrap().rx.close(&self.header, &self.tcp, Reason::Fork);
    }

    /// A non-blocking receive of up to `len` bytes.
    fn receive(&self, len: usize) {
        let mut side = self.receiving.lock().unwrap();
        let mut buffer = Buffer::zeroed(len, &[]);
        let mut sink = buffer.sink();
        let mut outcome = side.rx.receive(&self.header, &self.ring, &self.tcp, &mut sink);
        if outcome == Received::UseTcp {
            outcome = match self.tcp.receive(&mut sink) {
                Ok(0) => Received::EndOfFile,
                Ok(count) => Received::Bytes(count),
                Err(_) => Received::Empty,
            };
        }
        match outcome {
            Received::Bytes(count) => {
                assert!(!side.ended, "bytes behind the end of file");
                side.got.extend(&buffer.bytes()[..count]);
            }
            Received::EndOfFile => side.ended = true,
            Received::Empty => {}
            outcome => panic!("{outcome:?}"),
        }
    }

    /// A blocking receive of one byte, for a thread that found the direction on TCP. It enters the
    /// kernel without the lock, and a signal ends it if no byte comes.
    fn receive_blocking(&self) {
        {
            let mut side = self.receiving.lock().unwrap();
            if !side.rx.is_adopted() {
                return;
            }
            side.in_kernel += 1;
        }
        let mut buffer = Buffer::zeroed(1, &[]);
        let count = self.tcp.receive(&mut buffer.sink()).unwrap_or(0);
        let mut side = self.receiving.lock().unwrap();
        side.in_kernel -= 1;
        side.got.extend(&buffer.bytes()[..count]);
    }

    /// Reads the rest after both ends have stopped. Every sent byte must be there, and then the
    /// end.
    fn drain(&self) -> Vec<u8> {
        self.send_again(&mut self.sending.lock().unwrap());
        self.finish();
        self.receiving.lock().unwrap().rx.note_tcp_news();
        for _ in 0..10 {
            self.receive(3);
            let side = self.receiving.lock().unwrap();
            if side.ended {
                return side.got.clone();
            }
        }
        panic!("no end of file: {:?}", self.receiving.lock().unwrap().rx);
    }
}

fn counting(bytes: u8) -> Vec<u8> {
    (1..=bytes).collect()
}

/// L4, receiver first: the sender may begin, publish, fall back and write to TCP between any two
/// steps of a receive.
///
/// Detects: in `tcp_share`, no check of the lane after asking TCP while watching, no limit while
/// catching up, or more taken than TCP held; in `Rx::step`, `is_closed` called after `beginning`,
/// or with a Relaxed load.
#[test]
fn nothing_overtakes_a_lane_that_begins() {
    for (name, len) in [("begins, receives of 1", 1), ("begins, receives of 8", 8)] {
        explore(name, 4, move || {
            let connection = Connection::watched();
            let sender = thread::spawn({
                let connection = connection.clone();
                move || {
                    connection.send(2);
                    connection.close_sending();
                    connection.send(3);
                }
            });
            connection.receive(len);
            connection.receive(len);
            sender.join().unwrap();
            assert_eq!(connection.drain(), counting(3));
        });
    }
}

/// The receiver is already on the lane, and asks TCP because the kernel reported it as readable.
///
/// Detects: in `tcp_share`, no check of the lane after asking TCP while on it.
#[test]
fn nothing_overtakes_a_lane_that_ends() {
    explore("ends", 4, || {
        let connection = Connection::switched();
        let sender = thread::spawn({
            let connection = connection.clone();
            move || {
                connection.send(3);
                connection.close_sending();
                connection.send(4);
            }
        });
        for _ in 0..2 {
            connection.receiving.lock().unwrap().rx.note_tcp_news();
            connection.receive(8);
        }
        sender.join().unwrap();
        assert_eq!(connection.drain(), counting(4));
    });
}

/// L4: the offset is right although another thread of the sender is inside a kernel send.
///
/// Detects: `quiet` ignored in `Tx::transport`; the count of senders incremented after the lock is
/// released.
#[test]
fn the_lane_begins_behind_every_send_of_two_threads() {
    explore("two senders", 3, || {
        let connection = Connection::adopted();
        let other = thread::spawn({
            let connection = connection.clone();
            move || connection.send(20)
        });
        let first = thread::spawn({
            let connection = connection.clone();
            move || {
                connection.send_blocking(10);
                connection.send_blocking(11);
            }
        });
        connection.try_watch();
        connection.receive(8);
        first.join().unwrap();
        other.join().unwrap();
        let got = connection.drain();
        let of_first: Vec<u8> = got.iter().copied().filter(|byte| (10..20).contains(byte)).collect();
        assert_eq!((got.len(), got[0], of_first), (4, 1, vec![10, 11]), "{got:?}");
    });
}

/// L4: the sender does not begin while a thread of the receiver is inside a kernel receive.
///
/// Detects: `quiet` ignored in `Rx::try_watch`; `is_watched` that always returns `true`.
#[test]
fn the_receiver_watches_only_when_nobody_is_in_the_kernel() {
    explore("a receiver in the kernel", 3, || {
        let connection = Connection::adopted();
        let sender = thread::spawn({
            let connection = connection.clone();
            move || {
                connection.send(2);
                connection.close_sending();
                connection.send(3);
            }
        });
        let blocked = thread::spawn({
            let connection = connection.clone();
            move || connection.receive_blocking()
        });
        if connection.try_watch() {
            connection.receive(1);
            connection.receive(8);
        }
        blocked.join().unwrap();
        sender.join().unwrap();
        assert_eq!(connection.drain(), counting(3));
    });
}

/// L2: either end falls back, or both at the same time, while bytes are being published.
///
/// Detects: `commit` that loads and stores instead of comparing and swapping; a sender that drops
/// the bytes that a closed lane refused; a receiver that leaves before the lane is drained.
fn goes_back(name: &str, sender_closes: bool, receiver_closes: bool) {
    explore(name, 4, move || {
        let connection = Connection::switched();
        let sender = thread::spawn({
            let connection = connection.clone();
            move || {
                connection.send(3);
                if sender_closes {
                    connection.close_sending();
                }
                connection.send(4);
                connection.send(5);
            }
        });
        connection.receive(1);
        if receiver_closes {
            connection.close_receiving();
        }
        connection.receive(1);
        connection.receive(8);
        sender.join().unwrap();
        assert_eq!(connection.drain(), counting(5));
    });
}

/// L2 for a reader that will be out of reach: the bytes that it has not read come again by TCP,
/// once and in their place.
///
/// Detects: `give_back` that sets its bits without a comparison; a sender that continues before it
/// has sent those bytes again, or does not announce that it has continued; a `close` by the sender
/// that does not notice the return.
fn gives_back(name: &str, sender_closes: bool, receiver_closes: bool) {
    explore(name, 4, move || {
        let connection = Connection::switched();
        let sender = thread::spawn({
            let connection = connection.clone();
            move || {
                connection.send(3);
                connection.send(4);
                if sender_closes {
                    connection.close_sending();
                }
                connection.send(5);
            }
        });
        connection.receive(1);
        if receiver_closes {
            // As before a fork, of which this is the child.
            connection.close_receiving();
        }
        // If the sender has left the lane, it is drained here instead.
        let _ = connection.give_back();
        connection.receive(8);
        sender.join().unwrap();
        assert_eq!(connection.drain(), counting(5));
    });
}

#[test]
fn what_is_given_back_comes_again_in_its_place() {
    gives_back("gives back", false, false);
}

#[test]
fn what_is_given_back_survives_a_sender_that_closes() {
    gives_back("gives back while the sender closes", true, false);
}

#[test]
fn what_is_given_back_late_comes_again_in_its_place() {
    gives_back("gives back after an end", false, true);
}

/// L9: a sender reclaims the bytes that the receiver has not read, and continues by TCP. At any
/// moment the receiver may read after all, return the bytes itself, or end the lane.
///
/// Detects: `take_back` that only loads the receiver's cursor; a consumer that moves it by a store;
/// one that takes reclaimed bytes as its own.
fn takes_back(name: &str, receiver_ends: fn(&Connection)) {
    explore(name, 4, move || {
        let connection = Connection::switched();
        let sender = thread::spawn({
            let connection = connection.clone();
            move || {
                connection.send(3);
                connection.send(4);
                connection.take_back();
                connection.send(5);
            }
        });
        connection.receive(1);
        receiver_ends(&connection);
        connection.receive(8);
        sender.join().unwrap();
        assert_eq!(connection.drain(), counting(5));
    });
}

#[test]
fn what_is_taken_back_comes_again_in_its_place() {
    takes_back("takes back", |_| {});
}

#[test]
fn what_is_taken_back_and_given_back_comes_once() {
    takes_back("takes back what is given back", |connection| {
        let _ = connection.give_back();
    });
}

#[test]
fn what_is_taken_back_from_a_lane_that_has_ended_comes_again_in_its_place() {
    takes_back("takes back after an end", Connection::close_receiving);
}

/// The sender reclaims before the receiver knows whether it has begun.
#[test]
fn the_sender_takes_back_while_the_receiver_catches_up() {
    explore("takes back while it begins", 4, || {
        let connection = Connection::watched();
        let sender = thread::spawn({
            let connection = connection.clone();
            move || {
                connection.send(2);
                connection.take_back();
                connection.send(3);
            }
        });
        connection.receive(1);
        connection.receive(8);
        sender.join().unwrap();
        assert_eq!(connection.drain(), counting(3));
    });
}

/// The receiver returns bytes before it knows whether the sender has begun.
#[test]
fn the_receiver_gives_back_while_the_sender_begins() {
    explore("gives back while it begins", 4, || {
        let connection = Connection::watched();
        let sender = thread::spawn({
            let connection = connection.clone();
            move || {
                connection.send(2);
                connection.send(3);
            }
        });
        let _ = connection.give_back();
        connection.receive(8);
        sender.join().unwrap();
        assert_eq!(connection.drain(), counting(3));
    });
}

#[test]
fn the_receiver_goes_back_without_loss() {
    goes_back("the receiver goes back", false, true);
}

#[test]
fn the_sender_goes_back_without_loss() {
    goes_back("the sender goes back", true, false);
}

#[test]
fn both_go_back_at_once_without_loss() {
    goes_back("both go back", true, true);
}

/// The receiver closes before it knows whether the sender has begun.
///
/// Detects: `Rx::close` that leaves immediately while watching; no limit while catching up.
#[test]
fn the_receiver_goes_back_while_the_sender_begins() {
    explore("goes back while it begins", 4, || {
        let connection = Connection::watched();
        let sender = thread::spawn({
            let connection = connection.clone();
            move || {
                connection.send(2);
                connection.send(3);
            }
        });
        connection.close_receiving();
        connection.receive(8);
        connection.receive(8);
        sender.join().unwrap();
        assert_eq!(connection.drain(), counting(3));
    });
}

/// The sender, or the whole process, stops after any of its steps, and its kernel sends the FIN.
/// The receiver gets exactly the published bytes, and then the end, even if it polls TCP at that
/// very moment.
///
/// Detects: in `tcp_share`, an end of file believed without a check of the lane behind it, while
/// watching or on the lane.
#[test]
fn the_end_of_file_comes_behind_everything_published() {
    for steps in 0..=4 {
        explore(&format!("the sender stops after {steps} steps"), 4, move || {
            let connection = Connection::watched();
            let sender = thread::spawn({
                let connection = connection.clone();
                move || {
                    let program: [&dyn Fn() -> u8; 4] = [
                        // Begins, and dies before it has published.
                        &|| {
                            let mut side = connection.sending.lock().unwrap();
                            side.tx.transport(&connection.header, &connection.tcp, true);
                            0
                        },
                        &|| {
                            connection.send(2);
                            1
                        },
                        &|| {
                            connection.send(3);
                            1
                        },
                        // Announces its end, as a process that is not killed does.
                        &|| {
                            connection.header.set_end(End::ShutDown);
                            0
                        },
                    ];
                    let sent: u8 = program[..steps].iter().map(|step| step()).sum();
                    connection.finish();
                    sent
                }
            });
            for _ in 0..3 {
                connection.receiving.lock().unwrap().rx.note_tcp_news();
                connection.receive(8);
            }
            let sent = sender.join().unwrap();
            assert_eq!(connection.drain(), counting(1 + sent));
        });
    }
}
