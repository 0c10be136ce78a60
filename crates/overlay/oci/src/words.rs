//! Splits a command line into options and other words, as runc (urfave/cli) and crun (argp) do.
//!
//! The two parsers agree on `--option value`, `--option=value` and `-o value`. They disagree on
//! `-option`, `-o=value`, `-ovalue`, `-ab`, abbreviations, and options after the first other word.
//! Those forms are read as runc reads them, and reported as unclear.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

/// The options of a command, each by one or more names.
pub(crate) struct Known {
    /// The options with a value.
    pub(crate) with_value: &'static [&'static str],
    /// The options without a value.
    pub(crate) flags: &'static [&'static str],
}

impl Known {
    fn takes_value(&self, name: &[u8]) -> bool {
        self.with_value.iter().any(|one| one.as_bytes() == name)
    }

    fn is_flag(&self, name: &[u8]) -> bool {
        self.flags.iter().any(|one| one.as_bytes() == name)
    }
}

/// The options at the start of a command line, and the words after them.
pub(crate) struct Split<'a> {
    options: Vec<(&'a [u8], Option<&'a OsStr>)>,
    /// The words after the options.
    pub(crate) rest: &'a [OsString],
    /// The first option that is unknown, or that the runtimes parse differently.
    pub(crate) unclear: Option<&'a OsStr>,
}

impl<'a> Split<'a> {
    /// Parses options up to the first other word, or up to `--`.
    pub(crate) fn of(words: &'a [OsString], known: &Known) -> Split<'a> {
        let mut split = Split { options: Vec::new(), rest: words, unclear: None };
        while let [word, behind @ ..] = split.rest {
            let bytes = word.as_bytes();
            let Some(option) = bytes.strip_prefix(b"--").or(bytes.strip_prefix(b"-")) else { break };
            split.rest = behind;
            if option.is_empty() {
                // A single hyphen is not an option for either parser.
                let is_end = bytes == b"--";
                split.unclear = split.unclear.or((!is_end).then_some(word));
                break;
            }
            let (name, value) = match option.iter().position(|byte| *byte == b'=') {
                Some(equals) => (&option[..equals], Some(OsStr::from_bytes(&option[equals + 1..]))),
                None => (option, None),
            };
            let is_long = bytes.starts_with(b"--");
            let same_for_all = if is_long { name.len() > 1 } else { option.len() == 1 };
            let mut is_clear = same_for_all && (known.takes_value(name) || known.is_flag(name));
            let value = match behind {
                [next, behind @ ..] if value.is_none() && known.takes_value(name) => {
                    split.rest = behind;
                    Some(next.as_os_str())
                }
                _ => {
                    is_clear &= value.is_some() || !known.takes_value(name);
                    value
                }
            };
            split.options.push((name, value));
            split.unclear = split.unclear.or((!is_clear).then_some(word));
        }
        split
    }

    /// Returns the value of the last option with one of these names.
    pub(crate) fn value(&self, names: &[&str]) -> Option<&'a OsStr> {
        self.options.iter().rev().find(|(name, _)| is_one_of(names, name)).and_then(|(_, value)| *value)
    }

    /// Returns whether an option with one of these names is there.
    pub(crate) fn has(&self, names: &[&str]) -> bool {
        self.options.iter().any(|(name, _)| is_one_of(names, name))
    }
}

fn is_one_of(names: &[&str], name: &[u8]) -> bool {
    names.iter().any(|one| one.as_bytes() == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: Known = Known { with_value: &["bundle", "b"], flags: &["debug", "d"] };

    fn unclear(line: &str) -> Option<String> {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        Split::of(&words, &KNOWN).unclear.map(|word| word.to_string_lossy().into_owned())
    }

    #[test]
    fn forms_that_all_runtimes_read_alike_are_clear() {
        for line in
            ["--bundle /b id", "--bundle=/b id", "-b /b id", "--debug -d --bundle --debug id", "-- id"]
        {
            assert_eq!(unclear(line), None, "{line}");
        }
    }

    #[test]
    fn forms_that_runtimes_read_differently_are_unclear() {
        for (line, word) in [
            ("--debug -bundle /b id", "-bundle"),
            ("-b=/b id", "-b=/b"),
            ("-b/b id", "-b/b"),
            ("-db /b id", "-db"),
            ("--bund /b id", "--bund"),
            ("--b /b id", "--b"),
            ("--other --more id", "--other"),
            ("--debug -", "-"),
            ("--bundle", "--bundle"),
        ] {
            assert_eq!(unclear(line).as_deref(), Some(word), "{line}");
        }
    }
}
