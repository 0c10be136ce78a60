//! Reads from the headers of an ELF file whether the shim can be loaded into it.
//!
//! A file that is truncated or invalid is reported as not understood, and left to the kernel. Its
//! sizes and offsets may be anything, so each read is limited.

use std::fs::File;

use object::LittleEndian as Little;
use object::elf::{self, FileHeader64};
use object::pod::slice_from_bytes;
use object::read::elf::{Dyn, FileHeader, NoteIterator, ProgramHeader};
use object::read::{ReadCache, ReadRef};

/// The relevant properties of an ELF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Elf {
    /// Its word size differs from that of this shunt.
    OtherClass,
    /// Its word size is that of this shunt, but it is built for another processor.
    OtherMachine,
    /// It is built for this processor.
    Native {
        /// The dynamic linker that it requests. `None` in a static program.
        interpreter: Option<Vec<u8>>,
        /// It was built by the Go linker. Such programs make system calls without libc.
        go: bool,
    },
}

type Header = FileHeader64<Little>;
type Segment = elf::ProgramHeader64<Little>;
type Data<'f> = ReadCache<&'f File>;

const MACHINE: u16 = if cfg!(target_arch = "aarch64") { elf::EM_AARCH64 } else { elf::EM_X86_64 };
/// The limit for a path and for notes.
const MAX_BYTES: u64 = 4096;
/// The limit for the name of a library.
const MAX_NAME: u64 = 256;
const MAX_ENTRIES: usize = 1024;

/// Parses the headers. Returns `None` if this is not an ELF file, or not a valid one.
pub(crate) fn parse(file: &File) -> Option<Elf> {
    let data = ReadCache::new(file);
    let segments = match segments(&data)? {
        Ok(segments) => segments,
        Err(foreign) => return Some(foreign),
    };
    let of_kind = |kind| segments.iter().filter(move |segment| segment.p_type(Little) == kind);
    let interpreter = of_kind(elf::PT_INTERP).next().map(|segment| {
        let path = content(&data, segment, MAX_BYTES);
        path.split(|byte| *byte == 0).next().unwrap_or_default().to_owned()
    });
    let mut notes = of_kind(elf::PT_NOTE).map(|segment| content(&data, segment, MAX_BYTES));
    Some(Elf::Native { interpreter, go: notes.any(has_go_note) })
}

/// Returns the segments, or what makes the file foreign. Returns `None` if it is not a valid ELF
/// file.
fn segments<'d>(data: &'d Data<'_>) -> Option<Result<&'d [Segment], Elf>> {
    let [magic @ .., class] = data.read_at::<[u8; 5]>(0).ok()?;
    if *magic != elf::ELFMAG {
        return None;
    }
    if *class != elf::ELFCLASS64 {
        return Some(Err(Elf::OtherClass));
    }
    let header = data.read_at::<Header>(0).ok()?;
    if !header.is_little_endian() || header.e_machine(Little) != MACHINE {
        return Some(Err(Elf::OtherMachine));
    }
    // A larger number would be in a section.
    let is_small = header.e_phnum(Little) < elf::PN_XNUM;
    is_small.then(|| header.program_headers(Little, data).ok()).flatten().map(Ok)
}

/// Returns the names of the libraries that a program for this processor is linked with, in their
/// order. The list is empty if the file cannot be understood.
pub(crate) fn libraries(file: &File) -> Vec<Vec<u8>> {
    libraries_of(&ReadCache::new(file)).unwrap_or_default()
}

fn libraries_of(data: &Data<'_>) -> Option<Vec<Vec<u8>>> {
    let segments = segments(data)?.ok()?;
    let dynamic = segments.iter().find(|segment| segment.p_type(Little) == elf::PT_DYNAMIC)?;
    let size = size_of::<elf::Dyn64<Little>>();
    let dynamic = content(data, dynamic, (MAX_ENTRIES * size) as u64);
    let (entries, _) = slice_from_bytes::<elf::Dyn64<Little>>(dynamic, dynamic.len() / size).ok()?;
    let tagged =
        |tag| entries.iter().filter(move |entry| entry.tag(Little) == tag).map(|entry| entry.val(Little));
    let strings = tagged(elf::DT_STRTAB).next()?;
    let strings =
        segments.iter().filter(|segment| segment.p_type(Little) == elf::PT_LOAD).find_map(|segment| {
            let (offset, bytes) = segment.file_range(Little);
            let into = strings.checked_sub(segment.p_vaddr(Little)).filter(|into| *into < bytes)?;
            offset.checked_add(into)
        })?;
    let end = data.len().ok()?;
    let name = |at: u64| {
        let start = strings.checked_add(at)?;
        let name = data.read_bytes_at_until(start..start.saturating_add(MAX_NAME).min(end), 0);
        name.ok().map(<[u8]>::to_owned)
    };
    Some(tagged(elf::DT_NEEDED).filter_map(name).collect())
}

/// Returns whether the notes contain that of the Go linker. Its owner is "Go".
fn has_go_note(notes: &[u8]) -> bool {
    let notes = NoteIterator::<Header>::new(Little, 4, notes);
    notes.is_ok_and(|mut notes| {
        std::iter::from_fn(|| notes.next().ok().flatten()).any(|note| note.name() == b"Go")
    })
}

/// Returns the beginning of a segment's content, at most `limit` bytes. It is empty if the file
/// ends before.
fn content<'d>(data: &'d Data<'_>, segment: &Segment, limit: u64) -> &'d [u8] {
    let (offset, size) = segment.file_range(Little);
    data.read_bytes_at(offset, size.min(limit)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn parsed(content: &[u8]) -> Option<Elf> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        parse(&file)
    }

    #[test]
    fn this_test_is_a_native_dynamic_program() {
        let file = File::open("/proc/self/exe").unwrap();
        let Some(Elf::Native { interpreter: Some(path), go: false }) = parse(&file) else {
            panic!("{:?}", parse(&file))
        };
        assert!(path.starts_with(b"/lib"));
    }

    #[test]
    fn this_test_is_linked_with_libc() {
        let libraries = libraries(&File::open("/proc/self/exe").unwrap());
        assert!(libraries.iter().any(|name| name == b"libc.so.6"), "{libraries:?}");
        let mut rubbish = tempfile::tempfile().unwrap();
        rubbish.write_all(b"\x7fELF\x02\x01 and no more").unwrap();
        assert!(super::libraries(&rubbish).is_empty());
    }

    #[test]
    fn other_word_sizes_and_processors_are_told_apart() {
        let mut header = [0; size_of::<Header>()];
        header[..6].copy_from_slice(b"\x7fELF\x01\x01");
        assert_eq!(parsed(&header), Some(Elf::OtherClass));
        header[4] = elf::ELFCLASS64;
        header[18] = 243;
        assert_eq!(parsed(&header), Some(Elf::OtherMachine));
    }

    #[test]
    fn rubbish_is_no_elf_file() {
        assert_eq!(parsed(b""), None);
        assert_eq!(parsed(b"\x7fELF"), None);
        assert_eq!(parsed(b"#!/bin/sh\n"), None);
        let mut header = [0xff; size_of::<Header>()];
        header[..6].copy_from_slice(b"\x7fELF\x02\x01");
        header[18..20].copy_from_slice(&MACHINE.to_le_bytes());
        assert_eq!(parsed(&header), None);
        header[54..56].copy_from_slice(&(size_of::<Segment>() as u16).to_le_bytes());
        assert_eq!(parsed(&header), None);
    }

    #[test]
    fn go_leaves_a_note() {
        let note = b"\x04\0\0\0\x04\0\0\0\x01\0\0\0GNU\0abcd\x04\0\0\0\x02\0\0\0\x04\0\0\0Go\0\0xy\0\0";
        assert!(has_go_note(note));
        assert!(!has_go_note(&note[..20]));
        assert!(!has_go_note(&[0xff; 40]));
    }
}
