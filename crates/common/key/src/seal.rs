//! Seals the few messages of one exchange with AES-256-GCM, under a key that was made for it.

use std::fmt;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::LENGTH;

/// The number of bytes by which a sealed message is longer.
pub const SEAL: usize = 16;

/// A key for the messages of one exchange. It must not be used for another one.
pub struct MessageKey(LessSafeKey);

impl MessageKey {
    /// Returns the message with that number, followed by its authentication tag. A number stands
    /// for one message of one side, and is sealed at most once.
    pub fn seal(&self, number: u8, bytes: &[u8]) -> Vec<u8> {
        let mut sealed = bytes.to_vec();
        let done = self.0.seal_in_place_append_tag(nonce(number), Aad::empty(), &mut sealed);
        done.expect("messages are short");
        sealed
    }

    /// Decrypts the message with that number. Returns `None` if it was sealed with another key or
    /// another number, was changed, or has another length.
    pub fn open<const LENGTH: usize>(&self, number: u8, sealed: &[u8]) -> Option<[u8; LENGTH]> {
        let mut bytes = sealed.to_vec();
        let opened = self.0.open_in_place(nonce(number), Aad::empty(), &mut bytes).ok()?;
        (*opened).try_into().ok()
    }
}

impl From<[u8; LENGTH]> for MessageKey {
    fn from(bytes: [u8; LENGTH]) -> MessageKey {
        MessageKey(LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &bytes).expect("32 bytes are a key")))
    }
}

impl fmt::Debug for MessageKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("MessageKey")
    }
}

fn nonce(number: u8) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[0] = number;
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_has_the_key_opens_it_and_only_in_its_place() {
        let [key, other] = [1, 2].map(|byte| MessageKey::from([byte; LENGTH]));
        let sealed = key.seal(1, b"the message");
        assert_eq!(sealed.len(), 11 + SEAL);
        assert!(!sealed.windows(3).any(|bytes| bytes == b"the"));
        assert_eq!(key.open::<11>(1, &sealed).unwrap(), *b"the message");
        assert!(key.open::<11>(2, &sealed).is_none());
        assert!(other.open::<11>(1, &sealed).is_none());
        assert!(key.open::<10>(1, &sealed).is_none());
        for at in 0..sealed.len() {
            let mut bent = sealed.clone();
            bent[at] ^= 1;
            assert!(key.open::<11>(1, &bent).is_none(), "{at}");
            assert!(key.open::<11>(1, &sealed[..at]).is_none(), "{at}");
        }
    }
}
