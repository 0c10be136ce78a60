//! A chunked body (RFC 9112, section 7.1), byte by byte.
//!
//! ```text
//! Size --";"--> Name --"="--> Value ----+
//!  |             |            Quoted <-> Escaped
//!  | CR          | CR          | CR     |
//!  v             v             v        v
//! SizeEnd <-------------------------- AfterQuoted
//!  | LF, size > 0: Data --> DataEnd --CR--> DataLineEnd --LF--> Size
//!  | LF, size = 0: Last --CR--> LastEnd --LF--> Done
//!                   |
//!                   +-- other: Trailer --empty line--> Done
//! ```
//!
//! Extensions are checked and dropped, so that a backend sees sizes only. Trailers are collected,
//! checked as the fields of a head, and forwarded without those that may not be in a trailer.

use super::body::{BadBody, Passed};
use super::fields::{self, Name, has_whole_line_ends};

/// The most digits of a size.
const DIGITS: u8 = 15;
/// The most bytes of the extensions of one chunk.
const EXTENSIONS: u16 = 256;
/// The most bytes of the trailers.
const TRAILERS: usize = 8 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Size,
    /// The name of an extension.
    Name {
        is_empty: bool,
    },
    /// Its value, a word.
    Value {
        is_empty: bool,
    },
    /// Its value, in quotation marks.
    Quoted,
    Escaped,
    AfterQuoted,
    SizeEnd,
    Data,
    DataEnd,
    DataLineEnd,
    /// The beginning of the trailers or of the empty line after the last chunk.
    Last,
    LastEnd,
    Trailer,
    Done,
}

/// A chunked body of which a part has been forwarded.
#[derive(Debug)]
pub struct Chunked {
    state: State,
    /// Digits of the current size.
    digits: u8,
    /// Bytes of the current extensions.
    extensions: u16,
    /// The current size, or the rest of the current chunk.
    size: u64,
    trailers: Vec<u8>,
    /// Only the content of chunks is forwarded.
    decodes: bool,
}

impl Chunked {
    pub(super) fn new(decodes: bool) -> Chunked {
        Chunked { state: State::Size, digits: 0, extensions: 0, size: 0, trailers: Vec::new(), decodes }
    }

    pub(super) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    pub(super) fn plain(&self) -> u64 {
        if self.state == State::Data { self.size } else { 0 }
    }

    pub(super) fn skip(&mut self, bytes: u64) {
        self.size -= bytes;
        if self.size == 0 {
            self.state = State::DataEnd;
        }
    }

    /// See [`super::Body::pass`]. No more bytes are kept than taken, so it works in place.
    pub(super) fn pass(&mut self, input: &mut [u8], tail: &mut Vec<u8>) -> Result<Passed, BadBody> {
        let (mut taken, mut kept) = (0, 0);
        while taken < input.len() && self.state != State::Done {
            if self.state == State::Data {
                let count = usize::try_from(self.size).unwrap_or(usize::MAX).min(input.len() - taken);
                if taken != kept {
                    input.copy_within(taken..taken + count, kept);
                }
                (taken, kept) = (taken + count, kept + count);
                self.skip(count as u64);
                continue;
            }
            let byte = input[taken];
            taken += 1;
            if self.step(byte, tail)? && !self.decodes {
                input[kept] = byte;
                kept += 1;
            }
        }
        Ok(Passed { taken, kept })
    }

    /// Takes a byte that is not content, and returns true if it is forwarded.
    fn step(&mut self, byte: u8, tail: &mut Vec<u8>) -> Result<bool, BadBody> {
        let (state, is_forwarded) = match (self.state, byte) {
            (State::Size, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                self.digits += 1;
                if self.digits > DIGITS {
                    return Err(BadBody);
                }
                self.size = self.size << 4 | u64::from((byte as char).to_digit(16).unwrap_or_default());
                (State::Size, true)
            }
            (State::Size, b'\r' | b';') if self.digits == 0 => return Err(BadBody),
            (
                State::Size
                | State::Name { is_empty: false }
                | State::Value { is_empty: false }
                | State::AfterQuoted,
                b'\r',
            ) => (State::SizeEnd, true),
            (
                State::Size
                | State::Name { is_empty: false }
                | State::Value { is_empty: false }
                | State::AfterQuoted,
                b';',
            ) => (State::Name { is_empty: true }, false),
            (State::Name { is_empty: false }, b'=') => (State::Value { is_empty: true }, false),
            (State::Name { .. }, byte) if is_token(byte) => (State::Name { is_empty: false }, false),
            (State::Value { is_empty: true }, b'"') => (State::Quoted, false),
            (State::Value { .. }, byte) if is_token(byte) => (State::Value { is_empty: false }, false),
            (State::Quoted, b'"') => (State::AfterQuoted, false),
            (State::Quoted, b'\\') => (State::Escaped, false),
            (State::Quoted | State::Escaped, b'\t' | b' '..=b'~' | 0x80..) => (State::Quoted, false),
            (State::SizeEnd, b'\n') => {
                (self.digits, self.extensions) = (0, 0);
                (if self.size == 0 { State::Last } else { State::Data }, true)
            }
            (State::DataEnd, b'\r') => (State::DataLineEnd, true),
            (State::DataLineEnd, b'\n') => (State::Size, true),
            (State::Last, b'\r') => (State::LastEnd, true),
            (State::LastEnd, b'\n') => (State::Done, true),
            (State::Last | State::Trailer, byte) => return self.trailer(byte, tail),
            _ => return Err(BadBody),
        };
        if matches!(state, State::Name { .. } | State::Value { .. } | State::Quoted | State::Escaped) {
            self.extensions += 1;
            if self.extensions > EXTENSIONS {
                return Err(BadBody);
            }
        }
        self.state = state;
        Ok(is_forwarded)
    }

    fn trailer(&mut self, byte: u8, tail: &mut Vec<u8>) -> Result<bool, BadBody> {
        self.state = State::Trailer;
        self.trailers.push(byte);
        if self.trailers.len() > TRAILERS {
            return Err(BadBody);
        }
        if byte == b'\n' {
            if !has_whole_line_ends(&self.trailers) {
                return Err(BadBody);
            }
            if self.trailers.ends_with(b"\r\n\r\n") {
                self.state = State::Done;
                self.write_trailers(tail)?;
            }
        }
        Ok(false)
    }

    fn write_trailers(&self, tail: &mut Vec<u8>) -> Result<(), BadBody> {
        let mut slots = [httparse::EMPTY_HEADER; fields::MAX_FIELDS];
        let Ok(httparse::Status::Complete((length, trailers))) =
            httparse::parse_headers(&self.trailers, &mut slots)
        else {
            return Err(BadBody);
        };
        if length != self.trailers.len() {
            return Err(BadBody);
        }
        if !self.decodes {
            let is_allowed = |name: &str| !Name::of(name).is_forbidden_in_trailer(name);
            for field in trailers.iter().filter(|field| is_allowed(field.name)) {
                fields::write(tail, field.name, field.value);
            }
            tail.extend_from_slice(b"\r\n");
        }
        Ok(())
    }
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes a body in pieces of `size` bytes. Returns the forwarded bytes, how many were taken, and whether
    /// it is done.
    fn pass(bytes: &[u8], size: usize, decodes: bool) -> Result<(Vec<u8>, usize, bool), BadBody> {
        let (mut body, mut out, mut taken) = (Chunked::new(decodes), Vec::new(), 0);
        for piece in bytes.chunks(size) {
            let (mut piece, mut tail) = (piece.to_vec(), Vec::new());
            let passed = body.pass(&mut piece, &mut tail)?;
            assert!(passed.kept <= passed.taken && (passed.taken == piece.len() || body.is_done()));
            out.extend_from_slice(&piece[..passed.kept]);
            out.extend(tail);
            taken += passed.taken;
            if body.is_done() {
                break;
            }
        }
        Ok((out, taken, body.is_done()))
    }

    #[test]
    fn body_is_forwarded_however_it_is_cut() {
        for (bytes, forwarded, content) in [
            ("0\r\n\r\n", "0\r\n\r\n", ""),
            ("3\r\nabc\r\n0\r\n\r\n", "3\r\nabc\r\n0\r\n\r\n", "abc"),
            ("A\r\n0123456789\r\n00\r\n\r\n", "A\r\n0123456789\r\n00\r\n\r\n", "0123456789"),
            ("3;a=b;c;d=\"e\\\";\"\r\nabc\r\n0;x\r\n\r\n", "3\r\nabc\r\n0\r\n\r\n", "abc"),
            ("1\r\na\r\n0\r\nX: 1\r\nHost: h\r\nY:\r\n\r\n", "1\r\na\r\n0\r\nX: 1\r\nY: \r\n\r\n", "a"),
            ("0\r\nContent-Length: 5\r\n\r\n", "0\r\n\r\n", ""),
        ] {
            let with_next = format!("{bytes}GET / HTTP/1.1\r\n");
            for size in 1..=with_next.len() {
                for (decodes, wanted) in [(false, forwarded), (true, content)] {
                    let (out, taken, is_done) = pass(with_next.as_bytes(), size, decodes).unwrap();
                    assert_eq!(
                        (String::from_utf8(out).unwrap().as_str(), taken, is_done),
                        (wanted, bytes.len(), true)
                    );
                }
            }
        }
    }

    #[test]
    fn malformed_body_is_refused() {
        let long = format!("1;{}\r\na\r\n", "x".repeat(300));
        let trailers = format!("0\r\nX: {}\r\n\r\n", "x".repeat(TRAILERS));
        for bytes in [
            "\r\n",
            ";a\r\n",
            "g\r\n",
            "-1\r\n",
            "+1\r\n",
            "0x1\r\n",
            "1_0\r\n",
            " 1\r\na\r\n",
            "1 \r\na\r\n",
            "1\na\r\n",
            "1\r\nab",
            "1\r\na\n0\r\n\r\n",
            "1\r\na\r0",
            "1;\r\na",
            "1;=a\r\n",
            "1;a=\r\n",
            "1;a=\"\r\n",
            "1;a\n",
            "1;a b\r\n",
            "1;a=\"x\"y\r\n",
            "1;\0\r\n",
            "1\r\r\n",
            "0\r\n\n",
            "0\r\nX : 1\r\n\r\n",
            "0\r\nX\r\n\r\n",
            "0\r\nX: 1\n\r\n",
            "0\r\n X: 1\r\n\r\n",
            "0\r\nX: 1\r\n y\r\n\r\n",
            "1000000000000000\r\n",
            "0\r\nX: \0\r\n\r\n",
            &long,
            &trailers,
        ] {
            for size in [1, 2, bytes.len()] {
                assert_eq!(pass(bytes.as_bytes(), size, false), Err(BadBody), "{bytes:?}");
            }
        }
    }

    #[test]
    fn content_of_long_chunk_may_be_skipped() {
        let (mut body, mut tail) = (Chunked::new(false), Vec::new());
        let mut bytes = *b"5\r\na";
        assert_eq!(body.pass(&mut bytes, &mut tail), Ok(Passed { taken: 4, kept: 4 }));
        assert_eq!(body.plain(), 4);
        body.skip(4);
        assert_eq!(body.plain(), 0);
        let mut bytes = *b"\r\n0\r\n\r\n";
        assert_eq!(body.pass(&mut bytes, &mut tail), Ok(Passed { taken: 7, kept: 7 }));
        assert!(body.is_done());
    }
}
