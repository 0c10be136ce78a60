//! The queue through which the entries of an io_uring go to the kernel, mapped a second time: what a program is about to submit can
//! be looked at there. It is memory that the program writes, so everything is copied once before it is judged.

use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering::*};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::{Errno, Result};

/// The kernel polls for entries by itself.
pub const SETUP_SQPOLL: u32 = 1 << 1;
/// Entries have twice the usual size.
pub const SETUP_SQE128: u32 = 1 << 10;
/// What is submitted is polled for, which few operations can be.
pub const SETUP_IOPOLL: u32 = 1;
/// Nothing can be submitted yet, and what may be can be restricted.
pub const SETUP_R_DISABLED: u32 = 1 << 6;
/// The memory is the program's own.
pub const SETUP_NO_MMAP: u32 = 1 << 14;
/// There is no descriptor.
pub const SETUP_REGISTERED_FD_ONLY: u32 = 1 << 15;
/// Entries are taken in the order in which they lie.
pub const SETUP_NO_SQARRAY: u32 = 1 << 16;
/// All flags of which it is known what they change here.
pub const SETUP_KNOWN: u32 = (1 << 19) - 1;

/// Where the parts of a queue lie in its first mapping, and what else decides how it is read.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Of the first entry that the kernel has not taken.
    pub head: u32,
    /// Of the first place that the program has not filled.
    pub tail: u32,
    /// Which entry stands at which place; there may be none.
    pub array: u32,
    /// How many there are: a power of two.
    pub entries: u32,
    /// As the ring was made.
    pub flags: u32,
}

/// What of struct io_uring_params counts here.
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
    /// What the kernel has written there.
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

/// A copy of one entry: struct io_uring_sqe.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Entry {
    /// What is to be done.
    pub operation: u8,
    /// How.
    pub flags: u8,
    /// Its priority, or flags of some operations.
    pub priority: u16,
    /// Where, for most.
    pub fd: i32,
    /// An offset, or a second address.
    pub offset: u64,
    /// A buffer, or what else there is to point to.
    pub address: u64,
    /// Its length.
    pub len: u32,
    /// Flags of the operation.
    pub operation_flags: u32,
    /// What its completion says.
    pub user_data: u64,
    /// A registered buffer, or a group of them.
    pub buffer: u16,
    /// Registered credentials.
    pub personality: u16,
    /// A second descriptor, or a place for one in the ring's own table.
    pub second: i32,
    rest: [u64; 2],
}

/// Does nothing.
pub const NOP: u8 = 0;

/// See the module.
#[derive(Debug)]
pub struct Queue {
    shape: Shape,
    shared: Region,
    entries: Region,
}

impl Queue {
    /// Maps that of `ring`, whose shape is as the kernel has said. Its file stays open until this is dropped.
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

    /// How the ring was made.
    pub fn flags(&self) -> u32 {
        self.shape.flags
    }

    /// The places that are filled, up to `end`, or to where the ring itself says. `None` if that is nonsense.
    pub fn filled(&self, end: Option<u32>) -> Option<impl Iterator<Item = u32> + use<>> {
        let head = self.shared.word(self.shape.head).load(Acquire);
        let tail = end.unwrap_or_else(|| self.shared.word(self.shape.tail).load(Acquire));
        let count = tail.wrapping_sub(head);
        (count <= self.shape.entries).then(|| (0..count).map(move |index| head.wrapping_add(index)))
    }

    /// The entry at a place. `None`: the kernel drops it.
    pub fn entry(&self, place: u32) -> Option<Entry> {
        // SAFETY: inside the mapping; every pattern of bits is an entry, and whoever writes it meanwhile spoils a copy.
        self.at(place).map(|entry| unsafe { entry.read_volatile() })
    }

    /// Has the entry at a place do nothing, and complete as what has been done.
    pub fn withdraw(&self, place: u32) {
        if let Some(entry) = self.at(place) {
            // SAFETY: as in `entry`; the program has handed it over, and does not look at it again.
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

/// Part of a ring's memory; unmapped at drop.
#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the address space and not to a thread; what it holds is reached only through raw pointers and atomics.
unsafe impl Send for Region {}

impl Region {
    /// As much of it as there is, as the kernel has said: it never shrinks.
    fn map(ring: impl AsFd, len: usize, offset: u64) -> Result<Region> {
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let start = unsafe {
            mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, ring, offset)?
        };
        Ok(Region { start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?, len })
    }

    fn word(&self, at: u32) -> &AtomicU32 {
        debug_assert!(at as usize + 4 <= self.len);
        // SAFETY: inside the mapping and aligned, as `Queue::map` has seen to.
        unsafe { self.start.add(at as usize).cast().as_ref() }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, and nothing points there any more.
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
        // SAFETY: the kernel fills the structure, and makes a descriptor.
        unsafe {
            let fd = crate::raw::call(libc::SYS_io_uring_setup, given).expect("a ring");
            (OwnedFd::from_raw_fd(fd as i32), params.as_ptr().cast::<Params>().read())
        }
    }

    /// Writes an entry as a program would, and says so.
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
