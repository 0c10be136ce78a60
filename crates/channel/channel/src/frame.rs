//! The frames in the ring: each is a header and a number of bytes. A message is one frame or
//! several.

use crate::error::Cause;

/// The most bytes of a message.
pub const MAX_MESSAGE: usize = 64 << 20;
/// The most descriptors of a message: the kernel's limit for one sendmsg(2).
pub const MAX_DESCRIPTORS: usize = 253;

/// Bytes of a header.
pub(crate) const HEADER: usize = 16;

/// A flag: the message begins with this frame.
pub(crate) const FIRST: u32 = 1;
/// A flag: the message ends with this frame.
pub(crate) const LAST: u32 = 2;
/// A flag: the message ends here, and its sender has given it up.
pub(crate) const ABORT: u32 = 4;
/// A flag: the bytes of the message are in a memfd, the first of its descriptors.
pub(crate) const MEMORY: u32 = 8;
/// A flag: the bytes of the message are in a slot that the sender lends. The frame has a [`Use`].
pub(crate) const LENT: u32 = 16;
/// A flag: no message. The number of the next message of a publisher is in the two last words.
const NUMBER: u32 = 32;

/// Bytes of a [`Use`].
pub(crate) const USE: usize = 16;

/// Returns the four bytes from `at` on as a number: one load where `at` is constant.
#[inline]
pub(crate) fn word<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Returns the eight bytes from `at` on as a number.
#[inline]
pub(crate) fn long<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    let [a, b, c, d] = word(bytes, at).to_ne_bytes();
    let [e, f, g, h] = word(bytes, at + 4).to_ne_bytes();
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// One use of a lent slot, whose values are not checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) slot: u32,
    /// The number of the use among those of its slot, from 1.
    pub(crate) number: u64,
}

impl Use {
    pub(crate) fn bytes(self) -> [u8; USE] {
        let mut bytes = [0; USE];
        bytes[..4].copy_from_slice(&self.slot.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.number.to_ne_bytes());
        bytes
    }

    pub(crate) fn of(bytes: [u8; USE]) -> Use {
        Use { slot: word(&bytes, 0), number: long(&bytes, 8) }
    }
}

/// A header, whose values are not checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) flags: u32,
    /// Bytes that follow in the ring.
    pub(crate) len: u32,
    /// Bytes of the message, in the first frame.
    pub(crate) total: u32,
    /// Descriptors that belong to it, in the first frame.
    pub(crate) descriptors: u32,
}

impl Frame {
    pub(crate) fn bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let words = [self.flags, self.len, self.total, self.descriptors];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Returns a frame that names the number of the next message.
    pub(crate) fn of_number(number: u64) -> Frame {
        Frame { flags: NUMBER, len: 0, total: number as u32, descriptors: (number >> 32) as u32 }
    }

    /// Returns the number that a frame names, if it is such a frame.
    #[inline]
    pub(crate) fn number(bytes: &[u8; HEADER]) -> Option<u64> {
        let frame = Frame::any(bytes);
        let number = u64::from(frame.descriptors) << 32 | u64::from(frame.total);
        (frame.flags == NUMBER && frame.len == 0).then_some(number)
    }

    /// Returns the frame, if a message can begin with it.
    pub(crate) fn first(bytes: &[u8; HEADER]) -> Result<Frame, Cause> {
        let frame = Frame::any(bytes);
        let (len, total) = (frame.len as usize, frame.total as usize);
        let fits = match frame.flags {
            flags if flags == FIRST => len < total,
            flags if flags == FIRST | LAST => len == total,
            flags if flags == FIRST | LAST | MEMORY => len == 0 && frame.descriptors > 0,
            flags if flags == FIRST | LAST | LENT => len == USE,
            _ => false,
        };
        if !fits || total > MAX_MESSAGE || frame.descriptors as usize > MAX_DESCRIPTORS {
            return Err(Cause::Misbehaved("no message begins with such a frame"));
        }
        Ok(frame)
    }

    /// Returns the frame, if a message that lacks `missing` bytes can continue with it.
    pub(crate) fn next(bytes: &[u8; HEADER], missing: usize) -> Result<Frame, Cause> {
        let frame = Frame::any(bytes);
        let len = frame.len as usize;
        let fits = match frame.flags {
            0 => len < missing && len > 0,
            LAST => len == missing,
            ABORT => len == 0,
            _ => false,
        };
        if !fits || frame.total != 0 || frame.descriptors != 0 {
            return Err(Cause::Misbehaved("no message goes on with such a frame"));
        }
        Ok(frame)
    }

    fn any(bytes: &[u8; HEADER]) -> Frame {
        let word = |at: usize| word(bytes, at);
        Frame { flags: word(0), len: word(4), total: word(8), descriptors: word(12) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_of_a_slot_is_read_as_it_was_written() {
        let one = Use { slot: 7, number: u64::MAX - 1 };
        assert_eq!(Use::of(one.bytes()), one);
    }

    #[test]
    fn numbers_are_frames_without_a_message() {
        for number in [0, 1, u64::from(u32::MAX) + 1, u64::MAX] {
            let bytes = Frame::of_number(number).bytes();
            assert_eq!(Frame::number(&bytes), Some(number));
            assert!(Frame::first(&bytes).is_err() && Frame::next(&bytes, 9).is_err());
        }
        for other in [NUMBER | FIRST, FIRST, 0] {
            assert_eq!(
                Frame::number(&Frame { flags: other, len: 0, total: 0, descriptors: 0 }.bytes()),
                None
            );
        }
        assert_eq!(Frame::number(&Frame { flags: NUMBER, len: 1, total: 0, descriptors: 0 }.bytes()), None);
    }

    #[test]
    fn frames_are_taken_only_where_they_belong() {
        let bytes = |flags, len, total, descriptors| Frame { flags, len, total, descriptors }.bytes();
        for good in [
            bytes(FIRST | LAST, 0, 0, 0),
            bytes(FIRST | LAST, 9, 9, 253),
            bytes(FIRST, 9, 10, 0),
            bytes(FIRST | LAST | MEMORY, 0, MAX_MESSAGE as u32, 1),
            bytes(FIRST | LAST | LENT, 16, MAX_MESSAGE as u32, 0),
        ] {
            let frame = Frame::first(&good).unwrap();
            assert_eq!(frame.bytes(), good);
            assert!(Frame::next(&good, 9).is_err());
        }
        for bad in [
            bytes(0, 0, 0, 0),
            bytes(FIRST, 9, 9, 0),
            bytes(FIRST | LAST, 9, 10, 0),
            bytes(FIRST | LAST, u32::MAX, u32::MAX, 0),
            bytes(FIRST | LAST, 0, 0, 254),
            bytes(FIRST | MEMORY, 0, 10, 1),
            bytes(FIRST | LAST | MEMORY, 0, 10, 0),
            bytes(FIRST | LAST | LENT, 0, 10, 0),
            bytes(FIRST | LAST | LENT | MEMORY, 16, 10, 1),
            bytes(FIRST | LENT, 16, 32, 0),
            bytes(FIRST | LAST | LENT, 16, MAX_MESSAGE as u32 + 1, 0),
            bytes(FIRST | LAST | 32, 0, 0, 0),
        ] {
            assert!(Frame::first(&bad).is_err(), "{bad:?}");
        }
        assert!(Frame::next(&bytes(0, 9, 0, 0), 10).is_ok() && Frame::next(&bytes(LAST, 9, 0, 0), 9).is_ok());
        assert!(Frame::next(&bytes(ABORT, 0, 0, 0), 9).is_ok());
        for bad in [
            bytes(0, 9, 0, 0),
            bytes(0, 0, 0, 0),
            bytes(LAST, 8, 0, 0),
            bytes(ABORT, 1, 0, 0),
            bytes(LAST, 9, 9, 0),
        ] {
            assert!(Frame::next(&bad, 9).is_err(), "{bad:?}");
        }
    }
}
