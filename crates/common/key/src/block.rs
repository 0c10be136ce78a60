//! Values of at most fifteen bytes, encrypted into one block of sixteen. The same value has the same
//! block. So observers learn which blocks are equal, and nothing else.

use aws_lc_rs::cipher::{
    AES_256, DecryptionContext, PaddedBlockDecryptingKey, PaddedBlockEncryptingKey, UnboundCipherKey,
};

use crate::Key;

/// The length of a block.
pub const BLOCK: usize = 16;

impl Key {
    /// Encrypts a value for that role with AES-256. The padding (PKCS #7) fills the block, so of a
    /// block that was not made with this key only one in `256 ^ (16 - length)` has this value's
    /// length.
    pub fn seal_block(&self, role: &[u8], value: &[u8]) -> [u8; BLOCK] {
        assert!(value.len() < BLOCK, "the padding has at least one byte");
        let key = PaddedBlockEncryptingKey::ecb_pkcs7(self.cipher(role)).expect("the key has the length");
        let mut block = value.to_vec();
        key.encrypt(&mut block).expect("nothing is too long");
        block.try_into().expect("one block")
    }

    /// Decrypts a block. Returns `None` if it was not made with this key for that role.
    pub fn open_block(&self, role: &[u8], block: &[u8; BLOCK]) -> Option<Vec<u8>> {
        let key = PaddedBlockDecryptingKey::ecb_pkcs7(self.cipher(role)).expect("the key has the length");
        let mut block = *block;
        key.decrypt(&mut block, DecryptionContext::None).ok().map(|value| value.to_vec())
    }

    /// Derives the key of a role.
    fn cipher(&self, role: &[u8]) -> UnboundCipherKey {
        UnboundCipherKey::new(&AES_256, &self.sign(&[role])).expect("HMAC-SHA256 has the length")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_opened_with_its_key_and_role_only() {
        let (key, other) = (Key::from([1; 32]), Key::from([2; 32]));
        for length in 0..BLOCK {
            let value = vec![7; length];
            let block = key.seal_block(b"role", &value);
            assert_eq!(key.open_block(b"role", &block), Some(value.clone()));
            assert_eq!(key.seal_block(b"role", &value), block);
            assert_ne!(key.open_block(b"another", &block), Some(value.clone()));
            assert_ne!(other.open_block(b"role", &block), Some(value));
        }
    }
}
