//! The TCP connection beneath both ends, for the property tests and the models.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::VecDeque;

use shunt_ring::Sink;
use shunt_transport::{EAGAIN, Waiting};

#[path = "../../../ring/tests/common/mod.rs"]
mod lanes;

pub(crate) use lanes::*;

/// `ECONNRESET`, as the kernel reports it.
pub(crate) const ECONNRESET: i32 = 104;

/// One direction of a TCP connection with the kernel's counts of it.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    /// Bytes that were written but have not arrived.
    flying: VecDeque<u8>,
    arrived: VecDeque<u8>,
    sent: u64,
    read: u64,
    fin: bool,
    reset: Option<Reset>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reset {
    Untold,
    Told,
}

impl Wire {
    pub(crate) fn send(&mut self, bytes: impl IntoIterator<Item = u8>) {
        let before = self.flying.len();
        self.flying.extend(bytes);
        self.sent += (self.flying.len() - before) as u64;
    }

    /// Lets up to `count` bytes arrive.
    pub(crate) fn arrive(&mut self, count: usize) {
        self.arrived.extend(self.flying.drain(..count.min(self.flying.len())));
    }

    pub(crate) fn finish(&mut self) {
        self.fin = true;
    }

    /// Resets the connection: bytes that have not arrived are lost.
    pub(crate) fn reset(&mut self) {
        self.flying.clear();
        self.reset = Some(Reset::Untold);
    }

    pub(crate) fn was_reset(&self) -> bool {
        self.reset.is_some()
    }

    /// Returns the number of bytes ever written.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    pub(crate) fn arrived_total(&self) -> u64 {
        self.read + self.arrived.len() as u64
    }

    /// Returns the number of bytes read; a kernel loses that count at a reset.
    pub(crate) fn read(&self) -> Option<u64> {
        self.reset.is_none().then_some(self.read)
    }

    pub(crate) fn waiting(&self) -> Waiting {
        match self.reset {
            _ if !self.arrived.is_empty() => Waiting::Bytes(self.arrived.len()),
            Some(Reset::Untold) => Waiting::Error,
            Some(Reset::Told) => Waiting::EndOfFile,
            None if self.fin && self.flying.is_empty() => Waiting::EndOfFile,
            None => Waiting::Nothing,
        }
    }

    pub(crate) fn receive(&mut self, sink: &mut Sink<'_>) -> Result<usize, i32> {
        match self.waiting() {
            Waiting::Bytes(count) => {
                let count = count.min(sink.remaining());
                self.read += count as u64;
                Ok(pour(self.arrived.drain(..count), sink))
            }
            Waiting::Nothing => Err(EAGAIN),
            Waiting::EndOfFile => Ok(0),
            Waiting::Error => {
                self.reset = Some(Reset::Told);
                Err(ECONNRESET)
            }
        }
    }

    /// Returns the first bytes that have arrived and not been read.
    pub(crate) fn peek(&self, count: usize) -> Vec<u8> {
        self.arrived.iter().copied().take(count).collect()
    }
}
