//! The notices that go over the socket: a greeting and its answer, doorbells, descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use shunt_sys::{Errno, Result, seqpacket};

/// The version of the protocol: 1 had one file, which both ends wrote.
pub(crate) const VERSION: u32 = 2;

const BYTES: usize = 16;
const GREETING: u32 = 0x7368_6d01;
const ANSWER: u32 = 0x7368_6d02;
const BELL: u32 = 2;
const DESCRIPTORS: u32 = 3;

/// One of them, whatever it says.
#[derive(Debug)]
pub(crate) enum Notice {
    /// The sender's first: the memory of the ring, and how long the ring is.
    Greeting { version: u32, ring_bytes: u64, memory: Option<OwnedFd> },
    /// The receiver's first: the memory of its words.
    Answer { version: u32, memory: Option<OwnedFd> },
    /// Somebody should look.
    Bell,
    /// Of one message.
    Descriptors(Descriptors),
    /// The other end has closed.
    End,
    /// None of these.
    Rubbish,
}

/// The descriptors of one message, as they arrived.
#[derive(Debug)]
pub(crate) struct Descriptors {
    /// How many were sent.
    pub(crate) sent: usize,
    /// Which message of those with descriptors.
    pub(crate) number: u64,
    /// Whether this process had no room for all.
    pub(crate) lost: bool,
    pub(crate) arrived: Vec<OwnedFd>,
}

fn bytes(kind: u32, count: u32, number: u64) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[..4].copy_from_slice(&kind.to_ne_bytes());
    bytes[4..8].copy_from_slice(&count.to_ne_bytes());
    bytes[8..].copy_from_slice(&number.to_ne_bytes());
    bytes
}

pub(crate) fn greet(socket: impl AsFd, ring_bytes: usize, memory: BorrowedFd<'_>) -> Result<()> {
    seqpacket::send(socket, &bytes(GREETING, VERSION, ring_bytes as u64), &[memory])
}

pub(crate) fn answer(socket: impl AsFd, memory: BorrowedFd<'_>) -> Result<()> {
    seqpacket::send(socket, &bytes(ANSWER, VERSION, 0), &[memory])
}

/// A full socket has been told enough.
pub(crate) fn ring(socket: impl AsFd) -> Result<()> {
    match seqpacket::send(socket, &bytes(BELL, 0, 0), &[]) {
        Err(Errno::AGAIN) => Ok(()),
        done => done,
    }
}

pub(crate) fn pass(socket: impl AsFd, number: u64, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    seqpacket::send_many(socket, &bytes(DESCRIPTORS, descriptors.len() as u32, number), descriptors)
}

/// The next, if there is one.
pub(crate) fn receive(socket: impl AsFd) -> Result<Option<Notice>> {
    // One byte more than any of ours.
    let mut buffer = [0; BYTES + 1];
    let mut arrived = Vec::new();
    let mut take = || seqpacket::receive_each(&socket, &mut buffer, |fd| arrived.push(fd));
    let received = match take() {
        // The other end has closed with doorbells unread. That is said once, before what it had sent.
        Err(Errno::CONNRESET) => take(),
        other => other,
    };
    let received = match received {
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        other => other?,
    };
    if received.len == 0 {
        return Ok(Some(Notice::End));
    }
    let word = |at: usize| u32::from_ne_bytes(std::array::from_fn(|byte| buffer[at + byte]));
    let number = u64::from_ne_bytes(std::array::from_fn(|byte| buffer[8 + byte]));
    let one = |mut arrived: Vec<OwnedFd>| if arrived.len() == 1 { arrived.pop() } else { None };
    Ok(Some(match (received.len, word(0)) {
        (BYTES, GREETING | ANSWER) if received.lost_descriptors => return Err(Errno::MFILE),
        (BYTES, GREETING) => Notice::Greeting { version: word(4), ring_bytes: number, memory: one(arrived) },
        (BYTES, ANSWER) => Notice::Answer { version: word(4), memory: one(arrived) },
        (BYTES, BELL) if arrived.is_empty() => Notice::Bell,
        (BYTES, DESCRIPTORS) => Notice::Descriptors(Descriptors {
            sent: word(4) as usize,
            number,
            lost: received.lost_descriptors,
            arrived,
        }),
        _ => Notice::Rubbish,
    }))
}
