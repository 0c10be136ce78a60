//! The router's keys. Their file may change while the router runs, and is checked every second.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use shunt_key::{KeyError, Keys};

use crate::lock::lock;

/// The key file, with the keys read from it.
#[derive(Debug)]
pub(crate) struct KeyFile {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    keys: Arc<Keys>,
    version: Version,
}

/// Identifies a version of the file. The file has changed if any of these fields differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    inode: u64,
    changed: (i64, i64),
    len: u64,
}

impl KeyFile {
    pub(crate) fn read(path: &Path) -> Result<KeyFile, KeyError> {
        // Read before the content, so that a later change is noticed.
        let version = version(path);
        let keys = Arc::new(Keys::read(path)?);
        let version = version.map_err(|source| KeyError::File { path: path.to_owned(), source })?;
        Ok(KeyFile { path: path.to_owned(), state: Mutex::new(State { keys, version }) })
    }

    /// Returns the current keys. An exchange about a connection ends with the keys with which it
    /// began.
    pub(crate) fn now(&self) -> Arc<Keys> {
        lock(&self.state).keys.clone()
    }

    /// Reads the keys again if the file has changed, and returns `true` if there are new ones. A
    /// file that is missing or holds no key changes nothing.
    pub(crate) fn look_again(&self) -> bool {
        let mut state = lock(&self.state);
        let Ok(version) = version(&self.path) else { return false };
        if version == state.version {
            return false;
        }
        state.version = version;
        match Keys::read(&self.path) {
            Ok(keys) => {
                tracing::info!(count = keys.all().count(), "the key file is another");
                state.keys = Arc::new(keys);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "the keys stay as they were");
                false
            }
        }
    }
}

fn version(path: &Path) -> std::io::Result<Version> {
    let found = fs::metadata(path)?;
    Ok(Version { inode: found.ino(), changed: (found.ctime(), found.ctime_nsec()), len: found.len() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_key::{Step, new_key, rotate};

    #[test]
    fn another_key_is_taken_and_nonsense_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        new_key(&path).unwrap();
        let file = KeyFile::read(&path).unwrap();
        let before = file.now();
        assert!(!file.look_again());
        assert!(Arc::ptr_eq(&before, &file.now()));
        rotate(&path, Step::Next).unwrap();
        assert!(file.look_again());
        assert_eq!(file.now().all().count(), 2);
        fs::write(&path, "nonsense").unwrap();
        assert!(!file.look_again());
        fs::remove_file(&path).unwrap();
        assert!(!file.look_again());
        assert_eq!(file.now().all().count(), 2);
    }
}
