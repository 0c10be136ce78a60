//! The key that the relays, or the routers of an overlay, share. Its file is readable by its owner
//! only.
//!
//! [`Key`] signs and verifies with HMAC-SHA256. [`Keys`] holds one or two of them, so that the key
//! can be changed while everything runs ([`rotate`]). [`MessageKey`] seals the messages of one
//! exchange with AES-256-GCM, under a key that both sides have agreed on in secret. A few bytes fit in
//! one encrypted block ([`Key::seal_block`]).

#![forbid(unsafe_code)]

mod block;
mod rotation;
mod seal;

pub use block::BLOCK;
pub use rotation::{Keys, Step, rotate};
pub use seal::{MessageKey, SEAL};

use std::fmt;
use std::fs::OpenOptions;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use aws_lc_rs::hmac;
use rustix::rand::{GetRandomFlags, getrandom};
use thiserror::Error;

/// The length of a key, in bytes.
const LENGTH: usize = 32;

/// A shared key.
#[derive(Clone)]
pub struct Key(hmac::Key);

/// An error with a key file.
#[derive(Debug, Error)]
pub enum KeyError {
    /// The file cannot be read or written.
    #[error("the key {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        source: std::io::Error,
    },
    /// The file is accessible to other users.
    #[error("the key {path} can be read by other users: chmod 600 {path}")]
    Open {
        /// The file.
        path: PathBuf,
    },
    /// The file's owner is neither root nor the user of this process, and could change the key.
    #[error(
        "the key {path} belongs to the user {owner}, who has it and can change it: chown root {path}, or to the user that runs this"
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// The user id of its owner.
        owner: u32,
    },
    /// The step is not possible now.
    #[error("the key {path}: {why}")]
    Rotation {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: &'static str,
    },
    /// The file's content is no key.
    #[error("{path} holds no key: 64 hexadecimal digits are expected, as shunt relay new-key writes them")]
    Shape {
        /// The file.
        path: PathBuf,
    },
}

impl Key {
    /// Reads a key that [`new_key`] has written.
    pub fn read(path: &Path) -> Result<Key, KeyError> {
        let text = read_private(path)?;
        let bytes = from_hex(text.trim()).ok_or_else(|| KeyError::Shape { path: path.to_owned() })?;
        Ok(Key::from(bytes))
    }

    /// Returns the HMAC-SHA256 of the concatenated parts. The protocol must fix their lengths.
    pub fn sign(&self, parts: &[&[u8]]) -> [u8; LENGTH] {
        let mut context = hmac::Context::with_key(&self.0);
        for part in parts {
            context.update(part);
        }
        context.sign().as_ref().try_into().expect("SHA-256 has 32 bytes")
    }

    /// Returns `true` if the keys are equal.
    pub fn is(&self, other: &Key) -> bool {
        const ANYTHING: &[&[u8]] = &[b"is it the same"];
        self.verifies(ANYTHING, &other.sign(ANYTHING))
    }

    /// Returns `true` if `proof` is the HMAC of the parts under this key. Takes constant time.
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

/// The number of bytes that are read of a key file. A valid one is far shorter.
const LONGEST: u64 = 4096;

/// Reads a file that only its owner can access. It is opened once, and the opened file is checked.
fn read_private(path: &Path) -> Result<String, KeyError> {
    let failed = |source| KeyError::File { path: path.to_owned(), source };
    // Opening a FIFO must not block.
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

/// Returns unpredictable bytes.
pub fn nonce() -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    // The library's own generator takes about 100 ms to start in each thread, so ask the kernel.
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

/// Returns two hexadecimal digits for each byte.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a key as a line of a key file.
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
