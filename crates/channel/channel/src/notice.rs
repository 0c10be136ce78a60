//! The notices on the socket: a greeting and its answer, doorbells, descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use shunt_sys::{Errno, Result, seqpacket};

use crate::frame::{long, word};

/// The version of the protocol. In version 1, both ends wrote to one file; version 2 had no lent
/// memory. Version 3 has publishers since they exist: no other ends have their frames and notices.
pub(crate) const VERSION: u32 = 3;

const BYTES: usize = 16;
const GREETING: u32 = 0x7368_6d01;
const ANSWER: u32 = 0x7368_6d02;
const SUBSCRIPTION: u32 = 0x7368_6d03;
const BELL: u32 = 2;
const DESCRIPTORS: u32 = 3;
const PAGES: u32 = 4;

/// A notice, whose values are not checked.
#[derive(Debug)]
pub(crate) enum Notice {
    /// The sender's first notice: the memory of the ring, and the length of the ring.
    Greeting { version: u32, ring_bytes: u64, memory: Option<OwnedFd> },
    /// The receiver's first notice: the memory of its words.
    Answer { version: u32, memory: Option<OwnedFd> },
    /// A subscriber's first notice, on whose socket a publisher greets.
    Subscription { version: u32 },
    /// The other end should check the ring.
    Bell,
    /// The descriptors of one message.
    Descriptors(Descriptors),
    /// Memory that the sender lends, divided into slots.
    Pages { slots: u32, bytes: u64, memory: Option<OwnedFd> },
    /// The other end has closed.
    End,
    /// An invalid notice.
    Rubbish,
}

/// The descriptors of one message, as they arrived.
#[derive(Debug)]
pub(crate) struct Descriptors {
    /// The number of descriptors sent.
    pub(crate) sent: usize,
    /// The index of the message among those with descriptors.
    pub(crate) number: u64,
    /// Whether this process had no room for all of them.
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

pub(crate) fn subscribe(socket: impl AsFd) -> Result<()> {
    seqpacket::send(socket, &bytes(SUBSCRIPTION, VERSION, 0), &[])
}

/// Sends a doorbell. A full socket already contains enough of them.
pub(crate) fn ring(socket: impl AsFd) -> Result<()> {
    match seqpacket::send(socket, &bytes(BELL, 0, 0), &[]) {
        Err(Errno::AGAIN) => Ok(()),
        done => done,
    }
}

pub(crate) fn pass(socket: impl AsFd, number: u64, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    seqpacket::send_many(socket, &bytes(DESCRIPTORS, descriptors.len() as u32, number), descriptors)
}

pub(crate) fn lend(socket: impl AsFd, slots: usize, bytes: usize, memory: BorrowedFd<'_>) -> Result<()> {
    seqpacket::send(socket, &self::bytes(PAGES, slots as u32, bytes as u64), &[memory])
}

/// Returns the next notice, if there is one.
pub(crate) fn receive(socket: impl AsFd) -> Result<Option<Notice>> {
    // One byte more than any valid notice.
    let mut buffer = [0; BYTES + 1];
    let mut arrived = Vec::new();
    let mut take = || seqpacket::receive_each(&socket, &mut buffer, |fd| arrived.push(fd));
    let received = match take() {
        // The other end has closed with unread doorbells. The kernel reports that once, before the
        // data that the other end had sent.
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
    let word = |at: usize| word(&buffer, at);
    let number = long(&buffer, 8);
    let one = |mut arrived: Vec<OwnedFd>| if arrived.len() == 1 { arrived.pop() } else { None };
    Ok(Some(match (received.len, word(0)) {
        (BYTES, GREETING | ANSWER | PAGES) if received.lost_descriptors => return Err(Errno::MFILE),
        (BYTES, GREETING) => Notice::Greeting { version: word(4), ring_bytes: number, memory: one(arrived) },
        (BYTES, ANSWER) => Notice::Answer { version: word(4), memory: one(arrived) },
        (BYTES, PAGES) => Notice::Pages { slots: word(4), bytes: number, memory: one(arrived) },
        (BYTES, SUBSCRIPTION) if arrived.is_empty() => Notice::Subscription { version: word(4) },
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
