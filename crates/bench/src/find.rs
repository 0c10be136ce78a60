//! Finds installed third-party programs.

use std::path::PathBuf;

use anyhow::{Context, Result};

/// Returns the path of a program: the distribution's, one of PostgreSQL's, or one in PATH. PATH
/// comes last because version managers put wrappers there. A name that ends with `*` matches the
/// newest version of a program with a versioned name.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    if let Some(beginning) = name.strip_suffix('*') {
        let programs = std::fs::read_dir("/usr/sbin").into_iter().flatten().flatten();
        let is_meant = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with(beginning);
        return programs.filter(is_meant).map(|entry| entry.path()).max();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    ["/usr/bin", "/usr/sbin", "/bin", "/sbin"]
        .map(PathBuf::from)
        .into_iter()
        .chain(postgres())
        .chain(std::env::split_paths(&path))
        .map(|directory| directory.join(name))
        .find(|file| file.is_file())
}

/// Returns the path of a program that must be installed.
pub(crate) fn installed(name: &str) -> Result<PathBuf> {
    program(name).with_context(|| format!("{name} is not installed"))
}

/// Returns PostgreSQL's directories, the newest first: Debian has one for each major version.
fn postgres() -> Vec<PathBuf> {
    let directories = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut directories: Vec<_> = directories.map(|entry| entry.path().join("bin")).collect();
    directories.sort();
    directories.reverse();
    directories
}
