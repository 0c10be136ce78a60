//! Changes the key without a moment in which two holders do not understand each other. A file can
//! hold two keys. A holder signs with the first, and accepts both.
//!
//! | step | file of each holder | signs with | accepts |
//! | --- | --- | --- | --- |
//! | before | old | old | old |
//! | [`Step::Next`] on one host, then copy the file | old, new | old | old, new |
//! | [`Step::UseNext`] on each host | new, old | new | old, new |
//! | [`Step::Retire`] on each host | new | new | new |
//!
//! Holders that are one step apart understand each other. So a step may begin when all hosts have
//! taken the one before it.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::{Key, KeyError, LENGTH, from_hex, line, nonce, read_private};

/// The keys of a file.
#[derive(Clone, Debug)]
pub struct Keys {
    own: Key,
    other: Option<Key>,
}

/// A step in changing a key file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Adds a new key as the second.
    Next,
    /// Swaps the two keys.
    UseNext,
    /// Removes the second key.
    Retire,
}

impl Keys {
    /// Reads a file with one or two keys.
    pub fn read(path: &Path) -> Result<Keys, KeyError> {
        let [own, other] = lines(path)?;
        let own = own.ok_or_else(|| KeyError::Shape { path: path.to_owned() })?;
        Ok(Keys { own: Key::from(own), other: other.map(Key::from) })
    }

    /// Returns the key to sign with.
    pub fn own(&self) -> &Key {
        &self.own
    }

    /// Returns `true` if `key` is one of the accepted keys.
    pub fn contain(&self, key: &Key) -> bool {
        self.all().any(|one| one.is(key))
    }

    /// Returns the accepted keys.
    pub fn all(&self) -> impl Iterator<Item = &Key> {
        std::iter::once(&self.own).chain(&self.other)
    }
}

impl From<Key> for Keys {
    fn from(own: Key) -> Keys {
        Keys { own, other: None }
    }
}

/// Changes a key file atomically.
pub fn rotate(path: &Path, step: Step) -> Result<(), KeyError> {
    let wrong = |why| KeyError::Rotation { path: path.to_owned(), why };
    let after = match (step, lines(path)?) {
        (Step::Next, [Some(own), None]) => [Some(own), Some(nonce())],
        (Step::Next, _) => return Err(wrong("it holds two keys already: retire one first")),
        (Step::UseNext, [Some(own), Some(next)]) => [Some(next), Some(own)],
        (Step::Retire, [Some(own), Some(_)]) => [Some(own), None],
        _ => return Err(wrong("it holds one key: make the next one first")),
    };
    let text: String = after.iter().flatten().map(line).collect();
    let failed = |source| KeyError::File { path: path.to_owned(), source };
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside).map_err(failed)?;
    let written = (&file)
        .write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| std::fs::rename(&beside, path));
    written.map_err(|source| {
        let _ = std::fs::remove_file(&beside);
        failed(source)
    })
}

fn lines(path: &Path) -> Result<[Option<[u8; LENGTH]>; 2], KeyError> {
    let text = read_private(path)?;
    let mut found = [None; 2];
    for (at, line) in text.trim().lines().enumerate() {
        let key = from_hex(line.trim()).filter(|_| at < found.len());
        found[at.min(1)] = Some(key.ok_or_else(|| KeyError::Shape { path: path.to_owned() })?);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::new_key;

    #[test]
    fn at_every_step_everybody_understands_everybody() {
        let directory = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| directory.path().join(name));
        new_key(&one).unwrap();
        let share = || std::fs::write(&two, std::fs::read(&one).unwrap()).unwrap();
        new_key(&two).unwrap();
        share();
        let first = Keys::read(&one).unwrap();
        let understand = || {
            let keys = [&one, &two].map(|path| Keys::read(path).unwrap());
            for (speaker, listener) in [(0, 1), (1, 0)] {
                let proof = keys[speaker].own().sign(&[b"x"]);
                assert!(keys[listener].all().any(|key| key.verifies(&[b"x"], &proof)));
            }
        };
        assert!(matches!(rotate(&one, Step::UseNext), Err(KeyError::Rotation { .. })));
        rotate(&one, Step::Next).unwrap();
        understand();
        share();
        assert!(matches!(rotate(&one, Step::Next), Err(KeyError::Rotation { .. })));
        for step in [Step::UseNext, Step::Retire] {
            for path in [&one, &two] {
                rotate(path, step).unwrap();
                understand();
            }
        }
        let last = Keys::read(&two).unwrap();
        assert!(!last.all().any(|key| key.verifies(&[b"x"], &first.own().sign(&[b"x"]))));
        assert_eq!(last.all().count(), 1);
        assert!(last.contain(last.own()) && !last.contain(first.own()));
        let lines =
            |count: usize| std::fs::write(&one, format!("{}\n", "0".repeat(64)).repeat(count)).unwrap();
        lines(3);
        assert!(matches!(Keys::read(&one), Err(KeyError::Shape { .. })));
        lines(2);
        assert_eq!(Keys::read(&one).unwrap().all().count(), 2);
    }
}
