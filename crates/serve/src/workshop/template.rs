//! The template of a new service.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// The service to begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Template {
    /// It forwards lines.
    Stateless,
    /// It counts lines.
    Stateful,
    /// It answers lines from a content store.
    Contents,
}

impl Template {
    /// Returns the source and the tests.
    fn files(self) -> [&'static str; 2] {
        match self {
            Template::Stateless => {
                [include_str!("../../template/service.c"), include_str!("../../template/service.tests")]
            }
            Template::Stateful => {
                [include_str!("../../template/stateful.c"), include_str!("../../template/stateful.tests")]
            }
            // A builtin service, whose name becomes that of the new one.
            Template::Contents => {
                [include_str!("../../services/line-cache.c"), include_str!("../../template/contents.tests")]
            }
        }
    }
}

/// An error that prevents the files from being written.
#[derive(Debug, Error)]
pub enum NewError {
    /// The name is not usable as a file's or a program's name.
    #[error("{0:?} is no name for a service: letters, digits and hyphens, a letter first")]
    Name(String),
    /// A file cannot be created, for example because it exists.
    #[error("{}: {error}", path.display())]
    File {
        /// The file's path.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
}

/// Puts the name of the service into a template.
fn named(text: &str, name: &str) -> String {
    text.replace("NAME", name).replace("line-cache", name)
}

/// Writes NAME.c and NAME.tests to a directory and returns their paths. Fails if one exists.
pub fn new(name: &str, directory: &Path, template: Template) -> Result<[PathBuf; 2], NewError> {
    let letter = name.starts_with(|first: char| first.is_ascii_alphabetic());
    if !letter || !name.chars().all(|other| other.is_ascii_alphanumeric() || other == '-') {
        return Err(NewError::Name(name.to_owned()));
    }
    let [source, tests] = template.files();
    let files =
        [("c", source), ("tests", tests)].map(|(end, text)| (directory.join(name).with_extension(end), text));
    for (path, text) in &files {
        let written =
            File::create_new(path).and_then(|mut file| file.write_all(named(text, name).as_bytes()));
        written.map_err(|error| NewError::File { path: path.clone(), error })?;
    }
    Ok(files.map(|(path, _)| path))
}
