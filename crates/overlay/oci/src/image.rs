//! Checks whether the shim can be loaded into the programs of a container's image.
//!
//! LD_PRELOAD applies to all programs of a container. So it is set only if none fails or prints an
//! error because of it: every dynamic linker of the image must be able to load the shim and the
//! libraries that the shim needs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::Path;

use object::Endianness;
use object::elf::{FileHeader64, SHT_DYNSYM, STB_WEAK};
use object::read::elf::{FileHeader, Sym};
use object::read::{ReadCache, ReadRef};

use crate::refusal::Refusal;
use crate::rootfs::Rootfs;

/// The dynamic linker of 64-bit programs with glibc.
const LINKER: &str =
    if cfg!(target_arch = "aarch64") { "/lib/ld-linux-aarch64.so.1" } else { "/lib64/ld-linux-x86-64.so.2" };
/// The dynamic linker of 32-bit programs. It would print an error, because it cannot load a 64-bit
/// library.
const LINKER_32: &str =
    if cfg!(target_arch = "aarch64") { "/lib/ld-linux-armhf.so.3" } else { "/lib/ld-linux.so.2" };
/// The dynamic linker of programs with musl.
const LINKER_MUSL: &str =
    if cfg!(target_arch = "aarch64") { "/lib/ld-musl-aarch64.so.1" } else { "/lib/ld-musl-x86_64.so.1" };
/// The directories in which distributions install glibc.
const DIRECTORIES: [&str; 3] = if cfg!(target_arch = "aarch64") {
    ["/lib/aarch64-linux-gnu", "/lib64", "/lib"]
} else {
    ["/lib/x86_64-linux-gnu", "/lib64", "/lib"]
};

/// The limits on reading. An image may come from anyone, and must not make the host read without
/// end.
const MAX_BYTES: u64 = 16 << 20;
const MAX_VERSIONS: usize = 1024;
const MAX_SYMBOLS: usize = 16384;

/// The versions that a library defines or needs, by the library's name.
type Versions = BTreeMap<String, Vec<String>>;

/// Checks that every program of the image can load the shim at `library`, or is static.
pub(crate) fn takes(rootfs: &Rootfs, library: &Path) -> Result<(), Refusal> {
    let (has_glibc, has_musl) = (rootfs.file(LINKER).is_some(), rootfs.file(LINKER_MUSL).is_some());
    if !has_glibc && !has_musl {
        return Err(Refusal::NoLibc);
    }
    let is_other = |name: &String| name.starts_with("ld-musl-") && format!("/lib/{name}") != LINKER_MUSL;
    if let Some(name) = rootfs.names("/lib").into_iter().find(is_other) {
        return Err(Refusal::OtherLinker(format!("/lib/{name}")));
    }
    if rootfs.file(LINKER_32).is_some() {
        return Err(Refusal::OtherLinker(LINKER_32.to_owned()));
    }
    let unreadable = |error: io::Error| Refusal::NoLibrary(format!("{}: {error}", library.display()));
    if has_glibc {
        for (name, versions) in needed(library).map_err(unreadable)? {
            let has = defined(rootfs, &name).ok_or_else(|| Refusal::OldGlibc(name.clone()))?;
            if let Some(missing) = versions.into_iter().find(|version| !has.contains(version)) {
                return Err(Refusal::OldGlibc(missing));
            }
        }
    }
    if has_musl {
        let has = symbols_of_musl(rootfs).ok_or_else(|| Refusal::OldMusl(LINKER_MUSL.to_owned()))?;
        // musl's file functions always use 64-bit offsets, and its linker resolves `open64` as
        // `open`.
        let is_there =
            |name: &str| has.contains(name) || name.strip_suffix("64").is_some_and(|name| has.contains(name));
        let wanted = File::open(library)
            .and_then(|file| read_symbols(&ReadCache::new(file), Wanted).map_err(io::Error::other));
        if let Some(missing) = wanted.map_err(unreadable)?.into_iter().find(|name| !is_there(name)) {
            return Err(Refusal::OldMusl(missing));
        }
    }
    Ok(())
}

/// Returns the symbols that the image's musl defines, or `None` if it cannot be read. musl's libc
/// is also its dynamic linker.
fn symbols_of_musl(rootfs: &Rootfs) -> Option<BTreeSet<String>> {
    let file = rootfs.file(LINKER_MUSL)?;
    file.metadata().is_ok_and(|metadata| metadata.len() <= MAX_BYTES).then_some(())?;
    read_symbols(&ReadCache::new(file), Defined).ok()
}

/// A selection of dynamic symbols.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    /// The symbols that a library defines.
    Defined,
    /// The symbols that a library requires.
    Wanted,
}
use Which::{Defined, Wanted};

fn read_symbols<'d>(data: impl ReadRef<'d>, which: Which) -> object::read::Result<BTreeSet<String>> {
    let header = Header::parse(data)?;
    let endian = header.endian()?;
    let symbols = header.sections(endian, data)?.symbols(endian, data, SHT_DYNSYM)?;
    let mut names = BTreeSet::new();
    for symbol in symbols.iter().take(MAX_SYMBOLS) {
        let is_undefined = symbol.is_undefined(endian);
        let is_meant = match which {
            Defined => !is_undefined,
            Wanted => is_undefined && symbol.st_bind() != STB_WEAK,
        };
        let name = symbol.name(endian, symbols.strings())?;
        if is_meant && !name.is_empty() {
            names.insert(text(name));
        }
    }
    Ok(names)
}

/// Returns the versions that the shim requires, by library.
fn needed(library: &Path) -> io::Result<Versions> {
    let data = ReadCache::new(File::open(library)?);
    read_needed(&data).map_err(io::Error::other)
}

fn read_needed<'d>(data: impl ReadRef<'d>) -> object::read::Result<Versions> {
    let header = Header::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let mut all = Versions::new();
    let Some((files, link)) = sections.gnu_verneed(endian, data)? else { return Ok(all) };
    let strings = sections.strings(endian, data, link)?;
    for file in files {
        let (file, versions) = file?;
        let of_file = all.entry(text(file.file(endian, strings)?)).or_default();
        for version in versions {
            of_file.push(text(version?.name(endian, strings)?));
        }
    }
    Ok(all)
}

/// Returns the versions that the image's library `name` defines, or `None` if there is no readable
/// library.
fn defined(rootfs: &Rootfs, name: &str) -> Option<Vec<String>> {
    let mut files = DIRECTORIES.iter().filter_map(|directory| rootfs.file(&format!("{directory}/{name}")));
    let library = files.find(|file| file.metadata().is_ok_and(|metadata| metadata.len() <= MAX_BYTES))?;
    read_defined(&ReadCache::new(library)).ok()
}

fn read_defined<'d>(data: impl ReadRef<'d>) -> object::read::Result<Vec<String>> {
    let header = Header::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let Some((definitions, link)) = sections.gnu_verdef(endian, data)? else { return Ok(Vec::new()) };
    let strings = sections.strings(endian, data, link)?;
    let mut names = Vec::new();
    for definition in definitions.take(MAX_VERSIONS) {
        let (_, mut parts) = definition?;
        // The first part is the version's own name. Others name its predecessors.
        if let Some(own) = parts.next()? {
            names.push(text(own.name(endian, strings)?));
        }
    }
    Ok(names)
}

type Header = FileHeader64<Endianness>;

fn text(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;
    use std::path::PathBuf;

    /// A host with a shim and a broker's directory, and a bundle whose image has this machine's
    /// glibc.
    pub(crate) struct Fixture {
        pub(crate) directory: tempfile::TempDir,
    }

    impl Fixture {
        pub(crate) fn new() -> Fixture {
            let directory = tempfile::tempdir().unwrap();
            let fixture = Fixture { directory };
            fs::create_dir_all(fixture.path("broker")).unwrap();
            fixture.copy("libm.so.6", "host/libshunt.so");
            fs::create_dir_all(fixture.path("bundle/rootfs/lib")).unwrap();
            fixture.copy(LINKER, &format!("bundle/rootfs{LINKER}"));
            fixture.copy("libc.so.6", &format!("bundle/rootfs{}/libc.so.6", DIRECTORIES[0]));
            fixture
        }

        pub(crate) fn path(&self, name: &str) -> PathBuf {
            self.directory.path().join(name)
        }

        /// A library that needs libc as the shim does.
        pub(crate) fn library(&self) -> PathBuf {
            self.path("host/libshunt.so")
        }

        /// Copies a library of this machine, or a file given by its path.
        fn copy(&self, name: &str, to: &str) {
            let places = DIRECTORIES.map(|directory| Path::new(directory).join(name));
            let from = places.iter().find(|place| place.is_file()).expect("this machine has glibc");
            let to = self.path(to);
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(from, to).unwrap();
        }

        fn takes(&self) -> Result<(), Refusal> {
            takes(&Rootfs::open(&self.path("bundle/rootfs")).unwrap(), &self.library())
        }
    }

    #[test]
    fn an_image_with_the_shims_glibc_takes_it() {
        Fixture::new().takes().unwrap();
    }

    #[test]
    fn an_image_without_either_libc_does_not() {
        let fixture = Fixture::new();
        fs::remove_file(fixture.path(&format!("bundle/rootfs{LINKER}"))).unwrap();
        assert!(matches!(fixture.takes(), Err(Refusal::NoLibc)));
    }

    #[test]
    fn nor_does_one_with_another_linker_beside_it() {
        for name in ["/lib/ld-musl-armhf.so.1", LINKER_32] {
            let fixture = Fixture::new();
            fs::write(fixture.path(&format!("bundle/rootfs{name}")), "").unwrap();
            assert!(matches!(fixture.takes(), Err(Refusal::OtherLinker(other)) if other == name));
        }
    }

    /// Compiles a library of these C functions.
    fn compile(path: &Path, source: &str) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("library.c");
        fs::write(&file, source).unwrap();
        let mut gcc = std::process::Command::new("gcc");
        gcc.args(["-shared", "-fPIC", "-nostdlib", "-o"]).arg(path).arg(file);
        assert!(gcc.status().unwrap().success());
    }

    #[test]
    fn one_of_musl_takes_it_if_that_has_what_the_shim_needs() {
        let fixture = Fixture::new();
        let musl = fixture.path(&format!("bundle/rootfs{LINKER_MUSL}"));
        compile(
            &fixture.path("host/libshunt.so"),
            "int getpid(void), open64(void), may_be(void) __attribute__((weak)); \
             int shim(void) { return getpid() + open64() + (may_be ? may_be() : 0); }",
        );
        compile(&musl, "int getpid(void) { return 1; } int open(void) { return 2; }");
        fixture.takes().unwrap();
        fs::remove_file(fixture.path(&format!("bundle/rootfs{LINKER}"))).unwrap();
        fixture.takes().unwrap();
        compile(&musl, "int open64(void) { return 2; }");
        assert!(matches!(fixture.takes(), Err(Refusal::OldMusl(name)) if name == "getpid"));
        fs::write(musl, "rubbish").unwrap();
        assert!(matches!(fixture.takes(), Err(Refusal::OldMusl(name)) if name == LINKER_MUSL));
    }

    #[test]
    fn nor_does_one_whose_glibc_is_older_or_rubbish() {
        let fixture = Fixture::new();
        let libc = format!("bundle/rootfs{}/libc.so.6", DIRECTORIES[0]);
        // A library that lacks the versions of libc.
        fixture.copy("libm.so.6", &libc);
        assert!(matches!(fixture.takes(), Err(Refusal::OldGlibc(version)) if version.starts_with("GLIBC_")));
        for rubbish in ["", "\x7fELF", "rubbish"] {
            fs::write(fixture.path(&libc), rubbish).unwrap();
            assert!(matches!(fixture.takes(), Err(Refusal::OldGlibc(name)) if name == "libc.so.6"));
        }
        // A sparse file that claims an enormous size.
        fs::File::create(fixture.path(&libc)).unwrap().set_len(1 << 40).unwrap();
        assert!(matches!(fixture.takes(), Err(Refusal::OldGlibc(_))));
    }

    /// Returns an offset: in the header, in the section table, or anywhere.
    fn any_place(length: usize) -> impl Strategy<Value = usize> {
        prop_oneof![0..64_usize, length - 64 * 32..length, 0..length]
    }

    #[test]
    fn an_images_library_may_be_any_bytes() {
        let library = fs::read(LINKER).unwrap();
        assert!(read_defined(&library[..]).unwrap().contains(&"GLIBC_PRIVATE".to_owned()));
        let changes = prop::collection::vec((any_place(library.len()), any::<u8>()), 1..32);
        proptest!(|(changes in changes, length in prop::option::of(any_place(library.len())))| {
            let mut bytes = library.clone();
            changes.iter().for_each(|(place, byte)| bytes[*place] = *byte);
            bytes.truncate(length.unwrap_or(bytes.len()));
            // The readers must end, with success or with an error.
            let _ = read_defined(&bytes[..]);
            let _ = read_needed(&bytes[..]);
        });
    }

    #[test]
    fn links_of_an_image_lead_into_the_image() {
        let fixture = Fixture::new();
        let linker = fixture.path(&format!("bundle/rootfs{LINKER}"));
        fs::remove_file(&linker).unwrap();
        std::os::unix::fs::symlink(fixture.library(), &linker).unwrap();
        assert!(matches!(fixture.takes(), Err(Refusal::NoLibc)), "it is a file of the host's only");
    }
}
