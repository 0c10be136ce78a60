//! The objects that the dynamic linker has loaded, read from its own tables. Nothing here needs the
//! lock that the dynamic linker holds while it loads an object.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::Relaxed};

/// A loaded object.
#[derive(Clone, Copy)]
pub(crate) struct Library<'a> {
    /// The load bias: the difference between an address in memory and the address in the file.
    pub(crate) base: usize,
    pub(crate) segments: &'a [libc::Elf64_Phdr],
    /// The path of its file. Empty for the program.
    pub(crate) name: &'a CStr,
}

/// Set if this library has been loaded after libc, into a program that ran already. The dynamic
/// linker finds libc's functions before the hooks then.
static IS_LATE: AtomicBool = AtomicBool::new(false);

/// Notes that this library has been loaded into a program that ran already.
pub(crate) fn note_late() {
    IS_LATE.store(true, Relaxed);
}

/// Returns whether this library has been loaded into a program that ran already.
pub(crate) fn is_late() -> bool {
    IS_LATE.load(Relaxed)
}

/// Returns the address of the dynamic linker's `struct r_debug`, or 0.
pub(crate) fn linkers_record() -> usize {
    // SAFETY: relocated before any code of this library runs.
    unsafe { shunt_debug }.map_or(0, |debug| std::ptr::from_ref(debug) as usize)
}

/// Calls `visitor` with each loaded object, until it returns `true`.
pub(crate) fn each_library(mut visitor: &mut dyn FnMut(&Library<'_>) -> bool) {
    // SAFETY: `visit` takes a pointer to the visitor.
    unsafe { iterate()(Some(visit), std::ptr::from_mut(&mut visitor).cast()) };
}

type Visit = unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut c_void) -> c_int;
type Iterate = unsafe extern "C" fn(Option<Visit>, *mut c_void) -> c_int;

// Only glibc's dynamic linker has this symbol.
std::arch::global_asm!(
    ".weak _r_debug",
    ".pushsection .data.rel.ro.shunt_debug, \"aw\", @progbits",
    ".balign 8",
    ".globl shunt_debug",
    ".hidden shunt_debug",
    ".type shunt_debug, @object",
    ".size shunt_debug, 8",
    "shunt_debug: .quad _r_debug",
    ".popsection",
);

unsafe extern "C" {
    static shunt_debug: Option<&'static Debug>;
}

/// The beginning of `struct r_debug` (link.h), which exists for debuggers.
#[repr(C)]
struct Debug {
    version: c_int,
    first: *const LinkMap,
}

/// The beginning of `struct link_map`.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: usize,
    next: *const LinkMap,
}

/// Returns libc's own dl_iterate_phdr. The sanitizers' runtimes have a hook in front of it, which
/// crashes before the runtime has begun. A runtime that begins looks functions up, and so calls
/// the shim.
#[inline(never)]
fn iterate() -> Iterate {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let mut found = FOUND.load(Relaxed);
    if found.is_null() {
        // SAFETY: the dynamic linker relocates it before any code of this library runs.
        found = unsafe { shunt_debug }.map_or(std::ptr::null_mut(), find_iterate);
        if found.is_null() {
            found = libc::dl_iterate_phdr as *mut c_void;
        }
        FOUND.store(found, Relaxed);
    }
    // SAFETY: the function has this prototype.
    unsafe { std::mem::transmute::<*mut c_void, Iterate>(found) }
}

fn find_iterate(debug: &Debug) -> *mut c_void {
    let mut next = debug.first;
    // SAFETY: libc is among the libraries that the program began with. They are the first of the
    // list and are not unloaded.
    while let Some(map) = unsafe { next.as_ref() } {
        // SAFETY: zeroes are a valid segment, of type PT_NULL.
        let mut segment = unsafe { std::mem::zeroed::<libc::Elf64_Phdr>() };
        segment.p_type = libc::PT_DYNAMIC;
        segment.p_vaddr = map.dynamic.wrapping_sub(map.base) as u64;
        let library = Library { base: map.base, segments: &[segment], name: c"" };
        if library.own_name().is_some_and(|name| name.to_bytes().starts_with(b"libc.so")) {
            return library.address_of(c"dl_iterate_phdr");
        }
        next = map.next;
    }
    std::ptr::null_mut()
}

unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, visitor: *mut c_void) -> c_int {
    // SAFETY: `info` is the dynamic linker's description of a loaded library. `visitor` comes from
    // `each_library`.
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
    /// Returns whether the address is in one of its loaded segments.
    pub(crate) fn has(&self, address: usize) -> bool {
        let is_inside = |segment: &libc::Elf64_Phdr| {
            let from = self.base.wrapping_add(segment.p_vaddr as usize);
            segment.p_type == libc::PT_LOAD && (from..from + segment.p_memsz as usize).contains(&address)
        };
        self.segments.iter().any(is_inside)
    }

    /// Returns its DT_SONAME.
    pub(crate) fn own_name(&self) -> Option<&CStr> {
        const DT_STRTAB: usize = 5;
        const DT_SONAME: usize = 14;
        let (names, offset) = (self.table(DT_STRTAB)?, self.number(DT_SONAME)?);
        // SAFETY: the name is in the library's string table.
        Some(unsafe { CStr::from_ptr((names + offset) as *const c_char) })
    }

    /// Returns the addresses from its first byte to its last.
    pub(crate) fn range(&self) -> std::ops::Range<usize> {
        let loaded = || self.segments.iter().filter(|segment| segment.p_type == libc::PT_LOAD);
        let at = |address: u64| self.base.wrapping_add(address as usize);
        let from = loaded().map(|one| at(one.p_vaddr)).min().unwrap_or(0);
        from..loaded().map(|one| at(one.p_vaddr + one.p_memsz)).max().unwrap_or(from)
    }

    /// Returns the address of a table in its dynamic section.
    pub(crate) fn table(&self, wanted: usize) -> Option<usize> {
        let at = self.number(wanted)?;
        // glibc replaces the file's addresses by addresses in memory. musl, and the kernel in its
        // vDSO, do not.
        Some(if at < self.base { self.base + at } else { at })
    }

    /// Returns an entry of its dynamic section.
    pub(crate) fn number(&self, wanted: usize) -> Option<usize> {
        let dynamic = self.segments.iter().find(|segment| segment.p_type == libc::PT_DYNAMIC)?;
        let entries = self.base.wrapping_add(dynamic.p_vaddr as usize) as *const [usize; 2];
        // SAFETY: an entry of kind 0 ends the section.
        let found =
            (0..).map(|index| unsafe { *entries.add(index) }).find(|[kind, _]| [wanted, 0].contains(kind));
        found.filter(|[kind, _]| *kind != 0).map(|[_, number]| number)
    }

    /// Returns the names of all functions and data that it exports.
    pub(crate) fn exports(&self) -> impl Iterator<Item = &CStr> {
        self.symbols().map(|symbol| self.name_of(symbol))
    }

    /// Returns the name and the address of each function that it defines, in all versions.
    pub(crate) fn functions(&self) -> impl Iterator<Item = (&CStr, usize)> {
        const FUNCTION: u8 = 2;
        let is_defined = |symbol: &&libc::Elf64_Sym| symbol.st_info & 0xf == FUNCTION && symbol.st_shndx != 0;
        self.symbols()
            .filter(is_defined)
            .map(|symbol| (self.name_of(symbol), self.base.wrapping_add(symbol.st_value as usize)))
    }

    fn name_of(&self, symbol: &libc::Elf64_Sym) -> &CStr {
        const DT_STRTAB: usize = 5;
        let names = self.table(DT_STRTAB).unwrap_or(0);
        // SAFETY: the string table has the name of each symbol.
        unsafe { CStr::from_ptr((names + symbol.st_name as usize) as *const c_char) }
    }

    fn symbols(&self) -> impl Iterator<Item = &libc::Elf64_Sym> {
        const DT_SYMTAB: usize = 6;
        const DT_GNU_HASH: usize = 0x6fff_fef5;
        const WORDS_OF_HEAD: usize = 4;
        let symbols = self.table(DT_SYMTAB).unwrap_or(0) as *const libc::Elf64_Sym;
        let hashes = self.table(DT_GNU_HASH).unwrap_or(0) as *const u32;
        // SAFETY: a linker made the tables. Each bucket has a list of hashes, and the last one in
        // the list is odd.
        let word = move |index: usize| unsafe { *hashes.add(index) };
        let [buckets, first, words_of_filter] = match hashes.is_null() {
            true => [0; 3],
            false => [0, 1, 2].map(|index| word(index) as usize),
        };
        let heads = WORDS_OF_HEAD + 2 * words_of_filter;
        let starts = (0..buckets).map(move |bucket| word(heads + bucket) as usize);
        let list = move |start: usize| {
            let is_last = move |index: usize| word(heads + buckets + index - first) & 1 == 1;
            std::iter::successors(Some(start), move |index| (!is_last(*index)).then_some(index + 1))
        };
        // SAFETY: as above.
        starts
            .filter(move |start| *start >= first)
            .flat_map(list)
            .map(move |index| unsafe { &*symbols.add(index) })
    }

    /// Returns the address of a function or variable from the hash table, or null. If there are
    /// several versions, returns the default one.
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
        // SAFETY: a linker made the tables. The lists of hashes are in the order of the symbols,
        // and the last hash of each list is odd.
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

/// Returns how often the dynamic linker has added an object, in all its namespaces.
pub(crate) fn times_added() -> u64 {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, times: *mut c_void) -> c_int {
        // SAFETY: `info` is the dynamic linker's description of an object, and `times` points to
        // the local below.
        unsafe { times.cast::<u64>().write((*info).dlpi_adds) };
        1
    }
    let mut times = 0_u64;
    // SAFETY: `visit` takes a pointer to a `u64`.
    unsafe { iterate()(Some(visit), (&raw mut times).cast()) };
    times
}
