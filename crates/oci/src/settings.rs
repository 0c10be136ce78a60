//! What stands in for a runtime has no command line of its own, so it has a file.

use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

/// Where the file is, if there is one.
pub const DEFAULT_SETTINGS: &str = "/etc/shunt/runtime.toml";

/// What is in it.
#[derive(Debug, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The runtime that starts containers: a path, or a name to look up in PATH.
    pub runtime: String,
    /// Where supervisors find the overlay's router, if it is not where it is by itself.
    pub router: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { runtime: "runc".into(), router: None }
    }
}

/// Why it says nothing. Containers are not started then: another runtime than the one that was meant may isolate them less.
#[derive(Debug, Error)]
pub enum SettingsError {
    /// It cannot be read.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is something else.
    #[error("{path}: {source}")]
    NotUnderstood {
        /// The file.
        path: PathBuf,
        /// Why.
        source: toml::de::Error,
    },
}

impl Settings {
    /// Reads the file; without one everything is as usual.
    pub fn read(path: &Path) -> Result<Settings, SettingsError> {
        match std::fs::read_to_string(path) {
            Ok(text) => toml::from_str(&text)
                .map_err(|source| SettingsError::NotUnderstood { path: path.to_owned(), source }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Settings::default()),
            Err(source) => Err(SettingsError::File { path: path.to_owned(), source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_wrong_is_no_file_that_is_missing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("runtime.toml");
        assert_eq!(Settings::read(&path).unwrap().runtime, "runc");
        std::fs::write(&path, "runtime = \"/usr/bin/crun\"\n").unwrap();
        assert_eq!(Settings::read(&path).unwrap().runtime, "/usr/bin/crun");
        for wrong in ["runtime = ", "runtimes = \"crun\"", "runtime = 1"] {
            std::fs::write(&path, wrong).unwrap();
            assert!(Settings::read(&path).is_err(), "{wrong}");
        }
    }
}
