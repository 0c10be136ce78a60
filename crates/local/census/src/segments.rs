//! Reads the program headers of a loaded object.

use crate::Memory;
use crate::bytes::{u16_at, u32_at, u64_at};

const PT_LOAD: u32 = 1;
const PT_GNU_EH_FRAME: u32 = 0x6474_e550;
/// Most program headers that are read; linkers write about a dozen.
const MOST: u64 = 64;

/// Bytes of an ELF header.
pub(crate) const HEADER: usize = 64;

/// Facts from the program headers, as addresses of the file.
pub(crate) struct Segments {
    /// The page of the object's first bytes.
    pub(crate) first_page: u64,
    /// The table by which the stack is unwound.
    pub(crate) frames: Option<u64>,
}

/// Returns the ELF header at `base`.
pub(crate) fn header(memory: &impl Memory, base: u64) -> Option<[u8; HEADER]> {
    let mut header = [0; HEADER];
    (memory.read(base, &mut header) && header.starts_with(b"\x7fELF\x02\x01")).then_some(header)
}

impl Segments {
    /// Reads those of the object with this `header`, which is loaded at `base`.
    pub(crate) fn read(memory: &impl Memory, base: u64, header: &[u8; HEADER]) -> Option<Segments> {
        let headers = u64_at(header, 32)?;
        let (size, count) = (u64::from(u16_at(header, 54)?), u64::from(u16_at(header, 56)?));
        let (mut first_page, mut frames) = (None, None);
        for index in 0..count.min(MOST) {
            let mut segment = [0; 56];
            if !memory.read(base.checked_add(headers.checked_add(index * size)?)?, &mut segment) {
                return None;
            }
            let address = u64_at(&segment, 16)?;
            match u32_at(&segment, 0)? {
                PT_LOAD => {
                    let page = address & !0xfff;
                    first_page = Some(first_page.map_or(page, |first: u64| first.min(page)));
                }
                PT_GNU_EH_FRAME => frames = Some(address),
                _ => {}
            }
        }
        Some(Segments { first_page: first_page?, frames })
    }
}
