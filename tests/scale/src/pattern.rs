//! The bytes of an exchange. A request's head has the lengths of both bodies and the seed of their
//! contents, so that each end can check every byte of the other.
//!
//! ```text
//! request:  u32 length of the body, u32 length of the answer, u64 seed, the body made from the seed
//! answer:   the body made from the inverted seed
//! ```
//!
//! All numbers are little-endian.

use anyhow::{Result, ensure};

/// Bytes of a request's head.
pub(crate) const HEAD: usize = 16;
/// The longest body. A larger length in a head means that the stream is corrupted.
pub(crate) const LONGEST: usize = 1 << 24;

/// The head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Bytes of the request's body.
    pub(crate) request: usize,
    /// Bytes of the answer.
    pub(crate) answer: usize,
    /// The seed of both bodies.
    pub(crate) seed: u64,
}

impl Head {
    /// Returns the whole request: head and body.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + self.request);
        bytes.extend((self.request as u32).to_le_bytes());
        bytes.extend((self.answer as u32).to_le_bytes());
        bytes.extend(self.seed.to_le_bytes());
        bytes.extend(body(self.seed, self.request));
        bytes
    }

    /// Decodes a head.
    pub(crate) fn decode(bytes: &[u8; HEAD]) -> Result<Head> {
        let [request, answer] =
            [0, 4].map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize);
        let seed = u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
        ensure!(request <= LONGEST && answer <= LONGEST, "the stream is corrupted: a head says {bytes:?}");
        Ok(Head { request, answer, seed })
    }

    /// Returns the bytes of the answer.
    pub(crate) fn answer_bytes(&self) -> Vec<u8> {
        body(!self.seed, self.answer).collect()
    }
}

/// Fails unless `bytes` are the body of a request with this head.
pub(crate) fn check_request(head: &Head, bytes: &[u8]) -> Result<()> {
    ensure!(bytes.iter().copied().eq(body(head.seed, head.request)), "a request's body is corrupted");
    Ok(())
}

/// Fails unless `bytes` are the answer to this head.
pub(crate) fn check_answer(head: &Head, bytes: &[u8]) -> Result<()> {
    ensure!(bytes.iter().copied().eq(body(!head.seed, head.answer)), "an answer is corrupted");
    Ok(())
}

/// Generates pseudo-random bytes, eight for each step of the generator.
fn body(seed: u64, len: usize) -> impl Iterator<Item = u8> {
    let mut random = Random::new(seed);
    std::iter::repeat_with(move || random.next().to_le_bytes()).flatten().take(len)
}

/// A small generator. Equal seeds give equal numbers.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    /// Returns the next number, by splitmix64.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    /// Returns a number below `limit`.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}
