//! Copies into a ring, and the choice between two methods for them.
//!
//! ```text
//! Plain      memcpy: the bytes stay in the sender's cache, from which the receiver's reads get them
//! Streaming  non-temporal stores: the bytes go to memory past the caches
//! ```
//!
//! Plain copies are the fastest if both processors share a cache. If they do not, each line of the
//! ring moves between two caches twice, and streaming can be several times as fast. Where the
//! processors are is not known: a hypervisor moves them. So a [`Chooser`] measures both methods.
//!
//! **Invariant.** Non-temporal stores are weakly ordered: on x86-64 a later store may become visible
//! before them. [`copy`] passes a store fence after the last one. So the bytes are visible before
//! the cursor that the caller publishes next, as after a plain copy. On 64-bit ARM `stnp` is ordered
//! by the release store of the cursor as any other store.

mod chooser;

pub use chooser::{Chooser, LEAST, Sampler};

/// A way to copy bytes into a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// An ordinary copy.
    #[default]
    Plain,
    /// A copy by non-temporal stores.
    Streaming,
}

impl Method {
    /// Returns the other method.
    pub fn other(self) -> Method {
        match self {
            Method::Plain => Method::Streaming,
            Method::Streaming => Method::Plain,
        }
    }

    /// Returns the method for a part of a copy that is one run of memory.
    #[inline]
    pub fn for_run(self, len: usize) -> Method {
        if len < LEAST { Method::Plain } else { self }
    }
}

/// Bytes of a cache line, and of a full buffer for non-temporal stores.
const LINE: usize = 64;

/// Copies `len` bytes by this method.
///
/// # Safety
/// As for `copy_nonoverlapping`. Another process may write both ranges meanwhile.
#[inline]
pub unsafe fn copy(method: Method, from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match method {
            Method::Plain => std::ptr::copy_nonoverlapping(from, to, len),
            Method::Streaming => stream(from, to, len),
        }
    }
}

/// Copies whole lines by non-temporal stores, and the bytes before the first and after the last by
/// an ordinary copy.
///
/// # Safety
/// As for [`copy`].
#[inline(never)]
unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    let head = (to.addr().wrapping_neg() & (LINE - 1)).min(len);
    let lines = (len - head) / LINE * LINE;
    let tail = head + lines;
    // SAFETY: the three parts are the range that the caller has promised. The second begins at a
    // line of `to`, and is made of whole lines.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        if lines > 0 {
            stream_lines(from.add(head), to.add(head), lines);
        }
        std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), len - tail);
    }
}

/// Copies `len` bytes by non-temporal stores, and passes a store fence.
///
/// 512-bit stores are no faster, and some processors then lower their frequency.
///
/// # Safety
/// As for [`copy`]; `to` begins at a line, and `len` is a multiple of a line, and not 0.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn stream_lines(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise. `stream_avx` is called only where the processor has AVX.
    unsafe {
        if is_x86_feature_detected!("avx") {
            stream_avx(from, to, len);
        } else {
            stream_sse2(from, to, len);
        }
        // The invariant at the head of this file.
        std::arch::x86_64::_mm_sfence();
    }
}

/// # Safety
/// As for [`stream_lines`]; the processor has AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream_avx(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    for at in (0..len).step_by(LINE) {
        // SAFETY: a line of both ranges; that of `to` is aligned.
        unsafe {
            let (from, to) = (from.add(at).cast::<__m256i>(), to.add(at).cast::<__m256i>());
            let (first, second) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            _mm256_stream_si256(to, first);
            _mm256_stream_si256(to.add(1), second);
        }
    }
}

/// # Safety
/// As for [`stream_lines`].
#[cfg(target_arch = "x86_64")]
unsafe fn stream_sse2(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    for at in (0..len).step_by(LINE) {
        // SAFETY: a line of both ranges; that of `to` is aligned. Every x86-64 processor has SSE2.
        unsafe {
            let (from, to) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
            let parts = [0, 1, 2, 3].map(|part| _mm_loadu_si128(from.add(part)));
            for (part, bytes) in parts.into_iter().enumerate() {
                _mm_stream_si128(to.add(part), bytes);
            }
        }
    }
}

/// Copies `len` bytes by non-temporal stores, which a later release store orders.
///
/// # Safety
/// As for [`copy`]; `len` is a multiple of a line, and not 0.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn stream_lines(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: each turn reads and writes a line of the two ranges. The registers are declared, and
    // the asm counts as an access to memory.
    unsafe {
        std::arch::asm!(
            "2:",
            "ldp {a:q}, {b:q}, [{from}]",
            "ldp {c:q}, {d:q}, [{from}, 32]",
            "stnp {a:q}, {b:q}, [{to}]",
            "stnp {c:q}, {d:q}, [{to}, 32]",
            "add {from}, {from}, 64",
            "add {to}, {to}, 64",
            "subs {left}, {left}, 64",
            "b.ne 2b",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            left = inout(reg) len => _,
            a = out(vreg) _,
            b = out(vreg) _,
            c = out(vreg) _,
            d = out(vreg) _,
            options(nostack),
        );
    }
}

/// Returns a counter that grows with time and is the same on all processors. The kernel lets
/// programs read the counter that its clocks use.
#[inline]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has this instruction, and it touches no memory.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(target_arch = "aarch64")]
    {
        let count;
        // SAFETY: the instructions change nothing. `isb` keeps the processor from reading the
        // counter before earlier loads.
        unsafe {
            std::arch::asm!("isb", "mrs {count}, cntvct_el0", count = out(reg) count, options(nostack))
        };
        count
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    type Copy = unsafe fn(*const u8, *mut u8, usize);

    /// All offsets within a line on both sides, with lengths around whole lines: the bytes arrive,
    /// and the bytes around them stay.
    fn copies_exactly(copy: Copy, alignment: usize, lens: &[usize]) {
        let from: Vec<u8> = (0..LINE + 512).map(|at| (at * 7 + 3) as u8).collect();
        for source in (0..LINE).step_by(13) {
            for target in (0..LINE).step_by(alignment) {
                for len in lens {
                    let mut to = [[0xeeu8; LINE]; 12];
                    let area = to.as_flattened_mut();
                    let aligned = (area.as_ptr().addr().wrapping_neg() & (LINE - 1)) + target;
                    // SAFETY: both ranges lie in their buffers.
                    unsafe { copy(from.as_ptr().add(source), area.as_mut_ptr().add(aligned), *len) };
                    assert_eq!(
                        area[aligned..aligned + len],
                        from[source..source + len],
                        "{source} {target} {len}"
                    );
                    let around = area[..aligned].iter().chain(&area[aligned + len..]);
                    assert!(around.into_iter().all(|byte| *byte == 0xee), "{source} {target} {len}");
                }
            }
        }
    }

    #[test]
    fn both_methods_copy_exactly_the_bytes() {
        let lens = [0, 1, 63, 64, 65, 127, 128, 129, 200, 256, 500];
        // SAFETY: `copies_exactly` promises it.
        copies_exactly(|from, to, len| unsafe { copy(Method::Plain, from, to, len) }, 1, &lens);
        // SAFETY: as above.
        copies_exactly(|from, to, len| unsafe { copy(Method::Streaming, from, to, len) }, 1, &lens);
    }

    #[test]
    fn every_width_of_store_copies_lines() {
        let lens = [64, 128, 448, 512];
        // SAFETY: as above; whole lines, to the beginning of one.
        copies_exactly(|from, to, len| unsafe { stream_lines(from, to, len) }, LINE, &lens);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        copies_exactly(|from, to, len| unsafe { stream_sse2(from, to, len) }, LINE, &lens);
    }
}
