//! The part of a stored reply that a request asks for (RFC 9110, section 14.2).

use std::ops::Range;

use super::policy::read_date;
use crate::message::Request;

/// Returns the one part that a request asks for, of a body of `length` bytes. `None` is for the backend:
/// several parts, none that the body has, and a condition that is not certainly true.
pub(crate) fn part(
    request: &Request<'_, '_>,
    length: usize,
    etag: Option<&[u8]>,
    modified: Option<&[u8]>,
) -> Option<Range<usize>> {
    let mut ranges = request.values("range");
    let (Some(range), None) = (ranges.next(), ranges.next()) else { return None };
    let mut conditions = request.values("if-range");
    match (conditions.next(), conditions.next()) {
        (None, _) => {}
        // Only the strong comparison counts.
        (Some(tag), None) if tag.starts_with(b"\"") => {
            etag.filter(|etag| *etag == tag)?;
        }
        (Some(date), None) => {
            read_date(date)?;
            modified.filter(|modified| *modified == date)?;
        }
        _ => return None,
    }
    let range = std::str::from_utf8(range).ok()?;
    let (unit, range) = range.split_once('=')?;
    let (first, last) = range.split_once('-')?;
    if !unit.eq_ignore_ascii_case("bytes") {
        return None;
    }
    let end = length.checked_sub(1)?;
    let part = match (first, last) {
        ("", count) => length - number(count)?.min(length)..length,
        (first, "") => number(first)?..length,
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some(first..last.min(end) + 1)?
        }
    };
    (!part.is_empty()).then_some(part)
}

fn number(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::request::parse;
    use crate::message::{Parsed, no_fields};

    fn asked(fields: &str) -> Option<Range<usize>> {
        let bytes = format!("GET / HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        let mut slots = no_fields();
        let Ok(Parsed::Complete(request)) = parse(bytes.as_bytes(), &mut slots, 4096) else {
            panic!("{fields}")
        };
        part(&request, 10, Some(b"\"a\""), Some(b"Sun, 06 Nov 1994 08:49:37 GMT"))
    }

    #[test]
    fn one_part_is_found_and_the_rest_is_for_the_backend() {
        for (range, expected) in [
            ("bytes=0-0", Some(0..1)),
            ("bytes=2-4", Some(2..5)),
            ("BYTES=2-400", Some(2..10)),
            ("bytes=9-", Some(9..10)),
            ("bytes=-3", Some(7..10)),
            ("bytes=-300", Some(0..10)),
            ("bytes=10-", None),
            ("bytes=10-11", None),
            ("bytes=-0", None),
            ("bytes=4-2", None),
            ("bytes=-", None),
            ("bytes=0-1,3-4", None),
            ("bytes=+1-2", None),
            ("bytes=0-99999999999999999999999", None),
            ("bytes = 0-1", None),
            ("lines=0-1", None),
            ("bytes", None),
            ("", None),
        ] {
            assert_eq!(asked(&format!("Range: {range}\r\n")), expected, "{range}");
        }
        assert_eq!(asked("Range: bytes=0-1\r\nRange: bytes=0-1\r\n"), None);
        assert_eq!(asked("If-Range: \"a\"\r\n"), None);
    }

    #[test]
    fn a_condition_has_to_be_certainly_true() {
        for (condition, is_true) in [
            ("\"a\"", true),
            ("\"b\"", false),
            ("W/\"a\"", false),
            ("Sun, 06 Nov 1994 08:49:37 GMT", true),
            ("Sun, 06 Nov 1994 08:49:38 GMT", false),
            ("yesterday", false),
            ("\"a\"\r\nIf-Range: \"a\"", false),
        ] {
            let part = asked(&format!("Range: bytes=0-1\r\nIf-Range: {condition}\r\n"));
            assert_eq!(part.is_some(), is_true, "{condition}");
        }
    }
}
