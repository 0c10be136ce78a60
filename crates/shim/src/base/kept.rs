//! The free blocks that a thread keeps of the shim's heap (`base::alloc`), for itself alone.

use std::cell::Cell;

/// Sizes of which a thread keeps blocks, from the smallest, and how many of each.
const SIZES: usize = 8;
const BLOCKS: u8 = 8;

/// See the module. Used behind the shield.
pub(crate) struct Kept {
    first: [Cell<*mut u8>; SIZES],
    count: [Cell<u8>; SIZES],
}

impl Kept {
    pub(crate) fn take(&self, class: usize) -> Option<*mut u8> {
        let block = self.first.get(class)?.get();
        if block.is_null() {
            return None;
        }
        // SAFETY: a free block begins with a pointer to the next.
        self.first[class].set(unsafe { block.cast::<*mut u8>().read() });
        self.count[class].set(self.count[class].get() - 1);
        Some(block)
    }

    /// `false` if there are enough.
    pub(crate) fn keep(&self, class: usize, block: *mut u8) -> bool {
        if class >= SIZES || self.count[class].get() == BLOCKS {
            return false;
        }
        // SAFETY: at least as large as a pointer, and no longer in use.
        unsafe { block.cast::<*mut u8>().write(self.first[class].get()) };
        self.first[class].set(block);
        self.count[class].set(self.count[class].get() + 1);
        true
    }

    /// Takes all, each with its size.
    pub(crate) fn take_each(&self, mut taken: impl FnMut(usize, *mut u8)) {
        for class in 0..SIZES {
            while let Some(block) = self.take(class) {
                taken(class, block);
            }
        }
    }
}
