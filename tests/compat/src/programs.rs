//! Finds programs: those under test, and shunt's own.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use shunt_built::release_dir;

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

/// Copies an executable by `cp`, because a test that forks in the meantime would inherit a writable
/// descriptor of this process. The file could then not be executed (ETXTBSY).
pub(crate) fn copy_executable(from: &Path, to: &Path) {
    let copied = Command::new("cp").args([from, to]).status().expect("cp runs").success();
    assert!(copied, "copying {} failed", from.display());
}

/// Returns the directory of a package of PyPI that Debian does not have, or only an older version
/// of. The package is fetched once, next to cargo's files.
pub fn python_package(name: &str) -> PathBuf {
    let packages = release_dir().with_file_name("python");
    let place = packages.join(name);
    if !place.exists() {
        let half = packages.join(format!("{name}.{}", std::process::id()));
        let fetched = Command::new("/usr/bin/python3")
            .args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"])
            .args([half.as_os_str(), name.as_ref()])
            .status();
        assert!(fetched.expect("pip runs").success(), "fetching {name} failed");
        // Another test may have been faster.
        let _ = std::fs::rename(&half, &place);
    }
    place
}

/// Returns the directory of a package of npm that Debian does not have. The package is fetched
/// once, next to cargo's files.
pub fn node_package(name: &str, version: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let packages = release_dir().with_file_name("node");
    let plain = name.replace('/', "-");
    let place = packages.join(format!("{plain}-{version}"));
    if !place.exists() {
        let half = packages.join(format!("{plain}.{}", std::process::id()));
        std::fs::create_dir_all(&half).expect("a directory beside what cargo builds");
        let fetched = Command::new("npm")
            .args([
                "install",
                "--silent",
                "--ignore-scripts",
                "--no-audit",
                "--no-fund",
                "--no-save",
                "--prefix",
            ])
            .arg(&half)
            .arg(format!("{name}@{version}"))
            .status();
        assert!(fetched.expect("npm runs").success(), "fetching {name} failed");
        // A test in another process may have been faster.
        let _ = std::fs::rename(&half, &place);
    }
    place.join("node_modules").join(name)
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
