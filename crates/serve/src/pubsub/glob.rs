//! Redis' patterns: `*`, `?`, `[a-z]`, `[^a]`, and `\` in front of a byte that stands for itself.

/// Returns true if the pattern matches all of the text. The work is bounded by the product of their
/// lengths, because only the last star is tried again.
pub(super) fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut rest) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    loop {
        if pattern.get(at) == Some(&b'*') {
            star = Some((at + 1, rest));
            at += 1;
            continue;
        }
        match (at < pattern.len(), text.get(rest)) {
            (false, None) => return true,
            (true, Some(byte)) => {
                let (fits, next) = one(pattern, at, *byte);
                if fits {
                    (at, rest) = (next, rest + 1);
                    continue;
                }
            }
            _ => {}
        }
        // Let the last star stand for one byte more.
        match &mut star {
            Some((after, begin)) if *begin < text.len() => {
                *begin += 1;
                (at, rest) = (*after, *begin);
            }
            _ => return false,
        }
    }
}

/// Compares a byte with the element at `at`. Returns the position behind that.
fn one(pattern: &[u8], at: usize, byte: u8) -> (bool, usize) {
    match pattern[at] {
        b'?' => (true, at + 1),
        b'[' => set(pattern, at + 1, byte),
        b'\\' if at + 1 < pattern.len() => (pattern[at + 1] == byte, at + 2),
        other => (other == byte, at + 1),
    }
}

/// Compares a byte with a set, which ends with the pattern if it has no bracket.
fn set(pattern: &[u8], mut at: usize, byte: u8) -> (bool, usize) {
    let is_negated = pattern.get(at) == Some(&b'^');
    at += usize::from(is_negated);
    let mut fits = false;
    loop {
        match (pattern.get(at), pattern.get(at + 1), pattern.get(at + 2)) {
            (Some(b'\\'), Some(other), _) => {
                fits |= *other == byte;
                at += 2;
            }
            (Some(b']'), ..) => {
                at += 1;
                break;
            }
            (None, ..) => break,
            (Some(first), Some(b'-'), Some(last)) => {
                fits |= (*first.min(last)..=*first.max(last)).contains(&byte);
                at += 3;
            }
            (Some(other), ..) => {
                fits |= *other == byte;
                at += 1;
            }
        }
    }
    (fits != is_negated, at)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns_match_as_in_redis() {
        for (pattern, text, fits) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("*", "abc", true),
            ("a*c", "abbbc", true),
            ("a*c", "abbb", false),
            ("a**b*", "axxbyy", true),
            ("h?llo", "hello", true),
            ("h?llo", "hllo", false),
            ("h[ae]llo", "hallo", true),
            ("h[ae]llo", "hillo", false),
            ("h[^e]llo", "hallo", true),
            ("h[^e]llo", "hello", false),
            ("h[a-c]llo", "hbllo", true),
            ("h[c-a]llo", "hbllo", true),
            ("h\\?llo", "h?llo", true),
            ("h\\?llo", "hello", false),
            ("news.*", "news.sport", true),
            ("[\\]]", "]", true),
            ("a[", "a", false),
            ("a\\", "a\\", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), fits, "{pattern} {text}");
        }
        // Many stars are no work for a lifetime.
        assert!(!matches("*a".repeat(2000).as_bytes(), &[b'b'; 20_000]));
    }
}
