//! A second mapping of an io_uring's submission queue, with which the shim inspects entries before
//! the program submits them. The program can write this memory at any time. So each entry is copied
//! once, and the checks use the copy.

use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering::*};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::{Errno, Result};

/// A kernel thread polls for entries.
pub const SETUP_SQPOLL: u32 = 1 << 1;
/// Entries have twice the usual size.
pub const SETUP_SQE128: u32 = 1 << 10;
/// Completions are polled for, which few operations support.
pub const SETUP_IOPOLL: u32 = 1;
/// The uring starts disabled, and its operations can be restricted first.
pub const SETUP_R_DISABLED: u32 = 1 << 6;
/// The program provides the memory of the queues.
pub const SETUP_NO_MMAP: u32 = 1 << 14;
/// The uring has no descriptor, only a registered index.
pub const SETUP_REGISTERED_FD_ONLY: u32 = 1 << 15;
/// Entries are taken in the order of their slots, without an index array.
pub const SETUP_NO_SQARRAY: u32 = 1 << 16;
/// All setup flags whose effect on this module is known.
pub const SETUP_KNOWN: u32 = (1 << 19) - 1;

/// Offsets of the parts of a queue in its first mapping, and the properties that decide how it is
/// read.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Offset of the head: the first entry that the kernel has not taken.
    pub head: u32,
    /// Offset of the tail: the first slot that the program has not filled.
    pub tail: u32,
    /// Offset of the index array, which maps slots to entries; unused with SETUP_NO_SQARRAY.
    pub array: u32,
    /// The number of entries: a power of two.
    pub entries: u32,
    /// The setup flags of the uring.
    pub flags: u32,
}

/// The beginning of `struct io_uring_params`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    unused: [u32; 7],
    head: u32,
    tail: u32,
    mask_and_more: [u32; 4],
    array: u32,
}

impl Params {
    /// Returns the shape that the kernel has written to the structure.
    pub fn shape(&self) -> Shape {
        Shape {
            head: self.head,
            tail: self.tail,
            array: self.array,
            entries: self.sq_entries,
            flags: self.flags,
        }
    }
}

/// A copy of one entry: `struct io_uring_sqe`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Entry {
    /// The operation code.
    pub operation: u8,
    /// IOSQE_* flags.
    pub flags: u8,
    /// The I/O priority, or flags of some operations.
    pub priority: u16,
    /// The descriptor of most operations.
    pub fd: i32,
    /// An offset, or a second address.
    pub offset: u64,
    /// The address of a buffer or of another argument.
    pub address: u64,
    /// The length of the buffer.
    pub len: u32,
    /// Flags of the operation.
    pub operation_flags: u32,
    /// A value that the completion repeats.
    pub user_data: u64,
    /// The index of a registered buffer, or a buffer group.
    pub buffer: u16,
    /// The id of registered credentials.
    pub personality: u16,
    /// A second descriptor, or a slot in the uring's own descriptor table.
    pub second: i32,
    rest: [u64; 2],
}

/// The operation without effect.
pub const NOP: u8 = 0;

/// A mapped submission queue.
#[derive(Debug)]
pub struct Queue {
    shape: Shape,
    shared: Region,
    entries: Region,
}

impl Queue {
    /// Maps the queue of `ring` with the shape that the kernel reported. The uring's file stays
    /// open until the queue is dropped.
    pub fn map(ring: impl AsFd, shape: Shape) -> Result<Queue> {
        const ENTRIES_AT: u64 = 0x1000_0000;
        let Shape { head, tail, array, entries, flags } = shape;
        let is_aligned = [head, tail, array].iter().all(|at| at.is_multiple_of(4));
        if !entries.is_power_of_two()
            || !is_aligned
            || flags & (SETUP_NO_MMAP | SETUP_REGISTERED_FD_ONLY) != 0
        {
            return Err(Errno::INVAL);
        }
        let places = if flags & SETUP_NO_SQARRAY == 0 { entries as usize * 4 } else { 0 };
        let len = (head.max(tail) as usize + 4).max(array as usize + places);
        Ok(Queue {
            shape,
            shared: Region::map(&ring, len, 0)?,
            entries: Region::map(&ring, entries as usize * shape.entry_bytes(), ENTRIES_AT)?,
        })
    }

    /// Returns the setup flags of the uring.
    pub fn flags(&self) -> u32 {
        self.shape.flags
    }

    /// Returns the positions of the filled slots, up to `end`, or up to the queue's own tail.
    /// Returns `None` if the tail is invalid.
    pub fn filled(&self, end: Option<u32>) -> Option<impl Iterator<Item = u32> + use<>> {
        let head = self.shared.word(self.shape.head).load(Acquire);
        let tail = end.unwrap_or_else(|| self.shared.word(self.shape.tail).load(Acquire));
        let count = tail.wrapping_sub(head);
        (count <= self.shape.entries).then(|| (0..count).map(move |index| head.wrapping_add(index)))
    }

    /// Returns a copy of the entry at a position. Returns `None` if its index is invalid; the
    /// kernel drops such an entry.
    pub fn entry(&self, place: u32) -> Option<Entry> {
        // SAFETY: inside the mapping. Every bit pattern is an entry, and a concurrent write only
        // spoils the copy.
        self.at(place).map(|entry| unsafe { entry.read_volatile() })
    }

    /// Turns the entry at a position into a NOP with the same user data, because its operation is
    /// done already.
    pub fn withdraw(&self, place: u32) {
        if let Some(entry) = self.at(place) {
            // SAFETY: as in `entry`. The program has submitted the entry and does not use it any
            // more.
            unsafe {
                (&raw mut (*entry).operation_flags).write_volatile(0);
                (&raw mut (*entry).operation).write_volatile(NOP);
            }
        }
    }

    fn at(&self, place: u32) -> Option<*mut Entry> {
        let Shape { entries, array, flags, .. } = self.shape;
        let slot = place & (entries - 1);
        let index = match flags & SETUP_NO_SQARRAY {
            0 => self.shared.word(array + slot * 4).load(Relaxed),
            _ => slot,
        };
        (index < entries).then(|| {
            self.entries.start.as_ptr().wrapping_add(index as usize * self.shape.entry_bytes()).cast()
        })
    }
}

impl Shape {
    fn entry_bytes(&self) -> usize {
        size_of::<Entry>() << u32::from(self.flags & SETUP_SQE128 != 0)
    }
}

/// A part of a uring's memory; unmapped at drop.
#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the address space and not to a thread. Its contents are reached
// only through raw pointers and atomics.
unsafe impl Send for Region {}

impl Region {
    /// Maps `len` bytes at `offset`. The kernel has reported that they exist, and they never
    /// shrink.
    fn map(ring: impl AsFd, len: usize, offset: u64) -> Result<Region> {
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let start = unsafe {
            mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, ring, offset)?
        };
        Ok(Region { start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?, len })
    }

    fn word(&self, at: u32) -> &AtomicU32 {
        debug_assert!(at as usize + 4 <= self.len);
        // SAFETY: inside the mapping and aligned, as `Queue::map` has checked.
        unsafe { self.start.add(at as usize).cast().as_ref() }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, and no pointer into it exists any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::{FromRawFd, OwnedFd};

    fn ring(flags: u32) -> (OwnedFd, Params) {
        let mut params = [0_u32; 30];
        params[2] = flags;
        let given = [4, params.as_mut_ptr() as usize, 0, 0, 0, 0];
        // SAFETY: the kernel fills the structure, and creates a descriptor.
        unsafe {
            let fd = crate::raw::call(libc::SYS_io_uring_setup, given).expect("a ring");
            (OwnedFd::from_raw_fd(fd as i32), params.as_ptr().cast::<Params>().read())
        }
    }

    /// Writes an entry and advances the tail, as a program would.
    fn fill(queue: &Queue, place: u32, user_data: u64) {
        if queue.shape.flags & SETUP_NO_SQARRAY == 0 {
            queue.shared.word(queue.shape.array + place % 4 * 4).store(place % 4, Relaxed);
        }
        let at = queue.at(place).unwrap();
        // SAFETY: inside the mapping.
        unsafe {
            (&raw mut (*at).user_data).write(user_data);
            (&raw mut (*at).operation).write(22);
        }
        queue.shared.word(queue.shape.tail).store(place + 1, Release);
    }

    #[test]
    fn what_has_been_filled_is_seen_whatever_the_size_of_entries() {
        for flags in [0, SETUP_SQE128, SETUP_NO_SQARRAY] {
            let (fd, params) = ring(flags);
            let queue = Queue::map(&fd, params.shape()).unwrap();
            let filled = |end| queue.filled(end).map(|places| places.collect::<Vec<_>>());
            assert_eq!(filled(None), Some(vec![]));
            fill(&queue, 0, 7);
            fill(&queue, 1, 8);
            assert_eq!(filled(None), Some(vec![0, 1]));
            assert_eq!(filled(Some(1)), Some(vec![0]));
            assert_eq!(filled(Some(5)), None, "there are four places");
            queue.withdraw(1);
            let seen = [0, 1].map(|place| queue.entry(place).map(|entry| (entry.operation, entry.user_data)));
            assert_eq!(seen, [Some((22, 7)), Some((NOP, 8))]);
        }
    }

    #[test]
    fn what_is_outside_is_not_touched() {
        let (fd, params) = ring(0);
        let queue = Queue::map(&fd, params.shape()).unwrap();
        queue.shared.word(queue.shape.array).store(4, Relaxed);
        assert!(queue.entry(0).is_none());
        queue.withdraw(0);
        let shape = params.shape();
        for wrong in [
            Shape { entries: 3, ..shape },
            Shape { head: 1, ..shape },
            Shape { flags: SETUP_NO_MMAP, ..shape },
        ] {
            assert!(Queue::map(&fd, wrong).is_err(), "{wrong:?}");
        }
    }
}
