//! Where programs are: the ones under test, and shunt itself.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// `shunt` and `libshunt.so`, side by side.
#[derive(Clone, Debug)]
pub struct Tools {
    /// The command.
    pub shunt: PathBuf,
    /// The shim.
    pub library: PathBuf,
}

impl Tools {
    /// Those named by `SHUNT_BIN` (the command; the other lies beside it), else the release build of the
    /// workspace. A missing file is a failure: a test is never skipped.
    pub fn locate() -> Tools {
        let shunt =
            env::var_os("SHUNT_BIN").map(PathBuf::from).unwrap_or_else(|| release_dir().join("shunt"));
        let library = shunt.with_file_name("libshunt.so");
        for file in [&shunt, &library] {
            assert!(file.is_file(), "{} is missing: run `make test`, which builds it", file.display());
        }
        Tools { shunt, library }
    }

    /// A copy of both in `dir`, so that a program running as another user can reach them.
    pub fn copy_to(&self, dir: &Path) -> Tools {
        let copy = Tools { shunt: dir.join("shunt"), library: dir.join("libshunt.so") };
        for (from, to) in [(&self.shunt, &copy.shunt), (&self.library, &copy.library)] {
            // Not in this process: a test that forks meanwhile would inherit a descriptor that can write the copy, and
            // then nobody could run it.
            let copied = Command::new("cp").args([from, to]).status().expect("cp runs").success();
            assert!(copied, "copying {} failed", from.display());
        }
        copy
    }
}

/// The release directory of the target directory that this very executable was built in.
fn release_dir() -> PathBuf {
    let executable = env::current_exe().expect("a running test has a path");
    executable
        .ancestors()
        .find(|dir| dir.join("CACHEDIR.TAG").is_file())
        .map(|target| target.join("release"))
        .expect("tests run from cargo's target directory")
}

/// Where a package of PyPI's is that Debian has not, or not as new: fetched once, beside what cargo builds.
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
        // Another test may have been first.
        let _ = std::fs::rename(&half, &place);
    }
    place
}

/// Returns the directory of a package of npm's that Debian does not have. The package is fetched once,
/// beside what cargo builds.
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
        // A test of another process may have been first.
        let _ = std::fs::rename(&half, &place);
    }
    place.join("node_modules").join(name)
}

/// The full path of a program: among the distribution's, PostgreSQL's own or in PATH. PATH comes last, because
/// version managers put wrapper scripts there.
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

/// Debian keeps PostgreSQL's programs per major version; the newest first.
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
