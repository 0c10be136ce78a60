//! Decides whether bytes outside of all known functions can be a system call, by what is around them.
//!
//! Decoding that begins at any byte falls into step with the instructions that are there after a few of them. So if decoding from
//! many places before the bytes steps over them, they are a part of another instruction. And after a system call a program goes
//! on: if what follows is no instruction, or one that only the kernel may execute, or a jump to where there is no code, the
//! bytes are data.
//!
//! `int 0x80` and `sysenter` count in functions alone: OpenSSL's tables contain the bytes of the former in a place that nothing else
//! here tells from code.

use std::ops::Range;

use crate::Memory;
use crate::instruction::{Effect, decode};

/// Decoding begins so far before the bytes at most, and at least.
const FARTHEST: u64 = 72;
const NEAREST: u64 = 24;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Bytes behind them that are looked at.
const BEHIND: u64 = 128;

/// Whether the bytes at `at`, in the executable memory `code`, can be a system call.
pub(crate) fn may_be_call(memory: &impl Memory, code: &Range<u64>, at: u64) -> bool {
    const BYTES: usize = (FARTHEST + BEHIND) as usize;
    let from = at.saturating_sub(FARTHEST).max(code.start);
    let to = at.saturating_add(BEHIND).min(code.end);
    let mut bytes = [0; BYTES];
    let bytes = &mut bytes[..(to - from) as usize];
    if !memory.read(from, bytes) {
        return true;
    }
    let offset = (at - from) as usize;
    // The other two take pointers of 32 bits: no 64-bit program has them in code that it hides from unwinding.
    if !bytes[offset..].starts_with(&SYSCALL) {
        return false;
    }
    is_in_step(bytes, offset) && goes_on(&bytes[offset..], at, to == code.end, code)
}

/// Whether decoding from before comes to `offset` often enough for an instruction to begin there.
fn is_in_step(bytes: &[u8], offset: usize) -> bool {
    // Where code begins, an instruction does.
    let starts = 0..(offset + 1).saturating_sub(NEAREST as usize).max(1);
    let (mut arriving, mut passing) = (0, 0);
    for start in starts {
        let mut here = start;
        while here < offset {
            let Some(instruction) = decode(&bytes[here..]) else { break };
            here += instruction.len;
        }
        arriving += usize::from(here == offset);
        passing += usize::from(here > offset);
    }
    arriving * 4 >= passing
}

/// Whether what is executed from the beginning of `bytes` on, which is at `at`, can be a program's.
fn goes_on(bytes: &[u8], at: u64, is_all: bool, code: &Range<u64>) -> bool {
    let mut here = 0;
    let mut is_first = true;
    while here < bytes.len() {
        let Some(instruction) = decode(&bytes[here..]) else {
            // It may reach behind what has been read.
            return !is_all && bytes.len() - here < crate::instruction::LONGEST;
        };
        here += instruction.len;
        let leads_to_code =
            |distance: i32| code.contains(&(at + here as u64).wrapping_add_signed(distance.into()));
        match instruction.effect {
            Effect::Call if is_first => {}
            Effect::Faults => return false,
            Effect::Branches(distance) | Effect::Calls(distance) if !leads_to_code(distance) => return false,
            Effect::Jumps(distance) => return leads_to_code(distance),
            Effect::Ends | Effect::JumpsAnywhere => return true,
            _ => {}
        }
        is_first = false;
    }
    true
}
