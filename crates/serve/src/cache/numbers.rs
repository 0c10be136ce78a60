//! Numbers and keys as memcached reads them. Its functions are wrappers of strtoul(3) and others, so
//! leading white space, signs and the truncation to 32 bits are theirs.

/// Parses a number, as strtol(3) does, that ends with the text or with white space.
fn scan(text: &[u8]) -> Option<(bool, u128)> {
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t'..=b'\r');
    let start = text.iter().position(|byte| !is_space(byte))?;
    let (negative, digits) = match text[start] {
        b'-' => (true, &text[start + 1..]),
        b'+' => (false, &text[start + 1..]),
        _ => (false, &text[start..]),
    };
    let count = digits.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if count == 0 || digits.get(count).is_some_and(|byte| !is_space(byte)) {
        return None;
    }
    let value = digits[..count].iter().try_fold(0_u128, |value, digit| {
        value.checked_mul(10)?.checked_add(u128::from(digit - b'0')).filter(|value| *value < 1 << 80)
    });
    // Anything that large is out of every range.
    Some((negative, value.unwrap_or(1 << 80)))
}

/// Parses an unsigned number of 64 bits (`safe_strtoull`).
pub(super) fn unsigned(text: &[u8]) -> Option<u64> {
    let (negative, value) = scan(text)?;
    let value = u64::try_from(value).ok()?;
    let result = if negative { value.wrapping_neg() } else { value };
    // A minus sign is refused only if the result looks negative.
    (!negative || result.cast_signed() >= 0).then_some(result)
}

/// Parses an unsigned number whose lower 32 bits count (`safe_strtoul`).
pub(super) fn unsigned_half(text: &[u8]) -> Option<u32> {
    unsigned(text).map(|value| value as u32)
}

/// Parses a signed number whose lower 32 bits count (`safe_strtol`).
pub(super) fn signed_half(text: &[u8]) -> Option<i32> {
    let (negative, value) = scan(text)?;
    let value = i128::try_from(value).ok()?;
    let value = if negative { -value } else { value };
    i64::try_from(value).ok().map(|value| value as i32)
}

/// Decodes base64, and ignores other characters. Returns `None` if nothing sensible results.
pub(super) fn decode(text: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        b'=' => Some(0),
        _ => None,
    };
    let digits: Vec<(u8, bool)> =
        text.iter().filter_map(|byte| Some((digit(*byte)?, *byte == b'='))).collect();
    if digits.is_empty() || !digits.len().is_multiple_of(4) || digits.len() / 4 * 3 > text.len() {
        return None;
    }
    let (mut bytes, mut pads) = (Vec::new(), 0);
    for block in digits.chunks(4) {
        pads += block.iter().filter(|(_, is_pad)| *is_pad).count();
        let value = block.iter().fold(0_u32, |value, (digit, _)| value << 6 | u32::from(*digit));
        bytes.extend_from_slice(&value.to_be_bytes()[1..]);
        match pads {
            0 => {}
            1 | 2 => {
                bytes.truncate(bytes.len() - pads);
                break;
            }
            _ => return None,
        }
    }
    (!bytes.is_empty()).then_some(bytes)
}

/// Encodes base64, with padding.
pub(super) fn encode(bytes: &[u8], to: &mut Vec<u8>) {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for chunk in bytes.chunks(3) {
        let value = (0..3).fold(0_u32, |value, at| value << 8 | u32::from(*chunk.get(at).unwrap_or(&0)));
        for at in 0..4 {
            let digit = DIGITS[(value >> (18 - 6 * at) & 63) as usize];
            to.push(if at > chunk.len() { b'=' } else { digit });
        }
    }
}

/// Appends a number in decimal digits.
pub(super) fn write(number: impl Into<u64>, to: &mut Vec<u8>) {
    let (mut number, mut digits, mut at) = (number.into(), [0; 20], 20);
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return to.extend_from_slice(&digits[at..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_c_library() {
        assert_eq!(unsigned(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(unsigned(b"18446744073709551616"), None);
        assert_eq!(unsigned(b"-1"), None);
        assert_eq!(unsigned(b"-0"), Some(0));
        assert_eq!(unsigned(b"+7"), Some(7));
        assert_eq!(unsigned(b" \t7\r"), Some(7));
        assert_eq!(unsigned(b"7a"), None);
        assert_eq!(unsigned(b""), None);
        assert_eq!(unsigned(b"-"), None);
        assert_eq!(unsigned(b"-18446744073709551615"), Some(1));
        assert_eq!(unsigned_half(b"4294967297"), Some(1));
        assert_eq!(signed_half(b"-1"), Some(-1));
        assert_eq!(signed_half(b"4294967295"), Some(-1));
        assert_eq!(signed_half(b"9223372036854775808"), None);
        assert_eq!(signed_half(b"-9223372036854775808"), Some(0));
        assert_eq!(unsigned(&[b'9'; 500]), None);
    }

    #[test]
    fn base64_is_reversible() {
        for length in 1..100_usize {
            let bytes: Vec<u8> = (0..length).map(|at| (at * 37 + length) as u8).collect();
            let mut text = Vec::new();
            encode(&bytes, &mut text);
            assert_eq!(decode(&text).as_deref(), Some(&bytes[..]));
        }
        assert_eq!((decode(b"abc"), decode(b""), decode(b"===="), decode(b"!")), (None, None, None, None));
    }
}
