//! Finds what `make build` has built, for tests that run the command and the shim that users get.

use std::env;
use std::path::{Path, PathBuf};

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
