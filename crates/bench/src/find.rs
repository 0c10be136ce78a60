//! Finds programs: `shunt`, this program, and installed third-party programs.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

/// The `shunt` that is measured.
static SHUNT: OnceLock<PathBuf> = OnceLock::new();

/// Sets the `shunt` that is measured: `given`, or the one that is installed with this program.
pub(crate) fn set_shunt(given: Option<PathBuf>) -> Result<()> {
    let shunt = match given {
        Some(shunt) => shunt,
        None => installed_shunt()?,
    };
    let _ = SHUNT.set(shunt);
    Ok(())
}

/// Returns the `shunt` that is measured.
pub(crate) fn shunt() -> Result<PathBuf> {
    SHUNT.get().cloned().map_or_else(installed_shunt, Ok)
}

/// Returns the `shunt` beside this program, or where `make install` puts it, or in PATH.
fn installed_shunt() -> Result<PathBuf> {
    let own = own()?;
    let directory = own.parent().unwrap_or(Path::new("/"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories =
        [directory.to_owned(), directory.join("../../bin")].into_iter().chain(std::env::split_paths(&path));
    let Some(directory) = directories.find(|directory| directory.join("shunt").is_file()) else {
        bail!("no shunt in {} or in PATH: install the package shunt", directory.display());
    };
    Ok(directory.join("shunt"))
}

/// Returns this program, which runs the synthetic loads.
pub(crate) fn own() -> Result<PathBuf> {
    std::env::current_exe().context("finding this program")
}

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

/// Returns a message about the first of these programs that is not installed.
pub(crate) fn missing(names: &[&str]) -> Option<String> {
    let missing = names.iter().find(|name| program(name).is_none())?;
    Some(format!("{missing} is not installed"))
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
