//! Settings of the configuration for single programs, as `shunt run` passes them to the shim in
//! each of them: one environment variable, such as `*:spin=off;postgres:offer=at-once,spin=50`.

use std::fmt::Write;

/// The name that stands for every program.
pub const EVERY: &str = "*";

/// Returns the name that identifies a program: the last part of the path by which it was started.
pub fn name_of(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

/// Returns whether a program of this name can have rules.
pub fn can_be_named(name: &str) -> bool {
    !name.is_empty()
        && name != EVERY
        && !name.contains(|letter: char| "/:;".contains(letter) || letter.is_control())
}

/// Returns the setting of `key` for the program whose name `is_meant` accepts, or else the setting
/// for every program.
pub fn value<'a>(rules: &'a [u8], is_meant: impl Fn(&[u8]) -> bool, key: &str) -> Option<&'a [u8]> {
    said(rules, is_meant, key).or_else(|| said(rules, |name| name == EVERY.as_bytes(), key))
}

fn said<'a>(rules: &'a [u8], is_meant: impl Fn(&[u8]) -> bool, key: &str) -> Option<&'a [u8]> {
    let rules = rules.split(|byte| *byte == b';').filter_map(|rule| split(rule, b':'));
    let mut pairs = rules
        .filter(|(name, _)| is_meant(name))
        .flat_map(|(_, settings)| settings.split(|byte| *byte == b',').filter_map(|pair| split(pair, b'=')));
    pairs.find_map(|(name, value)| (name == key.as_bytes()).then_some(value))
}

/// Returns the rules in the form that [`value`] reads: for each name, keys with their values.
pub fn write<'a, S>(rules: impl Iterator<Item = (&'a str, S)>) -> String
where
    S: Iterator<Item = (&'a str, &'a str)>,
{
    let mut text = String::new();
    for (name, settings) in rules {
        let mut before = ':';
        for (key, value) in settings {
            if before == ':' {
                let _ = write!(text, "{}{name}", if text.is_empty() { "" } else { ";" });
            }
            let _ = write!(text, "{before}{key}={value}");
            before = ',';
        }
    }
    text
}

fn split(text: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let end = text.iter().position(|byte| *byte == at)?;
    Some((&text[..end], &text[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_has_what_is_said_for_it_before_what_is_said_for_all() {
        let of_all = [("spin", "off"), ("offer", "used")];
        let of_one = [("spin", "50")];
        let rules = [(EVERY, &of_all[..]), ("none", &[]), ("a b", &of_one[..])];
        let text = write(rules.iter().map(|(name, settings)| (*name, settings.iter().copied())));
        assert_eq!(text, "*:spin=off,offer=used;a b:spin=50");
        let said = |name: &str, key| {
            let value = value(text.as_bytes(), |one| one == name.as_bytes(), key);
            value.map(|value| std::str::from_utf8(value).unwrap())
        };
        assert_eq!(said("a b", "spin"), Some("50"));
        assert_eq!(said("a b", "offer"), Some("used"));
        assert_eq!(said("a", "spin"), Some("off"));
        assert_eq!(said("a", "pin"), None);
        assert_eq!(value(b"", |_| true, "spin"), None);
        assert_eq!(value(b";:;a;a:b;=", |_| true, "spin"), None);
    }

    #[test]
    fn names_are_those_of_files() {
        assert_eq!(name_of(b"/usr/bin/redis-server"), b"redis-server");
        assert_eq!(name_of(b"a.sh"), b"a.sh");
        assert!(["postgres", "my program", "python3.11"].into_iter().all(can_be_named));
        assert!(!["", "*", "/bin/true", "a:b", "a;b", "a\n"].into_iter().any(can_be_named));
    }
}
