//! Finds the bytes of the instructions that enter the kernel.

use std::ops::Range;

use memchr::memchr3_iter;

use crate::Memory;

/// Calls `each` with the address of every such pair of bytes in `range`, in order, until it returns
/// `Some`. Unreadable memory is treated as if a pair were at its beginning.
pub(crate) fn each(
    memory: &impl Memory,
    range: Range<u64>,
    buffer: &mut [u8],
    mut each: impl FnMut(u64) -> Option<u64>,
) -> Option<u64> {
    let mut at = range.start;
    while range.end.saturating_sub(at) >= 2 {
        let len = usize::try_from(range.end - at).map_or(buffer.len(), |left| left.min(buffer.len()));
        let code = &mut buffer[..len];
        if !memory.read(at, code) {
            return Some(at);
        }
        // The second bytes are the rarer ones.
        for offset in memchr3_iter(0x05, 0x34, 0x80, code).filter(|offset| *offset > 0) {
            if is_call(code[offset - 1], code[offset])
                && let Some(found) = each(at + offset as u64 - 1)
            {
                return Some(found);
            }
        }
        // A pair may lie across two pieces.
        at += len as u64 - 1;
    }
    None
}

/// Returns whether these are the bytes of `syscall`, `sysenter` or `int 0x80`.
fn is_call(first: u8, second: u8) -> bool {
    matches!((first, second), (0x0f, 0x05 | 0x34) | (0xcd, 0x80))
}
