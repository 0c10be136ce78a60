//! Helpers of the tests: content that shows where it belongs, descriptors whose closing can be
//! seen, other processes.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use shunt_channel::{Cause, Event, Message, ReceiveError, Receiver, SenderId, Wait};

/// A time longer than any step of the tests takes.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

pub(crate) fn soon() -> Wait {
    Wait::at_most(LIMIT)
}

/// Returns bytes that differ by their seed and by their position.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let word = |index: u64| (index ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut block: Vec<u8> = (0..512u64).flat_map(|index| word(index).to_le_bytes()).collect();
    let mut bytes = Vec::with_capacity(len + block.len());
    while bytes.len() < len {
        let place = bytes.len() as u64;
        block[..8].copy_from_slice(&word(place).to_le_bytes());
        bytes.extend_from_slice(&block);
    }
    bytes.truncate(len);
    bytes
}

/// Returns both ends of a pipe. The reading end shows when all copies of the writing end are
/// closed.
pub(crate) fn witness() -> (PipeReader, OwnedFd) {
    let (reader, writer) = std::io::pipe().unwrap();
    (reader, writer.into())
}

/// Waits until all copies of the writing end have been closed.
pub(crate) fn is_gone(mut reader: PipeReader) -> bool {
    reader.read(&mut [0; 1]).unwrap() == 0
}

pub(crate) fn copies(fd: &OwnedFd, count: usize) -> Vec<BorrowedFd<'_>> {
    vec![fd.as_fd(); count]
}

/// Returns the sender of the next message.
pub(crate) fn next(receiver: &mut Receiver, message: &mut Message) -> SenderId {
    match receiver.receive(message, soon()) {
        Ok(Event::Message { from }) => from,
        other => panic!("{other:?}"),
    }
}

/// Returns the reason of the next end of a sender.
pub(crate) fn ending(receiver: &mut Receiver) -> Cause {
    match receiver.receive(&mut Message::new(), soon()) {
        Ok(Event::Ended { cause, .. }) => cause,
        other => panic!("{other:?}"),
    }
}

/// Asserts that there is neither a message nor an end.
pub(crate) fn assert_nothing(receiver: &mut Receiver) {
    let got = receiver.receive(&mut Message::new(), Wait::Never);
    assert!(matches!(got, Err(ReceiveError::WouldBlock | ReceiveError::NoSenders)), "{got:?}");
}

/// Returns the two ends of a channel's socket.
pub(crate) fn sockets() -> (OwnedFd, OwnedFd) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// Returns the number of open descriptors of this process.
pub(crate) fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
