//! A parser for memcached's text and binary protocols.

use std::ops::Range;

use shunt_serve::service::{Key, Refusal};

use super::{Decision, MALFORMED, MAX_LENGTH, Stop, TOO_COMPLEX, TOO_LONG, u32_at};

/// MEMCACHED_LINE in memcached.h.
const LINE: usize = 65536;
/// MEMCACHED_VALUES in memcached.h.
const VALUES: usize = 64;

fn is_binary(bytes: &[u8]) -> bool {
    matches!(bytes.first(), Some(0x80 | 0x81))
}

fn binary(bytes: &[u8], magic: u8) -> Result<usize, Stop> {
    let header: &[u8; 24] = bytes.first_chunk().ok_or(Stop::More)?;
    let body = u32_at(header, 8).expect("long enough") as usize;
    let key = usize::from(u16::from_be_bytes([header[2], header[3]]));
    if header[0] != magic || key + usize::from(header[4]) > body {
        return Err(MALFORMED);
    }
    if body > MAX_LENGTH - 24 { Err(TOO_LONG) } else { Ok(24 + body) }
}

/// Returns the end of the line that begins at `at`, after its LF.
fn line(bytes: &[u8], at: usize) -> Result<usize, Stop> {
    let rest = bytes.get(at..).unwrap_or(&[]);
    match rest.iter().take(LINE).position(|byte| *byte == b'\n') {
        Some(end) => Ok(at + end + 1),
        None if rest.len() >= LINE => Err(TOO_LONG),
        None => Err(Stop::More),
    }
}

/// Returns the ranges of the words of a line, without the line's end.
fn words(bytes: &[u8], at: usize, end: usize) -> Vec<Range<usize>> {
    let text = &bytes[at..end];
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    let text = text.strip_suffix(b"\r").unwrap_or(text);
    let mut begin = at;
    text.split(|byte| *byte == b' ')
        .map(|word| {
            let range = begin..begin + word.len();
            begin = range.end + 1;
            range
        })
        .collect()
}

/// Returns the length of a value, including its end, as announced by a word. A word ends at a space
/// or at the line's end.
fn value(bytes: &[u8], words: &[Range<usize>], index: usize) -> Result<usize, Stop> {
    if words.iter().take(index).any(Range::is_empty) {
        return Err(MALFORMED);
    }
    let word = words.get(index).ok_or(MALFORMED)?;
    let text = &bytes[word.clone()];
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    // "5\rx" counts as 5, because CR may end a line and therefore a number.
    let ends = text.get(digits).is_none_or(|byte| *byte == b'\r');
    if digits == 0 || digits > 9 || !ends {
        return Err(MALFORMED);
    }
    Ok(std::str::from_utf8(&text[..digits]).expect("digits").parse::<usize>().expect("a number") + 2)
}

pub(super) fn request(bytes: &[u8]) -> Result<usize, Stop> {
    if is_binary(bytes) {
        return binary(bytes, 0x80);
    }
    let end = line(bytes, 0)?;
    let words = words(bytes, 0, end);
    let needed = match &bytes[words[0].clone()] {
        b"get" | b"gets" | b"delete" | b"incr" | b"decr" | b"touch" => 1,
        b"gat" | b"gats" => 2,
        b"set" | b"add" | b"replace" | b"append" | b"prepend" | b"cas" => 1,
        _ => return Ok(end),
    };
    if (1..=needed).any(|index| words.get(index).is_none_or(Range::is_empty)) {
        return Err(MALFORMED);
    }
    match &bytes[words[0].clone()] {
        b"set" | b"add" | b"replace" | b"append" | b"prepend" | b"cas" => Ok(end + value(bytes, &words, 4)?),
        _ => Ok(end),
    }
}

pub(super) fn reply(bytes: &[u8]) -> Result<usize, Stop> {
    if is_binary(bytes) {
        return binary(bytes, 0x81);
    }
    let mut at = 0;
    for _ in 0..VALUES {
        let end = line(bytes, at)?;
        if !bytes[at..end].starts_with(b"VALUE ") {
            return Ok(end);
        }
        at = end + value(bytes, &words(bytes, at, end), 3)?;
        if at > MAX_LENGTH {
            return Err(TOO_LONG);
        }
    }
    Err(TOO_COMPLEX)
}

pub(super) fn decide(message: &[u8]) -> Decision {
    if is_binary(message) {
        let key = usize::from(u16::from_be_bytes([message[2], message[3]]));
        let begin = 24 + usize::from(message[4]);
        return match message[1] {
            0x00..=0x06 | 0x0c | 0x0e | 0x0f | 0x1c | 0x1d | 0x23 if key > 0 => {
                Decision::Forward(Key::Bytes(begin..begin + key), false)
            }
            0x07 | 0x0a | 0x0b | 0x17 => Decision::Own,
            opcode if key > 0 => match QUIET.iter().find(|(quiet, _)| *quiet == opcode) {
                Some((_, loud)) => {
                    let mut part = message.to_vec();
                    part[1] = *loud;
                    Decision::Split(vec![part])
                }
                None => Decision::Refuse(Refusal::UnknownCommand),
            },
            _ => Decision::Refuse(Refusal::UnknownCommand),
        };
    }
    let end = line(message, 0).expect("a line");
    let words = words(message, 0, end);
    let text = &message[..words.last().expect("one at least").end];
    let quiet = text.ends_with(b" noreply");
    let forward = |word: &Range<usize>, one_way| Decision::Forward(Key::Bytes(word.clone()), one_way);
    let split = |from: usize| {
        let command = &message[..words[from].start];
        if command.len() > 64 {
            return Decision::Refuse(Refusal::UnknownCommand);
        }
        let keys = words[from..].iter().filter(|word| !word.is_empty());
        Decision::Split(keys.map(|key| [command, &message[key.clone()], b"\r\n"].concat()).collect())
    };
    match (&message[words[0].clone()], words.len()) {
        (b"get" | b"gets", 2) => forward(&words[1], false),
        (b"gat" | b"gats", 3) => forward(&words[2], false),
        (b"get" | b"gets", 3..) => split(1),
        (b"gat" | b"gats", 4..) => split(2),
        (b"delete" | b"incr" | b"decr" | b"touch", _) => forward(&words[1], quiet),
        (b"set" | b"add" | b"replace" | b"append" | b"prepend" | b"cas", _) => forward(&words[1], quiet),
        (b"version" | b"quit", _) => Decision::Own,
        _ => Decision::Refuse(Refusal::UnknownCommand),
    }
}

/// The quiet commands with a key, each with its equivalent that is not quiet.
const QUIET: [(u8, u8); 12] = [
    (0x09, 0x00),
    (0x0d, 0x0c),
    (0x11, 0x01),
    (0x12, 0x02),
    (0x13, 0x03),
    (0x14, 0x04),
    (0x15, 0x05),
    (0x16, 0x06),
    (0x19, 0x0e),
    (0x1a, 0x0f),
    (0x1e, 0x1d),
    (0x24, 0x23),
];
