//! Finds the system calls that a program with a libc makes with its own instructions.
//!
//! Nearly all such programs make none. The two bytes of `syscall` then occur by chance, inside
//! other instructions or in data. So a match must be rejected reliably and fast.
//!
//! A match is a call if it lies in a function that the unwind tables list (see `frames`), and that
//! function decodes to valid instructions only, one of which is the match. In addition, its system
//! call number must be known, or the function's control flow must reach it.

use std::ops::Range;

use iced_x86::{FlowControl, Instruction, Mnemonic, Register};
use memchr::memmem;
use shunt_abi::intercept::{MOST_CODE, NUMBERS, SYSCALL};

use crate::Closed;
use crate::elf::File;
use crate::frames::Frames;
use crate::text::{Text, has_bit};

/// The direct system calls of a program with a libc.
pub(crate) struct Own {
    frames: Frames,
    /// The addresses of the calls, with their system call numbers where known.
    calls: Vec<(u64, Option<u64>)>,
    /// Targets of jump tables in functions that contain calls.
    by_tables: Vec<u64>,
}

impl Own {
    /// Searches a program. The result has at least one call.
    pub(crate) fn of(program: &File) -> Result<Own, Closed> {
        if program.len_of_code() > MOST_CODE {
            return Err(Closed::TooMuch);
        }
        let frames = Frames::of(program)?.ok_or(Closed::NoCalls)?;
        let mut own = Own { frames, calls: Vec::new(), by_tables: Vec::new() };
        for (address, code) in program.code()? {
            let mut looked_to = 0;
            for at in memmem::find_iter(&code, &SYSCALL) {
                let Some(function) = own.frames.at(address + at as u64) else { continue };
                let place = |of: u64| of.checked_sub(address).map(|of| of as usize);
                let range = place(function.start).zip(place(function.end));
                let Some((from, to)) =
                    range.filter(|(from, to)| at >= looked_to && code.get(*from..*to).is_some())
                else {
                    continue;
                };
                looked_to = to;
                own.look(program, &function, &code[from..to])?;
            }
        }
        own.calls.sort_unstable();
        if own.calls.is_empty() { Err(Closed::NoCalls) } else { Ok(own) }
    }

    /// Returns `true` if the number of a call is unknown or has a bit in `numbers`.
    pub(crate) fn matters(&self, numbers: &[u32; NUMBERS / 32]) -> bool {
        self.calls.iter().any(|(_, number)| number.is_none_or(|number| has_bit(numbers, number)))
    }

    pub(crate) fn is_call(&self, address: u64) -> bool {
        self.calls.binary_search_by_key(&address, |(at, _)| *at).is_ok()
    }

    pub(crate) fn begins_function(&self, address: u64) -> bool {
        self.frames.at(address).is_some_and(|function| function.start == address)
    }

    /// Splits code at the bounds of functions.
    pub(crate) fn pieces<'a>(&self, address: u64, code: &'a [u8]) -> Vec<(u64, &'a [u8])> {
        let end = address + code.len() as u64;
        let bounds = self.frames.all().flat_map(|function| [function.start, function.end]);
        let mut cuts: Vec<u64> =
            bounds.filter(|at| (address..end).contains(at)).chain([address, end]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        let piece = |cut: &[u64]| (cut[0], &code[(cut[0] - address) as usize..(cut[1] - address) as usize]);
        cuts.windows(2).map(piece).collect()
    }

    /// Returns the possible jump targets that no jump instruction names: functions, which can be
    /// called by address, and the targets of jump tables.
    pub(crate) fn other_targets(&self) -> impl Iterator<Item = u64> {
        self.frames.all().map(|function| function.start).chain(self.by_tables.iter().copied())
    }

    /// Adds the calls of one function.
    fn look(&mut self, program: &File, function: &Range<u64>, code: &[u8]) -> Result<(), Closed> {
        let Some(mut text) = Text::of_function(function.start, code) else { return Ok(()) };
        if text.calls.is_empty() {
            return Ok(());
        }
        let by_tables = by_tables(program, function, &text)?;
        text.targets.extend(by_tables.iter().chain([&function.start]));
        text.targets.sort_unstable();
        let is_led = led(&text);
        for call in &text.calls {
            let number = text.number(*call);
            if number.is_some() || is_led[*call] {
                self.calls.push((text.instructions[*call].ip(), number));
            }
        }
        self.by_tables.extend(by_tables);
        Ok(())
    }
}

/// Returns, for each instruction of a function, whether control flow can reach it.
fn led(text: &Text) -> Vec<bool> {
    let mut goes_on = false;
    let one = |instruction: &Instruction| {
        let is_led = goes_on || text.is_target(instruction.ip());
        goes_on = is_led
            && !matches!(
                instruction.flow_control(),
                FlowControl::Return
                    | FlowControl::UnconditionalBranch
                    | FlowControl::IndirectBranch
                    | FlowControl::Exception
            );
        is_led
    };
    text.instructions.iter().map(one).collect()
}

/// Returns the targets of a function's jump tables that lie inside the function. Compilers emit
/// tables of offsets from the table, or of addresses.
fn by_tables(program: &File, function: &Range<u64>, text: &Text) -> Result<Vec<u64>, Closed> {
    /// The maximum number of bytes of a table that are read.
    const MOST: u64 = 8192;
    let jumps = |instruction: &Instruction| instruction.flow_control() == FlowControl::IndirectBranch;
    let mut found = Vec::new();
    if !text.instructions.iter().any(jumps) {
        return Ok(found);
    }
    for instruction in &text.instructions {
        let content = |at: u64| program.from(at, MOST).map(Option::unwrap_or_default);
        if instruction.mnemonic() == Mnemonic::Lea && instruction.is_ip_rel_memory_operand() {
            let table = instruction.ip_rel_memory_address();
            let content = content(table)?;
            let (lines, _) = content.as_chunks();
            let places = lines.iter().map(|line| table.wrapping_add_signed(i32::from_le_bytes(*line).into()));
            found.extend(places.take_while(|place| function.contains(place)));
        } else if instruction.memory_base() == Register::None && instruction.memory_index_scale() == 8 {
            let content = content(instruction.memory_displacement64())?;
            let (lines, _) = content.as_chunks();
            let places = lines.iter().map(|line| u64::from_le_bytes(*line));
            found.extend(places.take_while(|place| function.contains(place)));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const AT: u64 = 0x40_1000;

    #[test]
    fn this_test_has_calls_of_its_own() {
        let program = File::open(Path::new("/proc/self/exe")).unwrap();
        let own = Own::of(&program).unwrap();
        // rustix makes system calls directly.
        assert_eq!(rustix::process::getpid().as_raw_pid() as u32, std::process::id());
        for (at, _) in &own.calls {
            assert_eq!(program.from(*at, 2).unwrap().unwrap(), SYSCALL);
            assert!(own.is_call(*at) && !own.is_call(at + 1));
        }
        for (at, piece) in program.code().unwrap().iter().flat_map(|(at, code)| own.pieces(*at, code)) {
            assert!(!piece.is_empty() && own.frames.at(at).is_none_or(|function| function.start == at));
        }
    }

    #[test]
    fn what_is_inside_another_instruction_is_no_call() {
        // movabs rax, 0x50f0000000fc0c7; ret
        let code = [0x48, 0xb8, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05, 0xc3];
        assert!(Text::of_function(AT, &code).unwrap().calls.is_empty());
    }

    #[test]
    fn a_function_with_something_else_in_it_has_no_calls() {
        // syscall; ret; and a byte that is not an instruction.
        assert!(Text::of_function(AT, &[0x0f, 0x05, 0xc3, 0x06]).is_none());
        // The end of the function cuts off an instruction.
        assert!(Text::of_function(AT, &[0x0f, 0x05, 0xc3, 0xe8, 0]).is_none());
    }

    #[test]
    fn a_way_leads_to_a_call_or_none() {
        for (code, expected) in [
            // jmp over the syscall; syscall; ret
            (&[0xeb, 2, 0x0f, 0x05, 0xc3][..], false),
            // jmp to the syscall; nop; syscall; ret
            (&[0xeb, 1, 0x90, 0x0f, 0x05, 0xc3], true),
            // je over the syscall; syscall; ret
            (&[0x74, 2, 0x0f, 0x05, 0xc3], true),
            // ret; nop; syscall
            (&[0xc3, 0x90, 0x0f, 0x05], false),
        ] {
            let mut text = Text::of_function(AT, code).unwrap();
            text.targets.push(AT);
            text.targets.sort_unstable();
            assert_eq!(led(&text)[text.calls[0]], expected, "{code:02x?}");
        }
    }
}
