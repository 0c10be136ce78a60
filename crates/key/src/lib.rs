//! A key that relays, or the routers of an overlay, share, in a file that nobody else can read.

#![forbid(unsafe_code)]

mod rotation;
mod seal;

pub use rotation::{Keys, Step, rotate};
pub use seal::SEAL;

use std::fmt;
use std::fs::OpenOptions;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use aws_lc_rs::hmac;
use rustix::rand::{GetRandomFlags, getrandom};
use thiserror::Error;

/// Bytes.
const LENGTH: usize = 32;

/// For proofs that one has it.
#[derive(Clone)]
pub struct Key(hmac::Key);

/// Why there is no key.
#[derive(Debug, Error)]
pub enum KeyError {
    /// The file cannot be read or written.
    #[error("the key {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Others could have it.
    #[error("the key {path} can be read by other users: chmod 600 {path}")]
    Open {
        /// The file.
        path: PathBuf,
    },
    /// Another user than root and the one that runs this process could change it at any time, and has it.
    #[error(
        "the key {path} belongs to the user {owner}, who has it and can change it: chown root {path}, or to the user that runs this"
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// The number of its owner.
        owner: u32,
    },
    /// This is not the time for that step.
    #[error("the key {path}: {why}")]
    Rotation {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: &'static str,
    },
    /// It is something else.
    #[error("{path} holds no key: 64 hexadecimal digits are expected, as shunt relay new-key writes them")]
    Shape {
        /// The file.
        path: PathBuf,
    },
}

impl Key {
    /// Reads one that [`new_key`] has written.
    pub fn read(path: &Path) -> Result<Key, KeyError> {
        let text = read_private(path)?;
        let bytes = from_hex(text.trim()).ok_or_else(|| KeyError::Shape { path: path.to_owned() })?;
        Ok(Key::from(bytes))
    }

    /// Over the parts, whose lengths are fixed by the protocol.
    pub fn sign(&self, parts: &[&[u8]]) -> [u8; LENGTH] {
        let mut context = hmac::Context::with_key(&self.0);
        for part in parts {
            context.update(part);
        }
        context.sign().as_ref().try_into().expect("SHA-256 has 32 bytes")
    }

    /// Whether it is the same.
    pub fn is(&self, other: &Key) -> bool {
        const ANYTHING: &[&[u8]] = &[b"is it the same"];
        self.verifies(ANYTHING, &other.sign(ANYTHING))
    }

    /// Whether `proof` is that of somebody with the same key; takes as long whatever it is.
    pub fn verifies(&self, parts: &[&[u8]], proof: &[u8]) -> bool {
        hmac::verify(&self.0, &parts.concat(), proof).is_ok()
    }
}

impl From<[u8; LENGTH]> for Key {
    fn from(bytes: [u8; LENGTH]) -> Key {
        Key(hmac::Key::new(hmac::HMAC_SHA256, &bytes))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Key")
    }
}

/// No file of keys is longer, by far.
const LONGEST: u64 = 4096;

/// Reads a file that nobody else can read or change. It is opened once, and checked as it was opened.
fn read_private(path: &Path) -> Result<String, KeyError> {
    let failed = |source| KeyError::File { path: path.to_owned(), source };
    // A pipe in its place must not keep whoever reads it waiting.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let about = file.metadata().map_err(failed)?;
    if !about.is_file() {
        return Err(failed(std::io::Error::other("it is no regular file")));
    }
    check(path, about.uid(), about.mode(), rustix::process::geteuid().as_raw())?;
    let mut text = String::new();
    file.take(LONGEST).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

/// Checks that the user `own` may trust a key's file with that owner and mode.
fn check(path: &Path, owner: u32, mode: u32, own: u32) -> Result<(), KeyError> {
    if owner != 0 && owner != own {
        return Err(KeyError::Owner { path: path.to_owned(), owner });
    }
    if mode & 0o077 != 0 {
        return Err(KeyError::Open { path: path.to_owned() });
    }
    Ok(())
}

/// What nobody can foresee.
pub fn nonce() -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    // From the kernel itself: the library's own generator takes some 100 ms to begin with, in each thread.
    let count = getrandom(&mut bytes[..], GetRandomFlags::empty()).expect("the kernel has random bytes");
    assert_eq!(count, LENGTH, "so few are never cut short");
    bytes
}

/// Writes a new key to a file that does not exist yet.
pub fn new_key(path: &Path) -> Result<(), KeyError> {
    let text = line(&nonce());
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| KeyError::File { path: path.to_owned(), source })
}

/// Two digits for each byte.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A key as it is in a file.
fn line(key: &[u8; LENGTH]) -> String {
    to_hex(key) + "\n"
}

fn from_hex(text: &str) -> Option<[u8; LENGTH]> {
    let digits: Vec<u8> =
        text.chars().map(|char| char.to_digit(16).map(|digit| digit as u8)).collect::<Option<_>>()?;
    let bytes: Vec<u8> =
        digits.chunks(2).map(|pair| pair[0] << 4 | pair.get(1).copied().unwrap_or(0)).collect();
    bytes.try_into().ok().filter(|_| digits.len() == 2 * LENGTH)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_new_key_is_its_owners_alone_and_is_not_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        new_key(&path).unwrap();
        let key = Key::read(&path).unwrap();
        assert!(key.verifies(&[b"a", b"b"], &key.sign(&[b"a", b"b"])));
        assert!(!key.verifies(&[b"a", b"c"], &key.sign(&[b"a", b"b"])));
        assert!(matches!(new_key(&path), Err(KeyError::File { .. })));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(Key::read(&path), Err(KeyError::Open { .. })));
    }

    #[test]
    fn only_root_and_the_own_user_may_have_a_key() {
        let told = |owner, mode, own| check(Path::new("/k"), owner, mode, own);
        assert!(told(0, 0o600, 0).is_ok() && told(0, 0o400, 7).is_ok() && told(7, 0o100_600, 7).is_ok());
        for (owner, own) in [(7, 0), (8, 7)] {
            let error = told(owner, 0o600, own).unwrap_err();
            assert!(matches!(error, KeyError::Owner { .. }));
            assert!(
                error.to_string().contains(&format!("user {owner}")) && error.to_string().contains("chown")
            );
        }
        for mode in [0o604, 0o602, 0o640, 0o620, 0o610] {
            assert!(matches!(told(0, mode, 0), Err(KeyError::Open { .. })), "{mode:o}");
        }
    }

    /// Needs root.
    #[test]
    fn a_key_of_another_user_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        new_key(&path).unwrap();
        std::os::unix::fs::chown(&path, Some(12345), None).expect("this test needs root");
        assert!(matches!(Key::read(&path), Err(KeyError::Owner { owner: 12345, .. })));
        assert!(matches!(rotate(&path, Step::Next), Err(KeyError::Owner { .. })));
        assert!(matches!(Key::read(directory.path()), Err(KeyError::File { .. })));
    }

    #[test]
    fn what_is_no_key_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        for text in ["", "00", &"0".repeat(63), &"0".repeat(65), &"g".repeat(64), &"é".repeat(32)] {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
            assert!(matches!(Key::read(&path), Err(KeyError::Shape { .. })), "{text}");
        }
    }
}
