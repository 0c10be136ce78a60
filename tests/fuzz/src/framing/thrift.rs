//! A recursive parser for Apache Thrift's binary protocol.

use shunt_serve::service::{Key, Refusal};

use super::{Decision, MALFORMED, MAX_LENGTH, Stop, TOO_COMPLEX, TOO_LONG, u32_at};

/// THRIFT_DEPTH in thrift.h.
const DEPTH: usize = 16;

/// A cursor. Bytes after the end of a frame are not read.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    frame: Option<usize>,
}

struct Header {
    frame: Option<usize>,
    kind: u8,
    body: usize,
}

/// The result for an incomplete header: the end of its frame if known, and the reason.
struct Early(Option<usize>, Stop);

fn header(bytes: &[u8]) -> Result<Header, Early> {
    let more = |frame| Early(frame, Stop::More);
    let malformed = Early(None, MALFORMED);
    let mut first = u32_at(bytes, 0).ok_or(more(None))?;
    let mut frame = None;
    let mut at = 0;
    if first < 1 << 31 {
        if first as usize > MAX_LENGTH - 4 {
            return Err(Early(None, TOO_LONG));
        }
        // A method name does not begin with a byte of 0 or of 128 or more.
        let next = *bytes.get(4).ok_or(more(None))?;
        if next == 0 || next >= 0x80 {
            let end = first as usize + 4;
            frame = Some(end);
            at = 4;
            first = match u32_at(bytes, 4) {
                Some(first) => first,
                None if end < 8 => return Err(malformed),
                None => return Err(more(frame)),
            };
        }
    }
    let strict = first >= 1 << 31;
    let mut kind = first as u8;
    if strict {
        if first >> 16 != 0x8001 {
            return Err(Early(None, Stop::Refused(Refusal::UnknownVersion)));
        }
        at += 4;
        first = match u32_at(bytes, at) {
            Some(first) => first,
            None if frame.is_some_and(|end| end < at + 4) => return Err(malformed),
            None => return Err(more(frame)),
        };
    }
    if first == 0 || first > 65536 {
        return Err(malformed);
    }
    at += 4 + first as usize;
    let body = at + if strict { 4 } else { 5 };
    if frame.is_some_and(|end| body > end) {
        return Err(malformed);
    }
    if bytes.len() < body {
        return Err(more(frame));
    }
    if !strict {
        kind = bytes[at];
    }
    if !(1..=4).contains(&kind) {
        return Err(malformed);
    }
    Ok(Header { frame, kind, body })
}

pub(super) fn message(bytes: &[u8]) -> Result<usize, Stop> {
    let header = match header(bytes) {
        Ok(header) => header,
        Err(Early(Some(end), Stop::More)) => return Ok(end),
        Err(Early(_, stop)) => return Err(stop),
    };
    if let Some(end) = header.frame {
        return Ok(end);
    }
    let mut reader = Reader { bytes, at: header.body, frame: None };
    reader.fields(0, |_, _, _| Ok(false))?;
    Ok(reader.at)
}

pub(super) fn decide(message: &[u8]) -> Decision {
    let header = match header(message) {
        Ok(header) => header,
        Err(Early(_, Stop::Refused(why))) => return Decision::Refuse(why),
        Err(Early(_, Stop::More)) => panic!("the message is whole"),
    };
    if !matches!(header.kind, 1 | 4) {
        return Decision::Refuse(Refusal::Malformed);
    }
    let mut key = None;
    let mut reader = Reader { bytes: message, at: header.body, frame: header.frame };
    let walked = reader.fields(0, |reader, id, kind| {
        if id != 1 {
            return Ok(false);
        }
        key = reader.key(kind)?;
        Ok(true)
    });
    match (walked, key) {
        (Err(Stop::Refused(why)), _) => Decision::Refuse(why),
        (Err(Stop::More), _) => panic!("the message is whole"),
        (Ok(()), Some(key)) => Decision::Forward(key, header.kind == 4),
        (Ok(()), None) => Decision::Refuse(Refusal::MissingField),
    }
}

impl<'a> Reader<'a> {
    /// Returns the next bytes without consuming them.
    fn peek(&self, length: usize) -> Result<&'a [u8], Stop> {
        if self.frame.is_some_and(|end| self.at + length > end) {
            return Err(MALFORMED);
        }
        self.bytes.get(self.at..self.at + length).ok_or(Stop::More)
    }

    fn skip(&mut self, length: usize) -> Result<(), Stop> {
        self.at += length;
        if self.frame.is_some_and(|end| self.at > end) {
            return Err(MALFORMED);
        }
        if self.at > MAX_LENGTH { Err(TOO_LONG) } else { Ok(()) }
    }

    fn count(&self, bytes: &[u8]) -> Result<usize, Stop> {
        usize::try_from(u32_at(bytes, 0).expect("four bytes") as i32).map_err(|_| MALFORMED)
    }

    /// Iterates over the fields of a struct until `take` accepts one.
    fn fields(
        &mut self,
        depth: usize,
        mut take: impl FnMut(&mut Self, i16, u8) -> Result<bool, Stop>,
    ) -> Result<(), Stop> {
        loop {
            let kind = self.peek(1)?[0];
            if kind == 0 {
                return self.skip(1);
            }
            let field = self.peek(3)?;
            let id = i16::from_be_bytes([field[1], field[2]]);
            self.skip(3)?;
            if take(self, id, kind)? {
                return Ok(());
            }
            self.value(kind, depth)?;
        }
    }

    fn value(&mut self, kind: u8, depth: usize) -> Result<(), Stop> {
        if let Some(size) = size(kind) {
            return self.skip(size);
        }
        if kind == 12 {
            enter(depth)?;
            return self.fields(depth + 1, |_, _, _| Ok(false));
        }
        let (kinds, count): (&[u8], usize) = match kind {
            11 => {
                let length = self.count(self.peek(4)?)?;
                return self.skip(4 + length);
            }
            13 => {
                let bytes = self.peek(6)?;
                (&bytes[..2], self.count(&bytes[2..])?)
            }
            14 | 15 => {
                let bytes = self.peek(5)?;
                (&bytes[..1], self.count(&bytes[1..])?)
            }
            _ => return Err(MALFORMED),
        };
        let skipped = kinds.len() + 4;
        if count == 0 {
            return self.skip(skipped);
        }
        if kinds.iter().any(|kind| size(*kind).is_none() && !(11..=15).contains(kind)) {
            return Err(MALFORMED);
        }
        if let Some(sizes) = kinds.iter().map(|kind| size(*kind)).sum::<Option<usize>>() {
            return self.skip(skipped + count * sizes);
        }
        if kinds.len() == 2 && count > MAX_LENGTH {
            return Err(TOO_LONG);
        }
        self.skip(skipped)?;
        enter(depth)?;
        for _ in 0..count {
            for kind in kinds {
                self.value(*kind, depth + 1)?;
            }
        }
        Ok(())
    }

    /// Returns the value of an integer or the bytes of a string; `None` for other types.
    fn key(&mut self, kind: u8) -> Result<Option<Key>, Stop> {
        let number = |number: i64| Ok(Some(Key::Number(number as u64)));
        match kind {
            2 | 3 => number(self.peek(1)?[0] as i8 as i64),
            6 => number(i16::from_be_bytes(*self.peek(2)?.first_chunk().expect("two")).into()),
            8 => number(i32::from_be_bytes(*self.peek(4)?.first_chunk().expect("four")).into()),
            10 => number(i64::from_be_bytes(*self.peek(8)?.first_chunk().expect("eight"))),
            11 => {
                let length = self.count(self.peek(4)?)?;
                self.skip(4 + length)?;
                if self.at > self.bytes.len() {
                    return Err(Stop::More);
                }
                Ok(Some(Key::Bytes(self.at - length..self.at)))
            }
            _ => match size(kind) {
                Some(size) => self.peek(size).map(|_| None),
                None if (12..=15).contains(&kind) => Ok(None),
                None => Err(MALFORMED),
            },
        }
    }
}

fn enter(depth: usize) -> Result<(), Stop> {
    if depth + 1 >= DEPTH { Err(TOO_COMPLEX) } else { Ok(()) }
}

fn size(kind: u8) -> Option<usize> {
    match kind {
        2 | 3 => Some(1),
        6 => Some(2),
        8 => Some(4),
        4 | 10 => Some(8),
        16 => Some(16),
        _ => None,
    }
}
