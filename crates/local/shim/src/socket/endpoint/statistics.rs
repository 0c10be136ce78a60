//! What `shunt status` and the process's counters show of an endpoint.

use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::*};

use shunt_abi::page::{self, Counter};

use crate::base::process;

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

    pub(super) fn reset(&self) {
        let Statistics { row, is_counted_as_used, is_counted_as_attached, has_moved } = self;
        row.store(std::ptr::null_mut(), Release);
        is_counted_as_used.store(false, Relaxed);
        is_counted_as_attached.store(false, Relaxed);
        has_moved.store(false, Relaxed);
    }

    /// Sets each field to a value that no new endpoint has.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        self.row.store(std::ptr::dangling_mut(), Relaxed);
        self.is_counted_as_used.store(true, Relaxed);
        self.is_counted_as_attached.store(true, Relaxed);
        self.note_moved();
    }
}
