//! Searches the memory of a stopped program for addresses of libc's functions.
//!
//! The dynamic linker has written such addresses to global offset tables and to data, and the
//! program may have copied them anywhere: a table of functions, an object on the heap, a stack, a
//! register. Each becomes the address of the hook. An address is a word of eight bytes at a
//! multiple of eight; that another value is equal to one is practically impossible.
//!
//! Only memory that the program has written itself can have such an address: other pages have the
//! contents of their files. Code that was generated can have it anywhere, also as a distance. Such
//! code is not changed.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::Refusal;
use crate::process::{Mapping, Process};

const PAGE: u64 = 4096;
/// The number of pages that are read at a time.
const BATCH: usize = 256;

/// The addresses that become others.
#[derive(Debug)]
pub(crate) struct Redirects {
    hooks: HashMap<u64, u64>,
    range: Range<u64>,
}

impl Redirects {
    pub(crate) fn new(pairs: &[[u64; 2]]) -> Redirects {
        let hooks: HashMap<u64, u64> = pairs.iter().map(|[function, hook]| (*function, *hook)).collect();
        let from = hooks.keys().min().copied().unwrap_or(0);
        let to = hooks.keys().max().map_or(0, |last| last + 1);
        Redirects { hooks, range: from..to }
    }

    /// Returns the hook in place of a function, or the value itself.
    pub(crate) fn of(&self, value: u64) -> u64 {
        self.hook(value).unwrap_or(value)
    }

    #[inline]
    fn hook(&self, value: u64) -> Option<u64> {
        if self.range.contains(&value) { self.hooks.get(&value).copied() } else { None }
    }
}

/// Returns each place with an address of a function, and the hook. `untouched` memory is skipped.
pub(crate) fn find(
    process: &Process,
    redirects: &Redirects,
    untouched: &[[u64; 2]],
) -> Result<Vec<[u64; 2]>, Refusal> {
    let pages = File::open(format!("/proc/{}/pagemap", process.pid)).map_err(Refusal::Unreadable)?;
    let mut found = Vec::new();
    let mut buffer = vec![0; BATCH * PAGE as usize];
    for mapping in process.mappings()? {
        let is_kernels = mapping.path.to_str().is_some_and(|path| path.starts_with("[v"));
        if !mapping.is_readable || !mapping.is_private || is_kernels {
            continue;
        }
        for range in pages_of(&pages, &mapping, is_own)? {
            let mut at = range.start;
            while at < range.end {
                let len = (range.end - at).min(buffer.len() as u64);
                let bytes = &mut buffer[..len as usize];
                process.read(at, bytes)?;
                look(at, bytes, redirects, untouched, mapping.is_executable, &mut found)?;
                at += len;
            }
        }
    }
    Ok(found)
}

/// Refuses a program that has addresses of functions in memory that it shares with other processes.
/// These would be redirected too, and do not have the hooks.
pub(crate) fn check_shared(process: &Process, redirects: &Redirects) -> Result<(), Refusal> {
    let pages = File::open(format!("/proc/{}/pagemap", process.pid)).map_err(Refusal::Unreadable)?;
    let mut buffer = vec![0; BATCH * PAGE as usize];
    let mut found = Vec::new();
    for mapping in process.mappings()? {
        // Memory of a device may not be read.
        let is_memory = !mapping.path.starts_with("/dev") || mapping.path.starts_with("/dev/shm");
        let is_memory = is_memory || mapping.path == Path::new("/dev/zero");
        if !mapping.is_readable || !mapping.is_writable || mapping.is_private || !is_memory {
            continue;
        }
        for range in pages_of(&pages, &mapping, is_present)? {
            let mut at = range.start;
            while at < range.end {
                let len = (range.end - at).min(buffer.len() as u64);
                // The program runs, and may have unmapped it.
                if process.read(at, &mut buffer[..len as usize]).is_ok() {
                    look(at, &buffer[..len as usize], redirects, &[], false, &mut found)?;
                }
                at += len;
            }
        }
    }
    if found.is_empty() { Ok(()) } else { Err(Refusal::SharesCalls) }
}

/// Returns whether a page, by its word in `pagemap`, has been mapped since it was written.
fn is_present(word: u64) -> bool {
    word >> 63 == 1
}

/// Returns whether a page, by its word in `pagemap`, has been written by the program itself.
fn is_own(word: u64) -> bool {
    const PRESENT_OR_SWAPPED: u64 = 3 << 62;
    const OF_FILE: u64 = 1 << 61;
    word & PRESENT_OR_SWAPPED != 0 && word & OF_FILE == 0
}

/// Returns the pages of a mapping whose words in `pagemap` are `wanted`.
fn pages_of(pages: &File, mapping: &Mapping, is_wanted: fn(u64) -> bool) -> Result<Vec<Range<u64>>, Refusal> {
    const AT_A_TIME: usize = 8192;
    let mut found: Vec<Range<u64>> = Vec::new();
    let mut bytes = vec![0; 8 * AT_A_TIME];
    let mut at = mapping.range.start;
    while at < mapping.range.end {
        let wanted = ((mapping.range.end - at) / PAGE).min(AT_A_TIME as u64) as usize;
        let read = match pages.read_at(&mut bytes[..8 * wanted], at / PAGE * 8) {
            Ok(read) if read >= 8 => read / 8,
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Refusal::Memory(error)),
        };
        for word in bytes[..8 * read].chunks_exact(8) {
            let word = u64::from_ne_bytes(word.try_into().expect("eight bytes"));
            if is_wanted(word) {
                match found.last_mut() {
                    Some(last) if last.end == at => last.end += PAGE,
                    _ => found.push(at..at + PAGE),
                }
            }
            at += PAGE;
        }
    }
    Ok(found)
}

fn look(
    from: u64,
    bytes: &[u8],
    redirects: &Redirects,
    untouched: &[[u64; 2]],
    is_executable: bool,
    found: &mut Vec<[u64; 2]>,
) -> Result<(), Refusal> {
    let is_untouched = |at: u64| {
        untouched.iter().any(|[start, end]| (start & !(PAGE - 1)..end.next_multiple_of(PAGE)).contains(&at))
    };
    for (index, word) in bytes.chunks_exact(8).enumerate() {
        let value = u64::from_ne_bytes(word.try_into().expect("eight bytes"));
        if let Some(hook) = redirects.hook(value) {
            let at = from + 8 * index as u64;
            if !is_untouched(at) {
                found.push([at, hook]);
            }
        }
    }
    if is_executable && !is_untouched(from) && calls_directly(from, bytes, redirects) {
        return Err(Refusal::Generated);
    }
    Ok(())
}

/// Returns whether code has the address of a function as an operand, or calls or jumps to it.
fn calls_directly(from: u64, code: &[u8], redirects: &Redirects) -> bool {
    const CALL: u8 = 0xe8;
    const JUMP: u8 = 0xe9;
    let operand = |at: usize| {
        code.get(at..at + 8).map(|bytes| u64::from_ne_bytes(bytes.try_into().expect("eight bytes")))
    };
    (0..code.len()).any(|at| {
        let distance = || {
            let bytes = code.get(at + 1..at + 5)?;
            let distance = i32::from_ne_bytes(bytes.try_into().expect("four bytes"));
            Some((from + at as u64 + 5).wrapping_add_signed(distance.into()))
        };
        operand(at).is_some_and(|value| redirects.hook(value).is_some())
            || [CALL, JUMP].contains(&code[at])
                && distance().is_some_and(|target| redirects.hook(target).is_some())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FUNCTION: u64 = 0x7f00_1234_5670;
    const HOOK: u64 = 0x7f11_0000_0010;

    fn redirects() -> Redirects {
        Redirects::new(&[[FUNCTION, HOOK], [FUNCTION + 0x40, HOOK + 0x40]])
    }

    #[test]
    fn only_whole_words_with_the_address_are_redirected() {
        let words = [1, FUNCTION, FUNCTION + 8, FUNCTION + 0x40, FUNCTION << 8];
        let bytes = words.map(u64::to_ne_bytes).concat();
        let mut found = Vec::new();
        look(0x1000, &bytes, &redirects(), &[], false, &mut found).unwrap();
        assert_eq!(found, [[0x1008, HOOK], [0x1018, HOOK + 0x40]]);
        found.clear();
        look(0x1000, &bytes, &redirects(), &[[0x1010, 0x1020]], false, &mut found).unwrap();
        assert!(found.is_empty(), "the whole page is untouched");
    }

    #[test]
    fn generated_code_that_calls_a_function_is_found() {
        let mut code = vec![0x90; 32];
        assert!(!calls_directly(0x1000, &code, &redirects()));
        code[3..11].copy_from_slice(&FUNCTION.to_ne_bytes());
        assert!(calls_directly(0x1000, &code, &redirects()));
        let near = FUNCTION - 0x100;
        let mut code = vec![0x90; 32];
        code[7] = 0xe8;
        code[8..12].copy_from_slice(&((FUNCTION - (near + 12)) as i32).to_ne_bytes());
        assert!(calls_directly(near, &code, &redirects()));
        assert!(!calls_directly(near + 1, &code, &redirects()));
    }
}
