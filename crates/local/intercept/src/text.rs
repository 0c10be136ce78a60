//! Finds the `syscall` instructions of a program, and decides how each is redirected to the
//! library.
//!
//! The instruction has two bytes, and a jump to a stub has five. So neighbouring instructions move
//! into the stub too: those before the call, or those behind it.
//!
//! ```text
//!   before:  mov eax, 1        after:  jmp stub       stub:  mov eax, 1
//!            syscall                   (padding)             lea rcx, [the syscall below]
//!            ret                       ret                   jmp [library]
//!                                                            syscall
//!                                                            jmp back, to the ret
//! ```
//!
//! A neighbour can move if no jump leads to it, if it is not a `call` (whose return address would
//! change), and if it can be encoded for another address. A call whose number the library does not
//! handle stays where it is.
//!
//! A jump table of offsets into the middle of the moved instructions would not be seen. Compilers
//! put no instruction between a system call and the check of its result, so there is none.

use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Code, Decoder, DecoderOptions, FlowControl, Instruction,
    InstructionBlock, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
};
use shunt_abi::intercept::NUMBERS;

use crate::Closed;
use crate::elf::File;
use crate::own::Own;

/// Bytes of a `jmp` with a reach of 2 GiB.
const JUMP: usize = 5;
/// How many instructions around a call are kept, and how far back its number is searched.
const AROUND: usize = 16;

/// A system call that is to be redirected.
#[derive(Debug)]
pub(crate) struct Site {
    /// The moved instructions, as a range of addresses.
    pub(crate) from: u64,
    pub(crate) to: u64,
    before: Vec<Instruction>,
    behind: Vec<Instruction>,
}

/// The decoded code of a program or of a function.
#[derive(Default)]
pub(crate) struct Text {
    /// The calls, as indices into `instructions`.
    pub(crate) calls: Vec<usize>,
    /// The instructions around each call. Those in between are kept only if the text is a function.
    pub(crate) instructions: Vec<Instruction>,
    /// Sorted jump targets.
    pub(crate) targets: Vec<u64>,
    /// Sorted addresses in the code that are loaded by `lea`.
    taken: Vec<u64>,
    /// The first instruction that uses GS.
    uses_gs: Option<u64>,
}

/// Returns the calls of `program` that the library must receive: their number is unknown or has a
/// bit in `numbers`. For a program with a libc, `own` lists its calls.
pub(crate) fn sites(
    program: &File,
    own: Option<&Own>,
    numbers: &[u32; NUMBERS / 32],
) -> Result<Vec<Site>, Closed> {
    let mut text = Text::default();
    for (address, code) in program.code()? {
        match own {
            Some(own) => {
                own.pieces(address, &code).into_iter().for_each(|(at, piece)| text.decode(at, piece))
            }
            None => text.decode(address, &code),
        }
    }
    text.targets.extend(own.into_iter().flat_map(Own::other_targets));
    text.targets.sort_unstable();
    // Programs with a dynamic linker may use GS: shunt uses it only until the program's code runs.
    if let Some(at) = text.uses_gs.filter(|_| !program.has_linker()) {
        return Err(Closed::UsesGs(at));
    }
    if let Some(own) = own {
        text.calls.retain(|call| own.is_call(text.instructions[*call].ip()));
        text.taken.sort_unstable();
        let is_watched = |call: &&usize| {
            let behind = text.instructions[**call].next_ip();
            text.taken.binary_search(&behind).is_ok() && !own.begins_function(behind)
        };
        if let Some(call) = text.calls.iter().find(is_watched) {
            return Err(Closed::Watched(text.instructions[*call].ip()));
        }
    }
    if text.calls.is_empty() {
        return Err(Closed::NoCalls);
    }
    if let Some(call) = text.calls.iter().find(|call| text.is_cancellation_point(**call)) {
        return Err(Closed::Cancels(text.instructions[*call].ip()));
    }
    let matters = |call: &&usize| text.number(**call).is_none_or(|number| has_bit(numbers, number));
    let site = |call: &usize| text.site(*call).ok_or(Closed::Call(text.instructions[*call].ip()));
    text.calls.iter().filter(matters).map(site).collect()
}

pub(crate) fn has_bit(numbers: &[u32], number: u64) -> bool {
    let word = usize::try_from(number / 32).ok().and_then(|index| numbers.get(index));
    word.is_some_and(|word| word >> (number % 32) & 1 != 0)
}

impl Text {
    /// Decodes a whole function. Returns `None` if it contains anything but valid instructions.
    pub(crate) fn of_function(address: u64, code: &[u8]) -> Option<Text> {
        let mut text = Text::default();
        let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
        while decoder.can_decode() {
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                return None;
            }
            text.add(&instruction);
        }
        Some(text)
    }

    /// Decodes one more run of code.
    fn decode(&mut self, address: u64, code: &[u8]) {
        let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
        let mut instruction = Instruction::default();
        while decoder.can_decode() {
            decoder.decode_out(&mut instruction);
            self.add(&instruction);
            self.forget_between_calls();
        }
    }

    fn add(&mut self, instruction: &Instruction) {
        self.note(instruction);
        if instruction.code() == Code::Syscall {
            self.calls.push(self.instructions.len());
        }
        self.instructions.push(*instruction);
    }

    /// Drops instructions between calls, but keeps the neighbours of each call.
    fn forget_between_calls(&mut self) {
        let (last, behind) = self.calls.last().map_or((0, 0), |call| (*call, call + AROUND));
        if self.instructions.len() - last >= 8 * AROUND {
            let before = self.instructions.len() - AROUND;
            self.instructions.drain(behind..before);
        }
    }

    fn note(&mut self, instruction: &Instruction) {
        let is_branch = matches!(
            instruction.op0_kind(),
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
        );
        if is_branch {
            self.targets.push(instruction.near_branch_target());
        }
        // Code may jump to any address that is taken.
        if instruction.is_ip_rel_memory_operand() {
            self.targets.push(instruction.ip_rel_memory_address());
            if instruction.mnemonic() == Mnemonic::Lea {
                self.taken.push(instruction.ip_rel_memory_address());
            }
        }
        let uses_gs = instruction.segment_prefix() == Register::GS
            || matches!(instruction.mnemonic(), Mnemonic::Wrgsbase | Mnemonic::Swapgs);
        if uses_gs {
            self.uses_gs.get_or_insert(instruction.ip());
        }
    }

    pub(crate) fn is_target(&self, address: u64) -> bool {
        self.targets.binary_search(&address).is_ok()
    }

    /// Returns `true` if libc may cancel a thread inside this call, which it decides by the
    /// thread's program counter.
    ///
    /// musl does so if it supports cancellation at all, and glibc always does since 2.41. Both keep
    /// the word that they check on the stack during the call, which is the pattern matched here.
    fn is_cancellation_point(&self, index: usize) -> bool {
        let Some(before) = index.checked_sub(1).map(|index| &self.instructions[index]) else { return false };
        before.code() == Code::Mov_rm64_r64
            && before.op0_kind() == OpKind::Memory
            && before.memory_base() == Register::RSP
            && before.memory_displacement64() == 8
            && before.op1_register() == Register::R11
    }

    /// Returns the number of the call at `index`, if the code that runs straight into it sets a
    /// constant.
    pub(crate) fn number(&self, index: usize) -> Option<u64> {
        let mut factory = InstructionInfoFactory::new();
        let mut holder = Register::RAX;
        for index in (index.saturating_sub(AROUND) + 1..=index).rev() {
            // A jump to this point may bring another number.
            if self.is_target(self.instructions[index].ip()) || !self.leads_to(index) {
                return None;
            }
            let instruction = &self.instructions[index - 1];
            let is_written = factory.info(instruction).used_registers().iter().any(|used| {
                let is_read = matches!(used.access(), OpAccess::None | OpAccess::Read | OpAccess::CondRead);
                used.register().full_register() == holder && !is_read
            });
            if !is_written {
                continue;
            }
            let is_whole = matches!(instruction.op0_register().size(), 4 | 8);
            match (instruction.mnemonic(), instruction.op1_kind()) {
                (Mnemonic::Mov, OpKind::Register) if is_whole => {
                    holder = instruction.op1_register().full_register();
                }
                (Mnemonic::Xor, OpKind::Register)
                    if instruction.op0_register() == instruction.op1_register() =>
                {
                    return is_whole.then_some(0);
                }
                (Mnemonic::Mov, OpKind::Immediate32 | OpKind::Immediate64 | OpKind::Immediate32to64)
                    if is_whole =>
                {
                    return Some(instruction.immediate(1) & 0xffff_ffff);
                }
                _ => return None,
            }
        }
        None
    }

    /// Returns the instructions that move with the call at `index`: those before it, or else those
    /// behind it.
    fn site(&self, index: usize) -> Option<Site> {
        self.before(index).or_else(|| self.behind(index))
    }

    fn before(&self, index: usize) -> Option<Site> {
        let call = &self.instructions[index];
        let mut first = index;
        while call.next_ip() - self.instructions[first].ip() < JUMP as u64 {
            let instruction = &self.instructions[first.checked_sub(1)?];
            let is_target = self.is_target(self.instructions[first].ip());
            if is_target || !self.leads_to(first) || !is_movable(instruction) {
                return None;
            }
            first -= 1;
        }
        let before = self.instructions[first..index].to_vec();
        Some(Site { from: self.instructions[first].ip(), to: call.next_ip(), before, behind: Vec::new() })
    }

    /// Returns `true` if the instruction before `index` continues with the one at `index`.
    fn leads_to(&self, index: usize) -> bool {
        let Some(before) = index.checked_sub(1).map(|index| &self.instructions[index]) else { return false };
        let goes_on = matches!(before.flow_control(), FlowControl::Next | FlowControl::ConditionalBranch);
        goes_on && !before.is_invalid() && before.next_ip() == self.instructions[index].ip()
    }

    fn behind(&self, index: usize) -> Option<Site> {
        let call = &self.instructions[index];
        let mut behind = Vec::new();
        let mut end = call.next_ip();
        let mut ends = false;
        for instruction in &self.instructions[index + 1..] {
            if end - call.ip() >= JUMP as u64 {
                break;
            }
            if instruction.ip() != end || self.is_target(instruction.ip()) {
                return None;
            }
            end = instruction.next_ip();
            if ends {
                // Padding between functions, which never runs.
                if !matches!(instruction.mnemonic(), Mnemonic::Int3 | Mnemonic::Nop) {
                    return None;
                }
                continue;
            }
            if !is_movable(instruction) {
                return None;
            }
            ends =
                matches!(instruction.flow_control(), FlowControl::Return | FlowControl::UnconditionalBranch);
            behind.push(*instruction);
        }
        let is_enough = end - call.ip() >= JUMP as u64;
        is_enough.then(|| Site { from: call.ip(), to: end, before: Vec::new(), behind })
    }
}

fn is_movable(instruction: &Instruction) -> bool {
    matches!(
        instruction.flow_control(),
        FlowControl::Next
            | FlowControl::ConditionalBranch
            | FlowControl::UnconditionalBranch
            | FlowControl::Return
    ) && !instruction.is_invalid()
        && instruction.code() != Code::Syscall
}

impl Site {
    /// Returns the code that replaces the moved instructions: a jump to `there`, and traps as
    /// padding.
    pub(crate) fn jump(&self, bias: u64, there: u64) -> Result<Vec<u8>, Closed> {
        const TRAP: u8 = 0xcc;
        let mut code = jump(self.from.wrapping_add(bias), there)?;
        code.resize((self.to - self.from) as usize, TRAP);
        Ok(code)
    }

    /// Returns the code of the stub at `at`. It jumps to the address that is stored at `called`.
    pub(crate) fn stub(&self, bias: u64, at: u64, called: u64) -> Result<Vec<u8>, Closed> {
        let mut code = moved(&self.before, bias, at)?;
        // lea rcx, [rip + 6], the address of the syscall below; jmp [rip + ...]
        code.extend([0x48, 0x8d, 0x0d, 6, 0, 0, 0, 0xff, 0x25]);
        let behind = at + code.len() as u64 + 4;
        code.extend(distance(behind, called)?.to_le_bytes());
        code.extend([0x0f, 0x05]);
        code.extend(moved(&self.behind, bias, at + code.len() as u64)?);
        code.extend(jump(at + code.len() as u64, self.to.wrapping_add(bias))?);
        Ok(code)
    }
}

/// Encodes instructions for another address. The program is loaded `bias` above the addresses in
/// its file.
fn moved(instructions: &[Instruction], bias: u64, to: u64) -> Result<Vec<u8>, Closed> {
    if instructions.is_empty() {
        return Ok(Vec::new());
    }
    let biased: Vec<Instruction> =
        instructions.iter().map(|instruction| with_bias(*instruction, bias)).collect();
    let block = InstructionBlock::new(&biased, to);
    let encoded = BlockEncoder::encode(64, block, BlockEncoderOptions::NONE);
    encoded.map(|encoded| encoded.code_buffer).map_err(|_| Closed::Call(instructions[0].ip()))
}

fn with_bias(mut instruction: Instruction, bias: u64) -> Instruction {
    if matches!(instruction.op0_kind(), OpKind::NearBranch64) {
        instruction.set_near_branch64(instruction.near_branch_target().wrapping_add(bias));
    }
    if instruction.is_ip_rel_memory_operand() {
        let address = instruction.ip_rel_memory_address().wrapping_add(bias);
        instruction.set_memory_displacement64(address);
    }
    instruction.set_ip(instruction.ip().wrapping_add(bias));
    instruction
}

fn jump(from: u64, to: u64) -> Result<Vec<u8>, Closed> {
    let mut code = vec![0xe9];
    code.extend(distance(from + JUMP as u64, to)?.to_le_bytes());
    Ok(code)
}

fn distance(from: u64, to: u64) -> Result<i32, Closed> {
    i32::try_from(to.wrapping_sub(from) as i64).map_err(|_| Closed::NoRoom)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0x40_1000;

    fn text(code: &[u8]) -> Text {
        let mut text = Text::default();
        text.decode(AT, code);
        text.targets.sort_unstable();
        text
    }

    fn only_site(code: &[u8]) -> Option<Site> {
        let text = text(code);
        assert_eq!(text.calls.len(), 1);
        text.site(text.calls[0])
    }

    #[test]
    fn a_number_is_known_where_the_code_leads_straight_from_it() {
        for (code, number) in [
            // mov eax, 60; syscall
            (&[0xb8, 60, 0, 0, 0, 0x0f, 0x05][..], Some(60)),
            // mov rax, 15; syscall
            (&[0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05], Some(15)),
            // xor eax, eax; syscall
            (&[0x31, 0xc0, 0x0f, 0x05], Some(0)),
            // mov edx, 60; xor edi, edi; mov eax, edx; syscall
            (&[0xba, 60, 0, 0, 0, 0x31, 0xff, 0x89, 0xd0, 0x0f, 0x05], Some(60)),
            // mov eax, 60; mov al, 1; syscall
            (&[0xb8, 60, 0, 0, 0, 0xb0, 1, 0x0f, 0x05], None),
            // mov eax, edi; syscall
            (&[0x89, 0xf8, 0x0f, 0x05], None),
            // mov eax, 60; ret; syscall
            (&[0xb8, 60, 0, 0, 0, 0xc3, 0x0f, 0x05], None),
            // mov eax, 60; syscall; jmp to the syscall
            (&[0xb8, 60, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xfc], None),
        ] {
            let text = text(code);
            assert_eq!(text.number(text.calls[0]), number, "{code:02x?}");
        }
    }

    #[test]
    fn what_is_before_a_call_moves_with_it() {
        let site = only_site(&[0xb8, 60, 0, 0, 0, 0x0f, 0x05, 0xc3]).unwrap();
        assert_eq!((site.from, site.to), (AT, AT + 7));
        let there = AT + 0x1000;
        let jump = site.jump(0, there).unwrap();
        assert_eq!(jump, [0xe9, 0xfb, 0x0f, 0, 0, 0xcc, 0xcc]);
        let stub = site.stub(0, there, there - 8).unwrap();
        assert_eq!(stub[..5], [0xb8, 60, 0, 0, 0]);
        // The address of the syscall, which is behind the jump.
        assert_eq!(stub[5..12], [0x48, 0x8d, 0x0d, 6, 0, 0, 0]);
        assert_eq!(stub[18..20], [0x0f, 0x05]);
        // The jump back, to behind the replaced code.
        let back = i32::from_le_bytes(stub[21..25].try_into().unwrap());
        assert_eq!((there + 25).wrapping_add_signed(back.into()), AT + 7);
    }

    #[test]
    fn what_is_behind_moves_where_a_jump_leads_to_the_call() {
        // jmp to the syscall; nop; syscall; cmp rax, -4095; ret
        let code = [0xeb, 1, 0x90, 0x0f, 0x05, 0x48, 0x3d, 1, 0xf0, 0xff, 0xff, 0xc3];
        let site = only_site(&code).unwrap();
        assert_eq!((site.from, site.to), (AT + 3, AT + 11));
    }

    #[test]
    fn what_fills_the_space_between_functions_is_room() {
        // jmp to the syscall; syscall; ret; int3...
        let site = only_site(&[0xeb, 0, 0x0f, 0x05, 0xc3, 0xcc, 0xcc, 0xcc, 0xcc]).unwrap();
        assert_eq!((site.from, site.to), (AT + 2, AT + 7));
    }

    #[test]
    fn a_call_with_jumps_around_it_is_left() {
        // jmp to the syscall; syscall; nop; jmp to the nop
        assert!(only_site(&[0xeb, 0, 0x0f, 0x05, 0x90, 0xeb, 0xfd]).is_none());
        // Moving a `call` would change its return address.
        assert!(only_site(&[0xeb, 0, 0x0f, 0x05, 0xe8, 0, 0, 0, 0, 0xc3]).is_none());
    }

    #[test]
    fn neighbours_that_refer_to_their_place_refer_to_it_from_the_other() {
        // mov edi, [rip + 0x100]; syscall, in a program that is loaded with a bias of 0x10_0000.
        let (bias, there) = (0x10_0000, 0x4f_0000);
        let site = only_site(&[0x8b, 0x3d, 0, 1, 0, 0, 0x0f, 0x05]).unwrap();
        let stub = site.stub(bias, there, there - 8).unwrap();
        assert_eq!(stub[..2], [0x8b, 0x3d]);
        let distance = i32::from_le_bytes(stub[2..6].try_into().unwrap());
        assert_eq!((there + 6).wrapping_add_signed(distance.into()), AT + 6 + 0x100 + bias);
    }

    #[test]
    fn what_is_between_calls_is_not_kept() {
        let mut code = vec![0x90; 100_000];
        code.extend([0xb8, 60, 0, 0, 0, 0x0f, 0x05]);
        code.extend(vec![0x90; 100_000]);
        let text = text(&code);
        assert!(text.instructions.len() < 20 * AROUND, "{}", text.instructions.len());
        assert_eq!(text.number(text.calls[0]), Some(60));
        assert!(text.site(text.calls[0]).is_some());
    }
}
