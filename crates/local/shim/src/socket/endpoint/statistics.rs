//! What `shunt status` and the process's counters show of an endpoint.

use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::*};

use shunt_abi::page::{self, Counter};
use shunt_abi::reason::{Reason, Transport};

use super::{Endpoint, RxSide, TxSide};
use crate::base::{kernel, order, process};

/// The statistics of one endpoint.
#[derive(Debug, Default)]
pub(super) struct Statistics {
    /// The endpoint's row in the page, or null.
    row: AtomicPtr<page::Entry>,
    /// Set once the endpoint has been counted as used.
    is_counted_as_used: AtomicBool,
    /// Set once the endpoint has been counted as attached.
    is_counted_as_attached: AtomicBool,
    /// Set once a call has moved bytes by TCP, as far as this process knows.
    has_moved: AtomicBool,
    /// Set when the last bytes were sent by a lane: see [`Endpoint::count_sent`].
    sent_by_lane: AtomicBool,
}

impl Statistics {
    #[inline]
    pub(super) fn row(&self) -> Option<&'static page::Entry> {
        let row = self.row.load(Acquire);
        // SAFETY: rows lie in the page, which stays mapped for the life of the process.
        (!row.is_null()).then(|| unsafe { &*row })
    }

    pub(super) fn set_row(&self, row: Option<&'static page::Entry>) {
        let pointer = row.map_or(std::ptr::null_mut(), |row| std::ptr::from_ref(row).cast_mut());
        self.row.store(pointer, Release);
    }

    /// Counts the connection as used, once.
    pub(super) fn count_use(&self) {
        if !self.is_counted_as_used.swap(true, Relaxed) {
            process::count(Counter::Connections, 1);
        }
    }

    /// Returns whether the connection was used, but not enough for a row.
    pub(super) fn was_short(&self) -> bool {
        self.is_counted_as_used.load(Relaxed) && self.row.load(Relaxed).is_null()
    }

    /// Counts the connection as attached, once.
    pub(super) fn count_attached(&self) {
        if !self.is_counted_as_attached.swap(true, Relaxed) {
            process::count(Counter::ConnectionsOnShm, 1);
        }
    }

    pub(super) fn has_moved(&self) -> bool {
        self.has_moved.load(Relaxed)
    }

    #[inline]
    pub(super) fn note_moved(&self) {
        self.has_moved.store(true, Relaxed);
    }

    #[inline]
    fn note_lane(&self) {
        self.sent_by_lane.store(true, Relaxed);
    }

    /// Returns whether the last bytes were sent by a lane. Of several sends by TCP after it, one
    /// gets `true`.
    #[inline]
    fn take_sent_by_lane(&self) -> bool {
        self.sent_by_lane.load(Relaxed) && self.sent_by_lane.swap(false, Relaxed)
    }

    pub(super) fn reset(&self) {
        let Statistics { row, is_counted_as_used, is_counted_as_attached, has_moved, sent_by_lane } = self;
        row.store(std::ptr::null_mut(), Release);
        is_counted_as_used.store(false, Relaxed);
        is_counted_as_attached.store(false, Relaxed);
        has_moved.store(false, Relaxed);
        sent_by_lane.store(false, Relaxed);
    }

    /// Sets each field to a value that no new endpoint has.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        self.row.store(std::ptr::dangling_mut(), Relaxed);
        self.is_counted_as_used.store(true, Relaxed);
        self.is_counted_as_attached.store(true, Relaxed);
        self.note_moved();
        self.note_lane();
    }
}

impl Endpoint {
    /// Returns the endpoint's row in the page.
    #[inline]
    pub(crate) fn entry(&self) -> Option<&'static page::Entry> {
        self.statistics.row()
    }

    #[inline]
    pub(crate) fn set_entry(&self, entry: Option<&'static page::Entry>) {
        self.statistics.set_row(entry);
    }

    /// Counts the connection as used, once.
    #[inline]
    pub(crate) fn count_use(&self) {
        self.statistics.count_use();
    }

    /// Counts the connection as attached, once.
    #[inline]
    pub(crate) fn count_on_shm(&self) {
        self.statistics.count_attached();
    }

    /// Returns whether a call has moved bytes by TCP, as far as this process knows.
    #[inline]
    pub(crate) fn has_moved(&self) -> bool {
        self.statistics.has_moved()
    }

    #[inline]
    pub(crate) fn note_moved(&self) {
        self.statistics.note_moved();
    }

    /// Adds to the bytes received by TCP, for `shunt status`.
    #[inline]
    pub(crate) fn count_received(&self, bytes: usize) {
        if bytes != 0 {
            self.note_moved();
        }
        if let Some(entry) = self.entry() {
            entry.tcp_received.store(entry.tcp_received.load(Relaxed) + bytes as u64, Relaxed);
        }
    }

    /// Adds to the bytes sent by TCP. The first bytes after a lane are pushed. Otherwise Nagle's
    /// algorithm would hold them back: the acknowledgement of the bytes before the lane is late,
    /// because the answers went by lanes as well.
    #[inline]
    pub(crate) fn count_sent(&self, bytes: usize) {
        if bytes != 0 {
            self.note_moved();
        }
        if !self.offer.is_remote() {
            order::note_by_tcp();
        }
        if self.statistics.take_sent_by_lane() {
            kernel::push(self.fd());
        }
        if let Some(entry) = self.entry() {
            entry.tcp_sent.store(entry.tcp_sent.load(Relaxed) + bytes as u64, Relaxed);
        }
    }

    /// Notes that the sending direction is on a lane from now on.
    #[inline]
    pub(crate) fn note_lane(&self) {
        self.statistics.note_lane();
    }

    /// Reports the sending direction for `shunt status`. The caller holds its lock.
    pub(crate) fn report_tx(&self, side: &TxSide) {
        let Some(entry) = self.entry() else { return };
        entry.shm_sent.store(side.tx.lane_total(), Relaxed);
        process::count_tcp(entry, page::Which::Sent);
        let (transport, reason) = described(side.tx.on_lane(), side.tx.reason());
        let word = transport as u64 | u64::from(reason as u16) << 16;
        let _ = entry.transports.fetch_update(Relaxed, Relaxed, |old| Some(old & !0xffff_00ff | word));
    }

    /// Reports the received bytes, and the transport if it has changed. The caller holds the lock.
    #[inline(always)]
    pub(crate) fn report_received(&self, side: &mut RxSide) {
        self.report_transport(side);
        self.count_from_lane(side.rx.lane_total());
    }

    /// Reports the transport if it has changed. Any check for data to receive may change it. The
    /// caller holds the lock.
    #[inline(always)]
    pub(crate) fn report_transport(&self, side: &mut RxSide) {
        if side.told_on_lane != side.rx.on_lane() {
            self.report_rx(side);
        }
    }

    /// Reports the total of bytes received by lanes.
    #[inline(always)]
    pub(crate) fn count_from_lane(&self, total: u64) {
        if let Some(entry) = self.entry() {
            entry.shm_received.store(total, Relaxed);
        }
    }

    /// Reports the receiving direction. The caller holds its lock.
    pub(crate) fn report_rx(&self, side: &mut RxSide) {
        side.told_on_lane = side.rx.on_lane();
        let Some(entry) = self.entry() else { return };
        entry.shm_received.store(side.rx.lane_total(), Relaxed);
        process::count_tcp(entry, page::Which::Received);
        let (transport, reason) = described(side.rx.on_lane(), side.rx.reason());
        let word = (transport as u64) << 8 | u64::from(reason as u16) << 32;
        let _ = entry.transports.fetch_update(Relaxed, Relaxed, |old| Some(old & !0xffff_0000_ff00 | word));
    }
}

fn described(on_lane: bool, reason: Reason) -> (Transport, Reason) {
    if on_lane { (Transport::Shm, Reason::None) } else { (Transport::Tcp, reason) }
}
