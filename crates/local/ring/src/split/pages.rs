//! Memory that a sender lends: files that the sender alone writes, divided into slots of equal
//! length. The receiver maps such a file once, for reading only, and sees every later use of it.
//!
//! ```text
//! sender                                       receiver
//! OwnPages: file, sealed and whole  ─ passed ─>  ShownPages
//! OwnSlot, the only one of its slot              ShownSlot, as often as needed
//! DerefMut<[u8]>                                 copies, or bytes that may change
//! ```
//!
//! The seals forbid every other writable mapping. So an [`OwnSlot`] is exclusive memory of its
//! process, and may be a slice. A [`ShownSlot`] may change at any time, and is never one.

use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use shunt_sys::mapping::{Mapping, Shown, back};
use shunt_sys::{Result, memfd};

/// Creates a sealed file with every page allocated, and returns it with its slots.
pub fn create(slots: usize, slot_bytes: usize) -> Result<(OwnedFd, Vec<OwnSlot>)> {
    let (file, mapping) = memfd::create_whole("shunt-lent", slots * slot_bytes)?;
    back(mapping.as_ptr(), mapping.len())?;
    let pages = Arc::new(mapping);
    let slot = |index: usize| OwnSlot { pages: pages.clone(), at: index * slot_bytes, len: slot_bytes };
    Ok((file, (0..slots).map(slot).collect()))
}

/// A slot on the sender's side: its only value, and so exclusive memory.
#[derive(Debug)]
pub struct OwnSlot {
    pages: Arc<Mapping>,
    at: usize,
    len: usize,
}

impl Deref for OwnSlot {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `create` has made one value for each part of the mapping, which lives as long as
        // the value. No process has another writable mapping of the file, by its seals.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr().add(self.at), self.len) }
    }
}

impl DerefMut for OwnSlot {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_ptr().add(self.at), self.len) }
    }
}

/// A sender's file on the receiver's side.
#[derive(Clone, Debug)]
pub struct ShownPages {
    pages: Arc<Shown>,
    slot_bytes: usize,
}

impl ShownPages {
    /// Maps a file of `slots` slots, `bytes` in all, after [`memfd::verify_whole`]. Returns `None`
    /// if there is no memory.
    pub fn map(file: impl AsFd, slots: usize, bytes: usize) -> Option<ShownPages> {
        let slot_bytes = bytes.checked_div(slots).filter(|each| each * slots == bytes)?;
        let shown = Shown::map(file, bytes).ok()?;
        shown.back(bytes).ok()?;
        Some(ShownPages { pages: Arc::new(shown), slot_bytes })
    }

    /// Returns a slot, if it is there.
    pub fn slot(&self, index: usize) -> Option<ShownSlot> {
        let at = index.checked_mul(self.slot_bytes)?;
        let is_inside = at.checked_add(self.slot_bytes)? <= self.pages.len();
        is_inside.then(|| ShownSlot { pages: self.pages.clone(), at, len: self.slot_bytes })
    }
}

/// A slot on the receiver's side, whose sender may write it at any time.
#[derive(Clone, Debug)]
pub struct ShownSlot {
    pages: Arc<Shown>,
    at: usize,
    len: usize,
}

/// A byte that another process may change at any time.
#[derive(Debug)]
#[repr(transparent)]
pub struct SharedByte(AtomicU8);

impl SharedByte {
    /// Returns the byte as it is now. A later call may return another one.
    #[inline]
    pub fn get(&self) -> u8 {
        self.0.load(Relaxed)
    }
}

impl ShownSlot {
    /// Returns the number of bytes.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "no slot is empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the first byte, which stays mapped while `self` lives.
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.pages.as_ptr().wrapping_add(self.at)
    }

    /// Copies `into.len()` bytes from `offset`, once. Returns `false` and does nothing if the slot
    /// ends before.
    #[must_use]
    #[inline]
    pub fn copy(&self, offset: usize, into: &mut [u8]) -> bool {
        let is_inside = offset.checked_add(into.len()).is_some_and(|end| end <= self.len);
        if is_inside {
            // SAFETY: inside the mapping, which `self` keeps. `into` is memory of this process
            // only, so they do not overlap. A sender that writes meanwhile only changes which bytes
            // are copied (L5).
            unsafe {
                std::ptr::copy_nonoverlapping(self.as_ptr().add(offset), into.as_mut_ptr(), into.len());
            }
        }
        is_inside
    }

    /// Returns the bytes as bytes that may change.
    #[inline]
    pub fn bytes(&self) -> &[SharedByte] {
        // SAFETY: mapped while `self` lives, and laid out as bytes. `SharedByte` only loads, each
        // byte by itself, which is allowed in a mapping without write access.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_slot_is_separate_memory_that_the_other_side_sees() {
        let (file, mut own) = create(4, 4096).unwrap();
        memfd::verify_whole(&file, 4 * 4096).unwrap();
        let shown = ShownPages::map(&file, 4, 4 * 4096).unwrap();
        for (index, slot) in own.iter_mut().enumerate() {
            slot.fill(index as u8 + 1);
        }
        for index in 0..4 {
            let slot = shown.slot(index).unwrap();
            let mut bytes = [0; 4096];
            assert!(slot.copy(0, &mut bytes) && bytes == [index as u8 + 1; 4096]);
            assert!(slot.bytes().iter().all(|byte| byte.get() == index as u8 + 1));
            assert!(slot.copy(4095, &mut [0; 1]) && !slot.copy(4095, &mut [0; 2]));
            assert!(!slot.copy(usize::MAX, &mut [0; 2]));
        }
        assert!(shown.slot(4).is_none() && shown.slot(usize::MAX).is_none());
        assert!(ShownPages::map(&file, 3, 4 * 4096).is_none() && ShownPages::map(&file, 0, 4096).is_none());
        drop(shown.clone());
        let last = shown.slot(3).unwrap();
        drop((own, shown));
        assert_eq!(last.bytes()[0].get(), 4);
    }
}
