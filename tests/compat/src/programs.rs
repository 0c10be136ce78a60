//! Finds programs: those under test, and shunt's own.

use std::env;
use std::path::{Path, PathBuf};

use shunt_built::{copy_executable, release_dir};

/// The paths of `shunt` and `libshunt.so`, which are in one directory.
#[derive(Clone, Debug)]
pub struct Tools {
    /// The command.
    pub shunt: PathBuf,
    /// The shim.
    pub library: PathBuf,
}

impl Tools {
    /// Returns the tools of `SHUNT_BIN`, the path of the command, or else of the workspace's
    /// release build. A missing file is a failure, because a test is never skipped.
    pub fn locate() -> Tools {
        let shunt =
            env::var_os("SHUNT_BIN").map(PathBuf::from).unwrap_or_else(|| release_dir().join("shunt"));
        let library = shunt.with_file_name("libshunt.so");
        for file in [&shunt, &library] {
            assert!(file.is_file(), "{} is missing: run `make test`, which builds it", file.display());
        }
        Tools { shunt, library }
    }

    /// Copies both files to `dir`, so that a program that runs as another user can reach them.
    pub fn copy_to(&self, dir: &Path) -> Tools {
        let copy = Tools { shunt: dir.join("shunt"), library: dir.join("libshunt.so") };
        for (from, to) in [(&self.shunt, &copy.shunt), (&self.library, &copy.library)] {
            copy_executable(from, to);
        }
        copy
    }
}

/// Returns the full path of a program, from the distribution's directories, PostgreSQL's or PATH.
/// PATH comes last, because version managers put wrapper scripts there.
pub fn find(name: &str) -> PathBuf {
    search(name).unwrap_or_else(|| panic!("{name} is not installed: run `make test`, which sets it up"))
}

fn search(name: &str) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(name.into());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    ["/usr/bin", "/usr/sbin", "/bin", "/sbin"]
        .map(PathBuf::from)
        .into_iter()
        .chain(postgres_dirs())
        .chain(env::split_paths(&path))
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// Returns the directories of PostgreSQL's programs, newest first. Debian has one for each major
/// version.
fn postgres_dirs() -> Vec<PathBuf> {
    let mut dirs: Vec<_> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("bin"))
        .collect();
    dirs.sort();
    dirs.reverse();
    dirs
}
