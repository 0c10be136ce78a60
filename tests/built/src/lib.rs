//! Finds what `make build` has built, for tests that run the command and the shim that users get, and
//! keeps what tests fetch or compile themselves next to it.

mod packages;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::{env, fs};

pub use packages::{node_package, python_package};

/// Returns the release directory beside the directory of the running executable.
///
/// Cargo puts a program into `target/PROFILE` and a test into `target/PROFILE/deps`.
///
/// # Panics
///
/// Panics if the running executable has no path, or is in the root directory.
#[must_use]
pub fn release_dir() -> PathBuf {
    release_dir_of(&env::current_exe().expect("a running program has a path"))
}

fn release_dir_of(executable: &Path) -> PathBuf {
    let folder = executable.parent().expect("an executable is in a directory");
    let profile = if folder.ends_with("deps") { folder.parent().unwrap_or(folder) } else { folder };
    profile.with_file_name("release")
}

/// Returns the path of a file or directory in a folder next to cargo's directories, where it is kept
/// between tests. If there is none, `make` makes it at another path, so no test finds a half of it.
///
/// # Panics
///
/// Panics if it cannot be made.
pub fn kept(folder: &str, name: &str, make: impl FnOnce(&Path)) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = release_dir().with_file_name(folder);
    let place = folder.join(name);
    if !place.exists() {
        let half = folder.join(format!("{name}.{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a directory next to cargo's");
        make(&half);
        // A test in another process may have been faster.
        let _ = fs::rename(&half, &place);
        assert!(place.exists(), "{} was not made", place.display());
    }
    place
}

/// Copies an executable by `cp`, because a test that forks in the meantime would inherit a writable
/// descriptor of this process. The file could then not be executed (ETXTBSY).
///
/// # Panics
///
/// Panics if it cannot be copied.
pub fn copy_executable(from: &Path, to: &Path) {
    let copied = Command::new("cp").args([from, to]).status().expect("cp runs").success();
    assert!(copied, "copying {} failed", from.display());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_and_a_test_have_the_same_release_directory() {
        for executable in [
            "/shunt/target/debug/shunt-differential",
            "/shunt/target/debug/deps/short-0123",
            "/shunt/target/release/shunt-differential",
            "/shunt/target/release/deps/short-0123",
        ] {
            assert_eq!(release_dir_of(Path::new(executable)), Path::new("/shunt/target/release"));
        }
    }
}
