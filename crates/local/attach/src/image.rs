//! The functions of a loaded object, from its file.

use std::ops::Range;
use std::path::{Path, PathBuf};

use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, Object, ObjectSegment, ObjectSymbol};

use crate::Refusal;
use crate::process::{Mapping, Process};

/// A loaded object.
#[derive(Debug)]
pub(crate) struct Image {
    content: Vec<u8>,
    bias: u64,
    pub(crate) path: PathBuf,
    /// Another file, or none, has the path now.
    pub(crate) is_replaced: bool,
}

type Elf<'a> = ElfFile64<'a, Endianness>;

impl Image {
    /// Returns the object that the program has loaded from the file whose path `is_it`.
    pub(crate) fn find(
        process: &Process,
        mappings: &[Mapping],
        is_it: impl Fn(&Path) -> bool,
    ) -> Result<Option<Image>, Refusal> {
        let Some(first) = mappings.iter().find(|one| one.inode != 0 && one.offset == 0 && is_it(&one.path))
        else {
            return Ok(None);
        };
        let content = process.content(first)?;
        let lowest = {
            let file = parse(&content, &first.path)?;
            let loaded = file.segments().map(|segment| segment.address());
            loaded.min().unwrap_or(0)
        };
        Ok(Some(Image {
            content,
            bias: first.range.start.wrapping_sub(lowest & !0xfff),
            path: first.path.clone(),
            is_replaced: first.is_removed,
        }))
    }

    fn file(&self) -> Result<Elf<'_>, Refusal> {
        parse(&self.content, Path::new("a library"))
    }

    /// Returns the addresses of an exported symbol.
    pub(crate) fn symbol(&self, name: &str) -> Result<Option<Range<u64>>, Refusal> {
        let file = self.file()?;
        let found = file.dynamic_symbols().find(|one| one.name() == Ok(name) && one.is_definition());
        Ok(found.map(|one| {
            let from = self.bias.wrapping_add(one.address());
            from..from + one.size()
        }))
    }

    /// Returns the address of these bytes in its code.
    pub(crate) fn code(&self, wanted: &[u8]) -> Result<Option<u64>, Refusal> {
        let file = self.file()?;
        for segment in file.elf_program_headers() {
            let is_code = segment.p_flags(Endianness::Little) & object::elf::PF_X != 0;
            let is_loaded = segment.p_type(Endianness::Little) == object::elf::PT_LOAD;
            let content = segment.data(Endianness::Little, self.content.as_slice()).unwrap_or_default();
            if let Some(at) = content.windows(wanted.len()).position(|one| one == wanted)
                && is_code
                && is_loaded
            {
                let address = segment.p_vaddr(Endianness::Little) + at as u64;
                return Ok(Some(self.bias.wrapping_add(address)));
            }
        }
        Ok(None)
    }
}

fn parse<'a>(content: &'a [u8], path: &Path) -> Result<Elf<'a>, Refusal> {
    Elf::parse(content).map_err(|_| Refusal::File(path.display().to_string()))
}
