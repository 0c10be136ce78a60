//! Interprets arbitrary bytes as a sequence of choices. After the end of the input all bytes are
//! zero, so every input is valid.

/// A cursor over the input.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Input<'a> {
        Input(bytes)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Returns a number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (usize::from(self.byte()) | usize::from(self.byte()) << 8) % end
    }

    pub(crate) fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// Returns a new value for a word of shared memory that holds `now`: one close to it, or any
    /// other.
    pub(crate) fn lie(&mut self, now: u64) -> u64 {
        const CLOSED: u64 = 1 << 63;
        const RETURNED: u64 = 1 << 62;
        match self.byte() % 10 {
            0 => now.wrapping_add(self.below(8192) as u64),
            1 => now.wrapping_sub(self.below(8192) as u64),
            2 => now | CLOSED,
            3 => now | CLOSED | RETURNED,
            4 => now ^ RETURNED,
            5 => now & !(CLOSED | RETURNED),
            6 => u64::from(self.byte()),
            7 => u64::MAX,
            _ => self.word(),
        }
    }
}
