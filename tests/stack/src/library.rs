//! Reads the parts of a library's file that the analysis needs: its functions, its relocations and
//! its code.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use object::elf;
use object::read::elf::ElfFile64;
use object::{
    Object, ObjectSection, ObjectSymbol, RelocationFlags, RelocationTarget, SectionKind, SymbolKind,
};

/// A function of the library.
pub struct Function {
    /// The demangled name.
    pub name: String,
    /// The address after the last byte.
    pub end: u64,
}

/// The content of a memory word after relocation.
#[derive(Clone, Debug)]
pub enum Linked {
    /// The address of an object in this library.
    Local(u64),
    /// The address of a function of another library.
    Import(String),
}

/// A library that has been read.
pub struct Library {
    /// Functions, by address.
    pub functions: BTreeMap<u64, Function>,
    /// Exported functions, by name.
    pub exports: BTreeMap<String, u64>,
    /// Relocated words, by address.
    pub linked: HashMap<u64, Linked>,
    /// The names of all functions, also of those that share an address, and of all imports.
    pub names: BTreeSet<String>,
    sections: Vec<(u64, Vec<u8>)>,
}

impl Library {
    /// Reads `file`, which must have a symbol table.
    pub fn read(file: &[u8]) -> Library {
        let elf = ElfFile64::<object::Endianness>::parse(file).expect("an ELF file of 64 bits");
        let mut functions = BTreeMap::new();
        let mut names = BTreeSet::new();
        for symbol in elf.symbols().filter(|one| one.kind() == SymbolKind::Text && one.is_definition()) {
            let name = format!("{:#}", rustc_demangle::demangle(symbol.name().expect("a name")));
            let end = symbol.address() + symbol.size();
            names.insert(name.clone());
            functions.entry(symbol.address()).or_insert(Function { name, end });
        }
        let exports: BTreeMap<_, _> = elf
            .dynamic_symbols()
            .filter(|one| one.is_definition() && one.kind() == SymbolKind::Text)
            .map(|one| (one.name().expect("a name").to_owned(), one.address()))
            .collect();
        let mut linked = HashMap::new();
        for (place, relocation) in elf.dynamic_relocations().into_iter().flatten() {
            let RelocationFlags::Elf { r_type } = relocation.flags() else { continue };
            let name = match relocation.target() {
                RelocationTarget::Symbol(index) => {
                    let table = elf.dynamic_symbol_table().expect("it has relocations");
                    let symbol = object::ObjectSymbolTable::symbol_by_index(&table, index).expect("listed");
                    Some(symbol.name().expect("a name").to_owned())
                }
                _ => None,
            };
            let what = match (r_type, name) {
                (elf::R_X86_64_RELATIVE, _) => Linked::Local(relocation.addend() as u64),
                // In the link order this library precedes the others.
                (elf::R_X86_64_GLOB_DAT | elf::R_X86_64_JUMP_SLOT | elf::R_X86_64_64, Some(name)) => exports
                    .get(&name)
                    .map_or_else(|| Linked::Import(name.clone()), |address| Linked::Local(*address)),
                _ => continue,
            };
            linked.insert(place, what);
        }
        let constant = |kind| matches!(kind, SectionKind::Text | SectionKind::ReadOnlyData);
        let sections = elf
            .sections()
            .filter(|one| constant(one.kind()))
            .map(|one| (one.address(), one.data().expect("its bytes").to_vec()))
            .collect();
        names.extend(elf.dynamic_symbols().filter_map(|one| one.name().ok()).map(str::to_owned));
        Library { functions, exports, linked, names, sections }
    }

    /// Returns the bytes of code from `start` to `end`.
    pub fn code(&self, start: u64, end: u64) -> &[u8] {
        let (at, bytes) = self.section(start).expect("an address of code");
        &bytes[(start - at) as usize..((end - at) as usize).min(bytes.len())]
    }

    /// Returns the four-byte number at `place`, if it is in a section that never changes.
    pub fn number(&self, place: u64) -> Option<i32> {
        let (at, bytes) = self.section(place)?;
        let bytes = bytes.get((place - at) as usize..)?.first_chunk()?;
        Some(i32::from_le_bytes(*bytes))
    }

    fn section(&self, place: u64) -> Option<&(u64, Vec<u8>)> {
        self.sections.iter().find(|(at, bytes)| (*at..at + bytes.len() as u64).contains(&place))
    }

    /// Returns the name of the function that begins at `address`.
    pub fn name(&self, address: u64) -> &str {
        self.functions.get(&address).map_or("?", |function| &function.name)
    }

    /// Iterates over words of the library's data that hold the address of a function, in vtables
    /// and elsewhere.
    pub fn pointed_to(&self) -> impl Iterator<Item = (u64, u64)> {
        self.linked.iter().filter_map(|(place, linked)| match linked {
            Linked::Local(address) if self.functions.contains_key(address) => Some((*place, *address)),
            _ => None,
        })
    }
}
