//! What the shim calls that has not always been in libc. Until 2.33 glibc had the functions of the dynamic linker, of threads and of
//! POSIX AIO in libraries of their own, and a few of files in none at all. To need those libraries would have them loaded into every
//! program, which is another program then: libc does more for one that has threads. To need newer names of these functions would keep the
//! shim, and by its LD_PRELOAD the program too, from being started where libc is older. So the dynamic linker is asked for none of them:
//! dlsym is looked for here, and finds the others. Where libc has none, what it would find is looked for here as well: such a glibc's
//! allocates, and the allocator may be what makes the call that needs a function.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use crate::base::hidden::{c_name, hidden};

std::arch::global_asm!(
    ".weak shunt_dlsym",
    ".pushsection .data.rel.ro.shunt_stand_in, \"aw\", @progbits",
    ".balign 8",
    ".globl shunt_stand_in",
    ".hidden shunt_stand_in",
    ".type shunt_stand_in, @object",
    ".size shunt_stand_in, 8",
    "shunt_stand_in: .quad shunt_dlsym",
    ".popsection",
);

type Symbol = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

unsafe extern "C" {
    /// What stands in for dlsym where there is no dynamic linker (`door::libc`).
    static shunt_stand_in: Option<Symbol>;
}

/// See dlsym(3).
///
/// # Safety
/// As in C.
unsafe extern "C" fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let mut found = FOUND.load(Relaxed);
    if found.is_null() {
        // SAFETY: written before anything ran.
        let stand_in = unsafe { shunt_stand_in };
        found = stand_in.map_or_else(symbol_of_libc, |stand_in| stand_in as *mut c_void);
        FOUND.store(found, Relaxed);
    }
    // SAFETY: the caller's promise.
    let name_in_c = unsafe { CStr::from_ptr(name) };
    if found.is_null() {
        if [libc::RTLD_NEXT, libc::RTLD_DEFAULT].contains(&library) {
            return find_behind(name_in_c);
        }
        found = find_behind(c"dlsym");
    }
    // SAFETY: it has this prototype, or is null, which is none; the rest is the caller's promise.
    unsafe {
        let symbol = std::mem::transmute::<*mut c_void, Option<Symbol>>(found);
        symbol.map_or(std::ptr::null_mut(), |symbol| symbol(library, name))
    }
}

hidden!(dlsym, dlsym);

/// dlsym, if libc has it.
fn symbol_of_libc() -> *mut c_void {
    let mut found = std::ptr::null_mut();
    each_library(&mut |library| {
        let is_libc = library.has(libc::__errno_location as *const () as usize);
        if is_libc {
            found = library.address_of(c"dlsym");
        }
        is_libc
    });
    found
}

/// What the first library behind this one has under that name, or null: in the order in which they were loaded, which is that of the
/// program's look-ups. Also of one that has come after the program's start, where RTLD_NEXT does not look.
pub(crate) fn find_behind(name: &CStr) -> *mut c_void {
    let (mut is_behind, mut found) = (false, std::ptr::null_mut());
    each_library(&mut |library| {
        if is_behind {
            found = library.address_of(name);
        }
        is_behind |= library.has(visit as *const () as usize);
        !found.is_null()
    });
    found
}

/// One that is loaded.
struct Library<'a> {
    info: &'a libc::dl_phdr_info,
}

/// Called with each until it says that this was the last.
fn each_library(mut visitor: &mut dyn FnMut(&Library<'_>) -> bool) {
    // SAFETY: what the function below takes.
    unsafe { libc::dl_iterate_phdr(Some(visit), std::ptr::from_mut(&mut visitor).cast()) };
}

unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, visitor: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker's own description of a library that is loaded, and the visitor above.
    unsafe {
        let visitor = visitor.cast::<&mut dyn FnMut(&Library<'_>) -> bool>();
        (*visitor)(&Library { info: &*info }).into()
    }
}

impl Library<'_> {
    fn base(&self) -> usize {
        self.info.dlpi_addr as usize
    }

    fn segments(&self) -> &[libc::Elf64_Phdr] {
        // SAFETY: the dynamic linker's list, as long as it says.
        unsafe { std::slice::from_raw_parts(self.info.dlpi_phdr, self.info.dlpi_phnum.into()) }
    }

    /// Whether the address is in it.
    fn has(&self, address: usize) -> bool {
        let is_inside = |segment: &libc::Elf64_Phdr| {
            let from = self.base().wrapping_add(segment.p_vaddr as usize);
            segment.p_type == libc::PT_LOAD && (from..from + segment.p_memsz as usize).contains(&address)
        };
        self.segments().iter().any(is_inside)
    }

    /// A table of its dynamic section.
    fn table(&self, wanted: usize) -> Option<usize> {
        let dynamic = self.segments().iter().find(|segment| segment.p_type == libc::PT_DYNAMIC)?;
        let entries = self.base().wrapping_add(dynamic.p_vaddr as usize) as *const [usize; 2];
        // SAFETY: the section ends in a zero.
        let found =
            (0..).map(|index| unsafe { *entries.add(index) }).find(|[kind, _]| [wanted, 0].contains(kind));
        let [_, at] = found.filter(|[kind, _]| *kind != 0)?;
        // glibc writes addresses where musl, and the kernel's own, leave what is in the file.
        Some(if at < self.base() { self.base() + at } else { at })
    }

    /// The address of a function, or of data, by the hash table, or null. Of several versions it is the one that programs are linked with.
    fn address_of(&self, name: &CStr) -> *mut c_void {
        self.look_up(name).unwrap_or(std::ptr::null_mut())
    }

    fn look_up(&self, name: &CStr) -> Option<*mut c_void> {
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
                    return Some((self.base() + symbol.st_value as usize) as *mut c_void);
                }
                if start < first || own & 1 == 1 {
                    break;
                }
            }
        }
        None
    }
}

/// What is told of an address without dladdr: in which library it is.
unsafe fn library_of(address: *const c_void, info: *mut libc::Dl_info) -> c_int {
    let mut is_found = 0;
    each_library(&mut |library| {
        if library.has(address as usize) {
            // SAFETY: the caller's structure. The name stays as long as the library does.
            unsafe {
                (*info).dli_fname = library.info.dlpi_name;
                (*info).dli_fbase = library.base() as *mut c_void;
            }
            is_found = 1;
        }
        is_found != 0
    });
    is_found
}

/// Wherever it is.
#[inline(never)]
fn find(cell: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let mut found = cell.load(Relaxed);
    if found.is_null() {
        // SAFETY: a look-up of a constant name.
        found = unsafe { dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        if found.is_null() {
            found = find_behind(name);
        }
        cell.store(found, Relaxed);
    }
    found
}

/// Functions that are elsewhere, and what each answers where it is nowhere.
macro_rules! elsewhere {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $without:expr;)*) => { $(
        unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
            static CELL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            let found = find(&CELL, const { c_name(concat!(stringify!($name), "\0")) });
            // SAFETY: it has this prototype, or is null, which is none.
            let found = unsafe {
                std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($ty),*) -> $ret>>(found)
            };
            match found {
                // SAFETY: the caller's promise.
                Some(function) => unsafe { function($($arg),*) },
                None => $without,
            }
        }

        hidden!($name, $name);
    )* };
}

type AtEnd = unsafe extern "C" fn(*mut c_void);

elsewhere! {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void = std::ptr::null_mut();
    fn dlclose(library: *mut c_void) -> c_int = -1;
    fn dladdr(address: *const c_void, info: *mut libc::Dl_info) -> c_int =
        // SAFETY: the caller's promise.
        unsafe { library_of(address, info) };
    fn pthread_key_create(key: *mut c_uint, at_end: Option<AtEnd>) -> c_int = libc::EAGAIN;
    fn pthread_key_delete(key: c_uint) -> c_int = libc::EINVAL;
    fn pthread_setspecific(key: c_uint, value: *const c_void) -> c_int = libc::EINVAL;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_looked_for_here_is_what_the_dynamic_linker_has() {
        // Some have several versions.
        for name in [c"dlsym", c"getpid", c"posix_spawn", c"pthread_cond_wait", c"fcntl64", c"aio_read"] {
            // SAFETY: a look-up of a constant name.
            let expected = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
            assert!(!expected.is_null(), "{name:?}");
            assert_eq!(find_behind(name), expected, "{name:?}");
        }
        assert!(find_behind(c"shunt_has_no_such_function").is_null());
    }

    #[test]
    fn an_address_is_told_as_by_dladdr() {
        let address = libc::getpid as *const c_void;
        // SAFETY: zeroes are valid structures.
        unsafe {
            let (mut ours, mut theirs) =
                (std::mem::zeroed::<libc::Dl_info>(), std::mem::zeroed::<libc::Dl_info>());
            assert!(library_of(address, &mut ours) != 0 && libc::dladdr(address, &mut theirs) != 0);
            assert_eq!(ours.dli_fbase, theirs.dli_fbase);
            assert_eq!(CStr::from_ptr(ours.dli_fname), CStr::from_ptr(theirs.dli_fname));
            assert_eq!(library_of(std::ptr::null(), &mut ours), 0);
        }
    }

    #[test]
    fn a_name_that_nobody_has_is_not_found() {
        let mut cell = AtomicPtr::new(std::ptr::null_mut());
        assert!(find(&cell, c"shunt_has_no_such_function").is_null() && cell.get_mut().is_null());
        assert!(!find(&cell, c"dladdr").is_null() && !cell.get_mut().is_null());
    }
}
