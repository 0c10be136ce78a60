//! The program's settings of a socket that calls on a lane respect, as far as the kernel need not
//! be asked.
//!
//! The shim reads them from the kernel before an offer (`socket::settings`), and stores what later
//! calls of the program set.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use crate::socket::low_water::LowWater;

/// The settings of one socket. The fields that each receive loads come first.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Options {
    /// SO_RCVLOWAT. Changed by [`change_low_water`](super::Endpoint::change_low_water).
    pub(crate) low_water: LowWater,
    /// O_NONBLOCK.
    nonblocking: AtomicU32,
    /// SO_RCVTIMEO and SO_SNDTIMEO in nanoseconds; 0 means no timeout.
    receive_timeout: AtomicU64,
    send_timeout: AtomicU64,
    /// The socket option that keeps the endpoint on TCP, packed; 0 if there is none.
    unsupported: AtomicU64,
    /// TCP_INQ, as far as this process knows.
    reports_queue: AtomicBool,
}

impl Options {
    #[inline]
    pub(crate) fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Relaxed) != 0
    }

    pub(crate) fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on.into(), Relaxed);
    }

    /// Returns SO_RCVTIMEO in nanoseconds; 0 means no timeout.
    #[inline]
    pub(crate) fn receive_timeout(&self) -> u64 {
        self.receive_timeout.load(Relaxed)
    }

    /// Returns SO_SNDTIMEO in nanoseconds; 0 means no timeout.
    #[inline]
    pub(crate) fn send_timeout(&self) -> u64 {
        self.send_timeout.load(Relaxed)
    }

    pub(crate) fn set_timeouts(&self, receive: u64, send: u64) {
        self.receive_timeout.store(receive, Relaxed);
        self.send_timeout.store(send, Relaxed);
    }

    /// Returns whether receives report how many bytes remain (TCP_INQ).
    pub(crate) fn reports_queue(&self) -> bool {
        self.reports_queue.load(Relaxed)
    }

    pub(crate) fn set_reports_queue(&self, on: bool) {
        self.reports_queue.store(on, Relaxed);
    }

    /// Returns the option that was last stored as one that a lane does not emulate, packed.
    pub(super) fn unsupported(&self) -> u64 {
        self.unsupported.load(Relaxed)
    }

    pub(super) fn set_unsupported(&self, option: u64) {
        self.unsupported.store(option, Relaxed);
    }

    pub(super) fn reset(&self) {
        let Options { low_water, nonblocking, receive_timeout, send_timeout, unsupported, reports_queue } =
            self;
        low_water.clear();
        nonblocking.store(0, Relaxed);
        receive_timeout.store(0, Relaxed);
        send_timeout.store(0, Relaxed);
        unsupported.store(0, Relaxed);
        reports_queue.store(false, Relaxed);
    }

    /// Sets each field to a value that no new endpoint has.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        self.low_water.note(2);
        self.set_nonblocking(true);
        self.set_timeouts(3, 4);
        self.set_unsupported(5);
        self.set_reports_queue(true);
    }
}
