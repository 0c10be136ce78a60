//! Decides whether a function contains a system call that matters, by decoding it from its first
//! instruction.
//!
//! A call does not count as a bypass if its number is known and does not matter. The number is
//! known if an instruction loads it into rax, no instruction in between writes rax, and no jump of
//! the function leads in between.

use std::ops::Range;

use crate::instruction::{Effect, LONGEST, decode};
use crate::{Memory, Numbers};

/// Bytes that are decoded in one step.
const WINDOW: usize = 512;
/// Most calls with a known number in one function. A function with more is not judged.
const MOST_CALLS: usize = 12;
/// The largest function that is judged.
const MOST_BYTES: u64 = 4 << 20;

/// The result of judging a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contains {
    /// No instruction that enters the kernel, or only calls that do not matter.
    Nothing,
    /// A call at this address that matters, or whose number is unknown.
    Call(u64),
    /// Bytes at this address that are no valid instruction.
    Unknown(u64),
}

/// A call with a known number, and the address behind the instruction that loads the number.
#[derive(Clone, Copy, Default)]
struct Known {
    loaded: u64,
    call: u64,
}

/// Decodes the function at `bounds`, and returns what it contains.
pub(crate) fn judge(memory: &impl Memory, bounds: Range<u64>, numbers: &Numbers) -> Contains {
    if bounds.end - bounds.start > MOST_BYTES {
        return Contains::Unknown(bounds.start);
    }
    let mut known = [Known::default(); MOST_CALLS];
    let mut count = 0;
    let mut jumps_anywhere = false;
    // The number in rax, and the address from which on it is there.
    let mut number: Option<(u32, u64)> = None;
    let walked = walk(memory, bounds.clone(), |at, end, effect| {
        match effect {
            Effect::Call => {
                let Some((_, loaded)) = number.filter(|(number, _)| !numbers.matters(*number)) else {
                    return Some(Contains::Call(at));
                };
                let Some(free) = known.get_mut(count) else { return Some(Contains::Call(at)) };
                *free = Known { loaded, call: at };
                count += 1;
            }
            Effect::JumpsAnywhere => jumps_anywhere = true,
            _ => {}
        }
        number = match effect {
            Effect::Loads(value) => Some((value, end)),
            Effect::Keeps | Effect::Branches(_) => number,
            _ => None,
        };
        None
    });
    if walked != Contains::Nothing || count == 0 {
        return walked;
    }
    let known = &known[..count];
    let is_between = |target: u64, one: &&Known| target >= one.loaded && target <= one.call;
    if jumps_anywhere && let Some(one) = known.iter().find(|one| one.loaded != one.call) {
        return Contains::Call(one.call);
    }
    walk(memory, bounds, |_, end, effect| {
        let (Effect::Branches(distance) | Effect::Jumps(distance)) = effect else { return None };
        let target = end.wrapping_add_signed(distance.into());
        known.iter().find(|one| is_between(target, one)).map(|one| Contains::Call(one.call))
    })
}

/// Calls `each` with the address, the end and the effect of every instruction in `bounds`, until it
/// returns `Some`.
fn walk(
    memory: &impl Memory,
    bounds: Range<u64>,
    mut each: impl FnMut(u64, u64, Effect) -> Option<Contains>,
) -> Contains {
    let mut window = [0; WINDOW];
    let mut at = bounds.start;
    while at < bounds.end {
        let len = usize::try_from(bounds.end - at).map_or(WINDOW, |left| left.min(WINDOW));
        let code = &mut window[..len];
        if !memory.read(at, code) {
            return Contains::Unknown(at);
        }
        let is_last = bounds.end - at <= WINDOW as u64;
        let mut offset = 0;
        while offset < len && (is_last || len - offset >= LONGEST) {
            let here = at + offset as u64;
            let Some(instruction) = decode(&code[offset..]) else { return Contains::Unknown(here) };
            offset += instruction.len;
            if let Some(found) = each(here, here + instruction.len as u64, instruction.effect) {
                return found;
            }
        }
        at += offset as u64;
    }
    Contains::Nothing
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Code(&'static [u8]);

    impl Memory for Code {
        fn read(&self, address: u64, into: &mut [u8]) -> bool {
            let from = address as usize;
            self.0.get(from..from + into.len()).map(|bytes| into.copy_from_slice(bytes)).is_some()
        }
    }

    fn judged(code: &'static [u8]) -> Contains {
        // Only write matters.
        judge(&Code(code), 0..code.len() as u64, &Numbers(&[2]))
    }

    #[test]
    fn a_call_counts_unless_its_number_is_known_and_harmless() {
        // mov eax, 202; syscall; ret
        assert_eq!(judged(&[0xb8, 202, 0, 0, 0, 0x0f, 0x05, 0xc3]), Contains::Nothing);
        // mov eax, 202; xor edi, edi; syscall; ret
        assert_eq!(judged(&[0xb8, 202, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05, 0xc3]), Contains::Nothing);
        // mov eax, 1; syscall; ret
        assert_eq!(judged(&[0xb8, 1, 0, 0, 0, 0x0f, 0x05, 0xc3]), Contains::Call(5));
        // mov eax, edi; syscall; ret
        assert_eq!(judged(&[0x89, 0xf8, 0x0f, 0x05, 0xc3]), Contains::Call(2));
        // mov eax, 202; mov eax, [rdi]; syscall
        assert_eq!(judged(&[0xb8, 202, 0, 0, 0, 0x8b, 0x07, 0x0f, 0x05]), Contains::Call(7));
    }

    #[test]
    fn a_jump_brings_a_number_along() {
        // mov eax, 202; syscall; jmp to the syscall
        assert_eq!(judged(&[0xb8, 202, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xfc]), Contains::Call(5));
        // mov eax, 202; nop; syscall; jmp rax
        assert_eq!(judged(&[0xb8, 202, 0, 0, 0, 0x90, 0x0f, 0x05, 0xff, 0xe0]), Contains::Call(6));
    }

    #[test]
    fn what_is_inside_another_instruction_is_no_call() {
        // movabs rax, 0x50f0000000fc0c7; ret
        assert_eq!(judged(&[0x48, 0xb8, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05, 0xc3]), Contains::Nothing);
        // syscall; ret; and an invalid byte.
        assert_eq!(judged(&[0x90, 0xc3, 0x06]), Contains::Unknown(2));
    }
}
