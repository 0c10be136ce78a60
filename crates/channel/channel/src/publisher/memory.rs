//! The slots of a publisher, and the files that they are in.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use shunt_ring::split::MAX_SLOTS;
use shunt_ring::split::pages::{self, OwnSlot};

use crate::error::SendError;
use crate::sender::{CLASSES, FILE, LEAST, Loan, MOST, Returned, class_of};

#[derive(Debug)]
struct Slot {
    /// `None` while the program holds it.
    memory: Option<OwnSlot>,
    class: usize,
    file: usize,
    /// Whether its message is in the history.
    is_kept: bool,
    /// The number of subscribers that have its message.
    users: usize,
}

/// A file of slots, which is passed to each subscriber once.
#[derive(Debug)]
pub(super) struct File {
    pub(super) fd: OwnedFd,
    /// The first of its slots.
    pub(super) first: usize,
    pub(super) slots: usize,
    pub(super) bytes: usize,
}

/// The slots of a publisher.
#[derive(Debug)]
pub(super) struct Memory {
    slots: Vec<Slot>,
    files: Vec<File>,
    /// The slots of each class.
    classes: [Vec<usize>; CLASSES],
    bytes: usize,
    most: usize,
    returned: Arc<Returned>,
}

/// Returns the number of slots in a file of a class.
fn slots_of(class: usize) -> usize {
    (FILE / (LEAST << class)).max(1)
}

impl Memory {
    pub(super) fn new(most: usize) -> Memory {
        Memory {
            slots: Vec::new(),
            files: Vec::new(),
            classes: std::array::from_fn(|_| Vec::new()),
            bytes: 0,
            most: most.min(MOST),
            returned: Arc::default(),
        }
    }

    /// Lends a free slot of the class for `len` bytes.
    pub(super) fn lend(&mut self, len: usize) -> Option<Loan> {
        let class = class_of(len);
        self.lend_of(class..class + 1, len)
    }

    /// Lends a free slot of any class for `len` bytes.
    pub(super) fn lend_longer(&mut self, len: usize) -> Option<Loan> {
        self.lend_of(class_of(len)..CLASSES, len)
    }

    fn lend_of(&mut self, classes: std::ops::Range<usize>, len: usize) -> Option<Loan> {
        let slots = &mut self.slots;
        self.returned.take(|slot, memory| slots[slot].memory = Some(memory));
        let is_free = |slot: &Slot| slot.memory.is_some() && !slot.is_kept && slot.users == 0;
        let mut found = classes.flat_map(|class| &self.classes[class]);
        let slot = *found.find(|slot| is_free(&self.slots[**slot]))?;
        Some(Loan::of(self.slots[slot].memory.take()?, slot, len, &self.returned))
    }

    /// Makes a file more for messages of `len` bytes. Returns `false` if there may be none.
    pub(super) fn grow(&mut self, len: usize) -> Result<bool, SendError> {
        let class = class_of(len);
        let (count, each) = (slots_of(class), LEAST << class);
        // Each class may have a first file.
        let others = (0..CLASSES).filter(|other| *other != class && self.classes[*other].is_empty());
        let reserved: usize = others.map(slots_of).sum();
        let is_within = self.bytes + count * each <= self.most;
        let may_grow = self.classes[class].is_empty() || is_within;
        if !may_grow || self.slots.len() + count + reserved > MAX_SLOTS {
            return Ok(false);
        }
        let (fd, slots) = pages::create(count, each).map_err(|_| SendError::NoMemory)?;
        let (first, file) = (self.slots.len(), self.files.len());
        self.files.push(File { fd, first, slots: count, bytes: count * each });
        self.bytes += count * each;
        self.classes[class].extend(first..first + count);
        let slot = |memory| Slot { memory: Some(memory), class, file, is_kept: false, users: 0 };
        self.slots.extend(slots.into_iter().map(slot));
        Ok(true)
    }

    /// Takes a loan, whose message is in the history from now on.
    pub(super) fn keep(&mut self, loan: &mut Loan) -> Option<usize> {
        let (slot, memory) = loan.take(&self.returned)?;
        let kept = &mut self.slots[slot];
        (kept.memory, kept.is_kept) = (Some(memory), true);
        Some(slot)
    }

    /// Notices that the message of a slot has left the history.
    pub(super) fn forget(&mut self, slot: usize) {
        self.slots[slot].is_kept = false;
    }

    /// Returns the file of a slot, and its number.
    pub(super) fn file_of(&self, slot: usize) -> (usize, &File) {
        let file = self.slots[slot].file;
        (file, &self.files[file])
    }

    /// Returns whether a message of `len` bytes fits into a slot.
    pub(super) fn fits(&self, slot: usize, len: usize) -> bool {
        self.slots[slot].class >= class_of(len)
    }

    pub(super) fn add_user(&mut self, slot: usize) {
        self.slots[slot].users += 1;
    }

    pub(super) fn remove_user(&mut self, slot: usize) {
        self.slots[slot].users -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::MAX_MESSAGE;

    #[test]
    fn each_length_has_a_slot_whatever_the_others_use() {
        let mut memory = Memory::new(usize::MAX);
        let mut loans = Vec::new();
        while memory.grow(1).unwrap() {
            while let Some(loan) = memory.lend(1) {
                loans.push(loan);
            }
        }
        for class in 1..CLASSES {
            // Only the shorter ones are made, of which there are more.
            if class < 8 {
                assert!(memory.grow(LEAST << class).unwrap(), "{class}");
                assert!(memory.lend(LEAST << class).is_some(), "{class}");
            }
        }
        assert!(memory.slots.len() <= MAX_SLOTS && (0..CLASSES).map(slots_of).sum::<usize>() <= MAX_SLOTS);
        // All of it is less than what a subscriber maps.
        let firsts: usize = (0..CLASSES).map(|class| slots_of(class) * (LEAST << class)).sum();
        assert!(firsts + MOST <= 8 * MAX_MESSAGE);
    }

    #[test]
    fn loan_of_another_publisher_is_refused() {
        let (mut one, mut other) = (Memory::new(0), Memory::new(0));
        assert!(one.grow(1).unwrap());
        let mut loan = one.lend(1).unwrap();
        assert!(other.keep(&mut loan).is_none());
        assert!(one.keep(&mut loan).is_some());
    }
}
