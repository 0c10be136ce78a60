//! One publisher and several subscribers: histories, gaps, slow and late subscribers, and memory that
//! all of them read.

mod common;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use common::*;
use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, poll};
use shunt_channel::{
    Borrowed, MAX_MESSAGE, Message, Publication, Publisher, PublisherOptions, ReceiveError, SendError,
    SubscribeError, Subscriber, SubscriberState, Wait,
};

fn options(history: usize) -> PublisherOptions {
    PublisherOptions { history, ..PublisherOptions::default() }
}

fn listen(directory: &tempfile::TempDir, options: PublisherOptions) -> (Publisher, PathBuf) {
    let path = directory.path().join("topic");
    (Publisher::listen(&path, options).unwrap(), path)
}

/// Returns a publisher and its subscribers, over pairs of sockets.
fn with(options: PublisherOptions, count: usize) -> (Publisher, Vec<Subscriber>) {
    let mut publisher = Publisher::new(options).unwrap();
    let subscribers = (0..count).map(|_| subscribe(&mut publisher)).collect();
    (publisher, subscribers)
}

fn subscribe(publisher: &mut Publisher) -> Subscriber {
    let (ours, theirs): (OwnedFd, OwnedFd) = sockets();
    publisher.adopt(ours).unwrap();
    Subscriber::over(theirs).unwrap()
}

fn next(subscriber: &mut Subscriber, message: &mut Message) -> Publication {
    subscriber.receive(message, soon()).unwrap()
}

fn borrow(subscriber: &mut Subscriber) -> (Borrowed, Publication) {
    let mut borrowed = Borrowed::new();
    let publication = subscriber.borrow(&mut borrowed, soon()).unwrap();
    (borrowed, publication)
}

fn assert_nothing(subscriber: &mut Subscriber) {
    let got = subscriber.receive(&mut Message::new(), Wait::Never);
    assert_eq!(got, Err(SubscribeError::Receive(ReceiveError::WouldBlock)));
}

fn states(publisher: &Publisher) -> Vec<SubscriberState> {
    publisher.subscribers().map(|status| status.state).collect()
}

#[test]
fn every_size_reaches_every_subscriber_in_order() {
    const SIZES: [usize; 11] = [0, 1, 64, 2048, 2049, 4096, 65_536, 112_192, 1 << 20, 8 << 20, MAX_MESSAGE];
    let directory = tempfile::tempdir().unwrap();
    // A message that a subscriber has no room for waits in the history.
    let (mut publisher, path) = listen(&directory, options(1));
    let subscribing: Vec<_> = (0..3)
        .map(|index| {
            let path = path.clone();
            thread::spawn(move || {
                let mut subscriber = Subscriber::connect(&path, soon()).unwrap();
                assert_eq!(subscriber.publisher().unwrap().pid, std::process::id());
                let mut message = Message::new();
                for (number, len) in SIZES.into_iter().enumerate() {
                    let expected = pattern(number as u64, len);
                    let publication = Publication { number: number as u64, missed: 0 };
                    if index == 0 {
                        let (borrowed, found) = borrow(&mut subscriber);
                        assert_eq!((found, borrowed.len()), (publication, len));
                        assert_eq!(borrowed.is_in_place(), len > 2048, "{len}");
                        assert!(borrowed.to_vec() == expected && borrowed.is_intact(), "{len}");
                    } else {
                        assert_eq!(next(&mut subscriber, &mut message), publication);
                        assert!(message.bytes() == expected, "{len}");
                    }
                }
                assert_eq!(subscriber.receive(&mut message, soon()), Err(SubscribeError::Gone));
                assert_eq!(subscriber.receive(&mut message, soon()), Err(SubscribeError::Gone));
                assert_eq!(subscriber.missed(), 0);
            })
        })
        .collect();
    let mut joined = 0;
    while joined < 3 {
        joined += publisher.attend(soon()).unwrap().joined;
    }
    for (number, len) in SIZES.into_iter().enumerate() {
        assert_eq!(publisher.publish(&pattern(number as u64, len)), Ok(number as u64));
        // None loses anything.
        assert!(publisher.flush(soon()).unwrap());
    }
    let own = publisher.subscribers().next().unwrap();
    assert_eq!((own.credentials.unwrap().pid, own.missed, own.revoked), (std::process::id(), 0, 0));
    drop(publisher);
    subscribing.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(!path.exists());
}

#[test]
fn late_subscriber_gets_the_last_messages() {
    for len in [10, 100_000] {
        let (mut publisher, mut early) = with(options(3), 1);
        let mut message = Message::new();
        for number in 0..10 {
            publisher.publish(&pattern(number, len)).unwrap();
            assert_eq!(next(&mut early[0], &mut message).number, number);
        }
        let mut late = subscribe(&mut publisher);
        publisher.publish(&pattern(10, len)).unwrap();
        for number in 7..=10 {
            // What it has never been able to get is not missed.
            assert_eq!(next(&mut late, &mut message), Publication { number, missed: 0 });
            assert!(message.bytes() == pattern(number, len));
        }
        assert_nothing(&mut late);
        assert_eq!((publisher.kept(), publisher.next_number()), (3, 11));
    }
}

/// A subscriber that does not read loses messages, and learns how many. The others lose none.
#[test]
fn slow_subscriber_misses_counted_messages_and_no_other_does() {
    for (len, history) in [(1000, 0), (1000, 5), (100_000, 0), (100_000, 5)] {
        let (mut publisher, mut both) = with(options(history), 2);
        let (mut slow, mut fast) = (both.pop().unwrap(), both.pop().unwrap());
        let mut message = Message::new();
        for number in 0..300 {
            assert_eq!(publisher.publish(&pattern(number, len)), Ok(number));
            assert_eq!(next(&mut fast, &mut message), Publication { number, missed: 0 });
            assert!(message.bytes() == pattern(number, len));
        }
        assert_eq!(states(&publisher), [SubscriberState::Current, SubscriberState::Behind]);
        let status = publisher.subscribers().nth(1).unwrap();
        assert!(status.missed > 100, "{len}, {history}: {status:?}");
        let (mut got, mut missed, mut last) = (0, 0, None);
        loop {
            match slow.receive(&mut message, Wait::Never) {
                Ok(publication) => {
                    assert!(message.bytes() == pattern(publication.number, len));
                    assert!(last.is_none_or(|last| publication.number == last + 1 + publication.missed));
                    last = Some(publication.number);
                    (got, missed) = (got + 1, missed + publication.missed);
                }
                Err(SubscribeError::Receive(ReceiveError::WouldBlock)) => {
                    // It gets what the history has.
                    if publisher.attend(Wait::Never).is_ok()
                        && states(&publisher)[1] == SubscriberState::Current
                    {
                        match slow.receive(&mut message, Wait::Never) {
                            Ok(publication) => {
                                last = Some(publication.number);
                                (got, missed) = (got + 1, missed + publication.missed);
                                continue;
                            }
                            Err(_) => break,
                        }
                    }
                }
                Err(error) => panic!("{error}"),
            }
        }
        publisher.publish(&pattern(300, len)).unwrap();
        let publication = next(&mut slow, &mut message);
        assert_eq!(publication.number, 300);
        assert_eq!(got + missed + publication.missed, 300, "{len}, {history}");
        assert_eq!(slow.missed(), missed + publication.missed);
        assert!(history == 0 || last == Some(299), "{last:?}");
        assert_eq!(next(&mut fast, &mut message).number, 300);
    }
}

/// A subscriber keeps all long messages that it gets. The publisher's memory is bounded, so they are
/// revoked, the oldest first, and are no longer intact.
#[test]
fn memory_that_a_subscriber_keeps_is_taken_back() {
    const LEN: usize = 1 << 20;
    let options = PublisherOptions { lent_bytes: 6 * LEN, ..options(0) };
    let (mut publisher, mut both) = with(options, 2);
    let (mut greedy, mut good) = (both.pop().unwrap(), both.pop().unwrap());
    let mut kept = Vec::new();
    let mut message = Message::new();
    for number in 0..40u64 {
        publisher.publish(&pattern(number, LEN)).unwrap();
        assert_eq!(next(&mut good, &mut message), Publication { number, missed: 0 });
        assert!(message.bytes() == pattern(number, LEN));
        let mut borrowed = Borrowed::new();
        if let Ok(publication) = greedy.borrow(&mut borrowed, Wait::Never) {
            kept.push((borrowed, publication));
        }
    }
    // It has no more than four at a time.
    assert_eq!(kept.len(), 4);
    assert!(kept.iter().all(|(borrowed, found)| {
        borrowed.is_intact() && borrowed.to_vec() == pattern(found.number, LEN)
    }));
    // The program needs all of the memory.
    let loans: Vec<_> = (0..6).map(|_| publisher.loan(LEN).unwrap()).collect();
    assert_eq!(publisher.loan(LEN).unwrap_err(), SendError::TooManyLoans);
    assert!(kept.iter().all(|(borrowed, _)| !borrowed.is_intact()));
    assert_eq!(publisher.subscribers().nth(1).unwrap().revoked, 4);
    drop(loans);
    // It is a subscriber as before, and misses what it was not sent. What it gives back now changes
    // nothing.
    let first = publisher.publish(&pattern(40, LEN)).unwrap();
    let (mut now, found) = borrow(&mut greedy);
    assert_eq!((found.number, found.missed), (first, first - 4));
    drop(kept);
    for number in 41..60 {
        assert!(now.is_intact() && now.to_vec() == pattern(number - 1, LEN));
        publisher.publish(&pattern(number, LEN)).unwrap();
        assert_eq!(next(&mut good, &mut message).number, number - if number == 41 { 1 } else { 0 });
        if number == 41 {
            assert_eq!(next(&mut good, &mut message).number, 41);
        }
        (now, _) = borrow(&mut greedy);
    }
}

/// Messages that were sent and revoked before they were read count as missed.
#[test]
fn revoked_messages_that_were_not_read_are_missed() {
    const LEN: usize = 1 << 20;
    let (mut publisher, mut slow) = with(PublisherOptions { lent_bytes: 4 * LEN, ..options(0) }, 1);
    for number in 0..4 {
        publisher.publish(&pattern(number, LEN)).unwrap();
    }
    let loans: Vec<_> = (0..3).map(|_| publisher.loan(LEN).unwrap()).collect();
    let mut message = Message::new();
    assert_eq!(next(&mut slow[0], &mut message), Publication { number: 3, missed: 0 });
    assert!(message.bytes() == pattern(3, LEN));
    drop(loans);
    publisher.publish(b"next").unwrap();
    assert_eq!(next(&mut slow[0], &mut message), Publication { number: 4, missed: 0 });
    assert_nothing(&mut slow[0]);
}

#[test]
fn subscribers_share_the_memory_of_a_loan() {
    const LEN: usize = 8 << 20;
    let (mut publisher, mut subscribers) = with(options(1), 3);
    let mut places = std::collections::HashSet::new();
    for round in 0..20u8 {
        let mut loan = publisher.loan(LEN).unwrap();
        places.insert(loan.as_ptr() as usize);
        loan[..2].fill(round);
        loan[LEN - 1] = round;
        loan.truncate(LEN - usize::from(round));
        publisher.commit(loan).unwrap();
        for subscriber in &mut subscribers {
            let (borrowed, found) = borrow(subscriber);
            assert_eq!((found.number, borrowed.len()), (round.into(), LEN - usize::from(round)));
            assert!(borrowed.is_in_place() && borrowed.may_change() && borrowed.byte(1) == Some(round));
        }
    }
    // One in the history, and one that is written.
    assert!(places.len() <= 3, "{}", places.len());
    let (mut other, _) = with(options(0), 0);
    let loan = publisher.loan(10).unwrap();
    assert_eq!(other.commit(loan), Err(SendError::NotLent));
    assert_eq!(publisher.loan(MAX_MESSAGE + 1).unwrap_err(), SendError::TooLong(MAX_MESSAGE + 1));
    assert_eq!(publisher.publish(&vec![0; MAX_MESSAGE + 1]), Err(SendError::TooLong(MAX_MESSAGE + 1)));
}

/// The history gives its memory up rather than that a message could not be published.
#[test]
fn history_is_shorter_if_there_is_no_memory_for_it() {
    const LEN: usize = 4 << 20;
    let (mut publisher, _) = with(PublisherOptions { lent_bytes: 3 * LEN, ..options(100) }, 0);
    for number in 0..10 {
        publisher.publish(&pattern(number, LEN)).unwrap();
    }
    assert_eq!(publisher.kept(), 3);
    let mut late = subscribe(&mut publisher);
    let mut message = Message::new();
    for number in 7..10 {
        assert_eq!(next(&mut late, &mut message).number, number);
        assert!(message.bytes() == pattern(number, LEN));
    }
}

/// A subscriber that reads in bursts gets everything that the history still has, without a message of
/// the publisher: its reading makes the publisher readable.
#[test]
fn publisher_is_readable_when_a_subscriber_has_made_room() {
    for len in [1000, 50_000] {
        let (mut publisher, mut subscribers) = with(options(100), 1);
        for number in 0..100 {
            publisher.publish(&pattern(number, len)).unwrap();
        }
        let is_behind = |publisher: &Publisher| states(publisher) == [SubscriberState::Behind];
        assert!(is_behind(&publisher));
        let mut message = Message::new();
        for number in 0..100 {
            loop {
                match subscribers[0].receive(&mut message, Wait::Never) {
                    Ok(found) => {
                        assert_eq!(found, Publication { number, missed: 0 });
                        break;
                    }
                    Err(error) => {
                        assert_eq!(error, SubscribeError::Receive(ReceiveError::WouldBlock));
                        let ready = poll(&mut [PollFd::new(&publisher, PollFlags::IN)], None).unwrap();
                        assert_eq!(ready, 1);
                        publisher.attend(Wait::Never).unwrap();
                    }
                }
            }
            assert!(message.bytes() == pattern(number, len));
        }
        assert!(publisher.flush(Wait::Never).unwrap());
    }
}

#[test]
fn subscribers_come_and_go() {
    let directory = tempfile::tempdir().unwrap();
    let (mut publisher, path) = listen(&directory, PublisherOptions { max_subscribers: 2, ..options(2) });
    let mut message = Message::new();
    for round in 0..20u64 {
        let mut one = Subscriber::connect(&path, soon()).unwrap();
        let mut two = Subscriber::connect(&path, soon()).unwrap();
        // Waits for a place.
        let mut three = Subscriber::connect(&path, soon()).unwrap();
        let mut joined = 0;
        while joined < 2 {
            joined += publisher.attend(soon()).unwrap().joined;
        }
        let number = publisher.publish(&pattern(round, 5000)).unwrap();
        for subscriber in [&mut one, &mut two] {
            while next(subscriber, &mut message).number != number {}
            assert!(message.bytes() == pattern(round, 5000));
        }
        assert_nothing(&mut three);
        drop(one);
        let attended = publisher.attend(soon()).unwrap();
        assert_eq!((attended.left, attended.refused), (1, 0));
        while publisher.subscribers().count() < 2 {
            publisher.attend(soon()).unwrap();
        }
        assert_eq!(next(&mut three, &mut message).number, number.saturating_sub(1));
        drop((two, three));
        while publisher.subscribers().count() > 0 {
            publisher.attend(soon()).unwrap();
        }
    }
    drop(publisher);
}

#[test]
fn waits_end_in_time() {
    let (mut publisher, mut subscribers) = with(options(1), 1);
    publisher.attend(Wait::Never).unwrap();
    let wait = || Wait::at_most(Duration::from_millis(5));
    assert_eq!(publisher.attend(wait()).unwrap(), shunt_channel::Attended::default());
    let got = subscribers[0].receive(&mut Message::new(), wait());
    assert_eq!(got, Err(SubscribeError::Receive(ReceiveError::TimedOut)));
    for number in 0..1000 {
        assert_eq!(publisher.publish(&[0; 1000]), Ok(number));
    }
    assert!(!publisher.flush(wait()).unwrap() && !publisher.flush(Wait::Never).unwrap());
    assert!(Publisher::new(PublisherOptions { ring_bytes: 5000, ..options(0) }).is_err());
}

/// A subscriber, the number of its last message, and the messages that it has borrowed.
type Reader = (Subscriber, Option<u64>, Vec<(Borrowed, u64)>);

#[derive(Clone, Debug)]
enum Step {
    Publish(usize),
    Receive(usize),
    Borrow(usize),
    Release(usize),
    Attend,
    Join,
    Leave(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![0usize..3000, Just(4096), Just(20_000), Just(300_000)];
    prop_oneof![
        8 => len.prop_map(Step::Publish),
        6 => (0usize..4).prop_map(Step::Receive),
        4 => (0usize..4).prop_map(Step::Borrow),
        3 => (0usize..4).prop_map(Step::Release),
        2 => Just(Step::Attend),
        1 => Just(Step::Join),
        1 => (0usize..4).prop_map(Step::Leave),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever each does when: a message that is received has the bytes of its number, numbers grow,
    /// and a borrowed one that is intact has them too.
    #[test]
    fn in_any_schedule_each_message_is_that_of_its_number(
        steps in proptest::collection::vec(step(), 1..200),
        history in 0usize..6,
    ) {
        let options = PublisherOptions { ring_bytes: 8192, lent_bytes: 1 << 20, ..options(history) };
        let mut publisher = Publisher::new(options).unwrap();
        let mut subscribers: Vec<Reader> = Vec::new();
        let mut lens = Vec::new();
        let mut message = Message::new();
        for step in steps {
            match step {
                Step::Publish(len) => {
                    prop_assert_eq!(publisher.publish(&pattern(lens.len() as u64, len)), Ok(lens.len() as u64));
                    lens.push(len);
                }
                Step::Attend => drop(publisher.attend(Wait::Never).unwrap()),
                Step::Join if subscribers.len() < 4 => {
                    subscribers.push((subscribe(&mut publisher), None, Vec::new()));
                }
                Step::Leave(at) if at < subscribers.len() => drop(subscribers.swap_remove(at)),
                Step::Receive(at) | Step::Borrow(at) if at < subscribers.len() => {
                    let (subscriber, last, kept) = &mut subscribers[at];
                    let mut borrowed = Borrowed::new();
                    let borrows = matches!(step, Step::Borrow(_));
                    let found = match borrows {
                        true => subscriber.borrow(&mut borrowed, Wait::Never),
                        false => subscriber.receive(&mut message, Wait::Never),
                    };
                    let Ok(Publication { number, missed }) = found else { continue };
                    let expected = pattern(number, lens[number as usize]);
                    prop_assert!(last.is_none_or(|last| last + 1 + missed == number));
                    *last = Some(number);
                    if borrows {
                        prop_assert!(borrowed.to_vec() == expected);
                        kept.push((borrowed, number));
                    } else {
                        prop_assert!(message.bytes() == expected);
                    }
                }
                Step::Release(at) if at < subscribers.len() => {
                    let kept = &mut subscribers[at].2;
                    for (borrowed, number) in kept.iter() {
                        let bytes = borrowed.to_vec();
                        prop_assert!(!borrowed.is_intact() || bytes == pattern(*number, lens[*number as usize]));
                    }
                    kept.drain(..kept.len().min(2));
                }
                _ => {}
            }
        }
        // Those that read get the newest message.
        for (_, _, kept) in &mut subscribers {
            kept.clear();
        }
        let number = publisher.publish(b"last").unwrap();
        for (subscriber, _, _) in &mut subscribers {
            loop {
                match subscriber.receive(&mut message, Wait::Never) {
                    Ok(publication) if publication.number == number => break,
                    Ok(_) => {}
                    Err(_) if history > 0 => drop(publisher.attend(Wait::Never).unwrap()),
                    Err(_) => break,
                }
            }
        }
    }
}
