//! Reads from the headers of an ELF file whether the shim can be loaded into it.
//!
//! A file that is truncated or invalid is reported as not understood, and left to the kernel.

use std::fs::File;
use std::os::unix::fs::FileExt;

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

const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;
const HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
const MAX_PROGRAM_HEADERS: usize = 128;

const NATIVE_MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// Parses the headers. Returns `None` if this is not an ELF file, or not a valid one.
pub(crate) fn parse(file: &File) -> Option<Elf> {
    let mut header = [0; HEADER_BYTES];
    let read = read_up_to(file, &mut header, 0);
    if read < 20 || !header.starts_with(b"\x7fELF") {
        return None;
    }
    if header[4] != CLASS_64 {
        return Some(Elf::OtherClass);
    }
    if header[5] != LITTLE_ENDIAN || u16_at(&header, 18) != NATIVE_MACHINE {
        return Some(Elf::OtherMachine);
    }
    if read < HEADER_BYTES || usize::from(u16_at(&header, 54)) != PROGRAM_HEADER_BYTES {
        return None;
    }
    let table = u64_at(&header, 32);
    let count = usize::from(u16_at(&header, 56)).min(MAX_PROGRAM_HEADERS);
    let mut interpreter = None;
    let mut go = false;
    for index in 0..count as u64 {
        let mut entry = [0; PROGRAM_HEADER_BYTES];
        let offset = table.checked_add(index * PROGRAM_HEADER_BYTES as u64)?;
        if read_up_to(file, &mut entry, offset) < PROGRAM_HEADER_BYTES {
            return None;
        }
        let (offset, bytes) = (u64_at(&entry, 8), u64_at(&entry, 32));
        match u32_at(&entry, 0) {
            PT_INTERP => {
                let mut path = segment(file, offset, bytes, 4096);
                path.truncate(path.iter().position(|byte| *byte == 0).unwrap_or(path.len()));
                interpreter = Some(path);
            }
            PT_NOTE => go |= has_go_note(&segment(file, offset, bytes, 4096)),
            _ => {}
        }
    }
    Some(Elf::Native { interpreter, go })
}

/// Returns the names of the libraries that a program for this processor is linked with, in their
/// order. The list is empty if the file cannot be understood.
pub(crate) fn libraries(file: &File) -> Vec<Vec<u8>> {
    libraries_of(file).unwrap_or_default()
}

fn libraries_of(file: &File) -> Option<Vec<Vec<u8>>> {
    const MOST_ENTRIES: usize = 1024;
    let mut header = [0; HEADER_BYTES];
    let is_whole = read_up_to(file, &mut header, 0) == HEADER_BYTES;
    if !is_whole || !header.starts_with(b"\x7fELF\x02\x01") || u16_at(&header, 18) != NATIVE_MACHINE {
        return None;
    }
    let table = u64_at(&header, 32);
    let count = usize::from(u16_at(&header, 56)).min(MAX_PROGRAM_HEADERS);
    let mut loaded = Vec::new();
    let mut dynamic = Vec::new();
    for index in 0..count as u64 {
        let mut entry = [0; PROGRAM_HEADER_BYTES];
        let offset = table.checked_add(index * PROGRAM_HEADER_BYTES as u64)?;
        if read_up_to(file, &mut entry, offset) < PROGRAM_HEADER_BYTES {
            return None;
        }
        let (offset, address, bytes) = (u64_at(&entry, 8), u64_at(&entry, 16), u64_at(&entry, 32));
        match u32_at(&entry, 0) {
            PT_LOAD => loaded.push((address, bytes, offset)),
            PT_DYNAMIC => dynamic = segment(file, offset, bytes, MOST_ENTRIES * 16),
            _ => {}
        }
    }
    let tagged = |wanted: u64| {
        let entries = dynamic.chunks_exact(16).map(|entry| (u64_at(entry, 0), u64_at(entry, 8)));
        entries.filter(move |(tag, _)| *tag == wanted).map(|(_, value)| value)
    };
    let strings = tagged(DT_STRTAB).next()?;
    let in_file = |address: u64| {
        let (start, _, offset) = loaded
            .iter()
            .find(|(start, bytes, _)| address.checked_sub(*start).is_some_and(|at| at < *bytes))?;
        offset.checked_add(address - start)
    };
    let strings = in_file(strings)?;
    let name = |at: u64| {
        let mut name = segment(file, strings.saturating_add(at), 256, 256);
        name.truncate(name.iter().position(|byte| *byte == 0)?);
        Some(name)
    };
    Some(tagged(DT_NEEDED).filter_map(name).collect())
}

/// Returns whether the notes contain that of the Go linker. Its owner is "Go", and its name length
/// includes the padding.
fn has_go_note(mut notes: &[u8]) -> bool {
    while notes.len() >= 12 {
        let (name, description) = (u32_at(notes, 0) as usize, u32_at(notes, 4) as usize);
        if matches!(name, 3 | 4) && notes[12..].starts_with(b"Go\0") {
            return true;
        }
        let padded = |bytes: usize| bytes.saturating_add(3) & !3;
        let whole = 12usize.saturating_add(padded(name)).saturating_add(padded(description));
        notes = notes.get(whole..).unwrap_or_default();
    }
    false
}

fn segment(file: &File, offset: u64, bytes: u64, limit: usize) -> Vec<u8> {
    let mut content = vec![0; limit.min(bytes.try_into().unwrap_or(limit))];
    let read = read_up_to(file, &mut content, offset);
    content.truncate(read);
    content
}

fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> usize {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset.saturating_add(done as u64)) {
            Ok(0) | Err(_) => break,
            Ok(read) => done += read,
        }
    }
    done
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
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
        let mut header = [0; HEADER_BYTES];
        header[..6].copy_from_slice(b"\x7fELF\x01\x01");
        assert_eq!(parsed(&header), Some(Elf::OtherClass));
        header[4] = CLASS_64;
        header[18] = 243;
        assert_eq!(parsed(&header), Some(Elf::OtherMachine));
    }

    #[test]
    fn rubbish_is_no_elf_file() {
        assert_eq!(parsed(b""), None);
        assert_eq!(parsed(b"\x7fELF"), None);
        assert_eq!(parsed(b"#!/bin/sh\n"), None);
        let mut header = [0xff; HEADER_BYTES];
        header[..6].copy_from_slice(b"\x7fELF\x02\x01");
        header[18..20].copy_from_slice(&NATIVE_MACHINE.to_le_bytes());
        assert_eq!(parsed(&header), None);
        header[54..56].copy_from_slice(&(PROGRAM_HEADER_BYTES as u16).to_le_bytes());
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
