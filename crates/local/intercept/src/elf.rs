//! Reads the parts of a 64-bit ELF file that this crate needs: segments, sections of code, notes
//! and the dynamic section.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use crate::Closed;

pub(crate) const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const PT_TLS: u32 = 7;
pub(crate) const EXECUTABLE: u32 = 1;
pub(crate) const WRITABLE: u32 = 2;

/// An open ELF file. Only the parts that are asked for are read.
pub(crate) struct File {
    file: fs::File,
    pub(crate) segments: Vec<Segment>,
}

/// A program header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) kind: u32,
    pub(crate) flags: u32,
    pub(crate) offset: u64,
    pub(crate) address: u64,
    pub(crate) in_file: u64,
    pub(crate) len: u64,
}

impl Segment {
    pub(crate) fn is_loaded(&self) -> bool {
        self.kind == PT_LOAD
    }

    pub(crate) fn is_executable(&self) -> bool {
        self.is_loaded() && self.flags & EXECUTABLE != 0
    }

    /// Returns the address after the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.address.saturating_add(self.len)
    }
}

/// The entries of the dynamic section. Each kind that is used here occurs once.
pub(crate) struct Dynamic(Vec<(u64, u64)>);

impl Dynamic {
    pub(crate) fn value(&self, kind: u64) -> Option<u64> {
        self.0.iter().find(|(found, _)| *found == kind).map(|(_, value)| *value)
    }
}

impl File {
    pub(crate) fn open(path: &Path) -> Result<File, Closed> {
        let file = fs::File::open(path).map_err(Closed::Unreadable)?;
        let mut file = File { file, segments: Vec::new() };
        let is_known = file.array(0)? == *b"\x7fELF\x02\x01";
        let (table, size, count) = (file.u64(32)?, file.u16(54)?, file.u16(56)?);
        if !is_known || size != 56 {
            return Err(Closed::Elf);
        }
        for index in 0..u64::from(count) {
            let at = table.checked_add(index * 56).ok_or(Closed::Elf)?;
            let segment = Segment {
                kind: file.u32(at)?,
                flags: file.u32(at + 4)?,
                offset: file.u64(at + 8)?,
                address: file.u64(at + 16)?,
                in_file: file.u64(at + 32)?,
                len: file.u64(at + 40)?,
            };
            file.segments.push(segment);
        }
        Ok(file)
    }

    /// Returns `true` if the file at `path` is this file and has not changed since it was opened.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        let (own, other) = (self.file.metadata(), fs::metadata(path));
        let same = |own: fs::Metadata, other: fs::Metadata| {
            let of = |one: &fs::Metadata| (one.dev(), one.ino(), one.len(), one.mtime(), one.mtime_nsec());
            of(&own) == of(&other)
        };
        own.ok().zip(other.ok()).is_some_and(|(own, other)| same(own, other))
    }

    /// Returns the address of the first instruction.
    pub(crate) fn entry(&self) -> Result<u64, Closed> {
        self.u64(24)
    }

    pub(crate) fn content(&self, segment: &Segment) -> Result<Vec<u8>, Closed> {
        self.slice(segment.offset, segment.in_file)
    }

    /// Returns the address and content of each run of code: of the executable sections, or of the
    /// executable segments if the file has no section table.
    pub(crate) fn code(&self) -> Result<Vec<(u64, Vec<u8>)>, Closed> {
        let sections = self.sections().filter(|sections| !sections.is_empty());
        match sections {
            Some(sections) => sections
                .into_iter()
                .map(|(address, offset, len)| Ok((address, self.slice(offset, len)?)))
                .collect(),
            None => {
                let executable = self.segments.iter().filter(|segment| segment.is_executable());
                executable.map(|segment| Ok((segment.address, self.content(segment)?))).collect()
            }
        }
    }

    /// Returns the size of the executable segments in bytes.
    pub(crate) fn len_of_code(&self) -> u64 {
        let executable = self.segments.iter().filter(|segment| segment.is_executable());
        executable.fold(0, |len, segment| len.saturating_add(segment.in_file))
    }

    /// Returns address, offset and length of each executable section, or `None` if there is no
    /// section table.
    fn sections(&self) -> Option<Vec<(u64, u64, u64)>> {
        const PROGBITS: u32 = 1;
        const EXECUTED: u64 = 4;
        let (table, size, count) = (self.u64(40).ok()?, self.u16(58).ok()?, self.u16(60).ok()?);
        if table == 0 || size != 64 {
            return None;
        }
        let mut found = Vec::new();
        for index in 0..u64::from(count) {
            let at = table.checked_add(index * 64)?;
            if self.u32(at + 4).ok()? == PROGBITS && self.u64(at + 8).ok()? & EXECUTED != 0 {
                found.push((self.u64(at + 16).ok()?, self.u64(at + 24).ok()?, self.u64(at + 32).ok()?));
            }
        }
        Some(found)
    }

    /// Returns `true` if the file is a Go program, whose goroutines have small stacks. Go's linker
    /// leaves a note with the owner "Go".
    pub(crate) fn is_of_go(&self) -> Result<bool, Closed> {
        const PT_NOTE: u32 = 4;
        let notes = self.segments.iter().filter(|segment| segment.kind == PT_NOTE);
        let contents = notes.map(|segment| self.content(segment)).collect::<Result<Vec<_>, _>>()?;
        // The owner's name follows three numbers: its length, the length of the description, and
        // the type.
        Ok(contents.iter().any(|notes| {
            notes.windows(15).any(|note| matches!(note[..4], [3 | 4, 0, 0, 0]) && note[12..] == *b"Go\0")
        }))
    }

    /// Returns `true` if the file asks for a dynamic linker.
    pub(crate) fn has_linker(&self) -> bool {
        self.segments.iter().any(|segment| segment.kind == PT_INTERP)
    }

    /// Returns `true` if the dynamic linker modifies the file's code (text relocations).
    pub(crate) fn changes_its_code(&self) -> Result<bool, Closed> {
        const DT_TEXTREL: u64 = 22;
        const DT_FLAGS: u64 = 30;
        const DF_TEXTREL: u64 = 4;
        let dynamic = self.dynamic()?;
        let flags = dynamic.value(DT_FLAGS).unwrap_or(0);
        Ok(dynamic.value(DT_TEXTREL).is_some() || flags & DF_TEXTREL != 0)
    }

    /// Returns `true` if the file exports or imports a dynamic symbol of this name. A longer name
    /// that ends in it counts too, because linkers let such names share their bytes.
    pub(crate) fn names(&self, wanted: &[u8]) -> Result<bool, Closed> {
        const DT_STRTAB: u64 = 5;
        const DT_STRSZ: u64 = 10;
        let dynamic = self.dynamic()?;
        let value = |kind| dynamic.value(kind).ok_or(Closed::Elf);
        let (at, len) = (value(DT_STRTAB)?, value(DT_STRSZ)?);
        let has_it =
            |segment: &&Segment| segment.is_loaded() && (segment.address..segment.end()).contains(&at);
        let segment = self.segments.iter().find(has_it).ok_or(Closed::Elf)?;
        let names = self.slice(segment.offset + (at - segment.address), len)?;
        Ok(names.split(|byte| *byte == 0).any(|name| name.ends_with(wanted)))
    }

    /// Returns the file's content from a virtual address to the end of its segment, at most `most`
    /// bytes. Returns `None` if the file loads nothing there.
    pub(crate) fn from(&self, at: u64, most: u64) -> Result<Option<Vec<u8>>, Closed> {
        let in_it = |segment: &&Segment| {
            segment.is_loaded() && at.checked_sub(segment.address).is_some_and(|into| into < segment.in_file)
        };
        let Some(segment) = self.segments.iter().find(in_it) else { return Ok(None) };
        let into = at - segment.address;
        self.slice(segment.offset + into, most.min(segment.in_file - into)).map(Some)
    }

    pub(crate) fn own_data(&self) -> Option<Segment> {
        self.segments.iter().copied().find(|segment| segment.kind == PT_TLS)
    }

    pub(crate) fn dynamic(&self) -> Result<Dynamic, Closed> {
        let segment =
            self.segments.iter().find(|segment| segment.kind == PT_DYNAMIC).ok_or(Closed::Library)?;
        let content = self.content(segment)?;
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        Ok(Dynamic(content.chunks_exact(16).map(|pair| (word(&pair[..8]), word(&pair[8..]))).collect()))
    }

    fn slice(&self, offset: u64, len: u64) -> Result<Vec<u8>, Closed> {
        let end = offset.checked_add(len).ok_or(Closed::Elf)?;
        if end > self.file.metadata().map_err(Closed::Unreadable)?.len() {
            return Err(Closed::Elf);
        }
        let mut bytes = vec![0; len as usize];
        self.file.read_exact_at(&mut bytes, offset).map_err(Closed::Unreadable)?;
        Ok(bytes)
    }

    fn array<const LEN: usize>(&self, at: u64) -> Result<[u8; LEN], Closed> {
        let mut bytes = [0; LEN];
        self.file.read_exact_at(&mut bytes, at).map_err(|_| Closed::Elf)?;
        Ok(bytes)
    }

    fn u16(&self, at: u64) -> Result<u16, Closed> {
        self.array(at).map(u16::from_le_bytes)
    }

    fn u32(&self, at: u64) -> Result<u32, Closed> {
        self.array(at).map(u32::from_le_bytes)
    }

    fn u64(&self, at: u64) -> Result<u64, Closed> {
        self.array(at).map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_says_what_it_asks_its_dynamic_linker_for() {
        let own = File::open(Path::new("/proc/self/exe")).unwrap();
        assert!(own.has_linker() && !own.changes_its_code().unwrap() && !own.is_of_go().unwrap());
        assert!(own.names(b"__libc_start_main").unwrap());
        assert!(!own.names(b"shunt_has_no_such_function").unwrap());
    }
}
