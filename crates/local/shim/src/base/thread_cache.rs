//! The free blocks of the shim's heap (`base::alloc`) that one thread caches.

use std::cell::Cell;

/// Number of size classes that are cached, from the smallest, and of blocks in each.
const SIZES: usize = 8;
const BLOCKS: u8 = 8;

/// The cache. It is used only with the shield raised.
pub(crate) struct ThreadCache {
    first: [Cell<*mut u8>; SIZES],
    count: [Cell<u8>; SIZES],
}

impl ThreadCache {
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

    /// Adds a block to the cache. Returns `false` if the cache has enough of its size.
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

    /// Removes all blocks, and passes each with its size class to `taken`.
    pub(crate) fn take_each(&self, mut taken: impl FnMut(usize, *mut u8)) {
        for class in 0..SIZES {
            while let Some(block) = self.take(class) {
                taken(class, block);
            }
        }
    }
}
