//! The receiver's process has no room for the descriptors of a message. That is an error of this
//! message, and nothing else is lost. This test has its own program, because the limit applies to
//! the whole process.

mod common;

use std::os::fd::AsFd;

use common::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use shunt_channel::{Borrowed, Cause, Event, Message, ReceiveError, SendError, pair};

#[test]
fn a_message_whose_descriptors_find_no_room_is_an_error_and_the_others_arrive() {
    let (mut sender, mut receiver) = pair().unwrap();
    let (reader, writer) = witness();
    sender.send(b"before", &copies(&writer, 2), soon()).unwrap();
    sender.send(&pattern(1, 100_000), &copies(&writer, 200), soon()).unwrap();
    sender.send(b"between", &copies(&writer, 3), soon()).unwrap();
    let memory = shunt_sys::memfd::create_with("shunt-test", b"memory").unwrap();
    sender.send_memory(&memory, &copies(&writer, 200), soon()).unwrap();
    sender.send(b"after", &[writer.as_fd()], soon()).unwrap();
    let mut loan = sender.loan(100_000, soon()).unwrap();
    loan.copy_from_slice(&pattern(2, 100_000));
    sender.commit(loan, &copies(&writer, 200), soon()).unwrap();

    let limit = getrlimit(Resource::Nofile);
    let room = Rlimit { current: Some(open_descriptors() as u64 + 20), maximum: limit.maximum };
    setrlimit(Resource::Nofile, room).unwrap();
    let mut message = Message::new();
    let from = next(&mut receiver, &mut message);
    assert_eq!((message.bytes(), message.descriptors().len()), (&b"before"[..], 2));

    let lost = receiver.receive(&mut message, soon());
    let Err(ReceiveError::DescriptorsLost { from: of, sent: 200, arrived }) = lost else {
        panic!("{lost:?}")
    };
    assert!(of == from && (1..200).contains(&arrived), "{arrived}");
    assert!(message.bytes() == pattern(1, 100_000) && message.descriptors().is_empty());

    next(&mut receiver, &mut message);
    assert_eq!((message.bytes(), message.descriptors().len()), (&b"between"[..], 3));
    let lost = receiver.receive(&mut message, soon());
    assert!(matches!(lost, Err(ReceiveError::DescriptorsLost { sent: 201, .. })), "{lost:?}");
    assert!(message.bytes().is_empty() && message.descriptors().is_empty());
    next(&mut receiver, &mut message);
    assert_eq!((message.bytes(), message.descriptors().len()), (&b"after"[..], 1));

    // A lent message without its descriptors.
    let mut borrowed = Borrowed::new();
    let lost = receiver.borrow(&mut borrowed, soon());
    assert!(matches!(lost, Err(ReceiveError::DescriptorsLost { sent: 200, .. })), "{lost:?}");
    assert!(borrowed.to_vec() == pattern(2, 100_000) && borrowed.descriptors().is_empty());
    message.clear();
    borrowed.clear();

    // Lent memory is mapped once, and no end keeps a descriptor of it.
    let before = open_descriptors();
    setrlimit(Resource::Nofile, limit).unwrap();
    for _ in 0..100 {
        drop(sender.loan(1 << 20, soon()).unwrap());
        drop(sender.loan(100, soon()).unwrap());
        let loan = sender.loan(100_000, soon()).unwrap();
        sender.commit(loan, &[], soon()).unwrap();
        assert!(matches!(receiver.borrow(&mut borrowed, soon()), Ok(Event::Message { .. })));
        borrowed.clear();
    }
    assert_eq!(open_descriptors(), before);

    // Memory for which there is no descriptor ends its sender: later messages would be in it.
    let loan = sender.loan(4 << 20, soon()).unwrap();
    sender.commit(loan, &[], soon()).unwrap();
    let none = Rlimit { current: Some(3), maximum: limit.maximum };
    setrlimit(Resource::Nofile, none).unwrap();
    let ended = receiver.borrow(&mut borrowed, soon());
    setrlimit(Resource::Nofile, limit).unwrap();
    let cause = Cause::Socket(shunt_sys::Errno::MFILE);
    assert!(matches!(ended, Ok(Event::Ended { cause: why, .. }) if why == cause), "{ended:?}");
    assert_eq!(sender.loan(4 << 20, soon()).unwrap_err(), SendError::Gone);
    drop((sender, writer));
    assert!(is_gone(reader));
}
