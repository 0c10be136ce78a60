//! Decides whether bytes outside of all known functions can be a system call, by the bytes around
//! them.
//!
//! Decoding that begins at any byte gets into step with the real instructions after a few of them.
//! So if decoding from many places before the bytes steps over them, they are part of another
//! instruction. After a system call a program continues. If the following bytes are no instruction,
//! an instruction that only the kernel may execute, or a jump to where there is no code, the bytes
//! are data.
//!
//! `int 0x80` and `sysenter` count only in functions. OpenSSL's tables contain the bytes of `int
//! 0x80`, and no rule here distinguishes that place from code.

use std::ops::Range;

use crate::Memory;
use crate::instruction::{Effect, decode};

/// Farthest and nearest distance before the bytes at which decoding begins.
const FARTHEST: u64 = 72;
const NEAREST: u64 = 24;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Number of bytes behind them that are decoded.
const BEHIND: u64 = 128;

/// Returns whether the bytes at `at`, in the executable memory `code`, can be a system call.
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
    // The other two take pointers of 32 bits: no 64-bit program has them in code that it hides from
    // unwinding.
    if !bytes[offset..].starts_with(&SYSCALL) {
        return false;
    }
    is_in_step(bytes, offset) && goes_on(&bytes[offset..], at, to == code.end, code)
}

/// Returns whether decoding from before reaches `offset` often enough for an instruction to begin
/// there.
fn is_in_step(bytes: &[u8], offset: usize) -> bool {
    // An instruction begins where code begins.
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

/// Returns whether the code at the beginning of `bytes`, whose address is `at`, can belong to a
/// program.
fn goes_on(bytes: &[u8], at: u64, is_all: bool, code: &Range<u64>) -> bool {
    let mut here = 0;
    let mut is_first = true;
    while here < bytes.len() {
        let Some(instruction) = decode(&bytes[here..]) else {
            // The instruction may extend beyond the bytes that were read.
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
