//! The settings of `shunt-runtime`. They are in a file, because the engine determines the command
//! line.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use shunt_config::Fault;

/// The default path of the file, which need not exist.
pub const DEFAULT_SETTINGS: &str = "/etc/shunt/runtime.toml";

/// The content of the file.
#[derive(Debug, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The runtime that starts containers: a path, or a name to look up in PATH.
    pub runtime: String,
    /// The socket of the overlay's router, if it is not the default.
    pub router: Option<PathBuf>,
    /// The control socket of the overlay's router, if it is not the default. The annotations of
    /// containers are stored in the same directory.
    pub control: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { runtime: "runc".into(), router: None, control: None }
    }
}

impl Settings {
    /// Reads the file. Without a file, the defaults apply. With an error in it no container is
    /// started, because a runtime other than the configured one may isolate it less.
    pub fn read(path: &Path) -> Result<Settings, Fault> {
        match path.try_exists() {
            Ok(false) => Ok(Settings::default()),
            _ => shunt_config::read(path),
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
