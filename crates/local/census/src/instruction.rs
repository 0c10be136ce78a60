//! Decodes one x86-64 instruction: its length, and the few effects that a search for system calls
//! needs.
//!
//! The layout of an instruction follows from its prefixes, its opcode map and its ModRM byte, by a
//! few ranges of opcodes. An opcode that no current processor has ends the search: [`decode`]
//! returns `None`.

use std::ops::RangeInclusive;

/// Most bytes of an instruction.
pub(crate) const LONGEST: usize = 15;

/// An instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instruction {
    /// Its length in bytes.
    pub(crate) len: usize,
    /// Its effect.
    pub(crate) effect: Effect,
}

/// The effect of an instruction, as far as a search for system calls needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Enters the kernel: `syscall`, `sysenter` or `int 0x80`.
    Call,
    /// Sets rax to this value.
    Loads(u32),
    /// Leaves rax as it is, and continues with the next instruction.
    Keeps,
    /// Jumps on a condition to this distance behind the instruction, and leaves rax as it is.
    Branches(i32),
    /// Jumps to this distance behind the instruction.
    Jumps(i32),
    /// Jumps to the address in a register or a word of memory.
    JumpsAnywhere,
    /// Calls a function at this distance behind the instruction.
    Calls(i32),
    /// Ends a path: a return, or a trap that compilers put where the path cannot continue.
    Ends,
    /// Faults in a program: only the kernel may execute it, or no current program uses it.
    Faults,
    /// Anything else: rax is unknown afterwards.
    Other,
}

/// The bytes that follow an opcode.
#[derive(Clone, Copy)]
struct Layout {
    has_modrm: bool,
    immediate: usize,
}

const PLAIN: Layout = Layout { has_modrm: false, immediate: 0 };
const MODRM: Layout = Layout { has_modrm: true, immediate: 0 };

fn immediate(bytes: usize) -> Layout {
    Layout { has_modrm: false, immediate: bytes }
}

fn modrm_and(bytes: usize) -> Layout {
    Layout { has_modrm: true, immediate: bytes }
}

/// The prefixes of an instruction.
#[derive(Clone, Copy, Default)]
struct Prefixes {
    operand_size: bool,
    address_size: bool,
    repeats_f2: bool,
    rex: u8,
}

impl Prefixes {
    fn is_wide(self) -> bool {
        self.rex & 8 != 0
    }

    /// Returns the bytes of an immediate that is as wide as the operand, up to four.
    fn z(self) -> usize {
        if self.operand_size && !self.is_wide() { 2 } else { 4 }
    }
}

/// The opcode maps.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Map {
    One,
    Two,
    Three38,
    Three3a,
    /// With a VEX, EVEX or XOP prefix: none of these instructions writes rax and matters here.
    Vector(u8),
}

/// Returns the instruction at the beginning of `code`. Returns `None` if there is none, or if it
/// extends beyond the end of `code`.
pub(crate) fn decode(code: &[u8]) -> Option<Instruction> {
    let code = &code[..code.len().min(LONGEST)];
    let (prefixes, mut at) = prefixes(code);
    let first = *code.get(at)?;
    let (map, opcode);
    match first {
        0x0f => {
            let second = *code.get(at + 1)?;
            (map, opcode, at) = match second {
                0x38 => (Map::Three38, *code.get(at + 2)?, at + 3),
                0x3a => (Map::Three3a, *code.get(at + 2)?, at + 3),
                _ => (Map::Two, second, at + 2),
            };
        }
        0xc5 if prefixes.rex == 0 => {
            (map, opcode, at) = (Map::Vector(1), *code.get(at + 2)?, at + 3);
        }
        0xc4 if prefixes.rex == 0 => {
            (map, opcode, at) = (Map::Vector(code.get(at + 1)? & 0x1f), *code.get(at + 3)?, at + 4);
        }
        0x62 if prefixes.rex == 0 => {
            (map, opcode, at) = (Map::Vector(code.get(at + 1)? & 0x07), *code.get(at + 4)?, at + 5);
        }
        // XOP shares its first byte with pop, which uses no map above 7.
        0x8f if prefixes.rex == 0 && code.get(at + 1)? & 0x1f >= 8 => {
            (map, opcode, at) = (Map::Vector(code[at + 1] & 0x1f), *code.get(at + 3)?, at + 4);
        }
        _ => (map, opcode, at) = (Map::One, first, at + 1),
    }
    let layout = match map {
        Map::One => one_byte(opcode, prefixes, code.get(at).copied())?,
        Map::Two => two_bytes(opcode, prefixes)?,
        Map::Three38 => MODRM,
        Map::Three3a => modrm_and(1),
        Map::Vector(map) => vector(map, opcode)?,
    };
    let modrm = if layout.has_modrm { Some(*code.get(at)?) } else { None };
    let len =
        at + modrm.map_or(Some(0), |modrm| operand(modrm, code.get(at + 1).copied()))? + layout.immediate;
    let instruction = code.get(..len)?;
    Some(Instruction { len, effect: effect(map, opcode, prefixes, modrm, instruction) })
}

fn prefixes(code: &[u8]) -> (Prefixes, usize) {
    let mut prefixes = Prefixes::default();
    for (at, byte) in code.iter().enumerate() {
        match byte {
            0x66 => prefixes.operand_size = true,
            0x67 => prefixes.address_size = true,
            0xf2 => prefixes.repeats_f2 = true,
            0xf0 | 0xf3 | 0x2e | 0x36 | 0x3e | 0x26 | 0x64 | 0x65 => {}
            // REX must be the last byte before the opcode; elsewhere it has no effect.
            0x40..=0x4f => {
                prefixes.rex = *byte;
                continue;
            }
            _ => return (prefixes, at),
        }
        prefixes.rex = 0;
    }
    (prefixes, code.len())
}

/// Returns the bytes of a ModRM byte and of the operand that it announces.
fn operand(modrm: u8, next: Option<u8>) -> Option<usize> {
    let (mode, memory) = (modrm >> 6, modrm & 7);
    if mode == 3 {
        return Some(1);
    }
    let has_sib = memory == 4;
    let base = if has_sib { next? & 7 } else { memory };
    let displacement = match mode {
        0 if base == 5 => 4,
        0 => 0,
        1 => 1,
        _ => 4,
    };
    Some(1 + usize::from(has_sib) + displacement)
}

fn one_byte(opcode: u8, prefixes: Prefixes, next: Option<u8>) -> Option<Layout> {
    const ARITHMETIC: RangeInclusive<u8> = 0x00..=0x3f;
    Some(match opcode {
        _ if ARITHMETIC.contains(&opcode) => match opcode & 7 {
            0..=3 => MODRM,
            4 => immediate(1),
            5 => immediate(prefixes.z()),
            _ => return None,
        },
        0x50..=0x5f | 0x6c..=0x6f | 0x90..=0x99 | 0x9b..=0x9f | 0xa4..=0xa7 | 0xaa..=0xaf => PLAIN,
        0xc3 | 0xc9 | 0xcb | 0xcc | 0xcf | 0xd7 | 0xec..=0xef | 0xf1 | 0xf4 | 0xf5 | 0xf8..=0xfd => PLAIN,
        0x63 | 0x84..=0x8f | 0xd0..=0xd3 | 0xd8..=0xdf | 0xfe | 0xff => MODRM,
        0x6a | 0x70..=0x7f | 0xa8 | 0xb0..=0xb7 | 0xcd | 0xe0..=0xe7 | 0xeb => immediate(1),
        0x6b | 0x80 | 0x83 | 0xc0 | 0xc1 | 0xc6 => modrm_and(1),
        0x68 | 0xa9 => immediate(prefixes.z()),
        0x69 | 0x81 | 0xc7 => modrm_and(prefixes.z()),
        0xb8..=0xbf if prefixes.is_wide() => immediate(8),
        0xb8..=0xbf => immediate(prefixes.z()),
        0xa0..=0xa3 => immediate(if prefixes.address_size { 4 } else { 8 }),
        0xc2 | 0xca => immediate(2),
        0xc8 => immediate(3),
        0xe8 | 0xe9 => immediate(4),
        // test has an immediate, the others of its group have none.
        0xf6 if next? & 0x30 == 0 => modrm_and(1),
        0xf7 if next? & 0x30 == 0 => modrm_and(prefixes.z()),
        0xf6 | 0xf7 => MODRM,
        _ => return None,
    })
}

fn two_bytes(opcode: u8, prefixes: Prefixes) -> Option<Layout> {
    Some(match opcode {
        0x05..=0x09 | 0x0b | 0x0e | 0x30..=0x35 | 0x37 | 0x77 => PLAIN,
        0xa0..=0xa2 | 0xa8..=0xaa | 0xc8..=0xcf => PLAIN,
        0x0f | 0x70..=0x73 | 0xa4 | 0xac | 0xba | 0xc2 | 0xc4..=0xc6 => modrm_and(1),
        0x80..=0x8f => immediate(4),
        // Control and debug registers, whatever the mode bits are.
        0x20..=0x23 => immediate(1),
        // extrq and insertq have two immediates, vmread none.
        0x78 if prefixes.operand_size || prefixes.repeats_f2 => modrm_and(2),
        0x04 | 0x0a | 0x0c | 0x24..=0x27 | 0x36 | 0x39 | 0x3b..=0x3f | 0x7a | 0x7b | 0xa6 | 0xa7 => {
            return None;
        }
        _ => MODRM,
    })
}

fn vector(map: u8, opcode: u8) -> Option<Layout> {
    Some(match (map, opcode) {
        (1, 0x77) => PLAIN,
        (1, 0x70..=0x73 | 0xc2 | 0xc4..=0xc6) | (3 | 8, _) => modrm_and(1),
        (1 | 2 | 5 | 6 | 9, _) => MODRM,
        (10, _) => modrm_and(4),
        _ => return None,
    })
}

fn effect(map: Map, opcode: u8, prefixes: Prefixes, modrm: Option<u8>, code: &[u8]) -> Effect {
    let word = || code.last_chunk().map_or(0, |bytes| i32::from_le_bytes(*bytes));
    let byte = || i32::from(code.last().map_or(0, |byte| *byte as i8));
    let modrm = modrm.unwrap_or(0);
    // Registers by their encoding; 0 is rax.
    let register = modrm >> 3 & 7 | (prefixes.rex & 4) << 1;
    let operand = (modrm >> 6 == 3).then_some(modrm & 7 | (prefixes.rex & 1) << 3);
    let keeps = |written: Option<u8>| if written == Some(0) { Effect::Other } else { Effect::Keeps };
    match (map, opcode) {
        (Map::Two, 0x05 | 0x34) => Effect::Call,
        (Map::One, 0xcd) if code.last() == Some(&0x80) => Effect::Call,
        (Map::One, 0xb8) if prefixes.rex & 1 == 0 && code.len() >= 5 && !prefixes.is_wide() => {
            Effect::Loads(word() as u32)
        }
        (Map::One, 0xc7) if operand == Some(0) && !prefixes.operand_size => Effect::Loads(word() as u32),
        (Map::One, 0x31 | 0x33) if operand == Some(0) && register == 0 && !prefixes.operand_size => {
            Effect::Loads(0)
        }
        (Map::One, 0x70..=0x7f) => Effect::Branches(byte()),
        (Map::Two, 0x80..=0x8f) => Effect::Branches(word()),
        (Map::One, 0xe0..=0xe3) => Effect::Branches(byte()),
        (Map::One, 0xeb) => Effect::Jumps(byte()),
        (Map::One, 0xe9) => Effect::Jumps(word()),
        (Map::One, 0xe8) => Effect::Calls(word()),
        (Map::One, 0xc2 | 0xc3 | 0xcc) | (Map::Two, 0x0b) => Effect::Ends,
        (Map::One, 0xff) if modrm >> 3 & 7 == 4 => Effect::JumpsAnywhere,
        // Zeros, which are common in data: as an instruction they would add to memory at rax.
        (Map::One, 0x00) if modrm == 0 => Effect::Faults,
        // Port input and output, segments, interrupts and other instructions of the kernel.
        (Map::One, 0xff) if matches!(modrm >> 3 & 7, 3 | 5 | 7) => Effect::Faults,
        (Map::One, 0x6c..=0x6f | 0x8e | 0xca | 0xcb | 0xcd | 0xcf) => Effect::Faults,
        (Map::One, 0xe4..=0xe7 | 0xec..=0xef | 0xf1 | 0xf4 | 0xfa | 0xfb) => Effect::Faults,
        (Map::Two, 0x00 | 0x06..=0x09 | 0x20..=0x23 | 0x30 | 0x32 | 0x33 | 0x35) => Effect::Faults,
        // These write whole registers or memory, by the operand or by the register field.
        (Map::One, 0x01 | 0x09 | 0x21 | 0x29 | 0x31 | 0x89 | 0xc7) => keeps(operand),
        (Map::One, 0x03 | 0x0b | 0x23 | 0x2b | 0x33 | 0x63 | 0x8b | 0x8d) => keeps(Some(register)),
        (Map::Two, 0xb6 | 0xb7 | 0xbe | 0xbf) => keeps(Some(register)),
        (Map::One, 0x81 | 0x83) if modrm >> 3 & 7 == 7 => Effect::Keeps,
        (Map::One, 0x81 | 0x83) => keeps(operand),
        (Map::One, 0xb8..=0xbf | 0x58..=0x5f) => keeps(Some(opcode & 7 | (prefixes.rex & 1) << 3)),
        // Comparisons, pushes, no-ops, and vectors.
        (Map::One, 0x38 | 0x39 | 0x3a | 0x3b | 0x84 | 0x85 | 0x50..=0x57 | 0x68 | 0x6a) => Effect::Keeps,
        (Map::One, 0x90) if prefixes.rex & 1 == 0 => Effect::Keeps,
        (Map::Two, 0x1e | 0x1f | 0x10..=0x17 | 0x28 | 0x29 | 0x57 | 0x6f | 0x7f | 0xd6 | 0xef) => {
            Effect::Keeps
        }
        _ => Effect::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    /// The effects of instructions around a call, and of those that load a number.
    #[test]
    fn effects_are_those_of_the_instructions() {
        for (code, effect) in [
            (&[0x0f, 0x05][..], Effect::Call),
            (&[0xcd, 0x80], Effect::Call),
            (&[0xb8, 1, 2, 0, 0], Effect::Loads(0x201)),
            (&[0x48, 0xc7, 0xc0, 15, 0, 0, 0], Effect::Loads(15)),
            (&[0x31, 0xc0], Effect::Loads(0)),
            (&[0x41, 0xb8, 8, 0, 0, 0], Effect::Keeps),
            (&[0x89, 0xf8], Effect::Other),
            (&[0x48, 0x89, 0xc7], Effect::Keeps),
            (&[0x4c, 0x8b, 0x44, 0x24, 8], Effect::Keeps),
            (&[0x8b, 0x00], Effect::Other),
            (&[0x75, 0xfe], Effect::Branches(-2)),
            (&[0xeb, 2], Effect::Jumps(2)),
            (&[0xc3], Effect::Ends),
            (&[0xff, 0xe0], Effect::JumpsAnywhere),
        ] {
            assert_eq!(decode(code), Some(Instruction { len: code.len(), effect }), "{code:02x?}");
        }
        assert_eq!(decode(&[0x0f]), None);
        assert_eq!(decode(&[0xe8, 0, 0]), None);
        assert_eq!(decode(&[0x06, 0, 0, 0, 0, 0, 0, 0]), None);
    }

    /// The code of this test: its lengths must be those of another decoder.
    #[test]
    fn lengths_are_those_of_another_decoder() {
        let file = std::fs::read("/proc/self/exe").unwrap();
        let mut random = 1_u64;
        let mut compared = 0;
        for _ in 0..1_000_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (random >> 33) as usize % (file.len() - LONGEST);
            let code = &file[at..at + LONGEST];
            let mut decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
            let other = decoder.decode();
            let Some(own) = decode(code).filter(|_| !other.is_invalid()) else { continue };
            // Processors disagree about near branches with this prefix.
            if code[..own.len].contains(&0x66) && own.len != other.len() {
                continue;
            }
            compared += 1;
            assert_eq!(own.len, other.len(), "{code:02x?}");
        }
        assert!(compared > 100_000, "{compared}");
    }
}
