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
    /// This version could not be read, for a cause that may pass.
    is_unread: bool,
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
        Ok(KeyFile { path: path.to_owned(), state: Mutex::new(State { keys, version, is_unread: false }) })
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
        let is_retry = version == state.version;
        if is_retry && !state.is_unread {
            return false;
        }
        state.version = version;
        let read = Keys::read(&self.path);
        state.is_unread = matches!(read, Err(KeyError::File { .. }));
        match read {
            Ok(keys) => {
                tracing::info!(count = keys.all().count(), "the key file is another");
                state.keys = Arc::new(keys);
                true
            }
            Err(error) => {
                if !is_retry {
                    tracing::warn!(%error, "the keys stay as they were");
                }
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
        assert!(!lock(&file.state).is_unread, "it stays nonsense until it changes");
        fs::remove_file(&path).unwrap();
        assert!(!file.look_again());
        assert_eq!(file.now().all().count(), 2);
    }

    #[test]
    fn a_file_that_could_not_be_read_once_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        new_key(&path).unwrap();
        let file = KeyFile::read(&path).unwrap();
        // Stands for a lack of descriptors: a directory has a version, but cannot be read.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(!file.look_again());
        fs::remove_dir(&path).unwrap();
        new_key(&path).unwrap();
        lock(&file.state).version = version(&path).unwrap();
        assert!(file.look_again(), "the version is the one that was seen, but was not read");
    }
}
