//! Finds out by the section headers of an object's file whether an address is data.
//!
//! Some linkers put constants into the same executable segment as the code. The segments do not
//! show where they are, but the sections of the file do.

use crate::Memory;
use crate::bytes::{u16_at, u32_at, u64_at};
use crate::segments::{self, Segments};

/// Bytes of a section header.
const HEADER: u64 = 64;
/// Most sections that are read; linkers write about thirty.
const MOST: u64 = 256;
const SHF_ALLOC: u64 = 2;
const SHF_EXECINSTR: u64 = 4;
const SHT_NOBITS: u32 = 8;

/// Returns whether the byte at `address` belongs to a section without instructions. `file` has the
/// bytes of the object's file at their offsets there. `base` is where the first bytes of the file
/// are loaded in `memory`. In doubt it returns `false`.
pub fn is_data(memory: &impl Memory, base: u64, file: &impl Memory, address: u64) -> bool {
    find(memory, base, file, address).unwrap_or(false)
}

fn find(memory: &impl Memory, base: u64, file: &impl Memory, address: u64) -> Option<bool> {
    let header = segments::header(memory, base)?;
    // Another file may have been put at the path since the object was loaded.
    if segments::header(file, 0)? != header {
        return None;
    }
    let (first, size) = (u64_at(&header, 40)?, u64::from(u16_at(&header, 58)?));
    let count = u64::from(u16_at(&header, 60)?);
    if first == 0 || size != HEADER || count > MOST {
        return None;
    }
    let bias = base.wrapping_sub(Segments::read(memory, base, &header)?.first_page);
    for index in 0..count {
        let mut section = [0; HEADER as usize];
        if !file.read(first.checked_add(index * HEADER)?, &mut section) {
            return None;
        }
        let (kind, flags) = (u32_at(&section, 4)?, u64_at(&section, 8)?);
        let (start, len) = (u64_at(&section, 16)?, u64_at(&section, 32)?);
        let has_it = address.wrapping_sub(bias).checked_sub(start).is_some_and(|offset| offset < len);
        if has_it && flags & SHF_ALLOC != 0 && kind != SHT_NOBITS {
            return Some(flags & SHF_EXECINSTR == 0);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bytes(Vec<u8>);

    impl Memory for Bytes {
        fn read(&self, address: u64, into: &mut [u8]) -> bool {
            let from = address as usize;
            let found = from.checked_add(into.len()).and_then(|to| self.0.get(from..to));
            found.map(|bytes| into.copy_from_slice(bytes)).is_some()
        }
    }

    /// An object's file: one segment, whose first page is at 0x10000, and sections of these flags,
    /// addresses and lengths.
    fn file(sections: &[(u64, u64, u64)]) -> Bytes {
        const AT: usize = 256;
        let mut bytes = vec![0; AT + sections.len() * 64];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, b"\x7fELF\x02\x01");
        put(32, &64_u64.to_le_bytes());
        put(40, &(AT as u64).to_le_bytes());
        put(54, &56_u16.to_le_bytes());
        put(56, &1_u16.to_le_bytes());
        put(58, &64_u16.to_le_bytes());
        put(60, &(sections.len() as u16).to_le_bytes());
        put(64, &1_u32.to_le_bytes());
        put(64 + 16, &0x10040_u64.to_le_bytes());
        for (index, (flags, address, len)) in sections.iter().enumerate() {
            let at = AT + index * 64;
            put(at + 4, &1_u32.to_le_bytes());
            put(at + 8, &flags.to_le_bytes());
            put(at + 16, &address.to_le_bytes());
            put(at + 32, &len.to_le_bytes());
        }
        Bytes(bytes)
    }

    #[test]
    fn only_sections_without_instructions_are_data() {
        let sections = [
            (0, 0, 0),
            (SHF_ALLOC | SHF_EXECINSTR, 0x11000, 0x100),
            (SHF_ALLOC, 0x12000, 0x20),
            (0, 0x13000, 9),
        ];
        let file = file(&sections);
        // The object is loaded at 0, so its addresses are lower than in the file.
        let is_data = |address| is_data(&file, 0, &file, address);
        assert!(is_data(0x2000) && is_data(0x201f));
        // Code, what lies between sections, and a section that is not loaded.
        for address in [0x1000, 0x10ff, 0x1fff, 0x2020, 0x3000, 0, u64::MAX] {
            assert!(!is_data(address), "{address:#x}");
        }
    }

    #[test]
    fn another_file_or_a_damaged_one_says_nothing() {
        let right = file(&[(SHF_ALLOC, 0x12000, 0x20)]);
        assert!(is_data(&right, 0, &right, 0x2000));
        let other = file(&[(SHF_ALLOC, 0x12000, 0x20), (0, 0, 0)]);
        assert!(!is_data(&right, 0, &other, 0x2000) && !is_data(&Bytes(Vec::new()), 0, &right, 0x2000));
        for at in 0..right.0.len() {
            for value in [0, 0x7f, 0xff] {
                let mut damaged = Bytes(right.0.clone());
                damaged.0[at] = value;
                // It ends, and reads only what the file has.
                is_data(&damaged, 0, &damaged, 0x2000);
            }
        }
        let short = Bytes(right.0[..right.0.len() - 1].to_vec());
        assert!(!is_data(&short, 0, &short, 0x2000));
    }
}
