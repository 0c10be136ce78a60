//! A FIFO byte buffer: bytes are appended at the end and taken from the beginning.

/// Capacity that an empty buffer retains.
const KEPT: usize = 64 * 1024;

/// A FIFO of bytes.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    /// Index in `bytes` of the first byte that has not been taken.
    start: usize,
}

impl Buffer {
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        // Compact only when the vector would reallocate, and so move the rest, anyway.
        if self.start > 0 && self.bytes.len() + bytes.len() > self.bytes.capacity() {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    pub(crate) fn take(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.bytes.len());
        if self.is_empty() {
            self.clear();
        }
    }

    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(KEPT);
        self.start = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_comes_out() {
        let (mut buffer, mut put, mut got) = (Buffer::default(), 0u32, 0u32);
        for round in 0..2000usize {
            for _ in 0..round % 7 {
                buffer.push(&put.to_be_bytes());
                put += 1;
            }
            for _ in 0..(round % 5).min(buffer.len() / 4) {
                assert_eq!(buffer.as_slice()[..4], got.to_be_bytes());
                buffer.take(4);
                got += 1;
            }
        }
        assert_eq!(buffer.len(), (put - got) as usize * 4);
        assert!(got > 3000);
    }
}
