//! What a new service begins with.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use thiserror::Error;

const SOURCE: &str = include_str!("../../template/service.c");
const TESTS: &str = include_str!("../../template/service.tests");

/// Why nothing was written.
#[derive(Debug, Error)]
pub enum NewError {
    /// As a file or a program may not be called.
    #[error("{0:?} is no name for a service: letters, digits and hyphens, a letter first")]
    Name(String),
    /// It exists, for example.
    #[error("{}: {error}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
}

/// Writes NAME.c and NAME.tests to a directory, and gives their paths. Nothing that exists is changed.
pub fn new(name: &str, directory: &Path) -> Result<[PathBuf; 2], NewError> {
    let letter = name.starts_with(|first: char| first.is_ascii_alphabetic());
    if !letter || !name.chars().all(|other| other.is_ascii_alphanumeric() || other == '-') {
        return Err(NewError::Name(name.to_owned()));
    }
    let files =
        [("c", SOURCE), ("tests", TESTS)].map(|(end, text)| (directory.join(name).with_extension(end), text));
    for (path, text) in &files {
        let written =
            File::create_new(path).and_then(|mut file| file.write_all(text.replace("NAME", name).as_bytes()));
        written.map_err(|error| NewError::File { path: path.clone(), error })?;
    }
    Ok(files.map(|(path, _)| path))
}
