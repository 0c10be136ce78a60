//! Messages that only those who have the key can read, and make. Each has a key of its own (AES-256-GCM), which is made from the shared
//! one and from something that is never twice the same.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::Key;

/// What a sealed message is longer by.
pub const SEAL: usize = 16;

impl Key {
    /// Seals `bytes` in their place; what is returned belongs to them. `once` are parts of fixed lengths that together are never the same
    /// for two messages under this key; whoever opens it has to have the same.
    pub fn seal(&self, once: &[&[u8]], bytes: &mut [u8]) -> [u8; SEAL] {
        let tag = self.message_key(once).seal_in_place_separate_tag(zero(), Aad::empty(), bytes);
        let tag = tag.expect("messages are short");
        tag.as_ref().try_into().expect("AES-GCM's tag has 16 bytes")
    }

    /// Opens what was sealed: the bytes and their seal. None: by somebody else, or it was something else.
    pub fn open<'a>(&self, once: &[&[u8]], sealed: &'a mut [u8]) -> Option<&'a mut [u8]> {
        self.message_key(once).open_in_place(zero(), Aad::empty(), sealed).ok()
    }

    fn message_key(&self, once: &[&[u8]]) -> LessSafeKey {
        let bytes = self.sign(&[&[&b"seal"[..]], once].concat());
        LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &bytes).expect("32 bytes are a key"))
    }
}

/// The key is used once.
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
