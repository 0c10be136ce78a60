//! Reads commands in Redis' protocol: arrays of bulk strings, or words of a line; and writes answers.

use std::borrow::Cow;

/// The most arguments of a command, and the most bytes of one, as in Redis.
const MAX_ARGUMENTS: i64 = i32::MAX as i64;
const MAX_BULK: i64 = 512 << 20;
/// The most bytes of a line.
const MAX_LINE: usize = 64 * 1024;

/// Returns the length of the command at the beginning of `bytes`, or `None` if it is incomplete.
pub(super) fn measure(bytes: &[u8]) -> Result<Option<usize>, Cow<'static, str>> {
    if bytes.first() != Some(&b'*') {
        return match bytes.iter().take(MAX_LINE).position(|byte| *byte == b'\n') {
            Some(end) => Ok(Some(end + 1)),
            None if bytes.len() >= MAX_LINE => Err("too big inline request".into()),
            None => Ok(None),
        };
    }
    let Some((line, mut at)) = line(bytes, 0) else { return incomplete(bytes, "too big mbulk count string") };
    let count = number(&line[1..]).filter(|count| *count <= MAX_ARGUMENTS);
    let count = count.ok_or("invalid multibulk length")?;
    for _ in 0..count.max(0) {
        let Some((line, next)) = self::line(bytes, at) else {
            return incomplete(&bytes[at..], "too big bulk count string");
        };
        match line.first() {
            Some(b'$') => {}
            Some(other) => return Err(format!("expected '$', got '{}'", char::from(*other)).into()),
            None => return Err("expected '$', got ' '".into()),
        }
        let length = number(&line[1..]).filter(|length| (0..=MAX_BULK).contains(length));
        at = next + length.ok_or("invalid bulk length")? as usize + 2;
        if at > bytes.len() {
            return Ok((at > super::MAX_MESSAGE).then_some(at));
        }
    }
    Ok(Some(at))
}

fn incomplete(bytes: &[u8], why: &'static str) -> Result<Option<usize>, Cow<'static, str>> {
    if bytes.len() > MAX_LINE { Err(why.into()) } else { Ok(None) }
}

/// Returns a line without its end, and the position behind it.
fn line(bytes: &[u8], from: usize) -> Option<(&[u8], usize)> {
    let end = bytes[from..].iter().position(|byte| *byte == b'\r')? + from;
    // The byte behind is not compared, as in Redis.
    (end + 2 <= bytes.len()).then(|| (&bytes[from..end], end + 2))
}

fn number(digits: &[u8]) -> Option<i64> {
    let is_plain =
        digits.first().is_some_and(|first| *first != b'+' && (*first != b'0' || digits.len() == 1));
    is_plain.then(|| std::str::from_utf8(digits).ok()?.parse().ok()).flatten()
}

/// Returns the arguments of a whole command.
pub(super) fn arguments(message: &[u8]) -> Vec<&[u8]> {
    if message.first() != Some(&b'*') {
        let words = message.split(|byte| byte.is_ascii_whitespace());
        return words.filter(|word| !word.is_empty()).collect();
    }
    let (mut arguments, mut at) = (Vec::new(), line(message, 0).map_or(message.len(), |(_, next)| next));
    while let Some((head, next)) = line(message, at) {
        let length = number(head.get(1..).unwrap_or_default()).unwrap_or(0) as usize;
        let Some(argument) = message.get(next..next + length) else { break };
        arguments.push(argument);
        at = next + length + 2;
        if at >= message.len() {
            break;
        }
    }
    arguments
}

/// Appends a bulk string, or a null.
pub(super) fn bulk(to: &mut Vec<u8>, bytes: Option<&[u8]>) {
    let Some(bytes) = bytes else { return to.extend_from_slice(b"$-1\r\n") };
    to.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
    to.extend_from_slice(bytes);
    to.extend_from_slice(b"\r\n");
}

/// Appends the head of an array.
pub(super) fn array(to: &mut Vec<u8>, count: usize) {
    to.extend_from_slice(format!("*{count}\r\n").as_bytes());
}

pub(super) fn integer(to: &mut Vec<u8>, number: usize) {
    to.extend_from_slice(format!(":{number}\r\n").as_bytes());
}

/// Returns an error. Line ends in it become spaces.
pub(super) fn error(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref().iter().map(|byte| if matches!(byte, b'\r' | b'\n') { b' ' } else { *byte });
    [&b"-ERR "[..], &text.collect::<Vec<_>>(), b"\r\n"].concat()
}
