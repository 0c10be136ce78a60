//! The objects that the dynamic linker has loaded, as it describes them: it is asked for nothing that takes the lock which it holds
//! while it loads another.

use std::ffi::{CStr, c_char, c_int, c_void};

/// One that is loaded.
#[derive(Clone, Copy)]
pub(crate) struct Library<'a> {
    /// What is added to the addresses in its file.
    pub(crate) base: usize,
    pub(crate) segments: &'a [libc::Elf64_Phdr],
    /// Its path, or nothing for the program.
    pub(crate) name: &'a CStr,
}

/// Called with each until it says that this was the last.
pub(crate) fn each_library(mut visitor: &mut dyn FnMut(&Library<'_>) -> bool) {
    // SAFETY: what the function below takes.
    unsafe { libc::dl_iterate_phdr(Some(visit), std::ptr::from_mut(&mut visitor).cast()) };
}

unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, visitor: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker's own description of a library that is loaded, and the visitor above.
    unsafe {
        let (info, visitor) = (&*info, visitor.cast::<&mut dyn FnMut(&Library<'_>) -> bool>());
        let segments = match info.dlpi_phdr.is_null() {
            true => &[][..],
            false => std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()),
        };
        let name = if info.dlpi_name.is_null() { c"" } else { CStr::from_ptr(info.dlpi_name) };
        (*visitor)(&Library { base: info.dlpi_addr as usize, segments, name }).into()
    }
}

impl Library<'_> {
    /// Whether the address is in it.
    pub(crate) fn has(&self, address: usize) -> bool {
        let is_inside = |segment: &libc::Elf64_Phdr| {
            let from = self.base.wrapping_add(segment.p_vaddr as usize);
            segment.p_type == libc::PT_LOAD && (from..from + segment.p_memsz as usize).contains(&address)
        };
        self.segments.iter().any(is_inside)
    }

    /// From its first byte to its last.
    pub(crate) fn range(&self) -> std::ops::Range<usize> {
        let loaded = || self.segments.iter().filter(|segment| segment.p_type == libc::PT_LOAD);
        let at = |address: u64| self.base.wrapping_add(address as usize);
        let from = loaded().map(|one| at(one.p_vaddr)).min().unwrap_or(0);
        from..loaded().map(|one| at(one.p_vaddr + one.p_memsz)).max().unwrap_or(from)
    }

    /// A table of its dynamic section.
    pub(crate) fn table(&self, wanted: usize) -> Option<usize> {
        let at = self.number(wanted)?;
        // glibc writes addresses where musl, and the kernel's own, leave what is in the file.
        Some(if at < self.base { self.base + at } else { at })
    }

    /// A number of its dynamic section.
    pub(crate) fn number(&self, wanted: usize) -> Option<usize> {
        let dynamic = self.segments.iter().find(|segment| segment.p_type == libc::PT_DYNAMIC)?;
        let entries = self.base.wrapping_add(dynamic.p_vaddr as usize) as *const [usize; 2];
        // SAFETY: the section ends in a zero.
        let found =
            (0..).map(|index| unsafe { *entries.add(index) }).find(|[kind, _]| [wanted, 0].contains(kind));
        found.filter(|[kind, _]| *kind != 0).map(|[_, number]| number)
    }

    /// The address of a function, or of data, by the hash table, or null. Of several versions it is the one that programs are linked with.
    pub(crate) fn address_of(&self, name: &CStr) -> *mut c_void {
        self.look_up(name).unwrap_or(std::ptr::null_mut())
    }

    pub(crate) fn look_up(&self, name: &CStr) -> Option<*mut c_void> {
        const DT_STRTAB: usize = 5;
        const DT_SYMTAB: usize = 6;
        const DT_GNU_HASH: usize = 0x6fff_fef5;
        const DT_VERSYM: usize = 0x6fff_fff0;
        const WORDS_OF_HEAD: usize = 4;
        const HIDDEN: u16 = 1 << 15;
        const DATA: u8 = 1;
        const FUNCTION: u8 = 2;
        let (names, symbols) = (self.table(DT_STRTAB)?, self.table(DT_SYMTAB)? as *const libc::Elf64_Sym);
        let hashes = self.table(DT_GNU_HASH)? as *const u32;
        let versions = self.table(DT_VERSYM).map(|at| at as *const u16);
        let djb = |hash: u32, byte: &u8| hash.wrapping_mul(33).wrapping_add(u32::from(*byte));
        let hash = name.to_bytes().iter().fold(5381, djb);
        // SAFETY: the tables are as a linker makes them: lists of hashes, each of which ends in an odd one, in the order of the symbols.
        unsafe {
            let [buckets, first, words_of_filter] = [0, 1, 2].map(|index| *hashes.add(index) as usize);
            let lists = hashes.add(WORDS_OF_HEAD + 2 * words_of_filter);
            let start = *lists.add((hash as usize).checked_rem(buckets)?) as usize;
            for index in start.max(first).. {
                let (own, symbol) = (*lists.add(buckets + index - first), &*symbols.add(index));
                let is_old = versions.is_some_and(|versions| *versions.add(index) & HIDDEN != 0);
                let is_named = [DATA, FUNCTION].contains(&(symbol.st_info & 0xf));
                let is_there = is_named && symbol.st_shndx != 0 && !is_old;
                if start >= first
                    && own | 1 == hash | 1
                    && is_there
                    && CStr::from_ptr((names + symbol.st_name as usize) as *const c_char) == name
                {
                    return Some((self.base + symbol.st_value as usize) as *mut c_void);
                }
                if start < first || own & 1 == 1 {
                    break;
                }
            }
        }
        None
    }
}

/// How often the dynamic linker has added an object, in any namespace.
pub(crate) fn times_added() -> u64 {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, times: *mut c_void) -> c_int {
        // SAFETY: the dynamic linker's own description of an object, and the number below.
        unsafe { times.cast::<u64>().write((*info).dlpi_adds) };
        1
    }
    let mut times = 0_u64;
    // SAFETY: what the function above takes.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut times).cast()) };
    times
}
