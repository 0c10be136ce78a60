//! Docker's configuration, /etc/docker/daemon.json: the runtime `shunt` is added to it and taken away again, and nothing else changes.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;
use thiserror::Error;

use crate::replace::replace;
use crate::text::{Container, Splice};

/// What `docker run --runtime=` takes.
pub const NAME: &str = "shunt";
const RUNTIMES: &str = "runtimes";

/// Why the file is as it was.
#[derive(Debug, Error)]
pub enum RegisterError {
    /// It cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not what Docker reads.
    #[error("{path} is left as it is, since it cannot be read as JSON of Docker's: {why}")]
    NotUnderstood {
        /// The file.
        path: PathBuf,
        /// Why.
        why: serde_json::Error,
    },
    /// The name is somebody else's.
    #[error("{path} has another runtime of the name {NAME}, {other}: take that out first")]
    Taken {
        /// The file.
        path: PathBuf,
        /// What it is.
        other: String,
    },
}

/// Whether anything had to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The file is another one now.
    Made,
    /// It was as it should be.
    None,
}

/// A runtime, as Docker has it.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
struct Runtime {
    path: PathBuf,
}

/// Adds the runtime at `runtime`. A file that does not exist is made.
pub fn register(file: &Path, runtime: &Path) -> Result<Change, RegisterError> {
    let entry = Runtime { path: runtime.to_owned() };
    let Some(text) = read(file)? else {
        let fresh = fresh(&entry).map_err(not_understood(file))?;
        return create(file, &fresh).map(|()| Change::Made).map_err(at(file));
    };
    match added(&text, &entry).map_err(not_understood(file))? {
        Added::Text(text) => replace(file, &text).map(|()| Change::Made).map_err(at(file)),
        Added::There => Ok(Change::None),
        Added::Other(other) => Err(RegisterError::Taken { path: file.to_owned(), other }),
    }
}

/// Takes the runtime away, if it is one that `is_ours` knows; with it a file that was made for it.
pub fn unregister(file: &Path, is_ours: impl Fn(&Path) -> bool) -> Result<Change, RegisterError> {
    let Some(text) = read(file)? else { return Ok(Change::None) };
    let Some(value) = registered(&text).map_err(not_understood(file))? else { return Ok(Change::None) };
    let ours = serde_json::from_str::<Runtime>(&value).ok().filter(|entry| is_ours(&entry.path));
    let Some(entry) = ours else { return Err(RegisterError::Taken { path: file.to_owned(), other: value }) };
    if fresh(&entry).map_err(not_understood(file))? == text {
        return fs::remove_file(file).map(|()| Change::Made).map_err(at(file));
    }
    let without = removed(&text).map_err(not_understood(file))?;
    replace(file, &without).map(|()| Change::Made).map_err(at(file))
}

/// The path of the runtime that is registered, if any is and it is no more than a path.
pub fn find(file: &Path) -> Result<Option<PathBuf>, RegisterError> {
    let Some(text) = read(file)? else { return Ok(None) };
    let value = registered(&text).map_err(not_understood(file))?;
    Ok(value.and_then(|value| serde_json::from_str::<Runtime>(&value).ok()).map(|entry| entry.path))
}

/// What becomes of a text to which an entry is added.
#[derive(Debug, PartialEq)]
enum Added {
    Text(String),
    There,
    Other(String),
}

fn added(text: &str, entry: &Runtime) -> serde_json::Result<Added> {
    let whole = Container::object(text, text.trim())?;
    let member = format!("\"{NAME}\": {}", serde_json::to_string(entry)?);
    let splice = match whole.member(RUNTIMES) {
        None => whole.append(text, &format!("\"{RUNTIMES}\": {{{member}}}")),
        Some(runtimes) => {
            let runtimes = Container::object(text, runtimes)?;
            match runtimes.member(NAME) {
                None => runtimes.append(text, &member),
                Some(value) if serde_json::from_str(value).is_ok_and(|there: Runtime| there == *entry) => {
                    return Ok(Added::There);
                }
                Some(value) => return Ok(Added::Other(value.to_owned())),
            }
        }
    };
    Ok(Added::Text(Splice::apply(vec![splice], text)))
}

/// The reverse. Runtimes of which none is left are left out.
fn removed(text: &str) -> serde_json::Result<String> {
    let whole = Container::object(text, text.trim())?;
    let Some(runtimes) = whole.member(RUNTIMES) else { return Ok(text.to_owned()) };
    let runtimes = Container::object(text, runtimes)?;
    let splice = if runtimes.is_only(NAME) { whole.remove(RUNTIMES) } else { runtimes.remove(NAME) };
    Ok(Splice::apply(splice.into_iter().collect(), text))
}

fn registered(text: &str) -> serde_json::Result<Option<String>> {
    let Some(runtimes) = Container::object(text, text.trim())?.member(RUNTIMES) else { return Ok(None) };
    Ok(Container::object(text, runtimes)?.member(NAME).map(str::to_owned))
}

/// A file with nothing else in it.
fn fresh(entry: &Runtime) -> serde_json::Result<String> {
    Ok(format!("{:#}\n", serde_json::json!({ RUNTIMES: { NAME: entry } })))
}

fn read(file: &Path) -> Result<Option<String>, RegisterError> {
    match fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(at(file)(error)),
    }
}

fn create(file: &Path, text: &str) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let directory = file.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(directory)?;
    let mut new = NamedTempFile::new_in(directory)?;
    new.write_all(text.as_bytes())?;
    new.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
    new.as_file().sync_all()?;
    new.persist_noclobber(file)?;
    Ok(())
}

fn at(file: &Path) -> impl Fn(io::Error) -> RegisterError {
    |source| RegisterError::File { path: file.to_owned(), source }
}

fn not_understood(file: &Path) -> impl Fn(serde_json::Error) -> RegisterError {
    |why| RegisterError::NotUnderstood { path: file.to_owned(), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAND_IN: &str = "/usr/local/bin/shunt-runtime";

    fn is_ours(path: &Path) -> bool {
        path.ends_with("shunt-runtime")
    }

    struct Etc(tempfile::TempDir);

    impl Etc {
        fn new() -> Etc {
            Etc(tempfile::tempdir().unwrap())
        }

        fn file(&self) -> PathBuf {
            self.0.path().join("docker/daemon.json")
        }

        fn with(&self, text: &str) -> PathBuf {
            fs::create_dir_all(self.file().parent().unwrap()).unwrap();
            fs::write(self.file(), text).unwrap();
            self.file()
        }
    }

    #[test]
    fn a_file_is_as_it_was_once_the_runtime_is_taken_away() {
        let etc = Etc::new();
        for text in [
            "{}\n",
            "{\n    \"debug\": true\n}\n",
            "{\n\t\"log-opts\": {\"max-size\": \"10m\"},\n\t\"mtu\": 1.5e3\n}",
            "{\"runtimes\": {\"crun\": {\"path\": \"crun\", \"runtimeArgs\": []}}, \"bip\": \"10.0.0.1\\u002f24\"}",
        ] {
            let file = etc.with(text);
            assert_eq!(register(&file, STAND_IN.as_ref()).unwrap(), Change::Made);
            assert_eq!(find(&file).unwrap(), Some(STAND_IN.into()));
            let value: serde_json::Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
            assert_eq!(value["runtimes"]["shunt"]["path"], STAND_IN);
            assert_eq!(register(&file, STAND_IN.as_ref()).unwrap(), Change::None);
            assert_eq!(unregister(&file, is_ours).unwrap(), Change::Made);
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
            assert_eq!(unregister(&file, is_ours).unwrap(), Change::None);
        }
    }

    #[test]
    fn a_file_that_was_not_there_is_not_there_again() {
        let etc = Etc::new();
        assert_eq!(unregister(&etc.file(), is_ours).unwrap(), Change::None);
        assert_eq!(register(&etc.file(), STAND_IN.as_ref()).unwrap(), Change::Made);
        assert_eq!(find(&etc.file()).unwrap(), Some(STAND_IN.into()));
        assert_eq!(unregister(&etc.file(), is_ours).unwrap(), Change::Made);
        assert!(!etc.file().exists());
    }

    #[test]
    fn what_is_not_understood_or_somebody_elses_is_left_alone() {
        let etc = Etc::new();
        for text in [
            "",
            "{",
            "[]",
            "{\"debug\": true,}",
            "# a comment\n{}",
            "{\"runtimes\": []}",
            "{\"runtimes\": {\"shunt\": {\"path\": \"/opt/other\"}}}",
            "{\"runtimes\": {\"shunt\": {\"path\": \"/usr/local/bin/shunt-runtime\", \"runtimeArgs\": [\"x\"]}}}",
        ] {
            let file = etc.with(text);
            let error = register(&file, STAND_IN.as_ref()).unwrap_err().to_string();
            assert!(error.starts_with(&file.display().to_string()), "{error}");
            assert!(unregister(&file, is_ours).is_err(), "{text}");
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
        }
    }
}
