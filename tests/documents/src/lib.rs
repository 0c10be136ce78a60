//! Finds what the documents of this repository name, and what there is: tests by package and target, and files.
//! It reads sources only, and neither builds nor runs anything.

pub mod command;
pub mod markdown;
pub mod shell;
pub mod targets;
pub mod vocabulary;

use std::path::{Path, PathBuf};

/// Returns the top directory of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository is there")
}

/// Returns every file of the repository, relative to its top, without what is built or downloaded.
pub fn files() -> Vec<PathBuf> {
    let root = root();
    let mut found = Vec::new();
    let mut directories = vec![root.clone()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory of the repository can be read") {
            let entry = entry.expect("a directory of the repository can be read");
            let name = entry.file_name();
            if [".git", "target", "state", "node_modules"].iter().any(|other| name == *other) {
                continue;
            }
            match entry.file_type().expect("the type of a file can be read").is_dir() {
                true => directories.push(entry.path()),
                false => found.push(entry.path().strip_prefix(&root).expect("it is below").to_owned()),
            }
        }
    }
    found.sort();
    found
}

/// Reads a file of the repository.
///
/// # Panics
/// If it cannot be read.
pub fn read(path: &Path) -> String {
    std::fs::read_to_string(root().join(path))
        .unwrap_or_else(|error| panic!("{} cannot be read: {error}", path.display()))
}
