//! Names the code for which a program stays on TCP as `own_calls`.

use std::path::Path;

use shunt_abi::reason::Reason;

use super::process::range;
use super::report::Cause;

/// Where the code is that may make system calls past the shim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the program's own file.
    Program,
    /// In a library: its path, and the code's offset in the file.
    Library { path: String, offset: u64 },
    /// In memory without a file, which the program has filled.
    Memory { address: u64 },
}

impl Place {
    /// Finds an address of a process among its mappings, the text of `/proc/PID/maps`. `program` is
    /// the file that the process runs.
    pub(super) fn find(address: u64, maps: &str, program: Option<&Path>) -> Option<Place> {
        let line = maps.lines().find(|line| range(line).is_some_and(|range| range.contains(&address)))?;
        let fields: Vec<_> = line.splitn(6, ' ').collect();
        let path = fields.get(5).map_or("", |path| path.trim_start());
        if !path.starts_with('/') {
            return Some(Place::Memory { address });
        }
        if program.is_some_and(|program| Path::new(path) == program) {
            return Some(Place::Program);
        }
        let mapped = u64::from_str_radix(fields.get(2)?, 16).ok()?;
        let offset = mapped + (address - range(line)?.start);
        Some(Place::Library { path: path.to_owned(), offset })
    }

    /// Makes a cause name this place, if it is about calls that the shim cannot see.
    pub(super) fn name_in(&self, cause: &mut Cause) {
        if cause.label != Reason::OwnCalls.label() || cause.explanation != Reason::OwnCalls.explanation() {
            return;
        }
        const CANNOT: &str = "can make system calls by itself, which cannot be seen.";
        const TRUST: &str =
            "add `--own-calls trust` if you know that its calls concern no connection and no epoll instance.";
        (cause.explanation, cause.advice) = match self {
            Place::Program => return,
            Place::Library { path, offset } => (
                format!("Code of {path}, at offset {offset:#x} of the file, {CANNOT}"),
                format!("Run the program without that library, if it can do without, or {TRUST}"),
            ),
            Place::Memory { address } => (
                format!("Code in memory without a file, at {address:#x}, {CANNOT}"),
                format!("Switch off what generates code in the program, if it can do without, or {TRUST}"),
            ),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
55d000-55e000 r-xp 00001000 fe:00 11 /usr/bin/server
7f1000-7f3000 r-xp 00003000 fe:00 12                 /usr/lib/lib with spaces.so.8
7f8000-7f9000 r-xp 00000000 00:00 0
";

    #[test]
    fn code_is_named_by_its_file_and_the_offset_there() {
        let find = |address| Place::find(address, MAPS, Some(Path::new("/usr/bin/server")));
        assert_eq!(find(0x55d123), Some(Place::Program));
        let library = Place::Library { path: "/usr/lib/lib with spaces.so.8".into(), offset: 0x43ee };
        assert_eq!(find(0x7f23ee), Some(library.clone()));
        assert_eq!(find(0x7f8000), Some(Place::Memory { address: 0x7f8000 }));
        assert_eq!(find(0x7f9000), None);
        let mut cause = Cause::from(Reason::OwnCalls);
        library.name_in(&mut cause);
        assert!(cause.explanation.contains("lib with spaces.so.8, at offset 0x43ee of the file"));
        let mut other = Cause::from(Reason::Fork);
        library.name_in(&mut other);
        assert_eq!(other, Cause::from(Reason::Fork));
    }
}
