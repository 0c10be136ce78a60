//! Calls that are bound past the shim (L11). A library that was loaded with RTLD_DEEPBIND finds
//! libc's functions before the shim's. Where the dynamic linker has written the address of such a
//! function, this module writes the address of the hook.
//!
//! It changes slots of the global offset table and pointers in data, for names that the shim
//! exports. It leaves slots that the dynamic linker has not relocated yet, and checks them again
//! before the first offer.
//!
//! ```text
//! the slot's value points to     bound as usual     perhaps bound deep
//! libc's function                write the hook     write the hook
//! the object's own PLT           leave              write the hook; give up if another library
//!                                                     has the name
//! an unrelocated address         check again        check again
//! any other place                leave              leave
//! ```

use std::ffi::{CStr, c_char};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::*};

use rustix::mm::{MprotectFlags, mprotect};
use shunt_sys::memory;

use super::known;
use crate::base::library::{Library, each_library};

/// Identifies a loaded object by its place and by its path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Object {
    base: usize,
    segments: usize,
    path: u64,
}

/// The result of a check of all bindings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    /// Every call leads to the hooks.
    Here,
    /// The dynamic linker is still relocating some slots.
    NotYet,
    /// Some calls of the object at this address may lead past the hooks. 0 if it is unknown which
    /// object.
    Unclear(usize),
}

impl Bound {
    /// Returns the result for two objects together.
    fn and(self, other: Bound) -> Bound {
        match (self, other) {
            (Bound::Unclear(at), _) | (_, Bound::Unclear(at)) => Bound::Unclear(at),
            (Bound::NotYet, _) | (_, Bound::NotYet) => Bound::NotYet,
            _ => Bound::Here,
        }
    }
}

/// The kind of slot that a relocation fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A call through the procedure linkage table, which may be bound at the first call.
    Call,
    /// Any other address of a function.
    Address,
}

/// The target of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leads {
    /// A function of libc, or of another library whose functions have hooks.
    Behind,
    /// The object's own procedure linkage table: the call has not been made yet.
    Nowhere,
    /// An address in the file: the slot has not been relocated.
    Unrelocated,
    Elsewhere,
}

/// What this module does with a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    Leave,
    /// Write the hook's address to the slot.
    Put,
    /// Check the slot again later.
    Wait,
    GiveUp,
}

/// Returns the target of a slot with this `value`. The object's addresses are `own`. It imports the
/// name if it does not define it.
fn leads(kind: Kind, value: usize, own: &Range<usize>, imports: bool, is_behind: bool) -> Leads {
    match () {
        () if is_behind => Leads::Behind,
        () if value == 0 => Leads::Unrelocated,
        () if own.contains(&value) && kind == Kind::Call && imports => Leads::Nowhere,
        // An offset in the file. No memory of the process has such an address.
        () if value < own.end - own.start && value < own.start => Leads::Unrelocated,
        () => Leads::Elsewhere,
    }
}

/// Returns what to do with a slot for the name of a hook, in an object that is perhaps bound
/// `deep`.
fn deed(leads: Leads, deep: bool, others_define_it: impl FnOnce() -> bool) -> Deed {
    match leads {
        Leads::Behind => Deed::Put,
        Leads::Unrelocated => Deed::Wait,
        Leads::Nowhere if !deep => Deed::Leave,
        // The first call would bind the slot to the other library's function, or past it.
        Leads::Nowhere if others_define_it() => Deed::GiveUp,
        Leads::Nowhere => Deed::Put,
        Leads::Elsewhere => Deed::Leave,
    }
}

impl Object {
    pub(super) fn of(library: &Library<'_>) -> Object {
        let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        let path = library.name.to_bytes().iter().fold(0xcbf2_9ce4_8422_2325, fnv);
        Object { base: library.base, segments: library.segments.as_ptr() as usize, path }
    }
}

/// Appends all loaded objects.
pub(super) fn list(objects: &mut Vec<Object>) {
    each_library(&mut |library| {
        objects.push(Object::of(library));
        false
    });
}

/// Redirects every call of a hook's name to the hook. Objects that are not in `plain` may have been
/// bound deep. If there is no list, none has been.
pub(super) fn rebind(plain: Option<&[Object]>) -> Bound {
    let Some(work) = Work::begin(plain) else { return Bound::Unclear(0) };
    let mut bound = Bound::Here;
    each_library(&mut |library| {
        if is_judged(library) {
            bound = bound.and(work.rebind_one(library));
        }
        matches!(bound, Bound::Unclear(_))
    });
    bound
}

/// Redirects the calls of objects that are not in `plain`, as far as possible.
pub(super) fn rebind_others_than(plain: &[Object]) -> Bound {
    let Some(work) = Work::begin(Some(plain)) else { return Bound::Unclear(0) };
    let mut bound = Bound::Here;
    each_library(&mut |library| {
        if is_judged(library) && !plain.contains(&Object::of(library)) {
            bound = bound.and(work.rebind_one(library));
        }
        false
    });
    bound
}

/// Extends the lifetime of a library's description.
///
/// # Safety
/// The library must stay loaded for as long as the result is used.
pub(super) unsafe fn for_good(library: &Library<'_>) -> Library<'static> {
    // SAFETY: the caller's promise.
    unsafe {
        Library {
            base: library.base,
            segments: std::slice::from_raw_parts(library.segments.as_ptr(), library.segments.len()),
            name: CStr::from_ptr(library.name.as_ptr()),
        }
    }
}

pub(crate) fn is_ours(library: &Library<'_>) -> bool {
    library.has(rebind as *const () as usize)
}

/// Returns whether the calls of this library have to lead to the hooks.
pub(super) fn is_judged(library: &Library<'_>) -> bool {
    !is_ours(library) && !is_behind(library) && !known::is_covered(library.name.to_bytes())
}

/// Returns whether the hooks stand for functions of this library.
pub(super) fn is_behind(library: &Library<'_>) -> bool {
    library.has(libc::__errno_location as *const () as usize) || known::is_behind(library.name.to_bytes())
}

/// The addresses to redirect in a program that runs already.
#[derive(Debug, Default)]
pub(crate) struct Redirections {
    /// Each function of libc that has a hook, with that hook. The program may have its address
    /// anywhere in its memory.
    pub(crate) functions: Vec<[usize; 2]>,
    /// Each slot that the dynamic linker will bind at the first call, with the hook. Also each slot
    /// of this library for one of its hooks that the dynamic linker has bound to libc's function.
    pub(crate) slots: Vec<[usize; 2]>,
    /// The start and the end of each object that goes on calling libc.
    pub(crate) untouched: Vec<[usize; 2]>,
}

/// Why a program that runs cannot be entered.
#[derive(Debug)]
pub(crate) enum Unfit {
    /// An object defines a function that has a hook.
    Interposed(&'static CStr),
    /// The dynamic linker is relocating an object.
    Loading,
}

/// Lists the addresses to redirect in a program that this library has been loaded into.
pub(crate) fn redirections() -> Result<Redirections, Unfit> {
    let mut found = Redirections::default();
    let Some(work) = Work::begin(Some(&[])) else { return Err(Unfit::Loading) };
    for library in &work.behind {
        for (name, address) in library.functions() {
            if let Some(hook) = work.ours.look_up(name)
                && !found.functions.iter().any(|[function, _]| *function == address)
            {
                found.functions.push([address, hook as usize]);
            }
        }
    }
    // SAFETY: the value of the auxiliary vector.
    let linker = unsafe { libc::getauxval(libc::AT_BASE) as usize };
    let mut unfit = None;
    each_library(&mut |library| {
        if is_ours(library) {
            work.find_own_slots(&mut found.slots);
        }
        if is_ours(library) || is_behind(library) || library.has(linker) {
            let range = library.range();
            found.untouched.push([range.start, range.end]);
        } else {
            unfit = work.find_slots(library, &mut found.slots).err();
        }
        unfit.is_some()
    });
    unfit.map_or(Ok(found), Err)
}

struct Work<'a> {
    ours: Library<'static>,
    behind: Vec<Library<'static>>,
    plain: Option<&'a [Object]>,
}

/// A relocation in the ELF format.
#[repr(C)]
#[derive(Clone, Copy)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

impl Relocation {
    fn kind(self) -> Option<Kind> {
        #[cfg(target_arch = "x86_64")]
        const KINDS: [u32; 3] = [7, 6, 1];
        #[cfg(target_arch = "aarch64")]
        const KINDS: [u32; 3] = [1026, 1025, 257];
        let kind = self.info as u32;
        match KINDS.iter().position(|known| *known == kind)? {
            0 => Some(Kind::Call),
            _ => Some(Kind::Address),
        }
    }

    fn symbol(self) -> usize {
        (self.info >> 32) as usize
    }
}

impl Work<'_> {
    fn begin(plain: Option<&[Object]>) -> Option<Work<'_>> {
        let mut ours = None;
        let mut behind = Vec::new();
        each_library(&mut |library| {
            if is_ours(library) {
                // SAFETY: this library is not unloaded while it runs.
                ours = Some(unsafe { for_good(library) });
            } else if is_behind(library) {
                // SAFETY: libc and its parts stay loaded. liburing is used only below, before the
                // end of this walk's caller.
                behind.push(unsafe { for_good(library) });
            }
            false
        });
        Some(Work { ours: ours?, behind, plain })
    }

    fn rebind_one(&self, library: &Library<'_>) -> Bound {
        const DT_PLTRELSZ: usize = 2;
        const DT_RELA: usize = 7;
        const DT_RELASZ: usize = 8;
        const DT_PLTREL: usize = 20;
        const DT_JMPREL: usize = 23;
        const DT_RELACOUNT: usize = 0x6fff_fff9;
        const SIZE: usize = size_of::<Relocation>();
        let calls = (library.table(DT_JMPREL), library.number(DT_PLTRELSZ).unwrap_or(0) / SIZE, 0);
        // The relocations without a symbol come first.
        let nameless = library.number(DT_RELACOUNT).unwrap_or(0);
        let others = (library.table(DT_RELA), library.number(DT_RELASZ).unwrap_or(0) / SIZE, nameless);
        if library.number(DT_PLTREL).is_some_and(|kind| kind != DT_RELA) {
            return Bound::Unclear(library.range().start);
        }
        let deep = self.plain.is_some_and(|plain| !plain.contains(&Object::of(library)));
        let own = library.range();
        let mut bound = Bound::Here;
        for (table, count, first) in [calls, others] {
            let Some(table) = table else { continue };
            for index in first..count {
                // SAFETY: the object's own table. The object is not unloaded during the dynamic
                // linker's walk over its objects.
                let one = unsafe { (table as *const Relocation).add(index).read_unaligned() };
                match self.rebind_slot(library, one, &own, deep) {
                    Some(Deed::GiveUp) => bound = Bound::Unclear(own.start),
                    Some(Deed::Wait) => bound = bound.and(Bound::NotYet),
                    _ => {}
                }
            }
        }
        bound
    }

    /// Lists the slots of this library for functions that it defines. One hook may call another by
    /// its name, and a library that is loaded first finds its own.
    fn find_own_slots(&self, slots: &mut Vec<[usize; 2]>) {
        const DT_PLTRELSZ: usize = 2;
        const DT_SYMTAB: usize = 6;
        const DT_RELA: usize = 7;
        const DT_RELASZ: usize = 8;
        const DT_JMPREL: usize = 23;
        let Some(symbols) = self.ours.table(DT_SYMTAB) else { return };
        for (table, len) in [(DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)] {
            let Some(table) = self.ours.table(table) else { continue };
            for index in 0..self.ours.number(len).unwrap_or(0) / size_of::<Relocation>() {
                // SAFETY: this library's own tables.
                let (one, symbol) = unsafe {
                    let one = (table as *const Relocation).add(index).read_unaligned();
                    (one, &*(symbols as *const libc::Elf64_Sym).add(one.symbol()))
                };
                let is_own = one.symbol() != 0 && symbol.st_shndx != 0 && symbol.st_info & 0xf == 2;
                if one.kind().is_some() && is_own {
                    let function = self.ours.base.wrapping_add(symbol.st_value as usize);
                    slots.push([
                        self.ours.base.wrapping_add(one.offset as usize),
                        function.wrapping_add_signed(one.addend as isize),
                    ]);
                }
            }
        }
    }

    /// Lists the slots of a library that will be bound at the first call.
    fn find_slots(&self, library: &Library<'_>, slots: &mut Vec<[usize; 2]>) -> Result<(), Unfit> {
        const DT_PLTRELSZ: usize = 2;
        const DT_STRTAB: usize = 5;
        const DT_SYMTAB: usize = 6;
        const DT_JMPREL: usize = 23;
        for (name, _) in library.functions() {
            if self.ours.look_up(name).is_some() && self.behind.iter().any(|one| one.look_up(name).is_some())
            {
                // SAFETY: the library's own string. It stays loaded until the answer has been read.
                return Err(Unfit::Interposed(unsafe { CStr::from_ptr(name.as_ptr()) }));
            }
        }
        let (Some(table), Some(names), Some(symbols)) =
            (library.table(DT_JMPREL), library.table(DT_STRTAB), library.table(DT_SYMTAB))
        else {
            return Ok(());
        };
        let own = library.range();
        for index in 0..library.number(DT_PLTRELSZ).unwrap_or(0) / size_of::<Relocation>() {
            // SAFETY: the object's own tables.
            let (one, name) = unsafe {
                let one = (table as *const Relocation).add(index).read_unaligned();
                let symbol = &*(symbols as *const libc::Elf64_Sym).add(one.symbol());
                (one, CStr::from_ptr((names + symbol.st_name as usize) as *const c_char))
            };
            let slot = library.base.wrapping_add(one.offset as usize);
            if one.kind() != Some(Kind::Call)
                || one.symbol() == 0
                || !library.has(slot)
                || !slot.is_multiple_of(align_of::<usize>())
            {
                continue;
            }
            let Some(hook) = self.ours.look_up(name) else { continue };
            // SAFETY: an aligned word of the object.
            let value = unsafe { AtomicUsize::from_ptr(slot as *mut usize) }.load(Relaxed);
            match leads(Kind::Call, value, &own, true, false) {
                Leads::Nowhere => slots.push([slot, hook as usize]),
                Leads::Unrelocated => return Err(Unfit::Loading),
                Leads::Behind | Leads::Elsewhere => {}
            }
        }
        Ok(())
    }

    fn rebind_slot(
        &self,
        library: &Library<'_>,
        one: Relocation,
        own: &Range<usize>,
        deep: bool,
    ) -> Option<Deed> {
        const DT_STRTAB: usize = 5;
        const DT_SYMTAB: usize = 6;
        let kind = one.kind().filter(|_| one.symbol() != 0)?;
        let slot = library.base.wrapping_add(one.offset as usize);
        if !library.has(slot) || !slot.is_multiple_of(align_of::<usize>()) {
            return Some(Deed::GiveUp);
        }
        // SAFETY: an aligned word of the object.
        let value = unsafe { AtomicUsize::from_ptr(slot as *mut usize) }.load(Relaxed);
        let is_behind = self.behind.iter().any(|one| one.has(value));
        let first = leads(kind, value, own, true, is_behind);
        if first == Leads::Elsewhere || first == Leads::Nowhere && !deep {
            return Some(Deed::Leave);
        }
        let (names, symbols) =
            (library.table(DT_STRTAB)?, library.table(DT_SYMTAB)? as *const libc::Elf64_Sym);
        // SAFETY: the object's own tables.
        let (symbol, name) = unsafe {
            let symbol = &*symbols.add(one.symbol());
            (symbol, CStr::from_ptr((names + symbol.st_name as usize) as *const c_char))
        };
        let imports = symbol.st_shndx == 0;
        if !imports && !is_behind {
            return Some(Deed::Leave);
        }
        let hook = self.ours.look_up(name)?;
        if !is_behind && !self.behind.iter().any(|one| one.look_up(name).is_some()) {
            return Some(Deed::Leave);
        }
        let others_define_it = || {
            let mut do_they = false;
            each_library(&mut |other| {
                do_they = is_judged(other) && other.look_up(name).is_some();
                do_they
            });
            do_they
        };
        let deed = deed(leads(kind, value, own, imports, is_behind), deep, others_define_it);
        if deed == Deed::Put && !put(library, slot, hook as usize) {
            return Some(Deed::GiveUp);
        }
        Some(deed)
    }
}

/// Writes a slot. The slot may be in the part that the dynamic linker has made read-only after the
/// relocation. Then this function makes the page writable meanwhile.
fn put(library: &Library<'_>, slot: usize, hook: usize) -> bool {
    // SAFETY: a slot for the address of a function. The hook is a function of the same type.
    if unsafe { memory::put(slot, &hook.to_ne_bytes()) } {
        return true;
    }
    let page = rustix::param::page_size();
    let is_protected = library.segments.iter().any(|segment| {
        let from = library.base.wrapping_add(segment.p_vaddr as usize);
        let to = from.wrapping_add(segment.p_memsz as usize) & !(page - 1);
        segment.p_type == libc::PT_GNU_RELRO && (from & !(page - 1)..to).contains(&slot)
    });
    if !is_protected {
        return false;
    }
    let at = (slot & !(page - 1)) as *mut std::ffi::c_void;
    // SAFETY: the page belongs to the object, and is readable before and after. No other code
    // writes to it any more.
    unsafe {
        let is_open = mprotect(at, page, MprotectFlags::READ | MprotectFlags::WRITE).is_ok();
        if is_open {
            AtomicUsize::from_ptr(slot as *mut usize).store(hook, Release);
            let _ = mprotect(at, page, MprotectFlags::READ);
        }
        is_open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Range<usize> = 0x7f00_0000_0000..0x7f00_0001_0000;

    fn none() -> bool {
        panic!("nobody is to be asked")
    }

    #[test]
    fn a_slot_leads_where_its_value_says() {
        let [inside, file, far] = [OWN.start + 0x1036, 0x1036, 0x7f10_0000_0000];
        for (kind, value, imports, is_behind, expected) in [
            (Kind::Call, far, true, true, Leads::Behind),
            (Kind::Address, far, true, true, Leads::Behind),
            (Kind::Call, far, true, false, Leads::Elsewhere),
            (Kind::Call, inside, true, false, Leads::Nowhere),
            // The object's own function, and a program's PLT entry for a function of libc.
            (Kind::Call, inside, false, false, Leads::Elsewhere),
            (Kind::Address, inside, true, false, Leads::Elsewhere),
            (Kind::Call, file, true, false, Leads::Unrelocated),
            (Kind::Address, 0, true, false, Leads::Unrelocated),
        ] {
            assert_eq!(leads(kind, value, &OWN, imports, is_behind), expected, "{kind:?} {value:x}");
        }
        // A program at a fixed address: its unbound calls are not unrelocated ones.
        assert_eq!(leads(Kind::Call, 0x401036, &(0x400000..0x500000), true, false), Leads::Nowhere);
    }

    #[test]
    fn what_is_bound_past_the_hooks_is_bound_to_them() {
        assert_eq!(deed(Leads::Behind, false, none), Deed::Put);
        assert_eq!(deed(Leads::Behind, true, none), Deed::Put);
        assert_eq!(deed(Leads::Elsewhere, true, none), Deed::Leave);
        assert_eq!(deed(Leads::Unrelocated, false, none), Deed::Wait);
    }

    #[test]
    fn a_call_that_nobody_has_made_is_bound_to_them_only_if_it_would_not_be() {
        assert_eq!(deed(Leads::Nowhere, false, none), Deed::Leave);
        assert_eq!(deed(Leads::Nowhere, true, || false), Deed::Put);
        assert_eq!(deed(Leads::Nowhere, true, || true), Deed::GiveUp);
    }
}
