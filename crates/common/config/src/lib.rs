//! Reads configuration files. An error names the file, the line, and what to write instead:
//!
//! ```text
//! /etc/shunt/relay.toml:7: there is no key lsten; did you mean listen?
//! ```

#![forbid(unsafe_code)]

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// An error in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    file: PathBuf,
    /// `None` if the error concerns the whole file.
    line: Option<usize>,
    what: String,
}

impl Fault {
    /// Returns an error that concerns the whole file.
    pub fn of(file: &Path, what: impl Into<String>) -> Fault {
        Fault { file: file.to_owned(), line: None, what: what.into() }
    }

    /// Returns an error at a byte of the file's text.
    pub fn at(file: &Path, text: &str, byte: usize, what: impl Into<String>) -> Fault {
        Fault { line: Some(line(text, byte)), ..Fault::of(file, what) }
    }

    /// Returns an error at a line of the file.
    pub fn at_line(file: &Path, line: usize, what: impl Into<String>) -> Fault {
        Fault { line: Some(line), ..Fault::of(file, what) }
    }

    fn of_parser(file: &Path, text: &str, error: &toml::de::Error) -> Fault {
        let what = correction(error.message());
        match error.span() {
            Some(span) => Fault::at(file, text, span.start, what),
            None => Fault::of(file, what),
        }
    }

    /// Returns the number of the line.
    pub fn line(&self) -> Option<usize> {
        self.line
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, "{line}:")?;
        }
        write!(f, " {}", self.what)
    }
}

impl Error for Fault {}

/// Returns the number of the line that contains a byte of the text.
pub fn line(text: &str, byte: usize) -> usize {
    1 + text.bytes().take(byte).filter(|byte| *byte == b'\n').count()
}

/// Reads and parses a file.
pub fn read<T: DeserializeOwned>(file: &Path) -> Result<T, Fault> {
    parse(file, &read_text(file)?)
}

/// Reads a file.
pub fn read_text(file: &Path) -> Result<String, Fault> {
    std::fs::read_to_string(file).map_err(|error| Fault::of(file, error.to_string()))
}

/// Parses the text of a file.
pub fn parse<T: DeserializeOwned>(file: &Path, text: &str) -> Result<T, Fault> {
    toml::from_str(text).map_err(|error| Fault::of_parser(file, text, &error))
}

/// Returns how a message goes on about a name that is not known: with a similar one of the known
/// names, or with all of them.
pub fn suggestion<'a>(name: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    let distance = |one: &&str| strsim::damerau_levenshtein(name, one);
    match known.clone().min_by_key(distance).filter(|one| distance(one) <= 2) {
        Some(one) => format!("; did you mean {one}?"),
        None => format!("; there are {}", known.collect::<Vec<_>>().join(", ")),
    }
}

/// Rewrites a message of serde about a key or a value that is not known. Its names are between
/// backticks, such as in "unknown field `lsten`, expected `listen` or `name`".
fn correction(message: &str) -> String {
    let kinds = [("unknown field ", "key"), ("unknown variant ", "value")];
    let kind = kinds.iter().find_map(|(start, kind)| message.starts_with(start).then_some(kind));
    let mut names = message.split('`').skip(1).step_by(2);
    match kind.zip(names.next()) {
        Some((kind, name)) if names.clone().next().is_some() => {
            format!("there is no {kind} {name}{}", suggestion(name, names))
        }
        _ => message.trim().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "kebab-case")]
    #[expect(dead_code, reason = "only errors matter")]
    struct Sample {
        listen: String,
        #[serde(default)]
        kind: Kind,
        #[serde(default)]
        peer: Vec<Peer>,
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Kind {
        #[default]
        Early,
        Late,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only errors matter")]
    struct Peer {
        name: String,
    }

    #[test]
    fn error_names_file_and_line_and_correction() {
        for (text, said) in [
            ("lsten = 'a'", "f:1: there is no key lsten; did you mean listen?"),
            ("listen = 'a'\nx = 1", "f:2: there is no key x; there are listen, kind, peer"),
            ("listen = 'a'\nkind = 'lat'", "f:2: there is no value lat; did you mean late?"),
            ("listen = 'a'\n\n[[peer]]\nnmae = 'b'", "f:4: there is no key nmae; did you mean name?"),
            ("listen = ", "f:1: "),
            ("listen = 1", "f:1: invalid type"),
        ] {
            let fault = parse::<Sample>(Path::new("f"), text).expect_err(text).to_string();
            assert!(fault.starts_with(said), "{fault}");
        }
        let missing = parse::<Sample>(Path::new("f"), "").unwrap_err();
        assert!(missing.to_string().contains("missing field `listen`"), "{missing}");
    }

    #[test]
    fn file_that_cannot_be_read_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("none.toml");
        let fault = read::<Sample>(&file).unwrap_err();
        assert_eq!(fault.line(), None);
        assert!(fault.to_string().starts_with(&format!("{}: No such file", file.display())), "{fault}");
        std::fs::write(&file, "listen = 'a'").unwrap();
        assert_eq!(read::<Sample>(&file).unwrap().listen, "a");
    }
}
