//! Another key without a moment in which two who share one do not understand each other: a file can hold two. By the first its owner
//! speaks; he understands both.
//!
//! Everybody gets the new key as his second; when all have it, everybody speaks by it; when all do, the old one is forgotten.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::{Key, KeyError, LENGTH, from_hex, line, nonce, read_private};

/// Those of a file.
#[derive(Clone, Debug)]
pub struct Keys {
    own: Key,
    other: Option<Key>,
}

/// What is done with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A new key comes beside the one that there is.
    Next,
    /// They change places.
    UseNext,
    /// The second goes.
    Retire,
}

impl Keys {
    /// Reads a file with one or two.
    pub fn read(path: &Path) -> Result<Keys, KeyError> {
        let [own, other] = lines(path)?;
        let own = own.ok_or_else(|| KeyError::Shape { path: path.to_owned() })?;
        Ok(Keys { own: Key::from(own), other: other.map(Key::from) })
    }

    /// The one to speak by.
    pub fn own(&self) -> &Key {
        &self.own
    }

    /// Whether it is one of those that are understood.
    pub fn contain(&self, key: &Key) -> bool {
        self.all().any(|one| one.is(key))
    }

    /// Those that are understood.
    pub fn all(&self) -> impl Iterator<Item = &Key> {
        std::iter::once(&self.own).chain(&self.other)
    }
}

impl From<Key> for Keys {
    fn from(own: Key) -> Keys {
        Keys { own, other: None }
    }
}

/// Changes a file, at once or not at all.
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
