//! Seals messages, so that only holders of the key can read or make them. Each message is encrypted
//! with AES-256-GCM under a key that is derived from the shared key and from unique parts.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::Key;

/// The number of bytes by which a sealed message is longer.
pub const SEAL: usize = 16;

impl Key {
    /// Encrypts `bytes` in place, and returns their authentication tag. The parts in `once` have
    /// fixed lengths, and their concatenation must be unique among all messages under this key.
    /// [`Key::open`] needs the same parts.
    pub fn seal(&self, once: &[&[u8]], bytes: &mut [u8]) -> [u8; SEAL] {
        let tag = self.message_key(once).seal_in_place_separate_tag(zero(), Aad::empty(), bytes);
        let tag = tag.expect("messages are short");
        tag.as_ref().try_into().expect("AES-GCM's tag has 16 bytes")
    }

    /// Decrypts a message that is followed by its tag. Returns `None` if it was sealed with another
    /// key or other parts, or was changed.
    pub fn open<'a>(&self, once: &[&[u8]], sealed: &'a mut [u8]) -> Option<&'a mut [u8]> {
        self.message_key(once).open_in_place(zero(), Aad::empty(), sealed).ok()
    }

    fn message_key(&self, once: &[&[u8]]) -> LessSafeKey {
        let bytes = self.sign(&[&[&b"seal"[..]], once].concat());
        LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &bytes).expect("32 bytes are a key"))
    }
}

/// Returns the all-zero nonce. It is safe because each derived key seals one message only.
fn zero() -> Nonce {
    Nonce::assume_unique_for_key([0; NONCE_LEN])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_has_the_key_opens_it_and_only_in_its_place() {
        let [key, other] = [1, 2].map(|byte| Key::from([byte; 32]));
        let mut bytes = *b"the message";
        let tag = key.seal(&[b"1"], &mut bytes);
        assert_ne!(&bytes, b"the message");
        let sealed = [&bytes[..], &tag].concat();
        assert_eq!(key.open(&[b"1"], &mut sealed.clone()).unwrap(), b"the message");
        assert!(key.open(&[b"2"], &mut sealed.clone()).is_none());
        assert!(other.open(&[b"1"], &mut sealed.clone()).is_none());
        for at in 0..sealed.len() {
            let mut bent = sealed.clone();
            bent[at] ^= 1;
            assert!(key.open(&[b"1"], &mut bent).is_none(), "{at}");
        }
    }
}
