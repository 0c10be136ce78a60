//! Subscribers that lie, never read, or never give anything back: the publisher and the others go on.
//! Publishers that lie: their subscribers notice it.

mod common;
#[path = "common/liar.rs"]
mod liar;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use common::*;
use liar::*;
use proptest::prelude::*;
use shunt_channel::{
    Attended, Borrowed, Cause, Message, Options, Publisher, PublisherOptions, ReceiveError, Receiver,
    SendError, Sender, SubscribeError, Subscriber, Wait,
};
use shunt_ring::split::{Producer, RECEIVER_BYTES};
use shunt_sys::mapping::Mapping;
use shunt_sys::{Errno, memfd, seqpacket};

const NUMBER: u32 = 32;
const LEN: usize = 100_000;
/// Where the words of slots begin in a subscriber's file.
const SLOTS: usize = 1024;

fn subscription() -> Vec<u8> {
    notice(0x7368_6d03, 3, 0)
}

/// A subscriber made by hand, its words, and a correct subscriber of the same publisher.
struct Case {
    publisher: Publisher,
    good: Subscriber,
    socket: OwnedFd,
    words: Mapping,
    next: u64,
}

impl Case {
    fn new(history: usize) -> Case {
        let options = PublisherOptions { history, lent_bytes: 1 << 20, ..PublisherOptions::default() };
        let mut publisher = Publisher::new(options).unwrap();
        let mut subscribe = || {
            let (ours, theirs) = sockets();
            publisher.adopt(ours).unwrap();
            theirs
        };
        let (good, socket) = (subscribe(), subscribe());
        let good = Subscriber::over(good).unwrap();
        drop(next_descriptor(&socket));
        let (file, words) = memfd::create_whole("shunt-test", RECEIVER_BYTES).unwrap();
        seqpacket::send(&socket, &subscription(), &[]).unwrap();
        seqpacket::send(&socket, &answer(), &[file.as_fd()]).unwrap();
        publisher.attend(Wait::Never).unwrap();
        Case { publisher, good, socket, words, next: 0 }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        self.words.word(offset).unwrap()
    }

    /// Publishes a message that the correct subscriber gets.
    fn publish(&mut self, len: usize) {
        let expected = pattern(self.next, len);
        assert_eq!(self.publisher.publish(&expected), Ok(self.next));
        let mut message = Message::new();
        let publication = self.good.receive(&mut message, soon()).unwrap();
        assert_eq!((publication.number, publication.missed), (self.next, 0));
        assert!(message.bytes() == expected);
        self.next += 1;
    }

    /// Asserts that the publisher has disconnected the liar.
    fn assert_refused(mut self, what: &str) {
        let mut attended = Attended::default();
        for _ in 0..100 {
            self.publish(100);
            self.publish(LEN);
            let now = self.publisher.attend(Wait::Never).unwrap();
            // An empty notice is an end.
            attended.refused += now.refused + now.left;
        }
        assert_eq!((attended.refused, self.publisher.subscribers().count()), (1, 1), "{what}");
        while seqpacket::recv(&self.socket, &mut [0; 64]).is_ok_and(|(len, _)| len > 0) {}
        assert!(seqpacket::has_hung_up(&self.socket));
    }
}

#[test]
fn words_that_no_subscriber_writes_end_it_and_no_other() {
    for (offset, value) in [(0, u64::MAX), (0, 1 << 40), (SLOTS, 2), (SLOTS, u64::MAX)] {
        let mut case = Case::new(0);
        // A slot has been used once.
        case.publish(LEN);
        case.word(offset).store(value, Relaxed);
        // More than the ring has, so that the cursor is checked.
        for _ in 0..100 {
            case.publish(1000);
            let _ = case.publisher.loan(LEN);
        }
        let loans: Vec<_> = std::iter::from_fn(|| case.publisher.loan(LEN).ok()).collect();
        drop(loans);
        case.publish(LEN);
        let refused = case.publisher.attend(Wait::Never).unwrap().refused;
        assert_eq!((refused, case.publisher.subscribers().count()), (1, 1), "{offset} {value}");
    }
}

#[test]
fn notices_that_no_subscriber_sends_end_it_and_no_other() {
    let (reader, writer) = witness();
    let fd = writer.as_fd();
    let notices = [
        (vec![], vec![fd]),
        (vec![1; 17], vec![fd]),
        (notice(2, 0, 0), vec![fd]),
        (notice(3, 1, 0), vec![fd]),
        (notice(4, 1, 4096), vec![fd]),
        (greeting(65_536), vec![fd]),
        (answer(), vec![fd]),
        (notice(0x7368_6d03, 2, 0), vec![]),
        (notice(0x7368_6d03, 3, 0), vec![fd]),
    ];
    for (bytes, fds) in &notices {
        let case = Case::new(0);
        seqpacket::send(&case.socket, bytes, fds).unwrap();
        case.assert_refused(&format!("{bytes:?}"));
    }
    drop(notices);
    drop(writer);
    assert!(is_gone(reader));
}

#[test]
fn answers_with_other_memory_end_their_subscriber() {
    let sparse = memfd::create_fixed("shunt-test", RECEIVER_BYTES).unwrap();
    let (short, _mapping) = memfd::create_whole("shunt-test", 8192).unwrap();
    for memory in [sparse, short] {
        let mut case = Case::new(0);
        let (ours, theirs) = sockets();
        case.publisher.adopt(ours).unwrap();
        seqpacket::send(&theirs, &answer(), &[memory.as_fd()]).unwrap();
        case.publisher.attend(Wait::Never).unwrap();
        case.publish(100);
        assert_eq!(case.publisher.subscribers().count(), 2);
    }
}

/// A subscriber that neither reads nor answers nor gives anything back has a bounded number of
/// messages and of descriptors in flight.
#[test]
fn subscriber_that_does_nothing_stalls_no_other() {
    for history in [0, 8] {
        let mut case = Case::new(history);
        let (ours, silent) = sockets();
        case.publisher.adopt(ours).unwrap();
        for round in 0..400 {
            case.publish(if round % 2 == 0 { 1000 } else { 4096 << (round % 7) });
        }
        let statuses: Vec<_> = case.publisher.subscribers().collect();
        assert_eq!(statuses[0].missed + statuses[0].revoked, 0);
        for status in &statuses[1..] {
            assert!(status.missed > 200, "{status:?}");
        }
        let mut descriptors = 0;
        while let Ok((len, fds)) = seqpacket::recv(&silent, &mut [0; 64]) {
            descriptors += fds.len();
            assert!(len > 0);
        }
        assert!(descriptors <= 20, "{descriptors}");
        // Its end releases what it has.
        drop(case.socket);
        drop(silent);
        assert_eq!(case.publisher.attend(soon()).unwrap().left, 2);
    }
}

/// Two subscribers ring all the time, with a new sleep number each time too.
#[test]
fn flood_of_doorbells_stalls_no_other() {
    let mut case = Case::new(2);
    let socket = case.socket.as_fd().try_clone_to_owned().unwrap();
    let is_over = std::sync::Arc::new(AtomicU64::new(0));
    let flooding = std::thread::spawn({
        let is_over = is_over.clone();
        move || {
            while is_over.load(SeqCst) == 0 {
                match seqpacket::send(&socket, &notice(2, 0, 0), &[]) {
                    Ok(()) | Err(Errno::AGAIN) => {}
                    Err(error) => return assert_eq!(error, Errno::PIPE),
                }
            }
        }
    });
    for round in 0..500 {
        case.word(64).store(round + 1, Relaxed);
        case.publish(if round % 5 == 0 { LEN } else { 100 });
        // Ends in time although there is always something to do.
        case.publisher.attend(Wait::Never).unwrap();
        case.publisher.flush(Wait::at_most(Duration::from_micros(10))).unwrap();
        case.publisher.flush(Wait::Never).unwrap();
    }
    is_over.store(1, SeqCst);
    flooding.join().unwrap();
    assert_eq!(case.publisher.subscribers().count(), 2);
}

#[test]
fn other_kinds_of_ends_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (one, two) = (directory.path().join("topic"), directory.path().join("channel"));
    let mut publisher = Publisher::listen(&one, PublisherOptions::default()).unwrap();
    let mut sender = Sender::connect(&one, soon()).unwrap();
    while publisher.attend(soon()).unwrap().refused == 0 {}
    assert_eq!(sender.send(b"", &[], soon()), Err(SendError::Misbehaved));
    let mut receiver = Receiver::listen(&two, Options::default()).unwrap();
    let mut subscriber = Subscriber::connect(&two, soon()).unwrap();
    assert!(matches!(ending(&mut receiver), Cause::Misbehaved(_)));
    assert_eq!(subscriber.receive(&mut Message::new(), soon()), Err(SubscribeError::Gone));
}

/// A publisher made by hand, and its subscriber.
fn deceived() -> (Liar, Subscriber) {
    let (ours, theirs) = sockets();
    let subscriber = Subscriber::over(theirs).unwrap();
    let memory = greet(&ours);
    (Liar { socket: ours, memory, producer: Producer::new() }, subscriber)
}

fn number(number: u64) -> [u32; 4] {
    [NUMBER, 0, number as u32, (number >> 32) as u32]
}

#[test]
fn numbers_that_no_publisher_writes_are_noticed() {
    let message = [FIRST | LAST, 4, 4, 0];
    let cases: [&[[u32; 4]]; 8] = [
        &[message],
        &[number(5), number(5)],
        &[number(5), number(4)],
        &[number(5), message, number(5)],
        &[number(u64::MAX), message],
        &[[NUMBER, 1, 0, 0]],
        &[[NUMBER | FIRST, 0, 0, 0]],
        &[number(0), [FIRST, 4, 8, 0], number(9)],
    ];
    for frames in cases {
        let (mut liar, mut subscriber) = deceived();
        for frame in frames {
            liar.put(*frame, if frame[0] & FIRST != 0 { &[0; 4] } else { &[] });
        }
        let mut found = subscriber.receive(&mut Message::new(), soon());
        if found.is_ok() {
            found = subscriber.receive(&mut Message::new(), soon());
        }
        assert!(
            matches!(found, Err(SubscribeError::Misbehaved(Cause::Misbehaved(_)))),
            "{frames:?} {found:?}"
        );
    }
    // A sender's messages have no numbers.
    let (mut liar, mut receiver, _good) = Liar::new();
    liar.put(number(0), &[]);
    assert!(matches!(ending(&mut receiver), Cause::Misbehaved(_)));
}

/// A publisher that only ever names numbers does not keep its subscriber beyond its time.
#[test]
fn flood_of_numbers_ends_in_time() {
    let (mut liar, mut subscriber) = deceived();
    for at in 0..1000 {
        liar.put(number(at), &[]);
    }
    let wait = Wait::at_most(Duration::from_millis(1));
    let found = subscriber.receive(&mut Message::new(), wait);
    assert_eq!(found, Err(SubscribeError::Receive(ReceiveError::TimedOut)));
}

/// A publisher uses a slot again that a subscriber has borrowed, with or without revoking it.
#[test]
fn slot_that_is_borrowed_is_used_again_only_after_its_message_was_revoked() {
    for revokes in [false, true] {
        let (mut liar, mut subscriber) = deceived();
        let (file, mapping) = memfd::create_whole("shunt-test", 4096).unwrap();
        liar.lend(1, 4096, &[file.as_fd()]);
        assert!(mapping.put(0, &[1; 4096]));
        liar.put(number(7), &[]);
        liar.put_lent(0, 1, 4096);
        let (mut first, mut second) = (Borrowed::new(), Borrowed::new());
        assert_eq!(subscriber.borrow(&mut first, soon()).unwrap().number, 7);
        assert!(first.is_intact() && first.to_vec() == [1; 4096]);
        if revokes {
            liar.memory.words().sender.revoke_before(8);
            assert!(mapping.put(0, &[2; 4096]) && !first.is_intact());
        }
        liar.put_lent(0, 2, 4096);
        let found = subscriber.borrow(&mut second, soon());
        if revokes {
            assert_eq!(found.unwrap().number, 8);
            assert!(second.is_intact() && second.to_vec() == [2; 4096]);
        } else {
            assert!(matches!(found, Err(SubscribeError::Misbehaved(_))), "{found:?}");
        }
    }
}

/// Everything is revoked at all times.
#[test]
fn publisher_that_revokes_everything_is_only_a_publisher_of_nothing() {
    let (mut liar, mut subscriber) = deceived();
    let (file, _mapping) = memfd::create_whole("shunt-test", 4096).unwrap();
    liar.lend(1, 4096, &[file.as_fd()]);
    liar.put(number(0), &[]);
    liar.memory.words().sender.revoke_before(u64::MAX);
    for use_number in 1..=200 {
        liar.put_lent(0, use_number, 4096);
    }
    let wait = Wait::at_most(Duration::from_millis(1));
    let found = subscriber.receive(&mut Message::new(), wait);
    assert_eq!(found, Err(SubscribeError::Receive(ReceiveError::TimedOut)));
    liar.put([FIRST | LAST, 4, 4, 0], b"four");
    let mut message = Message::new();
    let found = subscriber.receive(&mut message, soon()).unwrap();
    assert_eq!((found.number, found.missed, message.bytes()), (200, 0, &b"four"[..]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A subscriber writes any words and sends any notices. The publisher and the other subscriber go
    /// on.
    #[test]
    fn any_words_and_notices_of_a_subscriber_harm_no_other(
        steps in proptest::collection::vec((0usize..6, any::<u64>(), 0u64..4), 1..60),
        history in 0usize..4,
    ) {
        let mut case = Case::new(history);
        for (what, value, small) in steps {
            match what {
                0 => case.word([0, 8, 64, SLOTS][small as usize]).store(value, Relaxed),
                1 => case.word([0, 64, SLOTS, SLOTS + 8][small as usize]).store(small, Relaxed),
                2 => drop(seqpacket::send(&case.socket, &notice(small as u32 + 1, value as u32, value), &[])),
                3 => drop(seqpacket::recv(&case.socket, &mut [0; 64])),
                4 => case.publish(value as usize % 300_000),
                _ => drop(case.publisher.attend(Wait::Never).unwrap()),
            }
        }
        case.publish(10);
        case.publish(LEN);
    }

    /// A publisher publishes any frames, revokes anything, and writes its slots meanwhile.
    #[test]
    fn any_frames_of_a_publisher_end_it_or_are_messages(
        steps in proptest::collection::vec((0usize..5, 0u32..64, 0u32..40, 0u64..5), 1..40),
    ) {
        let (mut liar, mut subscriber) = deceived();
        let (file, mapping) = memfd::create_whole("shunt-test", 2 * 4096).unwrap();
        liar.lend(2, 2 * 4096, &[file.as_fd()]);
        liar.put(number(0), &[]);
        let mut kept = Vec::new();
        for (what, flags, len, small) in steps {
            match what {
                0 => liar.put([flags, len, len, 0], &vec![1; len as usize]),
                1 => liar.put_lent(small as u32 % 3, small, len),
                2 => liar.put(number(small), &[]),
                3 => liar.memory.words().sender.revoke_before(small),
                _ => assert!(mapping.put(0, &[small as u8; 4096])),
            }
            let mut borrowed = Borrowed::new();
            let ended = match subscriber.borrow(&mut borrowed, Wait::Never) {
                Ok(_) => {
                    prop_assert!(borrowed.to_vec().len() == borrowed.len());
                    kept.push(borrowed);
                    kept.len() > 3
                }
                Err(SubscribeError::Receive(_)) => false,
                Err(_) => break,
            };
            if ended {
                kept.clear();
            }
        }
    }
}
