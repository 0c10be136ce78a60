//! A sender made by hand.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use shunt_channel::{Receiver, Sender, pair};
use shunt_ring::split::{Producer, RECEIVER_BYTES, SendMemory, sender_bytes};
use shunt_ring::{Published, Source};
use shunt_sys::mapping::Shown;
use shunt_sys::{memfd, seqpacket};

use crate::common::*;

pub(crate) const RING: usize = 65_536;
pub(crate) const FIRST: u32 = 1;
pub(crate) const LAST: u32 = 2;
pub(crate) const ABORT: u32 = 4;
pub(crate) const MEMORY: u32 = 8;
pub(crate) const LENT: u32 = 16;

/// A sender made by hand that writes any values.
pub(crate) struct Liar {
    pub(crate) socket: OwnedFd,
    pub(crate) memory: SendMemory,
    pub(crate) producer: Producer,
}

pub(crate) fn notice(kind: u32, count: u32, number: u64) -> Vec<u8> {
    [&kind.to_ne_bytes()[..], &count.to_ne_bytes(), &number.to_ne_bytes()].concat()
}

pub(crate) fn greeting(ring: usize) -> Vec<u8> {
    notice(0x7368_6d01, 3, ring as u64)
}

pub(crate) fn answer() -> Vec<u8> {
    notice(0x7368_6d02, 3, 0)
}

/// Sends a greeting as a sender does, and returns its memory.
pub(crate) fn greet(socket: &OwnedFd) -> SendMemory {
    let (file, mapping) = memfd::create_whole("shunt-test", sender_bytes(RING).unwrap()).unwrap();
    seqpacket::send(socket, &greeting(RING), &[file.as_fd()]).unwrap();
    SendMemory::over(mapping).unwrap()
}

/// Returns the descriptor that comes with the next notice.
pub(crate) fn next_descriptor(socket: &OwnedFd) -> OwnedFd {
    let (_, mut fds) = seqpacket::recv(socket, &mut [0; 64]).unwrap();
    fds.take_first().unwrap()
}

impl Liar {
    /// Returns a liar, its receiver, and a correct sender of the same receiver.
    pub(crate) fn new() -> (Liar, Receiver, Sender) {
        let (ours, theirs) = sockets();
        let (good, mut receiver) = pair().unwrap();
        receiver.adopt(theirs).unwrap();
        let memory = greet(&ours);
        (Liar { socket: ours, memory, producer: Producer::new() }, receiver, good)
    }

    /// Takes the receiver's answer, so that the producer sees the receiver's cursor.
    pub(crate) fn take_answer(&mut self) {
        let answer = next_descriptor(&self.socket);
        assert!(self.memory.set_receiver(Shown::map(&answer, RECEIVER_BYTES).unwrap()));
    }

    pub(crate) fn pass(&self, number: u64, fds: &[BorrowedFd<'_>]) {
        seqpacket::send_many(&self.socket, &notice(3, fds.len() as u32, number), fds).unwrap();
    }

    /// Lends memory of `slots` slots.
    pub(crate) fn lend(&self, slots: u32, bytes: usize, fds: &[BorrowedFd<'_>]) {
        seqpacket::send_many(&self.socket, &notice(4, slots, bytes as u64), fds).unwrap();
    }

    /// Sends a message of `len` bytes in a slot.
    pub(crate) fn put_lent(&mut self, slot: u32, number: u64, len: u32) {
        let of = [&slot.to_ne_bytes()[..], &[0; 4], &number.to_ne_bytes()].concat();
        self.put([FIRST | LAST | LENT, 16, len, 0], &of);
    }

    pub(crate) fn put(&mut self, words: [u32; 4], bytes: &[u8]) {
        let header: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let pieces = [IoSlice::new(&header), IoSlice::new(bytes)];
        let mut source = Source::of(&pieces);
        let len = source.remaining();
        let written = self.producer.write(self.memory.words(), &self.memory, &mut source);
        assert_eq!(written, Ok(Published::Bytes(len)));
        let _ = seqpacket::send(&self.socket, &notice(2, 0, 0), &[]);
    }
}
