//! Messages that are made and used in place: one word of each page is written, and read again.

/// The distance of the words.
const STEP: usize = 4096;
const WORD: usize = size_of::<u64>();

fn places(len: usize) -> impl Iterator<Item = usize> {
    (0..len).step_by(STEP).filter(move |at| at + WORD <= len)
}

/// Writes the number of the message.
pub(super) fn write(message: &mut [u8], number: u64) {
    for at in places(message.len()) {
        message[at..at + WORD].copy_from_slice(&number.to_ne_bytes());
    }
}

/// Returns whether each page has the number of the message.
pub(super) fn are(len: usize, number: u64, read: impl Fn(usize) -> Option<u64>) -> bool {
    places(len).all(|at| read(at) == Some(number))
}
