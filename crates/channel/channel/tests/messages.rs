//! Messages arrive whole, in order, with their descriptors: every size with every number of
//! descriptors, from many senders at a time.

mod common;

use std::collections::HashMap;
use std::io::Write;
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use common::*;
use rustix::event::{PollFd, PollFlags, poll};
use shunt_channel::{
    Cause, Event, MAX_DESCRIPTORS, MAX_MESSAGE, Message, Options, ReceiveError, Receiver, SendError, Sender,
    Wait, pair,
};
use shunt_sys::memfd;

const SIZES: [usize; 16] = [
    0,
    1,
    8,
    64,
    4079,
    4096,
    32_752,
    112_192,
    // The largest message that goes in one piece, and larger ones.
    262_128,
    262_129,
    524_288,
    1 << 20,
    3_000_001,
    8 << 20,
    (64 << 20) - 1,
    64 << 20,
];

#[test]
fn every_size_with_every_number_of_descriptors() {
    let (mut sender, mut receiver) = pair().unwrap();
    let (reader, writer) = witness();
    let counts = |len: usize| if len > 1 << 20 { vec![0, 253] } else { vec![0, 1, 2, 100, MAX_DESCRIPTORS] };
    let sending = thread::spawn(move || {
        for (index, len) in SIZES.into_iter().enumerate() {
            let bytes = pattern(index as u64, len);
            for count in counts(len) {
                sender.send(&bytes, &copies(&writer, count), soon()).unwrap();
            }
        }
    });
    let mut message = Message::new();
    for (index, len) in SIZES.into_iter().enumerate() {
        let expected = pattern(index as u64, len);
        for count in counts(len) {
            next(&mut receiver, &mut message);
            assert!(message.bytes() == expected, "{len} bytes with {count} descriptors");
            assert_eq!(message.descriptors().len(), count);
            for fd in message.take_descriptors() {
                assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
            }
        }
    }
    sending.join().unwrap();
    assert_eq!(ending(&mut receiver), Cause::Closed);
    assert!(is_gone(reader));
    assert_eq!(receiver.receive(&mut message, Wait::Forever), Err(ReceiveError::NoSenders));
}

/// Neither side ever waits: nothing is lost, and a message too long for the ring comes as a memfd.
#[test]
fn every_size_without_waiting() {
    let (mut sender, mut receiver) = pair().unwrap();
    let mut message = Message::new();
    assert_eq!(receiver.receive(&mut message, Wait::Never), Err(ReceiveError::WouldBlock));
    for len in SIZES {
        let bytes = pattern(len as u64, len);
        sender.send(&bytes, &[], Wait::Never).unwrap();
        assert!(matches!(receiver.receive(&mut message, Wait::Never), Ok(Event::Message { .. })), "{len}");
        assert!(message.bytes() == bytes, "{len}");
        assert_eq!(message.is_in_place(), len > 262_128, "{len}");
        assert_eq!(receiver.receive(&mut message, Wait::Never), Err(ReceiveError::WouldBlock));
    }
}

#[test]
fn descriptors_are_attached_to_their_own_message() {
    let (mut sender, mut receiver) = pair().unwrap();
    let sending = thread::spawn(move || {
        for index in 0..2_000u32 {
            let (mut file, count) = (memfd_of(index), index as usize % 3);
            file.write_all(b"!").unwrap();
            let len = if index % 97 == 0 { 600_000 } else { index as usize % 5_000 };
            let bytes = [&index.to_le_bytes()[..], &pattern(index.into(), len)].concat();
            sender.send(&bytes, &vec![file.as_fd(); count], soon()).unwrap();
        }
    });
    let mut message = Message::new();
    for index in 0..2_000u32 {
        next(&mut receiver, &mut message);
        assert_eq!(message.bytes()[..4], index.to_le_bytes());
        assert_eq!(message.descriptors().len(), index as usize % 3);
        for fd in message.descriptors() {
            let mut bytes = [0; 5];
            rustix::io::pread(fd, &mut bytes, 0).unwrap();
            assert_eq!(bytes[..4], index.to_le_bytes());
        }
    }
    sending.join().unwrap();
}

fn memfd_of(index: u32) -> std::fs::File {
    let mut file: std::fs::File =
        rustix::fs::memfd_create("shunt-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
    file.write_all(&index.to_le_bytes()).unwrap();
    file
}

#[test]
fn many_senders_at_once_each_in_its_order() {
    const SENDERS: u64 = 24;
    const MESSAGES: u64 = 100;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("many");
    let mut receiver = Receiver::listen(&path, Options::default()).unwrap();
    let (reader, writer) = witness();
    let sending: Vec<_> = (0..SENDERS)
        .map(|number| {
            let (path, fd) = (path.clone(), writer.try_clone().unwrap());
            thread::spawn(move || {
                let mut sender = Sender::connect(path, soon()).unwrap();
                for index in 0..MESSAGES {
                    let len = [0, 10, 3_000, 60_000, 400_000][(index * 7 + number) as usize % 5];
                    let mut bytes = [number.to_le_bytes(), index.to_le_bytes()].concat();
                    bytes.extend(pattern(number << 20 | index, len));
                    let fds = vec![fd.as_fd(); (index % 3) as usize];
                    sender.send(&bytes, &fds, soon()).unwrap();
                }
            })
        })
        .collect();
    let mut message = Message::new();
    let mut next_of = HashMap::new();
    let mut ended = 0;
    while ended < SENDERS {
        match receiver.receive(&mut message, soon()) {
            Ok(Event::Message { from }) => {
                let word = |at: usize| u64::from_le_bytes(message.bytes()[at..at + 8].try_into().unwrap());
                let (number, index) = (word(0), word(8));
                let expected = next_of.entry(from).or_insert((number, 0));
                assert_eq!((number, index), *expected, "out of order");
                assert!(message.bytes()[16..] == pattern(number << 20 | index, message.bytes().len() - 16));
                assert_eq!(message.descriptors().len() as u64, index % 3);
                expected.1 += 1;
            }
            Ok(Event::Ended { sender, cause }) => {
                assert_eq!((cause, next_of[&sender].1), (Cause::Closed, MESSAGES));
                ended += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    sending.into_iter().for_each(|thread| thread.join().unwrap());
    message.clear();
    drop(writer);
    assert!(is_gone(reader) && receiver.senders() == 0);
    drop(receiver);
    assert!(!path.exists());
}

/// A sender that floods does not keep the receiver from reading the others.
#[test]
fn a_busy_sender_does_not_starve_another() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("fair");
    let mut receiver = Receiver::listen(&path, Options::default()).unwrap();
    let flooding = thread::spawn({
        let path = path.clone();
        move || {
            let mut sender = Sender::connect(path, soon()).unwrap();
            while sender.send(b"again", &[], soon()).is_ok() {}
        }
    });
    let mut message = Message::new();
    next(&mut receiver, &mut message);
    let quiet = thread::spawn(move || {
        let mut sender = Sender::connect(path, soon()).unwrap();
        sender.send(b"at last", &[], soon()).unwrap();
    });
    while message.bytes() != b"at last" {
        let _ = receiver.receive(&mut message, soon()).unwrap();
    }
    drop(receiver);
    flooding.join().unwrap();
    quiet.join().unwrap();
}

#[test]
fn memory_is_sent_as_it_is() {
    let (mut sender, mut receiver) = pair().unwrap();
    let bytes = pattern(7, 5 << 20);
    let memory = memfd::create_with("shunt-test", &bytes).unwrap();
    let (reader, writer) = witness();
    sender.send_memory(&memory, &[writer.as_fd()], soon()).unwrap();
    drop(writer);
    let mut message = Message::new();
    next(&mut receiver, &mut message);
    assert!(message.is_in_place() && message.bytes() == bytes && message.descriptors().len() == 1);
    message.clear();
    assert!(is_gone(reader) && message.bytes().is_empty());
    let open = memfd::create_fixed("shunt-test", 4096).unwrap();
    assert_eq!(sender.send_memory(&open, &[], soon()), Err(SendError::NotFinal));
    assert_eq!(sender.send_memory(std::io::pipe().unwrap().0, &[], soon()), Err(SendError::NotFinal));
    assert_nothing(&mut receiver);
}

/// Pages that the memory's maker left out are filled before they are sent, so that the receiver
/// pays for none.
#[test]
fn memory_with_holes_is_sent_too() {
    let (mut sender, mut receiver) = pair().unwrap();
    let memory = memfd::create_fixed("shunt-test", 100_000).unwrap();
    rustix::io::pwrite(&memory, b"middle", 50_000).unwrap();
    rustix::fs::fcntl_add_seals(&memory, rustix::fs::SealFlags::WRITE).unwrap();
    let mut expected = vec![0; 100_000];
    expected[50_000..50_006].copy_from_slice(b"middle");
    sender.send_memory(&memory, &[], soon()).unwrap();
    let mut message = Message::new();
    next(&mut receiver, &mut message);
    assert!(message.is_in_place() && message.bytes() == expected);
}

/// A sender sends, and sleeps, before the receiver has mapped anything.
#[test]
fn what_is_sent_before_the_receiver_begins_arrives() {
    let (mut sender, mut receiver) = pair().unwrap();
    let mut sent = 0;
    while sender.send(&pattern(sent, 10_000), &[], Wait::Never).is_ok() {
        sent += 1;
    }
    assert!(sent > 10);
    let sending = thread::spawn(move || {
        let mut fds = [PollFd::new(&sender, PollFlags::IN)];
        poll(&mut fds, None).unwrap();
        sender.send(&pattern(sent, 5 << 20), &[], soon()).unwrap();
    });
    let mut message = Message::new();
    for index in 0..=sent {
        next(&mut receiver, &mut message);
        assert!(message.bytes() == pattern(index, if index == sent { 5 << 20 } else { 10_000 }));
    }
    sending.join().unwrap();
}

/// The receiver answers a new sender, checks, and sleeps, at any moment of its first message.
#[test]
fn no_first_message_is_missed() {
    for round in 0..500u64 {
        let (mut sender, mut receiver) = pair().unwrap();
        let sending = thread::spawn(move || {
            for _ in 0..round % 7 {
                thread::yield_now();
            }
            sender.send(b"first", &[], soon()).unwrap();
            sender
        });
        let mut message = Message::new();
        next(&mut receiver, &mut message);
        assert_eq!(message.bytes(), b"first");
        sending.join().unwrap();
    }
}

#[test]
fn what_is_too_much_is_refused_and_harms_nothing() {
    let (mut sender, mut receiver) = pair().unwrap();
    let (_reader, writer) = witness();
    let long = vec![0; MAX_MESSAGE + 1];
    assert_eq!(sender.send(&long, &[], soon()), Err(SendError::TooLong(MAX_MESSAGE + 1)));
    assert_eq!(sender.send(b"", &copies(&writer, 254), soon()), Err(SendError::TooManyDescriptors(254)));
    assert_nothing(&mut receiver);
    sender.send(b"fine", &copies(&writer, 253), soon()).unwrap();
    let mut message = Message::new();
    next(&mut receiver, &mut message);
    assert_eq!((message.bytes(), message.descriptors().len()), (&b"fine"[..], 253));
}

#[test]
fn a_buffer_is_used_again() {
    let (mut sender, mut receiver) = pair().unwrap();
    let mut message = Message::new();
    let mut places = Vec::new();
    for round in 0..8u64 {
        for len in [1_000_000, 10, 100_000] {
            let bytes = pattern(round, len);
            thread::scope(|scope| {
                scope.spawn(|| sender.send(&bytes, &[], soon()).unwrap());
                next(&mut receiver, &mut message);
            });
            assert!(message.bytes() == bytes);
            places.push(message.bytes().as_ptr());
        }
    }
    places.dedup();
    assert_eq!(places.len(), 1, "one buffer serves one sender");
}

/// Poll reports when to try again, for both ends.
#[test]
fn both_ends_can_be_polled() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    fn is_readable(fd: impl AsFd, limit: Duration) -> bool {
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap() == 1
    }
    let (mut sender, mut receiver) = pair().unwrap();
    let mut message = Message::new();
    for round in 0..50u64 {
        assert_nothing(&mut receiver);
        assert!(!is_readable(&receiver, Duration::ZERO), "round {round}");
        let mut sent = 0;
        while sender.send(&pattern(sent, 20_000), &[], Wait::Never).is_ok() {
            sent += 1;
        }
        assert!(is_readable(&receiver, LIMIT), "round {round}");
        let mut got = 0;
        while receiver.receive(&mut message, Wait::Never).is_ok() {
            assert!(message.bytes() == pattern(got, 20_000));
            got += 1;
        }
        assert!(got == sent && is_readable(&sender, LIMIT), "round {round}: {got} of {sent}");
    }
}
