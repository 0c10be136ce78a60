//! The shim's own heap. The shim cannot use the program's heap: a signal handler that interrupted
//! malloc may call poll, select and close, and a program's malloc may do anything, even use
//! sockets.
//!
//! The size of a small block is a power of two, and a freed block goes to a list of blocks of its
//! size. A large block is a mapping. Each thread caches a few of the smallest blocks. The cache
//! needs no lock, because no signal handler runs on the thread while its shield is raised.

use std::alloc::{GlobalAlloc, Layout};
use std::ptr::null_mut;

use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap, munmap};

use crate::base::lock::{AcrossFork, Lock};
use crate::base::rank;
use crate::base::signal::Shield;
use crate::base::thread;
use crate::base::thread_cache::ThreadCache;

const SMALLEST: usize = 16;
/// The largest block that is not a separate mapping.
const LARGEST: usize = 16 * 1024;
const SIZES: usize = (LARGEST / SMALLEST).trailing_zeros() as usize + 1;
/// Bytes that the heap takes from the kernel at a time for small blocks.
const CHUNK: usize = 256 * 1024;
const PAGE: usize = 4096;

static HEAP: Lock<Heap, { rank::HEAP }> =
    Lock::new(Heap { free: [null_mut(); SIZES], next: null_mut(), left: 0 });

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

struct Allocator;

struct Heap {
    /// Free blocks of each size, each pointing to the next.
    free: [*mut u8; SIZES],
    /// The unused rest of the current chunk, and its length in `left`.
    next: *mut u8,
    left: usize,
}

// SAFETY: the blocks belong to the process, not to a thread.
unsafe impl Send for Heap {}

// SAFETY: a block is as long as its layout, aligned to its size or to a page, and belongs to one
// owner until it is freed.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match class_of(layout) {
            Some(class) => {
                let _shield = Shield::raise();
                thread::this().kept.take(class).unwrap_or_else(|| HEAP.lock().take(class))
            }
            // A mapping is aligned to a page only.
            None if layout.align() > PAGE => null_mut(),
            None => map(layout.size()),
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match class_of(layout) {
            Some(class) => {
                let _shield = Shield::raise();
                let thread = thread::this();
                if thread.kept.keep(class, block) {
                    thread.await_end();
                } else {
                    HEAP.lock().give(class, block);
                }
            }
            // SAFETY: a mapping of this length.
            None => unsafe {
                let _ = munmap(block.cast(), pages(layout.size()));
            },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        let block = unsafe { self.alloc(layout) };
        if !block.is_null() && class_of(layout).is_some() {
            // SAFETY: the block has that length. A mapping is zeroed already.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (class_of(layout), class_of(wanted)) {
            (Some(old), Some(new)) if old == new => block,
            (None, None) => {
                let (old, new) = (pages(layout.size()), pages(size));
                // SAFETY: a mapping of that length. The caller gives up the old address.
                unsafe { mremap(block.cast(), old, new, MremapFlags::MAYMOVE) }
                    .map_or(null_mut(), |at| at.cast())
            }
            _ => {
                // SAFETY: the caller's promise; both blocks are at least as long as the copy.
                unsafe {
                    let fresh = self.alloc(wanted);
                    if !fresh.is_null() {
                        std::ptr::copy_nonoverlapping(block, fresh, size.min(layout.size()));
                        self.dealloc(block, layout);
                    }
                    fresh
                }
            }
        }
    }
}

impl Heap {
    fn give(&mut self, class: usize, block: *mut u8) {
        // SAFETY: at least as large as a pointer, and no longer in use.
        unsafe { block.cast::<*mut u8>().write(self.free[class]) };
        self.free[class] = block;
    }

    fn take(&mut self, class: usize) -> *mut u8 {
        let block = self.free[class];
        if !block.is_null() {
            // SAFETY: a free block begins with a pointer to the next.
            self.free[class] = unsafe { block.cast::<*mut u8>().read() };
            return block;
        }
        let size = SMALLEST << class;
        // Blocks are aligned to their size. The bytes skipped for that are lost, once per change of
        // size in a chunk.
        let skip = self.next.align_offset(size);
        if self.next.is_null() || self.left < skip + size {
            let chunk = map(CHUNK);
            if chunk.is_null() {
                return null_mut();
            }
            (self.next, self.left) = (chunk, CHUNK);
            return self.take(class);
        }
        // SAFETY: within the chunk, as was just checked.
        let block = unsafe { self.next.add(skip) };
        // SAFETY: the end of the block is within the chunk, or one past its end.
        self.next = unsafe { block.add(size) };
        self.left -= skip + size;
        block
    }
}

/// Frees the blocks that an ended thread had cached.
pub(crate) fn give_back(kept: &ThreadCache) {
    kept.take_each(|class, block| HEAP.lock().give(class, block));
}

/// Returns the size class of a layout, or `None` if it gets a mapping.
fn class_of(layout: Layout) -> Option<usize> {
    let size = layout.size().max(layout.align()).max(SMALLEST);
    (size <= LARGEST).then(|| (size.next_power_of_two() / SMALLEST).trailing_zeros() as usize)
}

fn pages(size: usize) -> usize {
    size.next_multiple_of(PAGE)
}

fn map(size: usize) -> *mut u8 {
    // SAFETY: a fresh anonymous mapping.
    unsafe {
        mmap_anonymous(null_mut(), pages(size), ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
            .map_or(null_mut(), |at| at.cast())
    }
}

/// Returns the heap's lock: the child gets a consistent copy.
pub(crate) fn across_fork() -> &'static impl AcrossFork {
    &HEAP
}
