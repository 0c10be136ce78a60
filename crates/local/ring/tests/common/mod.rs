//! Helpers of the tests of lanes, here and in `shunt-transport`: a program's buffers, and
//! under loom a ring, a doorbell and a runner.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use shunt_ring::user::Piece;
use shunt_ring::{Sink, Source};

#[cfg(loom)]
pub(crate) mod model;

/// A program's buffer in several pieces, some of them empty.
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    pieces: Vec<Piece>,
}

impl Buffer {
    /// A buffer of these bytes, cut at these places (taken modulo the length).
    pub(crate) fn new(bytes: Vec<u8>, cuts: &[usize]) -> Buffer {
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
        ends.push(bytes.len());
        ends.sort_unstable();
        Buffer { bytes, ends, pieces: Vec::new() }
    }

    /// An empty buffer of this size.
    pub(crate) fn zeroed(len: usize, cuts: &[usize]) -> Buffer {
        Buffer::new(vec![0; len], cuts)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn source(&mut self) -> Source<'_> {
        self.cut();
        // SAFETY: the pieces lie in `bytes`, which stays borrowed.
        unsafe { Source::new(&self.pieces) }
    }

    pub(crate) fn sink(&mut self) -> Sink<'_> {
        self.cut();
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { Sink::new(&self.pieces) }
    }

    fn cut(&mut self) {
        let base = self.bytes.as_mut_ptr();
        let mut from = 0;
        self.pieces = self
            .ends
            .iter()
            .map(|&end| {
                let piece = Piece { base: base.wrapping_add(from), len: end - from };
                from = end;
                piece
            })
            .collect();
    }
}

/// Puts bytes into a sink, as a kernel does, and returns how many there was room for.
pub(crate) fn pour(bytes: impl IntoIterator<Item = u8>, sink: &mut Sink<'_>) -> usize {
    let room = sink.remaining();
    for byte in bytes.into_iter().take(room) {
        let to = first_byte(sink.list());
        // SAFETY: inside a piece of a sink, which is valid for writes.
        unsafe { *to = byte };
        sink.advance(1);
    }
    room - sink.remaining()
}

/// Takes the next byte of a source.
pub(crate) fn take(source: &mut Source<'_>) -> u8 {
    // SAFETY: inside a piece of a source, which is valid for reads.
    let byte = unsafe { *first_byte(source.list()) };
    source.advance(1);
    byte
}

fn first_byte(mut pieces: impl Iterator<Item = Piece>) -> *mut u8 {
    pieces.next().expect("a byte is left").base
}
