//! The receiver's process has no room for the descriptors of a message. That is an error of this
//! message, and nothing else is lost. This test has its own program, because the limit applies to
//! the whole process.

mod common;

use std::os::fd::AsFd;

use common::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use shunt_channel::{Message, ReceiveError, pair};

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
    message.clear();
    setrlimit(Resource::Nofile, limit).unwrap();
    drop((sender, writer));
    assert!(is_gone(reader));
}
