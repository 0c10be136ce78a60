//! Text from untrusted sources, made fit to be shown.
//!
//! A program chooses its own name, and a user chooses the names of files and control groups. Such
//! text must not move a terminal's cursor, reverse the direction of the text around it, or be
//! invisible, and two different names must not look alike. So every character that a terminal does
//! not show as a letter by itself is shown as its code point, `\u{202e}`.

use std::borrow::Cow;

/// Returns `text` with every character that is not visible by itself replaced by its code point.
/// Text that has been made visible does not change.
pub fn visible(text: &str) -> Cow<'_, str> {
    if text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        match is_visible(letter) {
            true => shown.push(letter),
            false => shown.extend(letter.escape_unicode()),
        }
    }
    Cow::Owned(shown)
}

/// Returns `bytes` as visible text; bytes that are not UTF-8 are shown as `\xff`.
pub fn visible_bytes(bytes: &[u8]) -> String {
    let mut shown = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        shown += &visible(chunk.valid());
        chunk.invalid().iter().for_each(|byte| shown += &format!("\\x{byte:02x}"));
    }
    shown
}

/// Returns whether a terminal shows a letter within its own cell.
fn is_visible(letter: char) -> bool {
    match letter {
        ' '..='~' => true,
        // Letters by their class, but blank: fillers of Hangul, the empty pattern of Braille.
        '\u{115f}' | '\u{1160}' | '\u{3164}' | '\u{ffa0}' | '\u{2800}' => false,
        // Replaces text that could not be read.
        char::REPLACEMENT_CHARACTER => true,
        // Controls, formats (directions, joiners, characters without width), separators, private
        // and unassigned letters, and marks that are written over the letter before. The standard
        // library shows these as code points in debugging output.
        _ => letter.escape_debug().len() == 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_stay_as_they_are() {
        for name in ["memcached", "a b", "it's \"quoted\" \\u{202e}", "größe", "программа", "名前", ""]
        {
            assert_eq!(visible(name), name);
            assert_eq!(visible_bytes(name.as_bytes()), name);
        }
    }

    #[test]
    fn what_cannot_be_seen_is_shown_as_its_number() {
        for (name, shown) in [
            ("a\x1b[31m\n", "a\\u{1b}[31m\\u{a}"),
            ("tsoh\u{202e}", "tsoh\\u{202e}"),
            ("ng\u{200b}inx", "ng\\u{200b}inx"),
            ("a\u{2066}b\u{2069}\u{200d}\u{feff}\u{ad}", "a\\u{2066}b\\u{2069}\\u{200d}\\u{feff}\\u{ad}"),
            ("\u{3164}\u{a0}\u{2028}", "\\u{3164}\\u{a0}\\u{2028}"),
            ("e\u{301}", "e\\u{301}"),
            ("\u{e0041}\u{fe0f}\u{9b}", "\\u{e0041}\\u{fe0f}\\u{9b}"),
        ] {
            assert_eq!(visible(name), shown);
        }
        assert_eq!(visible_bytes(b"a\xff\xfe\x00b"), "a\\xff\\xfe\\u{0}b");
    }

    proptest! {
        #[test]
        fn whatever_is_said_is_shown_and_nothing_else_happens(text in any::<String>(), bytes: Vec<u8>) {
            for shown in [visible(&text).into_owned(), visible_bytes(&bytes)] {
                for letter in shown.chars() {
                    prop_assert!(!letter.is_control());
                    let code = u32::from(letter);
                    let is_format = matches!(code, 0xad | 0x61c | 0x180e | 0x200b..=0x200f | 0x2028..=0x202e
                        | 0x2060..=0x206f | 0xfe00..=0xfe0f | 0xfeff | 0xfff9..=0xfffb | 0xe0000..=0xe0fff);
                    prop_assert!(!is_format, "{shown:?}");
                }
                prop_assert_eq!(visible(&shown), shown.as_str(), "it is visible already");
            }
        }
    }
}
