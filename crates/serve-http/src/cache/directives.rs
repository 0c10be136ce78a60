//! The directives of Cache-Control and CDN-Cache-Control, and the parts of lists.

use crate::message::Reply;

/// The directives of Cache-Control that matter here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Directives {
    pub(super) no_store: bool,
    pub(super) no_cache: bool,
    pub(super) private: bool,
    pub(super) public: bool,
    pub(super) must_revalidate: bool,
    pub(super) must_understand: bool,
    pub(super) only_if_cached: bool,
    pub(super) max_age: Option<u64>,
    pub(super) shared_max_age: Option<u64>,
    pub(super) min_fresh: u64,
}

/// The largest number of seconds: more means this (RFC 9111, section 1.2.2).
const MOST: u64 = 1 << 31;

impl Directives {
    /// Reads the values of a field.
    pub(super) fn read<'a>(fields: impl Iterator<Item = &'a [u8]>) -> Directives {
        let mut found = Directives::default();
        // A number that cannot be read, or two of them, make a reply stale. So the lowest counts.
        let lower = |before: Option<u64>, value: Option<&[u8]>| {
            let seconds = value.and_then(seconds).unwrap_or(0);
            Some(before.map_or(seconds, |before| before.min(seconds)))
        };
        for value in fields {
            for element in list(value) {
                let (name, value) = match element.iter().position(|byte| *byte == b'=') {
                    Some(at) => (element[..at].trim_ascii(), Some(element[at + 1..].trim_ascii())),
                    None => (element, None),
                };
                let value = value.map(|value| {
                    value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value)
                });
                // The forms with names of fields (`private="x"`) count as those without.
                match &name.to_ascii_lowercase()[..] {
                    b"no-store" => found.no_store = true,
                    b"no-cache" => found.no_cache = true,
                    b"private" => found.private = true,
                    b"public" => found.public = true,
                    b"must-revalidate" => found.must_revalidate = true,
                    b"must-understand" => found.must_understand = true,
                    b"only-if-cached" => found.only_if_cached = true,
                    b"max-age" => found.max_age = lower(found.max_age, value),
                    b"s-maxage" => found.shared_max_age = lower(found.shared_max_age, value),
                    b"min-fresh" => found.min_fresh = value.and_then(seconds).unwrap_or(MOST),
                    _ => {}
                }
            }
        }
        found
    }

    /// Returns those of a reply for a cache that the owner of the site controls, and true if they replace
    /// Expires too. A valid CDN-Cache-Control replaces the directives for all caches (RFC 9213).
    pub(super) fn of_reply(reply: &Reply<'_, '_>) -> (Directives, bool) {
        let mut targeted = reply.values("cdn-cache-control").flat_map(list).peekable();
        let is_targeted = targeted.peek().is_some() && targeted.all(is_member);
        let name = if is_targeted { "cdn-cache-control" } else { "cache-control" };
        (Directives::read(reply.values(name)), is_targeted)
    }
}

/// Returns the elements of a list. A comma in a quoted string separates nothing.
pub(super) fn list(value: &[u8]) -> Vec<&[u8]> {
    let (mut elements, mut begin, mut is_quoted, mut is_escaped) = (Vec::new(), 0, false, false);
    for (at, byte) in value.iter().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_quoted => is_escaped = true,
            b'"' => is_quoted = !is_quoted,
            b',' if !is_quoted => {
                elements.push(value[begin..at].trim_ascii());
                begin = at + 1;
            }
            _ => {}
        }
    }
    elements.push(value[begin..].trim_ascii());
    elements.retain(|element| !element.is_empty());
    elements
}

/// Reads a number of seconds.
pub(super) fn seconds(value: &[u8]) -> Option<u64> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let digits = &value[..value.len().min(11)];
    let number = digits.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    Some(if value.len() > 11 { MOST } else { number.min(MOST) })
}

/// Returns true for a member of a dictionary of structured fields (RFC 9651), as far as it matters here.
fn is_member(element: &[u8]) -> bool {
    let mut parts = element.splitn(2, |byte| *byte == b'=');
    let (key, value) = (parts.next().unwrap_or_default(), parts.next());
    let is_key = key.first().is_some_and(|byte| byte.is_ascii_lowercase() || *byte == b'*')
        && key
            .iter()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-.*".contains(byte));
    let is_number = |value: &[u8]| seconds(value).is_some();
    is_key
        && match key {
            b"max-age" | b"s-maxage" => value.is_some_and(is_number),
            _ => value.is_none_or(|value| value.first().is_some_and(u8::is_ascii_graphic)),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_dictionaries_are_recognized() {
        for member in ["max-age=10", "private", "no-cache=\"x\"", "a.b=?1", "*x=1.5"] {
            assert!(is_member(member.as_bytes()), "{member}");
        }
        for member in
            ["max-age=\"10\"", "max-age", "max-age= 10", "max-age =10", "&&&", "Max-Age=10", "a=", "=1"]
        {
            assert!(!is_member(member.as_bytes()), "{member}");
        }
    }
}
