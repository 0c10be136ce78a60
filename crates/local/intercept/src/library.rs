//! The memory image of libshunt.so in a program without a dynamic linker. The image is relocated,
//! its imports are bound to the library's own replacements for libc functions, and its thread
//! pointer is in GS.

use std::collections::HashMap;

use shunt_abi::intercept::{NUMBERS, OFFER};

use crate::Closed;
use crate::elf::{File, Segment};

const PAGE: u64 = 4096;

const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_PLTRELSZ: u64 = 2;
const DT_JMPREL: u64 = 23;
const DT_INIT_ARRAY: u64 = 25;
const DT_INIT_ARRAYSZ: u64 = 27;

const R_64: u32 = 1;
const R_GLOB_DAT: u32 = 6;
const R_JUMP_SLOT: u32 = 7;
const R_RELATIVE: u32 = 8;
const R_DTPMOD64: u32 = 16;
const R_DTPOFF64: u32 = 17;
const R_TPOFF64: u32 = 18;

/// `add reg, fs:[0]`: a segment prefix; a REX byte that selects the upper eight registers; and in
/// the fourth byte the register.
const BY_FS: u8 = 0x64;
const BY_GS: u8 = 0x65;

/// The library, relocated for an address.
pub(crate) struct Library<'a> {
    file: &'a File,
    base: u64,
    /// Its memory from the beginning.
    image: Vec<u8>,
    /// The table that it exports.
    pub(crate) offer: Offer,
}

/// A run of whole pages of the image.
pub(crate) struct Part<'a> {
    /// Address, relative to the beginning of the image.
    pub(crate) address: u64,
    /// Access, as PF_* flags.
    pub(crate) flags: u32,
    /// Offset in the file, and the number of bytes that the file has.
    pub(crate) offset: u64,
    pub(crate) in_file: u64,
    /// The final content.
    pub(crate) content: &'a [u8],
}

/// The fields of [`shunt_abi::intercept::Offer`] that are used here.
pub(crate) struct Offer {
    pub(crate) start: u64,
    pub(crate) called: u64,
    pub(crate) numbers: [u32; NUMBERS / 32],
}

impl<'a> Library<'a> {
    /// Returns how many bytes the library takes in memory.
    pub(crate) fn len(file: &File) -> u64 {
        let ends = file.segments.iter().filter(|segment| segment.is_loaded()).map(Segment::end);
        ends.max().unwrap_or(0).next_multiple_of(PAGE)
    }

    /// Returns a bit map of the system calls that must be redirected to the library.
    pub(crate) fn numbers(file: &File) -> Result<[u32; NUMBERS / 32], Closed> {
        Ok(Library::load(file, 0, 0)?.offer.numbers)
    }

    /// Builds the image for the address `base`. Its `environ` is bound to the address
    /// `environment`.
    pub(crate) fn load(file: &'a File, base: u64, environment: u64) -> Result<Library<'a>, Closed> {
        let mut image = vec![0; Library::len(file) as usize];
        for segment in file.segments.iter().filter(|segment| segment.is_loaded()) {
            let content = file.content(segment)?;
            let at = segment.address as usize;
            image.get_mut(at..at + content.len()).ok_or(Closed::Library)?.copy_from_slice(&content);
        }
        let offer = Offer { start: 0, called: 0, numbers: [0; NUMBERS / 32] };
        let mut library = Library { file, base, image, offer };
        library.relocate(environment)?;
        library.use_gs()?;
        Ok(library)
    }

    /// Iterates over the loaded segments as whole pages.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let loaded = self.file.segments.iter().filter(|segment| segment.is_loaded());
        loaded.map(|segment| {
            let before = segment.address % PAGE;
            let address = segment.address - before;
            let end = segment.end().next_multiple_of(PAGE).min(self.image.len() as u64);
            Part {
                address,
                flags: segment.flags,
                offset: segment.offset - before,
                in_file: (segment.in_file + before).next_multiple_of(PAGE),
                content: &self.image[address as usize..end as usize],
            }
        })
    }

    /// Returns the initial image of a thread's local data: its address, its length in the file, and
    /// the total length.
    pub(crate) fn own_data(&self) -> Result<(u64, u64, u64), Closed> {
        let segment = self.file.own_data().ok_or(Closed::Library)?;
        Ok((self.base + segment.address, segment.in_file, segment.len.next_multiple_of(64)))
    }

    /// Returns the content of that initial image.
    pub(crate) fn own_data_content(&self) -> Result<Vec<u8>, Closed> {
        self.file.content(&self.file.own_data().ok_or(Closed::Library)?)
    }

    /// Returns the address and number of the entries in the table of initialisation functions.
    pub(crate) fn first_functions(&self) -> Result<(u64, u64), Closed> {
        let dynamic = self.file.dynamic()?;
        let at = dynamic.value(DT_INIT_ARRAY).ok_or(Closed::Library)?;
        let len = dynamic.value(DT_INIT_ARRAYSZ).ok_or(Closed::Library)?;
        Ok((self.base + at, len / 8))
    }

    fn relocate(&mut self, environment: u64) -> Result<(), Closed> {
        let dynamic = self.file.dynamic()?;
        let value = |kind| dynamic.value(kind).ok_or(Closed::Library);
        let (symbols, strings) = (value(DT_SYMTAB)?, value(DT_STRTAB)?);
        let mut tables = vec![(value(DT_RELA)?, value(DT_RELASZ)?)];
        if let (Some(at), Some(len)) = (dynamic.value(DT_JMPREL), dynamic.value(DT_PLTRELSZ)) {
            tables.push((at, len));
        }
        let (_, _, own_len) = self.own_data()?;
        let mut others = Vec::new();
        for (table, len) in tables {
            for at in (table..table + len).step_by(24) {
                let (place, info, addend) = (self.word(at)?, self.word(at + 8)?, self.word(at + 16)?);
                let (kind, symbol) = (info as u32, info >> 32);
                if kind == R_RELATIVE {
                    self.put(place, self.base.wrapping_add(addend))?;
                } else {
                    others.push((kind, place, symbols + symbol * 24, addend));
                }
            }
        }
        let offer = self.exported(symbols, strings, OFFER)?;
        let functions = self.functions(offer)?;
        let missing = *functions.get("missing").ok_or(Closed::Library)?;
        for (kind, place, symbol, addend) in others {
            let (name, info, value) = (self.half(symbol)?, self.half(symbol + 4)?, self.word(symbol + 8)?);
            let (is_defined, is_weak) = (info >> 16 != 0, (info & 0xff) >> 4 == 2);
            let address = || -> Result<u64, Closed> {
                let name = self.text(strings + u64::from(name))?;
                Ok(match functions.get(name) {
                    _ if is_defined => self.base + value,
                    _ if name == "environ" => environment,
                    Some(function) => *function,
                    None if is_weak => 0,
                    None => missing,
                })
            };
            let word = match kind {
                R_64 | R_GLOB_DAT | R_JUMP_SLOT => address()?.wrapping_add(addend),
                // The library is the only module.
                R_DTPMOD64 => 1,
                R_DTPOFF64 => value.wrapping_add(addend),
                R_TPOFF64 => value.wrapping_add(addend).wrapping_sub(own_len),
                _ => return Err(Closed::Library),
            };
            self.put(place, word)?;
        }
        self.offer.start = self.word(offer)?;
        self.offer.called = self.word(offer + 8)?;
        let numbers = self.word(offer + 32)?.wrapping_sub(self.base);
        for index in 0..self.offer.numbers.len() {
            self.offer.numbers[index] = self.half(numbers + 4 * index as u64)?;
        }
        Ok(())
    }

    /// Returns the replacements for libc functions, by name.
    fn functions(&self, offer: u64) -> Result<HashMap<String, u64>, Closed> {
        let (list, count) = (self.word(offer + 16)?.wrapping_sub(self.base), self.word(offer + 24)?);
        let one = |index| {
            let at = list + 16 * index;
            let name = self.text(self.word(at)?.wrapping_sub(self.base))?;
            Ok((name.to_owned(), self.word(at + 8)?))
        };
        (0..count).map(one).collect()
    }

    /// Returns the value of an exported symbol. The symbol table ends where the string table
    /// begins, in the layout that linkers produce.
    fn exported(&self, symbols: u64, strings: u64, wanted: &str) -> Result<u64, Closed> {
        for symbol in (symbols..strings).step_by(24) {
            let name = self.half(symbol)?;
            if name != 0 && self.text(strings + u64::from(name)).is_ok_and(|name| name == wanted) {
                return self.word(symbol + 8);
            }
        }
        Err(Closed::Library)
    }

    /// Makes every load of the thread pointer use GS. The library loads it with a single kind of
    /// instruction; see `crates/local/shim/src/base/thread.rs`.
    fn use_gs(&mut self) -> Result<(), Closed> {
        let mut count = 0;
        for segment in self.file.segments.iter().filter(|segment| segment.is_executable()) {
            let (from, to) = (segment.address as usize, segment.end() as usize);
            let code = self.image.get_mut(from..to).ok_or(Closed::Library)?;
            for at in 0..code.len().saturating_sub(9) {
                if is_thread_pointer(&code[at..at + 9]) {
                    code[at] = BY_GS;
                    count += 1;
                }
            }
        }
        if count == 0 { Err(Closed::Library) } else { Ok(()) }
    }

    fn word(&self, at: u64) -> Result<u64, Closed> {
        let bytes = self.image.get(at as usize..).and_then(|rest| rest.first_chunk());
        bytes.map(|bytes| u64::from_le_bytes(*bytes)).ok_or(Closed::Library)
    }

    fn half(&self, at: u64) -> Result<u32, Closed> {
        let bytes = self.image.get(at as usize..).and_then(|rest| rest.first_chunk());
        bytes.map(|bytes| u32::from_le_bytes(*bytes)).ok_or(Closed::Library)
    }

    fn put(&mut self, at: u64, word: u64) -> Result<(), Closed> {
        let bytes = self.image.get_mut(at as usize..).and_then(|rest| rest.first_chunk_mut());
        *bytes.ok_or(Closed::Library)? = word.to_le_bytes();
        Ok(())
    }

    fn text(&self, at: u64) -> Result<&str, Closed> {
        let rest = self.image.get(at as usize..).ok_or(Closed::Library)?;
        let len = rest.iter().position(|byte| *byte == 0).ok_or(Closed::Library)?;
        std::str::from_utf8(&rest[..len]).map_err(|_| Closed::Library)
    }
}

fn is_thread_pointer(code: &[u8]) -> bool {
    code[0] == BY_FS
        && matches!(code[1], 0x48 | 0x4c)
        && code[2] == 0x03
        && code[3] & 0b1100_0111 == 0b0000_0100
        && code[4..9] == [0x25, 0, 0, 0, 0]
}
