//! Tells which machine code can make system calls by its own instructions, past libc and so past a shim in front of libc.
//!
//! ```text
//!   executable memory ──search──> the two bytes of syscall, sysenter or int 0x80
//!                                      │ few, most of them parts of other instructions
//!                       unwind table ──┴─> the function around them ──decode──> a call, its number
//! ```
//!
//! The bytes occur by chance inside other instructions and in data, about three times in 64 KiB. So each occurrence is looked up in
//! the table by which the object's stack is unwound (`.eh_frame_hdr`), and the function that it lies in is decoded from its first
//! instruction on. An occurrence that is no instruction of its own, or a call with a number of no interest, counts for nothing.
//! Outside of all functions the bytes around an occurrence say whether it can be an instruction (`gap`). What cannot be decided
//! counts as a call.
//!
//! Nothing here allocates, and nothing trusts what it reads: memory is read through [`Memory`], which may fail at any address.

#![forbid(unsafe_code)]

mod frames;
mod function;
mod gap;
mod instruction;
mod search;

use std::ops::Range;

pub use frames::Frames;
use function::Contains;

/// Memory that can be read at any address, or not.
pub trait Memory {
    /// Fills `into` with what is at `address`. Returns `false` if not all of it can be read.
    fn read(&self, address: u64, into: &mut [u8]) -> bool;
}

/// The numbers of the system calls that matter, a bit each.
#[derive(Clone, Copy, Debug)]
pub struct Numbers<'a>(pub &'a [u32]);

impl Numbers<'_> {
    fn matters(&self, number: u32) -> bool {
        let word = self.0.get(number as usize / 32);
        word.is_some_and(|word| word >> (number % 32) & 1 != 0)
    }
}

/// Whether code can make a system call that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It contains none.
    Clean,
    /// It contains one at this address, or something there that cannot be decided.
    MayBypass(u64),
}

/// Judges the executable memory at `range`, reading it by way of `buffer`. `frames` tells where its functions are.
pub fn judge(
    memory: &impl Memory,
    range: Range<u64>,
    frames: Option<&Frames>,
    numbers: &Numbers,
    buffer: &mut [u8],
) -> Verdict {
    // The end of the function that was decoded last: what else is in it has been judged with it.
    let mut judged = 0;
    let found = search::each(memory, range.clone(), buffer, |at| {
        if at < judged {
            return None;
        }
        let Some(function) = frames.and_then(|frames| frames.at(memory, at)) else {
            return gap::may_be_call(memory, &range, at).then_some(at);
        };
        judged = function.end;
        match function::judge(memory, function, numbers) {
            Contains::Nothing => None,
            Contains::Call(at) | Contains::Unknown(at) => Some(at),
        }
    });
    found.map_or(Verdict::Clean, Verdict::MayBypass)
}
