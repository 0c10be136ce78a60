//! Finds out which machine code can make system calls by its own instructions, past libc and so
//! past a shim in front of libc.
//!
//! ```text
//!   executable memory ──search──> the two bytes of syscall, sysenter or int 0x80
//!                                      │ few, most of them parts of other instructions
//!                       unwind table ──┴─> the function around them ──decode──> a call, its number
//! ```
//!
//! The bytes occur by chance inside other instructions and in data, about three times in 64 KiB. So
//! each occurrence is looked up in the table by which the object's stack is unwound
//! (`.eh_frame_hdr`), and its function is decoded from the first instruction on. An occurrence
//! inside another instruction does not count, nor does a call with a number that does not matter.
//! Outside of all functions, the bytes around an occurrence decide whether it can be an instruction
//! (`gap`), unless the object's file says that they are in a section without instructions
//! (`sections`). An undecidable occurrence counts as a call.
//!
//! Nothing here allocates or trusts the code under test: memory is read through [`Memory`], which
//! may fail at any address.

#![forbid(unsafe_code)]

mod bytes;
mod frames;
mod function;
mod gap;
mod instruction;
mod search;
mod sections;
mod segments;

use std::ops::Range;

pub use frames::Frames;
use function::Contains;
pub use sections::is_data;

/// Memory that may be readable or not at any address.
pub trait Memory {
    /// Fills `into` with the bytes at `address`. Returns `false` if not all of them can be read.
    fn read(&self, address: u64, into: &mut [u8]) -> bool;
}

/// The numbers of the system calls that matter, one bit each.
#[derive(Clone, Copy, Debug)]
pub struct Numbers<'a>(pub &'a [u32]);

impl Numbers<'_> {
    fn matters(&self, number: u32) -> bool {
        let word = self.0.get(number as usize / 32);
        word.is_some_and(|word| word >> (number % 32) & 1 != 0)
    }
}

/// The verdict on whether code can make a system call that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It contains no such call.
    Clean,
    /// It contains one at this address, or bytes there that cannot be decided.
    MayBypass(u64),
}

/// Judges the executable memory at `range`, which is read through `buffer`. `frames` has the bounds
/// of its functions. `is_data` returns whether an address outside of all functions is certainly
/// data (see [`is_data`]).
pub fn judge(
    memory: &impl Memory,
    range: Range<u64>,
    frames: Option<&Frames>,
    numbers: &Numbers,
    is_data: impl Fn(u64) -> bool,
    buffer: &mut [u8],
) -> Verdict {
    // The end of the function that was decoded last: occurrences before it have been judged.
    let mut judged = 0;
    let found = search::each(memory, range.clone(), buffer, |at| {
        if at < judged {
            return None;
        }
        let Some(function) = frames.and_then(|frames| frames.at(memory, at)) else {
            return (gap::may_be_call(memory, &range, at) && !is_data(at)).then_some(at);
        };
        judged = function.end;
        match function::judge(memory, function, numbers) {
            Contains::Nothing => None,
            Contains::Call(at) | Contains::Unknown(at) => Some(at),
        }
    });
    found.map_or(Verdict::Clean, Verdict::MayBypass)
}
