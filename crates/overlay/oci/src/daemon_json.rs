//! Adds the runtime `shunt` to Docker's configuration, /etc/docker/daemon.json, and removes it.
//! Nothing else in the file changes.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;
use thiserror::Error;

use crate::replace::replace;
use crate::text::{Container, Splice};

/// The name for `docker run --runtime=`.
pub const NAME: &str = "shunt";
const RUNTIMES: &str = "runtimes";

/// Why the file was not changed.
#[derive(Debug, Error)]
pub enum RegisterError {
    /// The file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The file is not a valid configuration of Docker.
    #[error("{path} is left as it is, since it cannot be read as JSON of Docker's: {why}")]
    NotUnderstood {
        /// The file.
        path: PathBuf,
        /// The error.
        why: serde_json::Error,
    },
    /// The name belongs to a different runtime.
    #[error("{path} has another runtime of the name {NAME}, {other}: take that out first")]
    Taken {
        /// The file.
        path: PathBuf,
        /// That runtime's entry.
        other: String,
    },
}

/// Whether the file had to be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The file was changed.
    Made,
    /// The file was already as requested.
    None,
}

/// A runtime's entry in Docker's configuration.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
struct Runtime {
    path: PathBuf,
}

/// Adds the runtime at `runtime`. A file that does not exist is created.
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

/// Removes the runtime, if `is_ours` accepts its path. A file that [`register`] created is removed
/// as a whole.
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

/// Returns the path of the registered runtime. `None` if there is none, or if its entry contains
/// more than a path.
pub fn find(file: &Path) -> Result<Option<PathBuf>, RegisterError> {
    let Some(text) = read(file)? else { return Ok(None) };
    let value = registered(&text).map_err(not_understood(file))?;
    Ok(value.and_then(|value| serde_json::from_str::<Runtime>(&value).ok()).map(|entry| entry.path))
}

/// The result of adding an entry to a text.
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

/// Returns the text without the runtime. If no other runtime is left, the list of runtimes is
/// removed too.
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

/// Returns the content of a file that contains only this entry.
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
