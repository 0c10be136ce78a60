//! The answer to a client that speaks memcached's binary protocol, which the cache does not serve.
//! Without an answer, such a client would wait until its time-out.

/// The first byte of a request and of an answer.
const REQUEST: u8 = 0x80;
const ANSWER: u8 = 0x81;
/// The bytes of a header.
const HEADER: usize = 24;
/// The status "Unknown command".
const UNKNOWN: u16 = 0x81;
const TEXT: &[u8] = b"this cache has memcached's text protocol only, without the binary one";

/// Returns true if the message, in which no command is unfinished, is of the binary protocol.
pub(super) fn is_binary(message: &[u8]) -> bool {
    message.first() == Some(&REQUEST)
}

/// Returns the answer to a request, as soon as its header is there.
///
/// A header has the magic number, the opcode (1), and from byte 12 on four bytes that the client gets
/// back. An answer has the status at byte 6, and the length of its text at byte 8.
pub(super) fn refusal(message: &[u8]) -> Option<Vec<u8>> {
    let header = message.get(..HEADER).filter(|header| is_binary(header))?;
    let mut answer = vec![0; HEADER];
    (answer[0], answer[1]) = (ANSWER, header[1]);
    answer[6..8].copy_from_slice(&UNKNOWN.to_be_bytes());
    answer[8..12].copy_from_slice(&(TEXT.len() as u32).to_be_bytes());
    answer[12..16].copy_from_slice(&header[12..16]);
    answer.extend_from_slice(TEXT);
    Some(answer)
}
